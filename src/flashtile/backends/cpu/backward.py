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
    head_groups,
    hide_,
    key_blocks,
    of_keys,
    of_queries,
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
    shape = (spec.batch, spec.heads_k, spec.seqlen_q * spec.group)
    given = _Given(
        q, k, v, dout,
        scratch("minus_lse", exact, *shape, 1),
        scratch("minus_delta", exact, *shape, 1),
        scratch("dq_sums", exact, len(runs), *shape, spec.head_dim),
    )  # fmt: skip
    row_sums = itertools.product(groups, query_blocks(spec))
    workers.run(lambda: _RowSums(spec, given, out, lse, dlse), row_sums)
    workers.run(lambda: _KeyBlocks(spec, given, dk, dv), itertools.product(groups, enumerate(runs)))

    def sum_dq(heads: Heads) -> None:
        first, *others = given.dq_sums[:, heads.batch, heads.start : heads.end]
        for other in others:
            first += other
        dq_heads = of_queries(spec, dq, heads, Block(0, spec.seqlen_q))
        dq_heads.copy_(first.mul_(spec.softmax_scale).view(dq_heads.shape))

    workers.run(lambda: sum_dq, [(heads,) for heads in groups])
    return dq, dk, dv


def _key_runs(spec: AttentionSpec, groups: int) -> list[_KeyRun]:
    """The key blocks with their tiles, in a few runs, so that all threads are busy to the end.

    Parallel key blocks would race for dQ; each run sums a dQ of its own, so the same bits come every time.
    """
    blocks, threads = [(keys, tiles_of_keys(spec, keys)) for keys in key_blocks(spec)], torch.get_num_threads()
    wanted = 1 if groups % threads == 0 else 4 * threads // groups
    count = max(1, min(wanted, len(blocks), 8))  # not more than 8, to keep the memory for dQ linear
    return [blocks[first::count] for first in range(count)]


class _Given(NamedTuple):
    """What the loop over keys reads, None for a dout of zero, and the sums of dQ, which it writes."""

    q: Tensor  # (B, Sq, Hq, D)
    k: Tensor
    v: Tensor
    dout: Tensor | None  # (B, Sq, Hq, Dv)
    minus_lse: Tensor  # (B, Hk, Sq * G, 1)
    minus_delta: Tensor  # (B, Hk, Sq * G, 1)
    dq_sums: Tensor  # (runs, B, Hk, Sq * G, D)


class _RowSums:
    """Line 4: D = rowsum(dO o O), for one block of queries after another; -D and -L are what tiles add."""

    def __init__(self, spec: AttentionSpec, given: _Given, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        self.spec, self.given, self.out, self.scratch = spec, given, out, Scratch()
        self.lse, self.dlse = lse.transpose(1, 2), None if dlse is None else dlse.transpose(1, 2)

    def __call__(self, heads: Heads, queries: Block) -> None:
        """The gradient of lse enters dS like D, with the opposite sign."""
        spec, given = self.spec, self.given
        rows = _rows_of(spec, heads, queries)
        lse = of_queries(spec, self.lse, heads, queries)  # (h, M, G)
        minus_lse, minus_delta = given.minus_lse[rows].view(lse.shape), given.minus_delta[rows].view(lse.shape)
        torch.neg(lse, out=minus_lse)
        if self.dlse is None:
            minus_delta.zero_()
        else:
            minus_delta.copy_(of_queries(spec, self.dlse, heads, queries))
        if given.dout is not None:
            minus_delta -= self._row_dots(given.dout, heads, queries).view(lse.shape)

    def _row_dots(self, dout: Tensor, heads: Heads, queries: Block) -> Tensor:
        """rowsum(dO o O) (h, R), summed in the order of dP's products, so that what is equal cancels in dP - D."""
        if _vectors(self.spec):
            dout, out = (of_queries(self.spec, x, heads, queries).to(self.spec.lse_dtype) for x in (dout, self.out))
            return (dout * out).sum(-1)
        dout, out = self._padded("dout", dout, heads, queries), self._padded("out", self.out, heads, queries)
        products = self.scratch("products", dout.dtype, len(dout), DOT_ROWS, DOT_ROWS)  # autocast keeps off `out=`
        dots = torch.bmm(dout, out.mT, out=products).diagonal(dim1=1, dim2=2)
        return dots.reshape(heads.end - heads.start, -1)[:, : len(queries) * self.spec.group]

    def _padded(self, name: str, x: Tensor, heads: Heads, queries: Block) -> Tensor:
        """Rows of x (B, Sq, Hq, Dv), up to a multiple of DOT_ROWS in each head: (blocks, DOT_ROWS, Dv)."""
        x = of_queries(self.spec, x, heads, queries)  # (h, M, G, Dv)
        rows = x.shape[1] * x.shape[2]
        padded = self.scratch(name, self.spec.lse_dtype, len(x), rows + -rows % DOT_ROWS, x.shape[3])
        padded[:, :rows].view(x.shape).copy_(x)
        padded[:, rows:] = 0
        return padded.view(-1, DOT_ROWS, x.shape[3])


def _vectors(spec: AttentionSpec) -> bool:
    """Whether S is a row or a column: products with a vector sum in an order of their own."""
    return spec.seqlen_q * spec.group == 1 or spec.seqlen_k == 1


def _rows_of(spec: AttentionSpec, heads: Heads, queries: Block) -> tuple[int, slice, slice]:
    """Where the rows of a block stand in (B, Hk, Sq * G, ...)."""
    return heads.batch, slice(heads.start, heads.end), slice(queries.start * spec.group, queries.end * spec.group)


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

    def __init__(self, spec: AttentionSpec, given: _Given, dk: Tensor, dv: Tensor) -> None:
        self.spec, self.given, self.dk, self.dv = spec, given, dk, dv
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
            of_keys(self.dk, heads, keys).copy_(column_parts.whole.dk.mul_(self.dk_factor))  # line 18
            of_keys(self.dv, heads, keys).copy_(column_parts.whole.dv)

    def _row_block(self, heads: Heads, queries: Block, dq: Tensor) -> tuple[Callable[[], None], Parts]:
        """Line 9: what loads a block of queries into the operands, contiguous and in the dtypes of products."""
        given, scratch, factor = self.given, self.scratch, query_factor(self.spec)
        rows = _rows_of(self.spec, heads, queries)
        q = of_queries(self.spec, given.q, heads, queries)  # (h, M, G, D)
        q_scaled = scratch("q_scaled", self.exact, *q.shape)
        q_product = q_scaled if self.product == self.exact else scratch("q", self.product, *q.shape)
        dout = None if given.dout is None else of_queries(self.spec, given.dout, heads, queries)
        do_product = None if dout is None else scratch("dout", self.product, *dout.shape)

        def load() -> None:
            q_scaled.copy_(q).mul_(factor)
            if q_product is not q_scaled:
                q_product.copy_(q)
            if do_product is not None:
                do_product.copy_(dout)

        operands = (None if x is None else x.flatten(1, 2) for x in (q_scaled, q_product, do_product))
        return load, Parts(_Rows(*operands, given.minus_lse[rows], given.minus_delta[rows], dq[rows]))

    def _load_columns(self, heads: Heads, keys: Block) -> Parts:
        """Lines 6 and 7."""
        scratch, exact, product = self.scratch, self.exact, self.product
        k, v = of_keys(self.given.k, heads, keys), of_keys(self.given.v, heads, keys)
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
