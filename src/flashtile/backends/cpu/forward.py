"""FlashAttention-2 forward pass (Algorithm 1) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
Z heads at once, M queries (R = M * G rows) and N keys of a tile. Q: (Z, R, D) · K: (Z, N, D) · V: (Z, N, Dv) ·
S, P: (Z, R, N) · O: (Z, R, Dv) · m, l: (Z, R, 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from .tile import (
    LOG2_E,
    Scratch,
    Tile,
    heads_at_once,
    hide_,
    product_dtype,
    query_blocks,
    query_factor,
    scores,
    tiles_of_queries,
    without_keys,
)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    out = q.new_empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v)
    lse = q.new_empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=spec.lse_dtype)
    blocks = [(queries, tiles_of_queries(spec, queries)) for queries in query_blocks(spec)]
    scratch = Scratch()
    for heads in heads_at_once(spec):
        q_heads, out_heads, lse_heads = (heads.of_queries(spec, x) for x in (q, out, lse.mT))  # (B', H', Sq, G, ...)
        k_heads = heads.of_keys(k).to(spec.lse_dtype).flatten(0, 1)  # (Z, Sk, D)
        v_heads = heads.of_keys(v).to(product_dtype(spec)).flatten(0, 1)  # (Z, Sk, Dv)
        for queries, tiles_by_keys in blocks:  # line 3
            inside = slice(*queries)
            rows = _start(spec, q_heads[:, :, inside], scratch)  # lines 4, 5
            for keys, tiles in tiles_by_keys:  # line 6
                k_j, v_j = k_heads[:, slice(*keys)], v_heads[:, slice(*keys)]  # line 7
                for tile in tiles:
                    _tile(spec, tile, rows.part(tile.rows), k_j[:, tile.cols], v_j[:, tile.cols], scratch)
            rows.o.div_(rows.ell)  # line 12
            rows.o[:, : max(0, without_keys(spec) - queries.start) * spec.group] = 0
            # line 13, in float64 so that only the result is rounded
            l_i = (rows.ell.double().log2() - rows.minus_m).div_(LOG2_E[spec.lse_dtype])
            out_heads[:, :, inside].copy_(rows.o.view(out_heads[:, :, inside].shape))  # line 14
            lse_heads[:, :, inside].copy_(l_i.view(lse_heads[:, :, inside].shape))  # line 15
    return out, lse


class _Rows(NamedTuple):
    """One block of queries."""

    q: Tensor  # (Z, R, D)
    o: Tensor  # (Z, R, Dv)
    ell: Tensor  # (Z, R, 1)
    minus_m: Tensor  # (Z, R, 1), in units of log 2

    def part(self, rows: slice) -> _Rows:
        return _Rows(*(x[:, rows] for x in self))


def _start(spec: AttentionSpec, q: Tensor, scratch: Scratch) -> _Rows:
    """Lines 4 and 5 for q (B', H', M, G, D)."""
    exact = spec.lse_dtype
    q_i = scratch.copy("q", exact, q).flatten(1, 2).mul_(query_factor(spec))
    o_i = scratch("o", exact, *q_i.shape[:2], spec.head_dim_v).zero_()
    ell, minus_m = scratch("l, m", exact, 2, *q_i.shape[:2], 1).zero_()
    minus_m.fill_(torch.finfo(exact).max)  # not inf: rows without keys stay clear of NaN
    return _Rows(q_i, o_i, ell, minus_m)


def _tile(spec: AttentionSpec, tile: Tile, rows: _Rows, k: Tensor, v: Tensor, scratch: Scratch) -> None:
    """Lines 8 to 10."""
    log2_e = LOG2_E[spec.lse_dtype]
    s = scores(spec, rows.q, k, scratch)  # line 8
    if tile.masked:
        hide_(spec, tile, s, -math.inf)
    minus_m = torch.minimum(rows.minus_m, s.amax(2, keepdim=True).mul_(-log2_e))  # line 9
    p = torch.add(minus_m, s, alpha=log2_e, out=s).exp2_()  # exp(S - m): the change of base rides on the subtraction
    shrink = (minus_m - rows.minus_m).exp2_()
    rows.minus_m.copy_(minus_m)
    rows.ell.mul_(shrink).add_(p.sum(2, keepdim=True))
    rows.o.mul_(shrink)  # line 10
    scratch.add_product(rows.o, scratch.converted("p", v.dtype, p), v)
