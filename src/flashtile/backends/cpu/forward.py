"""FlashAttention-2 forward pass (Algorithm 1) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
M queries (R = M * G rows) and N keys of a tile. Q: (R, D) · K: (N, D) · V: (N, Dv) · S, P: (R, N) ·
O: (R, Dv) · m, l: (R, 1).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import workers
from .tile import (
    LOG2_E,
    OUTER,
    Block,
    Scratch,
    Tile,
    hide_,
    product_dtype,
    query_blocks,
    query_factor,
    query_heads,
    scores,
    tiles_of_queries,
    without_keys,
)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    out = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=spec.lse_dtype)
    # line 3, in parallel; the last query blocks first, as they see most keys under a causal mask
    blocks = [(queries, tiles_of_queries(spec, queries)) for queries in reversed(query_blocks(spec, OUTER))]
    tasks = itertools.product(range(spec.batch), range(spec.heads_k), blocks)
    workers.run(lambda: _QueryBlocks(spec, q, k, v, out, lse), tasks)
    return out, lse


class _Rows(NamedTuple):
    """Lines 4 and 5: one block of queries."""

    q: Tensor  # (R, D)
    o: Tensor  # (R, Dv)
    ell: Tensor  # (R, 1)
    minus_m: Tensor  # (R, 1), in units of log 2

    def part(self, rows: slice | None) -> _Rows:
        return self if rows is None else _Rows(*(x[rows] for x in self))


class _QueryBlocks:
    """Lines 4 to 15 for one block of queries after another."""

    def __init__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        self.spec, self.q, self.k, self.v, self.out, self.lse = spec, q, k, v, out, lse.transpose(1, 2)
        self.exact, self.product, self.scratch = spec.lse_dtype, product_dtype(spec), Scratch()
        self.head: tuple[int, int] | None = None
        self.head_keys: tuple[Tensor, Tensor]

    def __call__(self, batch: int, head_k: int, block: tuple[Block, list[tuple[Block, list[Tile]]]]) -> None:
        spec, (queries, tiles_by_keys) = self.spec, block
        q, out, lse = (query_heads(spec, x, batch, head_k)[slice(*queries)] for x in (self.q, self.out, self.lse))
        rows = self._start(q)
        k, v = self._keys(batch, head_k)
        for keys, tiles in tiles_by_keys:  # line 6
            k_j, v_j = k[slice(*keys)], v[slice(*keys)]  # (N, D), (N, Dv)
            for tile in tiles:
                cols = tile.cols
                if cols is None:
                    self._tile(tile, rows, k_j, v_j)
                else:
                    self._tile(tile, rows.part(tile.rows), k_j[cols], v_j[cols])
        rows.o.div_(rows.ell)  # line 12
        rows.o[: max(0, without_keys(spec) - queries.start) * spec.group] = 0
        l_i = (rows.ell.double().log2() - rows.minus_m).div_(
            LOG2_E[self.exact]
        )  # line 13, in float64 for one rounding at the end
        out.copy_(rows.o.view(out.shape))  # line 14
        lse.copy_(l_i.view(lse.shape))  # line 15

    def _keys(self, batch: int, head_k: int) -> tuple[Tensor, Tensor]:
        """Line 7: K (Sk, D) and V (Sk, Dv) of a key head in the dtypes of products.

        Where several blocks of queries follow each other, also contiguous, for products 3 % faster.
        """
        if self.head != (batch, head_k):
            k, v = self.k[batch, :, head_k].to(self.exact), self.v[batch, :, head_k].to(self.product)
            reused = self.spec.seqlen_q * self.spec.group > OUTER
            self.head, self.head_keys = (batch, head_k), (k.contiguous(), v.contiguous()) if reused else (k, v)
        return self.head_keys

    def _start(self, q: Tensor) -> _Rows:
        q = q.flatten(0, 1)  # (R, D), line 4
        q_i = self.scratch("q", self.exact, *q.shape).copy_(q).mul_(query_factor(self.spec))
        o_i = self.scratch("o", self.exact, len(q), self.spec.head_dim_v).zero_()  # line 5
        ell, minus_m = self.scratch("l, m", self.exact, 2, len(q), 1).zero_()
        minus_m.fill_(torch.finfo(self.exact).max)  # not inf: rows without keys stay clear of NaN
        return _Rows(q_i, o_i, ell, minus_m)

    def _tile(self, tile: Tile, rows: _Rows, k_j: Tensor, v_j: Tensor) -> None:
        """Lines 8 to 10."""
        log2_e = LOG2_E[self.exact]
        s = scores(self.spec, rows.q, k_j, self.scratch)  # line 8
        if tile.masked:
            hide_(self.spec, tile, s, -math.inf)
        minus_m = torch.minimum(rows.minus_m, s.amax(1, keepdim=True).mul_(-log2_e))  # line 9
        p = torch.add(minus_m, s, alpha=log2_e, out=s).exp2_()
        shrink = (minus_m - rows.minus_m).exp2_()
        rows.minus_m.copy_(minus_m)
        torch.addcmul(p.sum(1, keepdim=True), rows.ell, shrink, out=rows.ell)
        rows.o.mul_(shrink)  # line 10
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), v_j)
