"""Which tiles each program of a persistent kernel computes, and in which order: decided on the host, once per problem.

Each tile goes to the program that has least to do. Where tiles differ in length the longest come first, among heads
whose K and V fit in the L2 cache together; else one head comes after the other.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import replace
from typing import NamedTuple

from ...spec import AttentionSpec

# K and V of the heads that are worked on at a time: of the 50 MB of L2, what was best for an earlier
# kernel of this shape.
SECTION_BYTES = 33_600_000
# Tiles for each program that make a section large enough: K and V of fewer heads are read by more programs at a time.
# S = 512 causal, D 128, 16k tokens on an H200: 334 -> 356 TFLOP/s against sections as large as the cache.
BACKWARD_ROUNDS = (2,)
# The same in the forward pass, whichever leaves programs more even; if both do, the smaller. S = 512 and 1k causal, by
# one round, not two: D 256 +2 and +0.5 % on an H200, +4 and +3 % on an H100; D 64, which two leave more even, -3, -2 %.
FORWARD_ROUNDS = (1, 2)
# In the forward pass the shortest tiles, so many for each program, may come after all sections.
LAST_ROUNDS = 2
# Which it must make up for, as K and V of these have left the cache: so many bytes, read again, take a program as long
# as a step. By what such an end cost causal calls of 512 and 1k tokens: 0 to 15 % on an H200, 5 to 17 % on an H100.
AGAIN_BYTES = 150_000
# A program may have so much more to do than the mean, or sections are made larger. D 256, S = 1k causal, has 1.031 in
# the smaller ones; in larger ones it took 1.09 of the time on an H200.
MOST_UNEVEN = 1.035
# By how much a step is shorter if all warpgroups sit it out, so many of them by so much less. One of two: a tile of 16k
# keys takes 0.70, 0.76, 0.73 of the time at D 64, 128, 256 on an H200.
SITTING_OUT = 0.5
# What a tile costs beside its key blocks, in key blocks: its epilogue and the start of its pipeline. An estimate.
TILE_COST = 0.6
# The same for a tile of the backward pass, in query blocks: dK and dV on their way out.
BACKWARD_TILE_COST = 1.0
# Steps that a piece of a tile has at least.
PIECE_STEPS = 4
# What it costs to have pieces, in steps: their sums on the way out, and the kernel that adds them up. By what sharing
# out the last round saved on an H100 and what it would have for nothing, 8 to 15 steps, 15 to 25 us, in both passes.
PIECES_COST = 12
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

Tile = tuple[int, int]
"""(batch * Hq + head, m_block); in the backward pass (batch * Hk + head, n_block)"""


class Piece(NamedTuple):
    """Some blocks of a tile, what one program has of a tile that several share: of keys, of a tile of queries, or the
    other way round."""

    tile: Tile
    first: int
    end: int


def key_blocks(spec: AttentionSpec, m_block: int, rows: int, tile_n: int) -> int:
    """How many key blocks a tile of `rows` queries goes through: at least one."""
    first = spec.visible_keys(m_block * rows)[0]
    end = spec.visible_keys(min((m_block + 1) * rows, spec.seqlen_q) - 1)[1]
    return max(1, -(-end // tile_n) - first // tile_n)


def idle(spec: AttentionSpec, m_block: int, rows: int, warpgroups: int) -> float:
    """Which part of a tile's warpgroups have no rows."""
    missing = max(0, (m_block + 1) * rows - spec.seqlen_q)
    return missing * warpgroups // rows / warpgroups


