"""FlashAttention-2 forward pass (Algorithm 1) in torch operations on tiles.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims;
h key heads, M queries (R = M * G rows) and N keys of a tile. Q: (h, R, D) · K: (h, N, D) · V: (h, N, Dv) ·
S, P: (h, R, N) · O: (h, R, Dv) · m, l: (h, R, 1).
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
    query_blocks,
    query_factor,
    tiles_of_queries,
    without_keys,
)

# Scores up to here need no running maximum: exp and its sums stay far from the ends of float32 and bfloat16, and the
# rounding of the exponent, which m = 0 leaves in P, is below 2e-6. That is little beside the errors of a long row, and
# much beside those of a row of so few keys: with one key P should be 1, as it is with a maximum.
SAFE_SCORE = 24.0
FEW_KEYS = 64
# What counts as a step of decoding: queries of one key head.
DECODING_ROWS = 16


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    out = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=spec.lse_dtype)
    # line 3, in parallel; the last query blocks first, as they see most keys under a causal mask
    all_blocks = [(queries, tiles_of_queries(spec, queries)) for queries in reversed(query_blocks(spec))]
    tasks = itertools.product(head_groups(spec, each=len(all_blocks)), all_blocks)
    longest_keys = _longest_rows(k, spec.lse_dtype)
    workers.run(lambda: _QueryBlocks(spec, q, k, v, out, lse, longest_keys), tasks)
    return out, lse


class _Rows(NamedTuple):
    """Lines 4 and 5: one block of queries."""

    q: Tensor  # (h, R, D)
    o: Tensor  # (h, R, Dv)
    ell: Tensor  # (h, R, 1)
    m: Tensor  # (h, R, 1)


class _Columns(NamedTuple):
    """Line 7: one block of keys."""

    k: Tensor  # (h, N, D)
    v: Tensor  # (h, N, Dv)


class _QueryBlocks:
    """Lines 4 to 15 for one block of queries after another."""

    def __init__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, longest_keys: Tensor
    ) -> None:
        self.spec, self.q, self.k, self.v, self.out, self.lse = spec, q, k, v, out, lse.transpose(1, 2)
        self.longest_keys = longest_keys  # (B, Hk)
        self.exact, self.product, self.scratch = spec.lse_dtype, product_dtype(spec), Scratch()
        self.log2_e = LOG2_E[self.exact]
        self.heads: Heads | None = None

    def __call__(self, heads: Heads, block: tuple[Block, list[tuple[Block, list[Tile]]]]) -> None:
        spec, (queries, tiles_by_keys) = self.spec, block
        q, out, lse = (of_queries(spec, x, heads, queries) for x in (self.q, self.out, self.lse))  # (h, M, G, ...)
        if self.heads != heads:
            self.heads = heads
            self.columns = self._load_keys(of_keys(self.k, heads), of_keys(self.v, heads))
        rows, step = self._start(q, self.longest_keys[heads.batch, heads.start : heads.end])
        row_parts = Parts(rows)
        for keys, tiles in tiles_by_keys:  # line 6
            for tile in tiles:
                for part in tile.heads_at_once(len(q)):
                    step(tile, row_parts(part, tile.rows), self.columns[keys](part, tile.cols))
        rows.o.div_(rows.ell)  # line 12
        rows.o[:, : max(0, without_keys(spec) - queries.start) * spec.group] = 0
        # line 13, in float64: one rounding at the end
        l_i = rows.ell.double().log2().div_(self.log2_e).add_(rows.m)
        out.copy_(rows.o.view(out.shape))  # line 14
        lse.copy_(l_i.view(lse.shape))  # line 15

    def _load_keys(self, k: Tensor, v: Tensor) -> dict[Block, Parts]:
        """Line 7: the blocks of K (h, Sk, D) and V (h, Sk, Dv) of some key heads, in the dtypes of products.

        Contiguous, as in the backward pass, so that it finds the same scores; products are 3 % faster for it too. A
        decoding step has no gradient, and the copy would be most of its time.
        """
        scratch, spec = self.scratch, self.spec
        if spec.seqlen_q * spec.group > DECODING_ROWS:
            k, v = scratch("k", self.exact, *k.shape).copy_(k), scratch("v", self.product, *v.shape).copy_(v)
        else:
            k, v = scratch.converted("k", self.exact, k), scratch.converted("v", self.product, v)
        return {keys: Parts(_Columns(k[:, slice(*keys)], v[:, slice(*keys)])) for keys in key_blocks(spec)}

    def _start(self, q: Tensor, longest_keys: Tensor) -> tuple[_Rows, Callable[[Tile, _Rows, _Columns], None]]:
        """The rows of q (h, M, G, D), and the step of line 9 that they need.

        |s| <= |q| |k|, with softcap too. Where that shows that exp(s) stays in range, m = 0 will do.
        """
        scratch, spec, exact = self.scratch, self.spec, self.exact
        q_i = scratch("q", exact, *q.shape).copy_(q).mul_(query_factor(spec)).flatten(1, 2)  # line 4
        o_i = scratch("o", exact, *q_i.shape[:2], spec.head_dim_v).zero_()  # line 5
        ell, m = scratch("l, m", exact, 2, *q_i.shape[:2], 1).zero_()
        rows = _Rows(q_i, o_i, ell, m)
        longest = torch.linalg.vector_norm(q_i, dim=-1).amax(1).mul_(longest_keys).max().item()
        last_sees = spec.visible_keys(spec.seqlen_q - 1)
        if longest * (spec.softcap or 1.0) <= SAFE_SCORE and last_sees[1] - last_sees[0] > FEW_KEYS:  # a NaN is not
            return rows, self._bounded_step
        m.fill_(torch.finfo(exact).min / 2)  # not -inf: rows without keys stay clear of NaN
        return rows, self._online_step

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Line 8."""
        s = torch.matmul(q, k.mT, out=self.scratch("scores", self.exact, *q.shape[:-1], k.shape[-2]))
        return s.tanh_().mul_(self.spec.softcap) if self.spec.softcap > 0 else s

    def _online_step(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 8 to 10."""
        s = self._scores(rows.q, columns.k)
        if tile.masked:
            hide_(self.spec, tile, s, -math.inf)
        m = torch.maximum(rows.m, s.amax(-1, keepdim=True))  # line 9
        p = torch.add(m * -self.log2_e, s, alpha=self.log2_e, out=s).exp2_()  # the subtraction changes the base as well
        shrink = rows.m.sub_(m).mul_(self.log2_e).exp2_()
        rows.ell.mul_(shrink).add_(p.sum(-1, keepdim=True))
        rows.o.mul_(shrink)  # line 10
        rows.m.copy_(m)
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), columns.v)

    def _bounded_step(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 8 to 10 where m = 0 throughout, so that nothing has to be found, subtracted or rescaled."""
        p = self._scores(rows.q, columns.k).mul_(self.log2_e).exp2_()
        if tile.masked:
            hide_(self.spec, tile, p, 0.0)
        rows.ell.add_(p.sum(-1, keepdim=True))
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), columns.v)


def _longest_rows(k: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest norm of a key in each head of k (B, Sk, Hk, D): (B, Hk), 0 without keys."""
    if k.shape[1] == 0:
        return torch.zeros(k.shape[0], k.shape[2], dtype=dtype)
    return torch.linalg.vector_norm(k, dim=-1, dtype=dtype).amax(1)
