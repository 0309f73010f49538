"""The forward pass of few queries over many keys, as a call over a cache: its keys are split among programs
(FlashAttention-2 section 3.2, Flash-Decoding), and the queries of a group share a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cache import Arguments, CachedCall
from ...spec import AttentionSpec
from .. import Forward
from ..launcher import MAX_REMEMBERED
from . import forward as whole
from .decode_config import DecodeTiles, tasks_of, tasks_of_sequence, tile_m
from .decode_launch import attend_like, decode_spec, multiprocessors_of, passes_over
from .launch import dense_rows

# Keys for each query: a mask by which queries see few of them leaves none out here. Over 8k keys, one sequence, 8 and
# 16 key heads: 1 query takes 12 us for 89, 20 for 96, 64 take 39 for 95, 30 for 101, 128 take 69 for 95, 42 for 101;
# 64 and 8 sequences of one query over 4k and 32k 244 for 498, 243 for 473. See few_queries in hopper-runs-h200.json.
MANY_KEYS = 4
# Where a key head has several tiles of rows, tiles for each multiprocessor up to which keys are split, and from how
# many on: 128 queries of 16 heads take 13 us for 16 over 1k, 11 for 10 over 512; 256 of 8 key heads 133 for 96 over 8k.
FEW_TILES, LEAST_KEYS = 0.5, 1024

NOTHING_ELSE = (None,) * (len(Arguments._fields) - 3)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q and lse (B, Hq, Sq) in float32."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    key = spec, q.device, *((x.stride(), x.data_ptr() & 15) for x in (q, k, v))
    if key not in _BY_DECODING:
        if len(_BY_DECODING) >= MAX_REMEMBERED:
            _BY_DECODING.clear()
        _BY_DECODING[key] = _over_a_cache(spec, q, k, v)
    by_decoding = _BY_DECODING[key]
    return whole.forward(spec, q, k, v) if by_decoding is None else by_decoding(q, k, v)


def forward_like(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward | None:
    """`forward` for tensors that lie like these, None if it copies them first."""
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return None
    return _over_a_cache(spec, q, k, v) or whole.forward_like(spec, q, k, v)


_BY_DECODING: dict[tuple, Forward | None] = {}
"""By problem and layout, which takes the host longer to work out than to launch."""


def _over_a_cache(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward | None:
    """`forward` of few queries, None of many."""
    call = _call(spec, q, k, v)
    if not are_few(spec, multiprocessors_of(q.device)) or passes_over(call) is not None:
        return None
    attend = attend_like(call, 0, wants_lse=True)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend((q, k, v, *NOTHING_ELSE))
        assert lse is not None, "it was wanted"
        return out, lse

    return forward


def plan(spec: AttentionSpec, arch: str, multiprocessors: int) -> tuple[DecodeTiles, int, int]:
    """(tiles, programs, queries of a tile)."""
    q = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim, dtype=spec.dtype, device="meta")
    k = q.new_empty(spec.batch, spec.seqlen_k, spec.heads_k, spec.head_dim)
    v = q.new_empty(spec.batch, spec.seqlen_k, spec.heads_k, spec.head_dim_v)
    decode = decode_spec(_call(spec, q, k, v), 0, arch, multiprocessors)
    return decode.tiles, decode.programs or decode.tasks, max(tile_m(spec) // spec.group, 1)


def _call(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> CachedCall:
    return CachedCall(spec, Arguments(q, k, v, *NOTHING_ELSE), interleaved=False)


def are_few(spec: AttentionSpec, multiprocessors: int) -> bool:
    """Whether queries are so few that reading keys, or waiting for them, is what takes time."""
    if 0 in (spec.batch, spec.seqlen_q) or spec.seqlen_k < MANY_KEYS * spec.seqlen_q:
        return False
    few_tiles = tasks_of(spec) <= FEW_TILES * multiprocessors and spec.seqlen_k >= LEAST_KEYS
    return tasks_of_sequence(spec) == spec.heads_k or few_tiles
