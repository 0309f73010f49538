"""FlashAttention-2 backward pass (Algorithm 2) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims;
h key heads, M queries (R = M * G rows) and N keys of a tile. Q, dQ: (h, R, D) · dO: (h, R, Dv) · K: (h, N, D) ·
V: (h, N, Dv) · S, P, dP, dS: (h, R, N) · dK^T: (h, D, N) · dV^T: (h, Dv, N) · L, D: (h, R, 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import workers
from .tile import (
    LOG2_E,
    Block,
    Heads,
    Parts,
    Scratch,
    Tile,
    by_key_head,
    head_groups,
    hide_,
    key_blocks,
    product_dtype,
    product_plus,
    query_blocks,
    query_factor,
    tiles_of_keys,
)

# Rows of D are summed in products of so many, to be the same bits as in dP.
DOT_ROWS = 16

_KeyRun = list[tuple[Block, list[tuple[Block, list[Tile]]]]]


def backward(
    spec: AttentionSpec,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v; dout or dlse may be None, which means zero."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    groups = head_groups(spec, each=1)
    runs = _key_runs(spec, len(groups))
    exact, scratch = spec.lse_dtype, Scratch()
    shape = (spec.batch, spec.heads_k, spec.seqlen_q, spec.group)
    given = _Tensors(
        by_key_head(spec, q),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None if dout is None else by_key_head(spec, dout),
        scratch("minus_lse", exact, *shape, 1),
        scratch("minus_delta", exact, *shape, 1),
        scratch("dq_sums", exact, len(runs), *shape, spec.head_dim),
        dk.transpose(1, 2),
        dv.transpose(1, 2),
    )
    out, lse = by_key_head(spec, out), by_key_head(spec, lse.transpose(1, 2))
    dlse = None if dlse is None else by_key_head(spec, dlse.transpose(1, 2))
    workers.run(lambda: _RowSums(spec, given, out, lse, dlse), itertools.product(groups, query_blocks(spec)))
    workers.run(lambda: _KeyBlocks(spec, given), itertools.product(groups, enumerate(runs)))
    dq_heads = by_key_head(spec, dq)

    def sum_dq(heads: Heads, queries: Block) -> None:
        first, *others = (heads.of(dq_sum, queries) for dq_sum in given.dq_sums)
        for other in others:
            first += other
        heads.of(dq_heads, queries).copy_(first.mul_(spec.softmax_scale))

    workers.run(lambda: sum_dq, itertools.product(groups, query_blocks(spec)))
    return dq, dk, dv


def _key_runs(spec: AttentionSpec, groups: int) -> list[_KeyRun]:
    """The key blocks with their tiles, in a few runs, so that all threads are busy to the end.

    Parallel key blocks would race for dQ; each run sums a dQ of its own, so the same bits come every time.
    """
    blocks, threads = [(keys, tiles_of_keys(spec, keys)) for keys in key_blocks(spec)], torch.get_num_threads()
    wanted = 1 if groups % threads == 0 else 4 * threads // groups
    count = max(1, min(wanted, len(blocks), 8))  # not more than 8, to keep the memory for dQ linear
    return [blocks[first::count] for first in range(count)]


class _Tensors(NamedTuple):
    """What the loop over keys reads, None for a dout of zero, and what it writes, as views."""

    q: Tensor  # (B, Hk, Sq, G, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    dout: Tensor | None  # (B, Hk, Sq, G, Dv)
    minus_lse: Tensor  # (B, Hk, Sq, G, 1)
    minus_delta: Tensor  # (B, Hk, Sq, G, 1)
    dq_sums: Tensor  # (runs, B, Hk, Sq, G, D)
    dk: Tensor  # (B, Hk, Sk, D)
    dv: Tensor  # (B, Hk, Sk, Dv)


class _RowSums:
    """Line 4: D = rowsum(dO o O), for one block of queries after another; -D and -L are what tiles add."""

    def __init__(self, spec: AttentionSpec, given: _Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        self.spec, self.given, self.out, self.lse, self.dlse, self.scratch = spec, given, out, lse, dlse, Scratch()

    def __call__(self, heads: Heads, queries: Block) -> None:
        """The gradient of lse enters dS like D, with the opposite sign."""
        given = self.given
        heads.of(given.minus_lse, queries).copy_(heads.of(self.lse, queries).unsqueeze(-1)).neg_()
        minus_delta = heads.of(given.minus_delta, queries)  # (h, M, G, 1)
        if self.dlse is None:
            minus_delta.zero_()
        else:
            minus_delta.copy_(heads.of(self.dlse, queries).unsqueeze(-1))
        if given.dout is not None:
            minus_delta -= self._row_dots(heads.of(given.dout, queries), heads.of(self.out, queries))

    def _row_dots(self, dout: Tensor, out: Tensor) -> Tensor:
        """rowsum(dO o O) (h, M, G, 1), in the order of dP's products, so that what is equal cancels in dP - D."""
        if _vectors(self.spec):
            return (dout.to(self.spec.lse_dtype) * out).sum(-1, keepdim=True)
        heads, length, group = dout.shape[:3]
        rows = length * group
        scratch, blocks = self.scratch, -(-rows // DOT_ROWS)
        padded = scratch("dout and out", self.spec.lse_dtype, 2, heads, blocks * DOT_ROWS, dout.shape[3])
        for copy, x in zip(padded, (dout, out), strict=True):
            copy[:, :rows].view(x.shape).copy_(x)
            copy[:, rows:] = 0
        dout, out = padded.view(2, heads * blocks, DOT_ROWS, -1)
        products = scratch("products", dout.dtype, len(dout), DOT_ROWS, DOT_ROWS)
        dots = torch.bmm(dout, out.mT, out=products).diagonal(dim1=1, dim2=2)  # with out=, autocast keeps off
        return dots.reshape(heads, -1)[:, :rows].view(heads, length, group, 1)


def _vectors(spec: AttentionSpec) -> bool:
    """Whether S is a row or a column: products with a vector sum in an order of their own."""
    return spec.seqlen_q * spec.group == 1 or spec.seqlen_k == 1


class _Rows(NamedTuple):
    """One block of queries. q_scaled makes the scores, q and dout are operands of the other products."""

    q_scaled: Tensor  # (h, R, D)
    q: Tensor  # (h, R, D)
    dout: Tensor | None  # (h, R, Dv)
    minus_lse: Tensor  # (h, R, 1)
    minus_delta: Tensor  # (h, R, 1)
    dq: Tensor  # (h, R, D), a sum over key blocks


class _Columns(NamedTuple):
    """One block of keys, as operands of products; dk and dv are sums over query blocks."""

    k_scores: Tensor  # (h, N, D), in the dtype of scores
    k: Tensor  # (h, N, D)
    v: Tensor  # (h, N, Dv)
    dk: Tensor  # (h, N, D), transposed in memory, as Q^T dS runs up to a third faster than dS^T Q
    dv: Tensor  # (h, N, Dv), the same


class _KeyBlocks:
    """Lines 5 to 19 for one run of key blocks after another."""

    def __init__(self, spec: AttentionSpec, given: _Tensors) -> None:
        self.spec, self.given = spec, given
        self.exact, self.product, self.scratch = spec.lse_dtype, product_dtype(spec), Scratch()
        # dK = softmax_scale dS^T Q; where Q is the one scaled for the scores, it holds softmax_scale / softcap already
        self.dk_factor = spec.softmax_scale if self.product != self.exact else spec.softcap or 1.0
        self.column_parts: dict[torch.Size, Parts] = {}

    def __call__(self, heads: Heads, numbered_run: tuple[int, _KeyRun]) -> None:
        index, key_run = numbered_run
        dq = self.given.dq_sums[index]
        dq[heads.batch, heads.start : heads.end].zero_()  # line 3
        row_blocks = {queries: self._row_block(heads, queries, dq) for queries in query_blocks(self.spec)}
        for keys, tiles_by_queries in key_run:  # line 5
            column_parts = self._load_columns(heads, keys)  # lines 6, 7
            for queries, tiles in tiles_by_queries:  # line 8
                load, row_parts = row_blocks[queries]
                load()  # line 9
                for tile in tiles:
                    for part in tile.heads_at_once(heads.end - heads.start):
                        self._tile(tile, row_parts(part, tile.rows), column_parts(part, tile.cols))
            heads.of(self.given.dk, keys).copy_(column_parts.whole.dk.mul_(self.dk_factor))  # line 18
            heads.of(self.given.dv, keys).copy_(column_parts.whole.dv)

    def _row_block(self, heads: Heads, queries: Block, dq: Tensor) -> tuple[Callable[[], None], Parts]:
        """Line 9: what loads a block of queries into the operands, contiguous and in the dtypes of products."""
        given, scratch, factor = self.given, self.scratch, query_factor(self.spec)
        q = heads.of(given.q, queries)  # (h, M, G, D)
        dout = None if given.dout is None else heads.of(given.dout, queries)
        q_scaled = scratch("q_scaled", self.exact, *q.shape)
        q_product = q_scaled if self.product == self.exact else scratch("q", self.product, *q.shape)
        do_product = None if dout is None else scratch("dout", self.product, *dout.shape)

        def load() -> None:
            q_scaled.copy_(q).mul_(factor)
            if q_product is not q_scaled:
                q_product.copy_(q)
            if dout is not None and do_product is not None:
                do_product.copy_(dout)

        sums = (heads.of(x, queries).flatten(1, 2) for x in (given.minus_lse, given.minus_delta, dq))
        do_rows = None if do_product is None else do_product.flatten(1, 2)
        return load, Parts(_Rows(q_scaled.flatten(1, 2), q_product.flatten(1, 2), do_rows, *sums))

    def _load_columns(self, heads: Heads, keys: Block) -> Parts:
        """Lines 6 and 7."""
        scratch, exact, product = self.scratch, self.exact, self.product
        k, v = heads.of(self.given.k, keys), heads.of(self.given.v, keys)
        parts = self.column_parts.get(k.shape)
        if parts is None:
            k_scores = scratch("k_scores", exact, *k.shape)
            parts = self.column_parts[k.shape] = Parts(
                _Columns(
                    k_scores,
                    k_scores if product == exact else scratch("k", product, *k.shape),
                    scratch("v", product, *v.shape),
                    scratch("dk", exact, *k.mT.shape).mT,
                    scratch("dv", exact, *v.mT.shape).mT,
                )
            )
        columns = parts.whole
        columns.k_scores.copy_(k)
        if columns.k is not columns.k_scores:
            columns.k.copy_(k)
        columns.v.copy_(v)
        columns.dk.zero_()
        columns.dv.zero_()
        return parts

    def _tile(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 10 to 16."""
        spec, scratch, product = self.spec, self.scratch, self.product
        shape = (*rows.q.shape[:-1], columns.k.shape[-2])
        s, capped = scratch("scores", self.exact, *shape), None
        if spec.softcap > 0:
            torch.matmul(rows.q_scaled, columns.k_scores.mT, out=s).tanh_().mul_(spec.softcap)  # line 10
            capped = scratch("capped", self.exact, *shape).copy_(s)
            s.add_(rows.minus_lse)
        else:
            _product_minus(rows.minus_lse, rows.q_scaled, columns.k_scores.mT, s)
        p = s.mul_(LOG2_E[self.exact]).exp2_()  # line 11
        if tile.masked:
            hide_(spec, tile, p, 0.0)
        if rows.dout is None:
            ds = p.mul_(rows.minus_delta)
        else:
            scratch.add_product(columns.dv.mT, rows.dout.mT, scratch.converted("operand", product, p))  # line 12
            ds = scratch("ds", self.exact, *shape)
            if product == self.exact and _vectors(spec):
                torch.sum(rows.dout.unsqueeze(-2) * columns.v.unsqueeze(-3), -1, out=ds).add_(
                    rows.minus_delta
                )  # line 13
            elif product == self.exact:
                _product_minus(rows.minus_delta, rows.dout, columns.v.mT, ds)  # line 13
            else:
                ds.copy_(torch.matmul(rows.dout, columns.v.mT, out=scratch("operand", product, *shape)))
                ds.add_(rows.minus_delta)
            ds.mul_(p)  # line 14
        if capped is not None:
            ds.mul_(1 - capped.div_(spec.softcap).square_())  # the derivative of tanh is 1 - tanh^2
        if tile.masked:
            hide_(spec, tile, ds, 0.0)
        ds = scratch.converted("operand", product, ds)
        scratch.add_product(rows.dq, ds, columns.k)  # line 15
        scratch.add_product(columns.dk.mT, rows.q.mT, ds)  # line 16


def _product_minus(bias: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b + bias (h, R, 1), which is added to the whole sum, so that what is equal cancels.

    Products of float32 do so themselves, in no more time, up to a depth where they are cut in two.
    """
    if a.dtype == torch.float32 and a.shape[-1] <= 128:
        product_plus(bias, a, b, out)
    else:
        torch.matmul(a, b, out=out).add_(bias)
