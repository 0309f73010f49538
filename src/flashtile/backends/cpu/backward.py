"""FlashAttention-2 backward pass (Algorithm 2) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
M queries (R = M * G rows) and N keys of a tile. Q, dQ: (R, D) · dO: (R, Dv) · K: (N, D) · V: (N, Dv) ·
S, P, dP, dS: (R, N) · dK^T: (D, N) · dV^T: (Dv, N) · L, D: (R, 1).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import workers
from .tile import (
    LOG2_E,
    Block,
    Scratch,
    Tile,
    hide_,
    key_blocks,
    product_dtype,
    query_blocks,
    query_factor,
    query_heads,
    scores,
    tiles_of_keys,
)

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
    runs = _key_runs(spec)
    shape = (spec.batch, spec.heads_k, len(runs), spec.seqlen_q * spec.group, spec.head_dim)
    scratch = Scratch()
    dq_sums = scratch("dq_sums", spec.lse_dtype, *shape)
    given = _Given(q, k, v, out, lse.transpose(1, 2), dout, None if dlse is None else dlse.transpose(1, 2))
    heads = list(itertools.product(range(spec.batch), range(spec.heads_k)))
    workers.run(lambda: _KeyBlocks(spec, given, dq_sums, dk, dv), [(*head, *run) for head in heads for run in runs])

    def sum_dq(batch: int, head_k: int) -> None:
        dq_sum, *others = dq_sums[batch, head_k]
        for other in others:
            dq_sum += other
        dq_sum *= spec.softmax_scale
        query_heads(spec, dq, batch, head_k).copy_(dq_sum.view(spec.seqlen_q, spec.group, spec.head_dim))

    workers.run(lambda: sum_dq, heads)
    return dq, dk, dv


def _key_runs(spec: AttentionSpec) -> list[tuple[int, _KeyRun]]:
    """The key blocks with their tiles, in a few numbered runs, so that all threads are busy to the end.

    Parallel key blocks would race for dQ; each run sums a dQ of its own, so the same bits come every time.
    """
    blocks = [(keys, tiles_of_keys(spec, keys)) for keys in key_blocks(spec)]
    wanted = 4 * torch.get_num_threads() // max(1, spec.batch * spec.heads_k)
    runs = max(1, min(wanted, len(blocks), 8))  # not more than 8, to keep the memory for dQ linear
    return [(index, blocks[index::runs]) for index in range(runs)]


class _Given(NamedTuple):
    """What the forward pass kept, and the gradients that flow in; None is zero."""

    q: Tensor  # (B, Sq, Hq, D)
    k: Tensor
    v: Tensor
    out: Tensor  # (B, Sq, Hq, Dv)
    lse: Tensor  # (B, Sq, Hq)
    dout: Tensor | None  # (B, Sq, Hq, Dv)
    dlse: Tensor | None  # (B, Sq, Hq)


class _Rows(NamedTuple):
    """One block of queries. q_scaled makes the scores, q and dout are operands of the other products."""

    q_scaled: Tensor  # (R, D)
    q: Tensor  # (R, D)
    dout: Tensor | None  # (R, Dv)
    minus_lse: Tensor  # (R, 1)
    minus_delta: Tensor  # (R, 1)
    dq: Tensor  # (R, D), a sum over key blocks

    def part(self, rows: slice | None) -> _Rows:
        return self if rows is None else _Rows._make(None if x is None else x[rows] for x in self)


class _Columns(NamedTuple):
    """One block of keys, as operands of products; dk_t and dv_t are sums over query blocks."""

    k_scores: Tensor  # (N, D), in the dtype of scores
    k: Tensor  # (N, D)
    v: Tensor  # (N, Dv)
    dk_t: Tensor  # (D, N): transposed, as Q^T dS runs a third faster than dS^T Q
    dv_t: Tensor  # (Dv, N)

    def part(self, cols: slice | None) -> _Columns:
        if cols is None:
            return self
        return _Columns(self.k_scores[cols], self.k[cols], self.v[cols], self.dk_t[:, cols], self.dv_t[:, cols])


class _KeyBlocks:
    """Lines 5 to 19 for one run of key blocks after another."""

    def __init__(self, spec: AttentionSpec, given: _Given, dq_sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.spec, self.given, self.dq_sums, self.dk, self.dv = spec, given, dq_sums, dk, dv
        self.exact, self.product, self.scratch = spec.lse_dtype, product_dtype(spec), Scratch()
        # dK = softmax_scale dS^T Q; where Q is the one scaled for the scores, it holds softmax_scale / softcap already
        self.dk_factor = spec.softmax_scale if self.product != self.exact else spec.softcap or 1.0

    def __call__(self, batch: int, head_k: int, index: int, key_run: _KeyRun) -> None:
        k, v, dk, dv = (x[batch, :, head_k] for x in (self.given.k, self.given.v, self.dk, self.dv))
        dq = self.dq_sums[batch, head_k, index].zero_()  # line 3
        row_blocks = self._row_blocks(batch, head_k, dq)  # lines 2, 4
        for keys, tiles_by_queries in key_run:  # line 5
            inside = slice(*keys)
            columns = self._columns(k[inside], v[inside])  # lines 6, 7
            for queries, tiles in tiles_by_queries:  # line 8
                rows = self._loaded(row_blocks[queries])  # line 9
                for tile in tiles:
                    self._tile(tile, rows.part(tile.rows), columns.part(tile.cols))
            dk[inside] = columns.dk_t.mul_(self.dk_factor).t()  # line 18
            dv[inside] = columns.dv_t.t()

    def _row_blocks(self, batch: int, head_k: int, dq: Tensor) -> dict[Block, _Rows]:
        """All blocks of queries of one key head, as views; line 4: D = rowsum(dO o O).

        The gradient of lse enters dS like D, with the opposite sign.
        """
        spec = self.spec
        given, blocks = self.given, {}
        q, out, lse = (query_heads(spec, x, batch, head_k) for x in (given.q, given.out, given.lse))  # (Sq, G, ...)
        dout, dlse = (None if x is None else query_heads(spec, x, batch, head_k) for x in (given.dout, given.dlse))
        for queries in query_blocks(spec):
            inside = slice(*queries)
            delta = torch.zeros(len(queries), spec.group, dtype=self.exact)
            if dout is not None:
                shape = (*delta.shape, spec.head_dim_v)
                do_o = self.scratch("dout_exact", self.exact, *shape).copy_(dout[inside])
                torch.sum(do_o.mul_(self.scratch("out_exact", self.exact, *shape).copy_(out[inside])), -1, out=delta)
            if dlse is not None:
                delta -= dlse[inside]
            q_i = q[inside].flatten(0, 1)
            do_i = None if dout is None else dout[inside].flatten(0, 1)
            dq_i = dq[queries.start * spec.group : queries.end * spec.group]
            blocks[queries] = _Rows(q_i, q_i, do_i, lse[inside].reshape(-1, 1).neg(), delta.view(-1, 1).neg_(), dq_i)
        return blocks

    def _loaded(self, rows: _Rows) -> _Rows:
        """Line 9: the operands, contiguous and in the dtypes in which they are multiplied."""
        scratch, q, dout = self.scratch, rows.q, rows.dout
        q_scaled = scratch("q_scaled", self.exact, *q.shape).copy_(q).mul_(query_factor(self.spec))
        return rows._replace(
            q_scaled=q_scaled,
            q=q_scaled if self.product == self.exact else scratch("q", self.product, *q.shape).copy_(q),
            dout=None if dout is None else scratch("dout", self.product, *dout.shape).copy_(dout),
        )

    def _columns(self, k: Tensor, v: Tensor) -> _Columns:
        scratch, exact, product = self.scratch, self.exact, self.product
        k_scores = scratch("k_scores", exact, *k.shape).copy_(k)  # line 6
        return _Columns(
            k_scores,
            k_scores if product == exact else scratch("k", product, *k.shape).copy_(k),
            scratch("v", product, *v.shape).copy_(v),
            scratch("dk", exact, k.shape[1], k.shape[0]).zero_(),  # line 7
            scratch("dv", exact, v.shape[1], v.shape[0]).zero_(),
        )

    def _tile(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 10 to 16."""
        spec, scratch, product = self.spec, self.scratch, self.product
        capped = None
        if spec.softcap > 0:
            s = scores(spec, rows.q_scaled, columns.k_scores, scratch)  # line 10
            capped = scratch("capped", s.dtype, *s.shape).copy_(s)
            s.add_(rows.minus_lse)
        else:  # S - L by the product, for nothing
            s = scratch("scores", self.exact, len(rows.q), len(columns.k))
            torch.addmm(rows.minus_lse, rows.q_scaled, columns.k_scores.t(), out=s)
        p = s.mul_(LOG2_E[self.exact]).exp2_()  # line 11
        if tile.masked:
            hide_(spec, tile, p, 0.0)
        if rows.dout is None:
            ds = p.mul_(rows.minus_delta)
        else:
            scratch.add_product(columns.dv_t, rows.dout.t(), scratch.converted("operand", product, p))  # line 12
            ds = self._dp_minus_delta(rows, columns).mul_(p)  # lines 13, 14
        if capped is not None:
            ds.mul_(1 - capped.div_(spec.softcap).square_())  # the derivative of tanh is 1 - tanh^2
        if tile.masked:
            hide_(spec, tile, ds, 0.0)
        ds = scratch.converted("operand", product, ds)
        scratch.add_product(rows.dq, ds, columns.k)  # line 15
        scratch.add_product(columns.dk_t, rows.q.t(), ds)  # line 16

    def _dp_minus_delta(self, rows: _Rows, columns: _Columns) -> Tensor:
        """dP - D in the exact dtype, the subtraction by the product where that is in this dtype too."""
        scratch, shape = self.scratch, (len(rows.q), len(columns.k))
        if self.product == self.exact:
            ds = scratch("ds", self.exact, *shape)
            return torch.addmm(rows.minus_delta, rows.dout, columns.v.t(), out=ds)
        dp = torch.mm(rows.dout, columns.v.t(), out=scratch("operand", self.product, *shape))
        return scratch("ds", self.exact, *shape).copy_(dp).add_(rows.minus_delta)
