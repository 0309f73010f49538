"""The forward pass of few queries over many keys, as a call over a cache: its keys are split among programs
(FlashAttention-2 section 3.2, Flash-Decoding), and the queries of a group share a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ...arch import arch_of
from ...cache import MANY_KEYS, over_a_cache
from ...plan import Plan
from ...spec import AttentionSpec
from ..launcher import Launcher, Run, behind, multiprocessors_of
from .decode_config import tasks_of, tasks_of_sequence, tile_m
from .decode_launch import CACHED, decode_spec, passes_over

# Where a key head has several tiles of rows, tiles for each multiprocessor up to which keys are split, and from how
# many on: 128 queries of 16 heads take 13 us for 16 over 1k, 11 for 10 over 512; 256 of 8 key heads 133 for 96 over 8k.
# Of one tile, one sequence, 8k keys of 8 and 16 heads: 1 query takes 12 us for 89, 20 for 96, 16 take 18 for 95, 21 for
# 101; 64 and 8 sequences of one query over 4k and 32k 244 for 498, 243 for 473 (few_queries in hopper-runs-h200.json).
FEW_TILES, LEAST_KEYS = 0.5, 1024


class FewQueries(Launcher):
    """`decode_kernel`, and `merge_kernel` where programs share a task."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        *given, out, lse = tensors  # q, k, v
        arch = arch_of(out.device)
        assert arch is not None, "a tensor on a GPU, and no GPU"
        call = over_a_cache(spec, *given)
        decode = decode_spec(call, 0, arch, multiprocessors_of(out.device))
        n_acc, n_sums = decode.sizes_of_parts
        _, _, _, *nothing = call.given

        def parts() -> tuple[Tensor, Tensor | int]:
            room = torch.empty(n_acc + n_sums, dtype=torch.float32, device=out.device)
            return room, behind(room, n_acc)

        room, _ = parts()
        reads = *call.given, spec.seqlen_k, None, room, room[n_acc:]
        run = CACHED.run_for((None, decode), reads, (out, lse))
        return lambda q, k, v, out, lse: run(q, k, v, *nothing, spec.seqlen_k, None, *parts(), out, lse)


FEW_QUERIES = FewQueries()


def has_few_queries(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is better one over a cache, and can be."""
    return are_few(spec, multiprocessors_of(q.device)) and passes_over(over_a_cache(spec, q, k, v)) is None


def are_few(spec: AttentionSpec, multiprocessors: int) -> bool:
    """Whether queries are so few that reading keys, or waiting for them, is what takes time."""
    if 0 in (spec.batch, spec.seqlen_q) or spec.seqlen_k < MANY_KEYS * spec.seqlen_q:
        return False
    few_tiles = tasks_of(spec) <= FEW_TILES * multiprocessors and spec.seqlen_k >= LEAST_KEYS
    return tasks_of_sequence(spec) == spec.heads_k or few_tiles


def plan(spec: AttentionSpec, arch: str, multiprocessors: int, where: str) -> Plan:
    """The launch of few queries; `where`: what the tiles are of."""
    q, k, v = (
        torch.empty(spec.batch, seqlen, heads, dim, dtype=spec.dtype, device="meta")
        for seqlen, heads, dim in (
            (spec.seqlen_q, spec.heads_q, spec.head_dim), (spec.seqlen_k, spec.heads_k, spec.head_dim),
            (spec.seqlen_k, spec.heads_k, spec.head_dim_v),
        )
    )  # fmt: skip
    decode = decode_spec(over_a_cache(spec, q, k, v), 0, arch, multiprocessors)
    queries = max(tile_m(spec) // spec.group, 1)
    return Plan(f"{decode.tiles} ({where})", decode.programs or decode.tasks, queries, decode.tiles.tile_n)
