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
    Block,
    Scratch,
    Tile,
    add_product,
    exp_,
    hide,
    key_blocks,
    keys_of,
    product_dtype,
    queries_of,
    query_blocks,
    query_factor,
    scores,
    visible_tiles,
)


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
    runs = _runs(spec)
    # line 3: a dQ for each run of key blocks
    shape = (len(runs), spec.batch, spec.heads_k, spec.seqlen_q * spec.group, spec.head_dim)
    dq_sums = torch.zeros(shape, dtype=spec.lse_dtype)
    given = Given(dout, dlse, q, k, v, out, lse)
    tasks = itertools.product(enumerate(runs), range(spec.batch), range(spec.heads_k))
    workers.run(lambda: _KeyBlocks(spec, given, dq_sums, dk, dv), tasks)
    dq_sum = dq_sums.sum(0).mul_(spec.softmax_scale).unflatten(2, (spec.seqlen_q, spec.group))  # (B, Hk, Sq, G, D)
    dq.unflatten(2, (spec.heads_k, spec.group)).copy_(dq_sum.transpose(1, 2))
    return dq, dk, dv


def _runs(spec: AttentionSpec) -> list[list[Block]]:
    """The key blocks in one run, or in a few where there are too few heads to keep every thread busy.

    Parallel key blocks would race for dQ; each run sums a dQ of its own, so the same bits come every time.
    """
    blocks, heads = key_blocks(spec), max(1, spec.batch * spec.heads_k)
    runs = max(1, min(len(blocks), 2 * workers.count() // heads))
    return [blocks[start::runs] for start in range(runs)]


class Given(NamedTuple):
    """What the forward pass kept, and the gradients that flow in; None is zero."""

    dout: Tensor | None  # (B, Sq, Hq, Dv)
    dlse: Tensor | None  # (B, Hq, Sq)
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _Rows(NamedTuple):
    """Line 9: one block of queries. q and dout are operands of products, q_scaled makes the scores."""

    q_scaled: Tensor  # (R, D)
    q: Tensor  # (R, D)
    dout: Tensor | None  # (R, Dv)
    lse: Tensor  # (R, 1)
    delta: Tensor  # (R, 1)
    dq: Tensor  # (R, D), a sum over key blocks

    def part(self, rows: slice) -> _Rows:
        dout = None if self.dout is None else self.dout[rows]
        return _Rows(self.q_scaled[rows], self.q[rows], dout, self.lse[rows], self.delta[rows], self.dq[rows])


class _Columns(NamedTuple):
    """Lines 6 and 7: one block of keys, as operands of products; dk_t and dv_t are sums over query blocks."""

    k_scores: Tensor  # (N, D), in the dtype of scores
    k: Tensor  # (N, D)
    v: Tensor  # (N, Dv)
    dk_t: Tensor  # (D, N): transposed, as Q^T dS runs a third faster than dS^T Q
    dv_t: Tensor  # (Dv, N)

    def part(self, cols: slice) -> _Columns:
        return _Columns(self.k_scores[cols], self.k[cols], self.v[cols], self.dk_t[:, cols], self.dv_t[:, cols])


class _KeyBlocks:
    """Lines 5 to 19 for one run of key blocks after another, on one thread."""

    def __init__(self, spec: AttentionSpec, given: Given, dq_sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.spec, self.given, self.dq_sums, self.dk, self.dv = spec, given, dq_sums, dk, dv
        self.scores, self.capped, self.grads = (Scratch(spec, spec.lse_dtype) for _ in range(3))
        self.operands = Scratch(spec, product_dtype(spec))

    def __call__(self, run: tuple[int, list[Block]], batch: int, head_k: int) -> None:
        spec, (index, key_run) = self.spec, run
        dq = self.dq_sums[index, batch, head_k]  # (Sq * G, D)
        deltas = [(queries, self._delta(queries, batch, head_k)) for queries in query_blocks(spec)]  # line 4
        for keys in key_run:  # line 5
            columns = self._columns(keys, batch, head_k)  # lines 6, 7
            for queries, delta in deltas:  # line 8
                tiles = list(visible_tiles(spec, queries, keys))
                if not tiles:
                    continue
                rows = self._rows(queries, batch, head_k, delta, dq)  # line 9
                for tile in tiles:
                    row_part = rows.part(tile.queries.within(queries, spec.group))
                    self._tile(tile, row_part, columns.part(tile.keys.within(keys)))
            keys_of(self.dk, batch, head_k, keys).copy_(columns.dk_t.mul_(spec.softmax_scale).t())  # line 18
            keys_of(self.dv, batch, head_k, keys).copy_(columns.dv_t.t())

    def _delta(self, queries: Block, batch: int, head_k: int) -> Tensor:
        """Line 4: D = rowsum(dO o O), (R, 1). The gradient of lse enters dS with the opposite sign: D - dlse."""
        spec, (dout, dlse, *_, out, _) = self.spec, self.given
        delta = torch.zeros(len(queries), spec.group, dtype=spec.lse_dtype)
        if dout is not None:
            do, o = (queries_of(spec, x, batch, head_k, queries).to(spec.lse_dtype) for x in (dout, out))
            torch.sum(do * o, -1, out=delta)
        if dlse is not None:
            delta -= queries_of(spec, dlse.transpose(1, 2), batch, head_k, queries)
        return delta.view(-1, 1)

    def _columns(self, keys: Block, batch: int, head_k: int) -> _Columns:
        exact, product = self.spec.lse_dtype, product_dtype(self.spec)
        k, v = (keys_of(x, batch, head_k, keys) for x in (self.given.k, self.given.v))
        dk_t, dv_t = (torch.zeros(x.shape[1], x.shape[0], dtype=exact) for x in (k, v))
        return _Columns(k.to(exact), k.to(product), v.to(product), dk_t, dv_t)

    def _rows(self, queries: Block, batch: int, head_k: int, delta: Tensor, dq: Tensor) -> _Rows:
        spec, given, exact, product = self.spec, self.given, self.spec.lse_dtype, product_dtype(self.spec)
        q = queries_of(spec, given.q, batch, head_k, queries).flatten(0, 1)
        lse = queries_of(spec, given.lse.transpose(1, 2), batch, head_k, queries).reshape(-1, 1)
        dout = None
        if given.dout is not None:
            dout = queries_of(spec, given.dout, batch, head_k, queries).flatten(0, 1).to(product)
        dq = dq[queries.start * spec.group : queries.end * spec.group]
        return _Rows(q.to(exact) * query_factor(spec), q.to(product), dout, lse, delta, dq)

    def _tile(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 10 to 16."""
        spec = self.spec
        s = scores(spec, rows.q_scaled, columns.k_scores, self.scores)  # line 10
        capped = self.capped.tile(*s.shape).copy_(s) if spec.softcap > 0 else None
        p = exp_(s.sub_(rows.lse))  # line 11
        hide(spec, tile, p, 0.0)
        if rows.dout is None:
            ds = p.mul_(-rows.delta)
        else:
            add_product(columns.dv_t, rows.dout.t(), self.operands.converted(p))  # line 12: dV^T += dO^T P
            dp = torch.mm(rows.dout, columns.v.t(), out=self.operands.tile(*s.shape))  # line 13
            ds = self.grads.converted(dp).sub_(rows.delta).mul_(p)  # line 14
        if capped is not None:
            ds.mul_(1 - (capped / spec.softcap).square_())  # d tanh(x) = 1 - tanh(x)^2
        hide(spec, tile, ds, 0.0)
        ds = self.operands.converted(ds)
        add_product(rows.dq, ds, columns.k)  # line 15
        add_product(columns.dk_t, rows.q.t(), ds)  # line 16: dK^T += Q^T dS
