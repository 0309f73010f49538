"""Which tiles each program has of a call over a cache, whose lengths the host does not know: in plain Triton.

The host deals out tiles as if sequences came in order of their lengths, the longest first, to and fro: then every
program has as many, and as much to do, whether sequences are alike or each is a little shorter than the one before. A
kernel ahead of the forward pass finds out which sequence has which place in that order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...spec import AttentionSpec
from ..launcher import KernelCall, call_of
from . import config
from .launch import Shares, entries, whole_tiles
from .schedule import Tile

MOST_SEQUENCES = 128  # each is compared with all others
OPTIONS = {"num_warps": 8, "num_stages": 1}
AT_A_TIME = 16  # entries of the schedule


def schedule_of(spec: AttentionSpec, alike: bool, programs: int) -> tuple[Tensor, bool]:
    """`entries`, and whether they are of sequences in the order of their lengths, which is to be found. Where no
    program has two tiles any order will do."""
    tiles = config.choose(spec)
    in_order = not alike and 1 < spec.batch <= MOST_SEQUENCES
    lists = (dealt if in_order else whole_tiles)(spec, tiles, programs)
    return entries(Shares(lists, [[] for _ in lists])), in_order and max(map(len, lists)) > 1


def dealt(spec: AttentionSpec, tiles: config.Tiles, programs: int) -> list[list[Tile]]:
    """The tiles of every program; in place of a sequence, its place in the order of lengths."""
    pack = config.heads_per_tile(spec, tiles)
    heads_k, group, m_blocks = spec.batch * spec.heads_k, spec.group // pack, -(-spec.seqlen_q * pack // tiles.rows)
    in_order = [
        (head_k * group + i, m_block)
        for head_k in range(heads_k) for m_block in reversed(range(m_blocks)) for i in range(group)
    ]  # fmt: skip
    programs = min(programs, len(in_order))
    rounds = [in_order[first : first + programs] for first in range(0, len(in_order), programs)]
    lists: list[list[Tile]] = [[] for _ in range(programs)]
    for n, tiles_of_round in enumerate(rounds):
        for mine, tile in zip(lists if n % 2 == 0 else reversed(lists), tiles_of_round, strict=False):
            mine.append(tile)
    return lists


@triton.jit(do_not_specialize=["capacity", "batches", "heads", "rounds"])
def longest_first_kernel(
    seqlens_ptr, leftpad_ptr, capacity, schedule_ptr, dealt_ptr, batches, heads, rounds,
    TILE_B: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program's row of the schedule (see `entries` in launch.py): of each tile dealt to it, of the n-th longest
    sequence. Grid (programs,); of sequences with as many keys the first comes first."""
    sequence = tl.arange(0, TILE_B)
    here = sequence < batches
    keys = tl.full([TILE_B], 0, tl.int32) + capacity
    if seqlens_ptr is not None:
        keys = tl.minimum(tl.load(seqlens_ptr + sequence, here, 0).to(tl.int32), capacity)
    if leftpad_ptr is not None:
        keys -= tl.load(leftpad_ptr + sequence, here, 0).to(tl.int32)
    keys = tl.where(here, keys, -capacity - 1)
    ahead = (keys[:, None] > keys[None, :]) | (
        (keys[:, None] == keys[None, :]) & (sequence[:, None] < sequence[None, :])
    )
    rank = tl.sum(ahead.to(tl.int32), 0)  # (TILE_B,)
    for first in range(0, rounds, ENTRIES):
        number = first + tl.arange(0, ENTRIES)
        at = tl.program_id(0) * rounds + number
        entry = tl.load(dealt_ptr + at, number < rounds, 0)
        head = (entry >> 32).to(tl.int32)
        found = tl.sum(tl.where((head // heads)[:, None] == rank[None, :], sequence[None, :], 0), 1)
        of_sequence = ((found * heads + head % heads).to(tl.int64) << 32) | (entry & 0xFFFFFFFF)
        tl.store(schedule_ptr + at, tl.where(number == 0, entry, of_sequence), number < rounds)


def order_call(spec: AttentionSpec, moving: dict[str, Any], table: Tensor) -> KernelCall:
    """`longest_first_kernel`, from lengths and the table of what is dealt out to the schedule."""
    heads = spec.heads_q // config.heads_per_tile(spec, config.choose(spec))
    names = "cache_seqlens", "cache_leftpad", "end", "schedule"
    others = table, spec.batch, heads, table.shape[1], triton.next_power_of_2(spec.batch), AT_A_TIME
    return call_of(longest_first_kernel, len(table), moving, names, others, OPTIONS)
