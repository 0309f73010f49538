"""FlashAttention-2 backward pass (Algorithm 2) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
Z heads at once, M queries (R = M * G rows) and N keys of a tile. Q, dQ: (Z, R, D) · dO: (Z, R, Dv) · K: (Z, N, D) ·
V: (Z, N, Dv) · S, P, dP, dS: (Z, R, N) · dK^T: (Z, D, N) · dV^T: (Z, Dv, N) · L, D: (Z, R, 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from .tile import (
    LOG2_E,
    Block,
    Heads,
    Scratch,
    Tile,
    heads_at_once,
    hide_,
    key_blocks,
    product_dtype,
    query_blocks,
    query_factor,
    scores,
    tiles_of_keys,
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
    blocks = [(keys, tiles_of_keys(spec, keys)) for keys in key_blocks(spec)]
    scratch = Scratch()
    for heads in heads_at_once(spec):
        k_heads, v_heads, dk_heads, dv_heads = (heads.of_keys(x) for x in (k, v, dk, dv))  # (B', H', Sk, D or Dv)
        rows_of, dq_heads = _row_blocks(spec, heads, dout, dlse, q, out, lse)  # lines 2 to 4
        for keys, tiles_by_queries in blocks:  # line 5
            inside = slice(*keys)
            columns = _columns(spec, k_heads[:, :, inside], v_heads[:, :, inside], scratch)  # lines 6, 7
            for queries, tiles in tiles_by_queries:  # line 8
                rows = _operands(spec, rows_of[queries], scratch)  # line 9
                for tile in tiles:
                    _tile(spec, tile, rows.part(tile.rows), columns.part(tile.cols), scratch)
            columns.dk_t.mul_(_dk_factor(spec))
            for gradient, sums in ((dk_heads, columns.dk_t), (dv_heads, columns.dv_t)):  # line 18
                gradient[:, :, inside] = sums.mT.unflatten(0, gradient.shape[:2])
        heads.of_queries(spec, dq).copy_(dq_heads.mul_(spec.softmax_scale))
    return dq, dk, dv


class _Block(NamedTuple):
    """One block of queries: views of the tensors, a row's numbers, and the sum over key blocks that is its dQ."""

    q: Tensor  # (B', H', M, G, D)
    dout: Tensor | None  # (B', H', M, G, Dv)
    lse: Tensor  # (Z, R, 1)
    delta: Tensor  # (Z, R, 1)
    dq: Tensor  # (Z, R, D)


class _Rows(NamedTuple):
    """Rows of one tile. q and dout are operands of products, q_scaled makes the scores."""

    q_scaled: Tensor  # (Z, R, D)
    q: Tensor  # (Z, R, D)
    dout: Tensor | None  # (Z, R, Dv)
    lse: Tensor  # (Z, R, 1)
    delta: Tensor  # (Z, R, 1)
    dq: Tensor  # (Z, R, D)

    def part(self, rows: slice) -> _Rows:
        return _Rows._make(None if x is None else x[:, rows] for x in self)


class _Columns(NamedTuple):
    """Keys of one tile, as operands of products; dk_t and dv_t are sums over query blocks."""

    k_scores: Tensor  # (Z, N, D), in the dtype of scores
    k: Tensor  # (Z, N, D)
    v: Tensor  # (Z, N, Dv)
    dk_t: Tensor  # (Z, D, N): transposed, as Q^T dS runs a third faster than dS^T Q
    dv_t: Tensor  # (Z, Dv, N)

    def part(self, cols: slice) -> _Columns:
        return _Columns(*(x[:, cols] for x in self[:3]), *(x[:, :, cols] for x in self[3:]))


