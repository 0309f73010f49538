"""Which tiles each program of a persistent kernel computes, and in which order: decided on the host, once per problem.

Each tile goes to the program that has least to do. Where tiles differ in length the longest come first, among heads
whose K and V fit in the L2 cache together; else one head comes after the other.
"""

from __future__ import annotations

import heapq

from ...spec import AttentionSpec

# K and V of the heads that are worked on at a time: of the 50 MB of L2, what was best for an earlier
# kernel of this shape.
SECTION_BYTES = 33_600_000
# Tiles for each program that make a section large enough: K and V of fewer heads are read by more programs at a time.
# S = 512 causal, D 128, 16k tokens on an H200: 334 -> 356 TFLOP/s against sections as large as the cache.
SECTION_ROUNDS = 2
# What a tile costs beside its key blocks, in key blocks: its epilogue and the start of its pipeline. An estimate.
TILE_COST = 0.6

Tile = tuple[int, int]
"""(batch * Hq + head, m_block)"""


def key_blocks(spec: AttentionSpec, m_block: int, rows: int, tile_n: int) -> int:
    """How many key blocks a tile of `rows` queries goes through: at least one."""
    first = spec.visible_keys(m_block * rows)[0]
    end = spec.visible_keys(min((m_block + 1) * rows, spec.seqlen_q) - 1)[1]
    return max(1, -(-end // tile_n) - first // tile_n)


def sections(spec: AttentionSpec, tiles_per_head: int, programs: int, alike: bool) -> list[range]:
    """The key heads of the whole batch, counted through, in even sections; one by one if tiles are alike."""
    heads = spec.batch * spec.heads_k
    fitting = SECTION_BYTES // (spec.seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize)
    enough = -(-SECTION_ROUNDS * programs // tiles_per_head)
    count = heads if alike else min(heads, max(1, round(heads / max(1, min(fitting, enough)))))
    return [range(heads * i // count, heads * (i + 1) // count) for i in range(count)]


def schedule(spec: AttentionSpec, rows: int, tile_n: int, programs: int) -> list[list[Tile]]:
    """The tiles of every program, in order; at most `programs` programs, each with at least one tile."""
    m_blocks = range(-(-spec.seqlen_q // rows))
    cost = [key_blocks(spec, m_block, rows, tile_n) + TILE_COST for m_block in m_blocks]
    longest_first = sorted(m_blocks, key=lambda m_block: -cost[m_block])
    count = min(programs, len(m_blocks) * spec.batch * spec.heads_q)
    lists: list[list[Tile]] = [[] for _ in range(count)]
    load = [(0.0, program) for program in range(count)]
    for section in sections(spec, len(m_blocks) * spec.group, programs, alike=min(cost) == max(cost)):
        for m_block in longest_first:
            for head in range(section.start * spec.group, section.stop * spec.group):
                busy, program = load[0]
                lists[program].append((head, m_block))
                heapq.heapreplace(load, (busy + cost[m_block], program))
    return lists
