"""FlashAttention-2 forward pass (Algorithm 1) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims,
M queries (R = M * G rows) and N keys of a tile. Q: (R, D) · K: (N, D) · V: (N, Dv) · S, P: (R, N) ·
O: (R, Dv) · m, l: (R, 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import workers
from .tile import (
    LOG2_E,
    ROWS,
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

# Scores up to here need no running maximum: exp and its sums stay far from the ends of float32 and bfloat16, and the
# rounding of the exponent, which m = 0 leaves in P, is below 2e-6.
SAFE_SCORE = 24.0


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    out = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=spec.lse_dtype)
    # line 3, in parallel; the last query blocks first, as they see most keys under a causal mask
    blocks = [(queries, tiles_of_queries(spec, queries)) for queries in reversed(query_blocks(spec))]
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
        self.log2_e = LOG2_E[self.exact]
        self.head: tuple[int, int] | None = None

    def __call__(self, batch: int, head_k: int, block: tuple[Block, list[tuple[Block, list[Tile]]]]) -> None:
        spec, (queries, tiles_by_keys) = self.spec, block
        q, out, lse = (query_heads(spec, x, batch, head_k)[slice(*queries)] for x in (self.q, self.out, self.lse))
        if self.head != (batch, head_k):
            self.head = batch, head_k
            self._load_keys(self.k[batch, :, head_k], self.v[batch, :, head_k])
        rows, step = self._start(q)
        for keys, tiles in tiles_by_keys:  # line 6
            k_j, v_j = self.head_k[slice(*keys)], self.head_v[slice(*keys)]  # (N, D), (N, Dv)
            for tile in tiles:
                if tile.rows is None or tile.cols is None:
                    step(tile, rows, k_j, v_j)
                else:
                    step(tile, rows.part(tile.rows), k_j[tile.cols], v_j[tile.cols])
        rows.o.div_(rows.ell)  # line 12
        rows.o[: max(0, without_keys(spec) - queries.start) * spec.group] = 0
        # line 13, in float64: one rounding at the end
        l_i = (rows.ell.double().log2() - rows.minus_m).div_(self.log2_e)
        out.copy_(rows.o.view(out.shape))  # line 14
        lse.copy_(l_i.view(lse.shape))  # line 15

    def _load_keys(self, k: Tensor, v: Tensor) -> None:
        """Line 7: K (Sk, D) and V (Sk, Dv) of a key head in the dtypes of products.

        Where several blocks of queries read them also contiguous, for products 3 % faster.
        """
        scratch, spec = self.scratch, self.spec
        if spec.seqlen_q * spec.group > ROWS:
            self.head_k = scratch("k", self.exact, *k.shape).copy_(k)
            self.head_v = scratch("v", self.product, *v.shape).copy_(v)
        else:
            self.head_k = scratch.converted("k", self.exact, k)
            self.head_v = scratch.converted("v", self.product, v)
        self.longest_key = _longest_row(self.head_k)

    def _start(self, q: Tensor) -> tuple[_Rows, Callable[[Tile, _Rows, Tensor, Tensor], None]]:
        """The rows of q (M, G, D), and the step of line 9 that they need.

        |s| <= |q| |k|, with softcap too. Where that shows that exp(s) stays in range, m = 0 will do.
        """
        scratch, spec, exact = self.scratch, self.spec, self.exact
        q = q.flatten(0, 1)
        q_i = scratch("q", exact, *q.shape).copy_(q).mul_(query_factor(spec))  # line 4
        o_i = scratch("o", exact, len(q), spec.head_dim_v).zero_()  # line 5
        ell, minus_m = scratch("l, m", exact, 2, len(q), 1).zero_()
        if _longest_row(q_i) * self.longest_key * (spec.softcap or 1.0) <= SAFE_SCORE:  # a NaN is not
            q_i.mul_(1.0 if spec.softcap > 0 else self.log2_e)
            return _Rows(q_i, o_i, ell, minus_m), self._bounded_step
        minus_m.fill_(torch.finfo(exact).max)  # not inf: rows without keys stay clear of NaN
        return _Rows(q_i, o_i, ell, minus_m), self._online_step

    def _online_step(self, tile: Tile, rows: _Rows, k: Tensor, v: Tensor) -> None:
        """Lines 8 to 10."""
        s = scores(self.spec, rows.q, k, self.scratch)  # line 8
        if tile.masked:
            hide_(self.spec, tile, s, -math.inf)
        minus_m = torch.minimum(rows.minus_m, s.amax(1, keepdim=True).mul_(-self.log2_e))  # line 9
        p = torch.add(minus_m, s, alpha=self.log2_e, out=s).exp2_()  # exp(S - m): the subtraction changes the base
        shrink = (minus_m - rows.minus_m).exp2_()
        rows.minus_m.copy_(minus_m)
        rows.ell.mul_(shrink).add_(p.sum(1, keepdim=True))
        rows.o.mul_(shrink)  # line 10
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), v)

    def _bounded_step(self, tile: Tile, rows: _Rows, k: Tensor, v: Tensor) -> None:
        """Lines 8 to 10 where m = 0 throughout, so that nothing has to be found, subtracted or rescaled."""
        p = scores(self.spec, rows.q, k, self.scratch, self.log2_e).exp2_()
        if tile.masked:
            hide_(self.spec, tile, p, 0.0)
        rows.ell.add_(p.sum(1, keepdim=True))
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), v)


def _longest_row(x: Tensor) -> float:
    """The largest norm of a row of x; 0 if it has none."""
    return math.sqrt(x.square().sum(1).max().item()) if len(x) else 0.0
