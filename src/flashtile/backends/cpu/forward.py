"""FlashAttention-2 forward pass (Algorithm 1) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
M queries (R = M * G rows) and N keys of a tile. Q: (R, D) · K: (N, D) · V: (N, Dv) · S, P: (R, N) ·
O: (R, Dv) · m, l: (R, 1).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import workers
from .tile import (
    Block,
    Scratch,
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
    without_keys,
)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    out = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=spec.lse_dtype)
    # line 3, in parallel; the last query blocks first, as they see most keys under a causal mask
    tasks = itertools.product(reversed(query_blocks(spec)), range(spec.batch), range(spec.heads_k))
    workers.run(lambda: _QueryBlocks(spec, q, k, v, out, lse), tasks)
    return out, lse


class _QueryBlocks:
    """Lines 4 to 15 for one block of queries after another, on one thread."""

    def __init__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        self.spec, self.q, self.k, self.v, self.out, self.lse = spec, q, k, v, out, lse
        self.scores = Scratch(spec, spec.lse_dtype)
        self.operands = Scratch(spec, product_dtype(spec))

    def __call__(self, queries: Block, batch: int, head_k: int) -> None:
        spec, exact = self.spec, self.spec.lse_dtype
        q_i = queries_of(spec, self.q, batch, head_k, queries).flatten(0, 1)  # (R, D), line 4
        q_i = q_i.to(exact) * query_factor(spec)
        o_i = q_i.new_zeros(len(q_i), spec.head_dim_v)  # line 5
        l_i = q_i.new_zeros(len(q_i), 1)
        m_i = torch.full_like(l_i, torch.finfo(exact).min)  # finite, so that a row without keys gives no NaN
        for keys in key_blocks(spec):  # line 6
            tiles = list(visible_tiles(spec, queries, keys))
            if not tiles:
                continue
            k_j = keys_of(self.k, batch, head_k, keys).to(exact)  # (N, D), line 7
            v_j = keys_of(self.v, batch, head_k, keys).to(product_dtype(spec))  # (N, Dv)
            for tile in tiles:
                rows, cols = tile.queries.within(queries, spec.group), tile.keys.within(keys)
                s = scores(spec, q_i[rows], k_j[cols], self.scores)  # line 8
                hide(spec, tile, s, -math.inf)
                shrink = _online_softmax(s, m_i[rows], l_i[rows])  # line 9
                add_product(o_i[rows].mul_(shrink), self.operands.converted(s), v_j[cols])  # line 10
        o_i.div_(l_i)  # line 12
        o_i[: max(0, without_keys(spec) - queries.start) * spec.group] = 0
        l_i.log_().add_(m_i)  # line 13
        queries_of(spec, self.out, batch, head_k, queries).copy_(o_i.unflatten(0, (-1, spec.group)))  # line 14
        queries_of(spec, self.lse.transpose(1, 2), batch, head_k, queries).copy_(l_i.view(-1, spec.group))  # line 15


def _online_softmax(s: Tensor, m: Tensor, ell: Tensor) -> Tensor:
    """Line 9: turns S into P, updates m and l (here ell), and returns the factor by which O shrinks, (R, 1)."""
    m_new = torch.maximum(m, s.amax(1, keepdim=True))
    p = exp_(s.sub_(m_new))
    shrink = exp_(m - m_new)
    ell.mul_(shrink).add_(p.sum(1, keepdim=True))
    m.copy_(m_new)
    return shrink