def sections(heads: int, head_bytes: int, tiles_per_head: int, programs: int, rounds: int) -> list[int]:
    """Into how many sections the key heads of the whole batch may come: of a size that fits, no larger than for so many
    rounds of tiles, and a little more, all of one size. On an H200 these brought causal calls +1 to +2.5 % where
    programs became more even by that."""
    fitting = SECTION_BYTES // head_bytes
    enough = -(-rounds * programs // tiles_per_head)
    count = min(heads, max(1, round(heads / max(1, min(fitting, enough)))))
    return [count] + [n for n in range(count + 1, min(heads, count * 3 // 2) + 1) if heads % n == 0][:1]


def spread(
    cost: list[float], heads: int, group: int, head_bytes: int, programs: int, alike: bool,
    rounds: tuple[int, ...], last: int = 0,
) -> list[list[Tile]]:  # fmt: skip
    """The tiles of every program, `group` of each block of a key head: one key head after the other if tiles are alike,
    else in sections for the cache's sake, or in fewer, if that leaves some program with too much to do. The `last`
    blocks of each head may come after all sections."""
    mean = sum(cost) * heads * group / programs
    last_keys = sorted(cost)[last - 1] / max(cost) if last else 0  # of a head's
    again = last_keys * heads * head_bytes / programs / AGAIN_BYTES
    found: list[tuple[float, int, list[list[Tile]]]] = []

    def find(count: int) -> None:
        parts = [range(heads * i // count * group, heads * (i + 1) // count * group) for i in range(count)]
        for after in sorted({0, last}):
            lists = assign(cost, parts, programs, after)
            longest = max(sum(cost[block] for _, block in tiles) for tiles in lists)
            found.append((longest + again if after else longest, -count, lists))

    tiles = len(cost) * group
    counts = {heads} if alike else {n for some in rounds for n in sections(heads, head_bytes, tiles, programs, some)}
    for count in counts:
        find(count)
    count = min(counts)
    while not alike and count > 1 and min(found)[0] > MOST_UNEVEN * mean:
        count //= 2
        find(count)
    return min(found)[2]


def assign(cost: list[float], sections: list[range], programs: int, last: int) -> list[list[Tile]]:
    """The tiles of every program, in order: blocks that cost so much, of all heads of a section, then of the next; but
    the `last` shortest blocks of each head after all that.

    At most `programs` programs, each with at least one tile.
    """
    longest_first = sorted(range(len(cost)), key=lambda block: -cost[block])
    kept = max(len(cost) - last, 0)
    every_head = range(sections[0].start, sections[-1].stop)
    rounds = [*((heads, longest_first[:kept]) for heads in sections), (every_head, longest_first[kept:])]
    count = min(programs, len(cost) * len(every_head))
    lists: list[list[Tile]] = [[] for _ in range(count)]
    load = [(0.0, program) for program in range(count)]
    for heads, blocks in rounds:
        for block in blocks:
            for head in heads:
                busy, program = load[0]
                lists[program].append((head, block))
                heapq.heapreplace(load, (busy + cost[block], program))
    return lists


def schedule(spec: AttentionSpec, rows: int, warpgroups: int, tile_n: int, programs: int) -> list[list[Tile]]:
    """The forward pass: tiles of `rows` queries, which `warpgroups` share out."""
    m_blocks = range(-(-spec.seqlen_q // rows))
    blocks = [key_blocks(spec, m_block, rows, tile_n) for m_block in m_blocks]
    head_bytes = spec.seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    sat_out = [SITTING_OUT * idle(spec, m_block, rows, warpgroups) for m_block in m_blocks]
    cost = [n * (1 - part) + TILE_COST for n, part in zip(blocks, sat_out, strict=True)]
    alike = min(blocks) == max(blocks)
    last = 0 if alike else min(len(cost), -(-LAST_ROUNDS * programs // (spec.batch * spec.heads_q)))
    return spread(cost, spec.batch * spec.heads_k, spec.group, head_bytes, programs, alike, FORWARD_ROUNDS, last)


@functools.lru_cache(maxsize=64)
def mirrored(spec: AttentionSpec) -> AttentionSpec:
    """The problem seen from the keys: `visible_keys` of the result are the queries that see a key."""
    return replace(
        spec, seqlen_q=spec.seqlen_k, seqlen_k=spec.seqlen_q,
        window_left=spec.window_right, window_right=spec.window_left,
    )  # fmt: skip


def tile_costs(spec: AttentionSpec, keys: int, tile_m: int) -> list[float]:
    """What each tile of a head costs in the backward pass, in query blocks."""
    n_blocks = range(-(-spec.seqlen_k // keys))
    return [key_blocks(mirrored(spec), n_block, keys, tile_m) * spec.group + BACKWARD_TILE_COST for n_block in n_blocks]


def backward_head_bytes(spec: AttentionSpec) -> int:
    """What the tiles of a key head read, and add to, in the backward pass. Where dQ has a kernel of its own, and they
    add to nothing, the same: sections of heads by what they read alone are no faster."""
    row_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return spec.seqlen_k * row_bytes + spec.group * spec.seqlen_q * (row_bytes + 4 * spec.head_dim)


def backward_schedule(spec: AttentionSpec, keys: int, tile_m: int, programs: int) -> list[list[Tile]]:
    """The backward pass: tiles of `keys` keys, each with all queries of its group that see one of them."""
    cost = tile_costs(spec, keys, tile_m)
    alike = min(cost) == max(cost)
    return spread(cost, spec.batch * spec.heads_k, 1, backward_head_bytes(spec), programs, alike, BACKWARD_ROUNDS)


def with_pieces(
    spec: AttentionSpec, lists: list[list[Tile]], blocks: int, steps: int, programs: int, most: int | None = None
) -> tuple[list[list[Tile]], list[list[Piece]]]:
    """(tiles, pieces) of every program, of tiles of `blocks` blocks of so many steps each. Where the last round of
    tiles, without a mask, would leave programs without one, and that is worth it, all share it out, an equal part of a
    line of its blocks for each: the end of one tile and the beginning of another at most. If there is a `most`, in all
    no more pieces than that.
    """
    without: tuple[list[list[Tile]], list[list[Piece]]] = lists, [[] for _ in lists]
    if spec.window_left >= 0 or spec.window_right >= 0:
        return without
    rounds = min(map(len, lists)) if len(lists) == programs else 0
    last = [tile for tiles in lists for tile in tiles[rounds:]]
    if most is not None:  # a share may begin in the tile where one ends: as many pieces more as there are tiles
        programs = min(programs, max(most - len(last), 1))
    share = max(-(-len(last) * blocks // programs), -(-PIECE_STEPS // steps))
    longest = max(len(tiles) - rounds for tiles in lists) * blocks
    if not last or (longest - share) * steps <= PIECES_COST:
        return without
    pieces = [
        [
            Piece(last[at // blocks], at % blocks, min(at % blocks + end - at, blocks))
            for at in range(start, end)
            if at == start or at % blocks == 0
        ]
        for start, end in ((i, min(i + share, len(last) * blocks)) for i in range(0, len(last) * blocks, share))
    ]
    count = max(len(pieces), len(lists) if rounds else 0)
    whole = [tiles[:rounds] for tiles in lists] + [[]] * (count - len(lists))
    return whole[:count], pieces + [[]] * (count - len(pieces))


def query_blocks(spec: AttentionSpec, n_block: int, keys: int, tile_m: int) -> tuple[int, int, int, int]:
    """(first, end, full_first, full_end): blocks first ... end of queries hold all that see a key of the tile, at least
    one; of these, full_first ... full_end need no mask."""
    seen_from = mirrored(spec)
    row_blocks = -(-spec.seqlen_q // tile_m)
    key, last_key = n_block * keys, min((n_block + 1) * keys, spec.seqlen_k) - 1
    first = min(seen_from.visible_keys(key)[0] // tile_m, row_blocks - 1)
    end = max(-(-seen_from.visible_keys(last_key)[1] // tile_m), first + 1)
    full_first = -(-seen_from.visible_keys(last_key)[0] // tile_m)
    full_end = seen_from.visible_keys(key)[1] // tile_m if spec.window_left >= 0 else end
    if key + keys > spec.seqlen_k:
        full_first = end  # keys past the last are not there
    return first, end, full_first, full_end


def turn_of(spec: AttentionSpec, n_block: int, keys: int, tile_m: int, backwards: bool = False) -> int:
    """Where a tile begins: so many blocks past its first; with a mask the tiles of a head begin apart by themselves.

    A tile that may go backwards does so with a mask, from its last block to its first: it meets others there but once.
    """
    first, end, *_ = query_blocks(spec, n_block, keys, tile_m)
    if spec.window_left >= 0 or spec.window_right >= 0:
        return -(first + end) if backwards else 0
    return n_block * (end - first) * keys // spec.seqlen_k % (end - first)


def scattered(count: int) -> list[int]:
    """Places 0 ... count - 1, another for each, the first few of them far apart. Where tiles of a head begin like that,
    programs that begin a head before others have time for it come first to as many of its blocks each: else the last of
    them would come first to nearly all, and write them (`is_first`), which takes longer than to add to them."""
    places = [0] * count
    for place, i in enumerate(sorted(range(count), key=lambda i: i * GOLDEN_RATIO % 1)):
        places[i] = place
    return places


def begins_with_zeros(spec: AttentionSpec) -> bool:
    """Whether, in any order, dQ's sums are set to zero before, and tiles of a head begin one after the other: without a
    mask, if a query head is too large for the cache, as scattered tiles go over all of one at a time. D 128, S = 32k
    took 1.03 times as long by those on an H200."""
    masked = spec.window_left >= 0 or spec.window_right >= 0
    return not masked and backward_head_bytes(replace(spec, heads_q=spec.heads_k)) > SECTION_BYTES


def tile_fields(spec: AttentionSpec, n_block: int, keys: int, tile_m: int, turn: int, ranks: int) -> list[int]:
    """What `backward_kernel` reads of a tile after its batch and head, in its order."""
    key = n_block * keys
    left, right = max(spec.window_left, 0), max(spec.window_right, 0)
    edges = (spec.seqlen_k - key, key - spec.offset - right, key - spec.offset + left)
    return [key, *query_blocks(spec, n_block, keys, tile_m), *edges, turn, ranks]
