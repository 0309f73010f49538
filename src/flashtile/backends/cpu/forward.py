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
    by_key_head,
    head_groups,
    hide_,
    key_blocks,
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
    tensors = _Tensors(
        by_key_head(spec, q),
        by_key_head(spec, out),
        by_key_head(spec, lse.transpose(1, 2)),
        k.transpose(1, 2),
        v.transpose(1, 2),
    )
    workers.run(lambda: _QueryBlocks(spec, tensors), tasks)
    return out, lse


class _Tensors(NamedTuple):
    """What is read and written, as views."""

    q: Tensor  # (B, Hk, Sq, G, D)
    out: Tensor  # (B, Hk, Sq, G, Dv)
    lse: Tensor  # (B, Hk, Sq, G)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)


class _Rows(NamedTuple):
    """Lines 4 and 5: one block of queries."""

    q: Tensor  # (h, R, D)
    o: Tensor  # (h, R, Dv)
    ell: Tensor  # (h, R, 1)
    minus_m: Tensor  # (h, R, 1), in units of log 2: rounded as it enters P, so that line 13 takes out what came in


class _Columns(NamedTuple):
    """Line 7: one block of keys."""

    k: Tensor  # (h, N, D)
    v: Tensor  # (h, N, Dv)


class _QueryBlocks:
    """Lines 4 to 15 for one block of queries after another."""

    def __init__(self, spec: AttentionSpec, tensors: _Tensors) -> None:
        self.spec, self.tensors = spec, tensors
        self.exact, self.product, self.scratch = spec.lse_dtype, product_dtype(spec), Scratch()
        self.log2_e = LOG2_E[self.exact]
        self.heads: Heads | None = None

    def __call__(self, heads: Heads, block: tuple[Block, list[tuple[Block, list[Tile]]]]) -> None:
        spec, (queries, tiles_by_keys) = self.spec, block
        q, out, lse = (heads.of(x, queries) for x in self.tensors[:3])  # (h, M, G, ...)
        if self.heads != heads:
            self._load_keys(heads)
        rows, step = self._start(q)
        row_parts = Parts(rows)
        for keys, tiles in tiles_by_keys:  # line 6
            for tile in tiles:
                for part in tile.heads_at_once(len(q)):
                    step(tile, row_parts(part, tile.rows), self.columns[keys](part, tile.cols))
        rows.o.div_(rows.ell)  # line 12
        rows.o[:, : max(0, without_keys(spec) - queries.start) * spec.group] = 0
        # line 13, in float64: one rounding at the end
        l_i = (rows.ell.double().log2() - rows.minus_m).div_(self.log2_e)
        out.copy_(rows.o.view(out.shape))  # line 14
        lse.copy_(l_i.view(lse.shape))  # line 15

    def _load_keys(self, heads: Heads) -> None:
        """Line 7: the blocks of K (h, Sk, D) and V (h, Sk, Dv) of some key heads, in the dtypes of products.

        Contiguous, as in the backward pass, so that it finds the same scores; products are 3 % faster for it too. A
        decoding step has no gradient, and the copy would be most of its time.
        """
        scratch, spec = self.scratch, self.spec
        k, v = (heads.of(x, Block(0, spec.seqlen_k)) for x in (self.tensors.k, self.tensors.v))
        if spec.seqlen_q * spec.group > DECODING_ROWS:
            k, v = scratch("k", self.exact, *k.shape).copy_(k), scratch("v", self.product, *v.shape).copy_(v)
        else:
            k, v = scratch.converted("k", self.exact, k), scratch.converted("v", self.product, v)
        self.heads, self.longest_key = heads, _longest_row(k)
        self.columns = {keys: Parts(_Columns(k[:, slice(*keys)], v[:, slice(*keys)])) for keys in key_blocks(spec)}

    def _start(self, q: Tensor) -> tuple[_Rows, Callable[[Tile, _Rows, _Columns], None]]:
        """The rows of q (h, M, G, D), and the step of line 9 that they need.

        |s| <= |q| |k|, with softcap too. Where that shows that exp(s) stays in range, m = 0 will do.
        """
        scratch, spec, exact = self.scratch, self.spec, self.exact
        q_i = scratch("q", exact, *q.shape).copy_(q).mul_(query_factor(spec)).flatten(1, 2)  # line 4
        o_i = scratch("o", exact, *q_i.shape[:2], spec.head_dim_v).zero_()  # line 5
        ell, minus_m = scratch("l, m", exact, 2, *q_i.shape[:2], 1).zero_()
        rows = _Rows(q_i, o_i, ell, minus_m)
        largest = _longest_row(q_i) * self.longest_key * (spec.softcap or 1.0)
        first, end = spec.visible_keys(spec.seqlen_q - 1)
        if largest <= SAFE_SCORE and end - first > FEW_KEYS:  # a NaN is not
            if spec.softcap == 0:
                q_i.mul_(self.log2_e)
            return rows, self._bounded_step
        minus_m.fill_(torch.finfo(exact).max)  # not inf: rows without keys stay clear of NaN
        return rows, self._online_step

    def _scores(self, q: Tensor, k: Tensor, capped: float) -> Tensor:
        """Line 8; with a soft cap, at most `capped`."""
        s = torch.matmul(q, k.mT, out=self.scratch("scores", self.exact, *q.shape[:-1], k.shape[-2]))
        return s.tanh_().mul_(capped) if self.spec.softcap > 0 else s

    def _online_step(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 8 to 10."""
        s = self._scores(rows.q, columns.k, self.spec.softcap)
        if tile.masked:
            hide_(self.spec, tile, s, -math.inf)
        minus_m = torch.minimum(rows.minus_m, s.amax(-1, keepdim=True).mul_(-self.log2_e))  # line 9
        p = torch.add(minus_m, s, alpha=self.log2_e, out=s).exp2_()  # exp(S - m): the subtraction changes the base
        shrink = (minus_m - rows.minus_m).exp2_()
        rows.ell.mul_(shrink).add_(p.sum(-1, keepdim=True))
        rows.o.mul_(shrink)  # line 10
        rows.minus_m.copy_(minus_m)
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), columns.v)

    def _bounded_step(self, tile: Tile, rows: _Rows, columns: _Columns) -> None:
        """Lines 8 to 10 where m = 0 throughout, so that nothing has to be found, subtracted or rescaled: scores come in
        base 2."""
        p = self._scores(rows.q, columns.k, self.spec.softcap * self.log2_e).exp2_()
        if tile.masked:
            hide_(self.spec, tile, p, 0.0)
        rows.ell.add_(p.sum(-1, keepdim=True))
        self.scratch.add_product(rows.o, self.scratch.converted("p", self.product, p), columns.v)


def _longest_row(x: Tensor) -> float:
    """The largest norm of a row of x (h, R, D); 0 if it has none."""
    return torch.linalg.vector_norm(x, dim=-1).max().item() if x.shape[1] else 0.0