def _row_blocks(
    spec: AttentionSpec, heads: Heads, dout: Tensor | None, dlse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor
) -> tuple[dict[Block, _Block], Tensor]:
    """The blocks of queries of some heads, and dQ = 0 (B', H', Sq, G, D), of which each holds a part.

    Line 4: D = rowsum(dO o O). The gradient of lse enters dS like D, with the opposite sign.
    """
    exact, blocks = spec.lse_dtype, {}
    q, out, lse = (heads.of_queries(spec, x) for x in (q, out, lse.mT))  # (B', H', Sq, G, ...)
    dout, dlse = (
        None if dout is None else heads.of_queries(spec, dout),
        None if dlse is None else heads.of_queries(spec, dlse.mT),
    )
    dq = q.new_zeros(q.shape, dtype=exact)
    for queries in query_blocks(spec):
        inside = slice(*queries)
        lse_i = lse[:, :, inside].contiguous()  # (B', H', M, G)
        delta = torch.zeros_like(lse_i)
        if dout is not None:
            delta += (dout[:, :, inside].to(exact) * out[:, :, inside]).sum(-1)
        if dlse is not None:
            delta -= dlse[:, :, inside]
        columns = (len(lse_i) * lse_i.shape[1], -1, 1)
        blocks[queries] = _Block(
            q[:, :, inside],
            None if dout is None else dout[:, :, inside],
            lse_i.flatten(0, 1).flatten(1)[..., None],
            delta.flatten(0, 1).flatten(1)[..., None],
            dq.flatten(0, 1).flatten(1, 2)[:, queries.start * spec.group : queries.end * spec.group],
        )
    return blocks, dq


def _operands(spec: AttentionSpec, block: _Block, scratch: Scratch) -> _Rows:
    """Line 9: the rows of a block in the dtypes in which they are multiplied."""
    product = product_dtype(spec)
    q_scaled = scratch.copy("q_scaled", spec.lse_dtype, block.q).flatten(1, 2).mul_(query_factor(spec))
    q = q_scaled if product == q_scaled.dtype else scratch.copy("q", product, block.q).flatten(1, 2)
    dout = None if block.dout is None else scratch.copy("dout", product, block.dout).flatten(1, 2)
    return _Rows(q_scaled, q, dout, block.lse, block.delta, block.dq)


def _columns(spec: AttentionSpec, k: Tensor, v: Tensor, scratch: Scratch) -> _Columns:
    """Lines 6 and 7 for k (B', H', N, D) and v (B', H', N, Dv)."""
    exact, product = spec.lse_dtype, product_dtype(spec)
    k_scores = scratch.copy("k_scores", exact, k)
    return _Columns(
        k_scores,
        k_scores if product == exact else scratch.copy("k", product, k),
        scratch.copy("v", product, v),
        scratch("dk_t", exact, *k_scores.mT.shape).zero_(),
        scratch("dv_t", exact, len(k_scores), spec.head_dim_v, k.shape[2]).zero_(),
    )


def _dk_factor(spec: AttentionSpec) -> float:
    """What remains to be multiplied to dS^T Q: where Q is scaled for the scores already, it holds softmax_scale."""
    if product_dtype(spec) != spec.lse_dtype:
        return spec.softmax_scale
    return spec.softcap if spec.softcap > 0 else 1.0


def _tile(spec: AttentionSpec, tile: Tile, rows: _Rows, columns: _Columns, scratch: Scratch) -> None:
    """Lines 10 to 16."""
    product = product_dtype(spec)
    s = scores(spec, rows.q_scaled, columns.k_scores, scratch)  # line 10
    capped = scratch("capped", s.dtype, *s.shape).copy_(s) if spec.softcap > 0 else None
    p = s.sub_(rows.lse).mul_(LOG2_E[s.dtype]).exp2_()  # line 11
    if tile.masked:
        hide_(spec, tile, p, 0.0)
    if rows.dout is None:
        ds = p.mul_(-rows.delta)
    else:
        scratch.add_product(columns.dv_t, rows.dout.mT, scratch.converted("operand", product, p))  # line 12
        dp = scratch.product("operand", rows.dout, columns.v.mT)  # line 13
        ds = scratch.converted("ds", p.dtype, dp).sub_(rows.delta).mul_(p)  # line 14
    if capped is not None:
        ds.mul_(1 - capped.div_(spec.softcap).square_())  # the derivative of tanh is 1 - tanh^2
    if tile.masked:
        hide_(spec, tile, ds, 0.0)
    ds = scratch.converted("operand", product, ds)
    scratch.add_product(rows.dq, ds, columns.k)  # line 15
    scratch.add_product(columns.dk_t, rows.q.mT, ds)  # line 16
