"""Which tiles each program has of a call over a cache, whose lengths the host does not know.

Where tiles are few for the GPU, or one sequence may be much longer than others, programs share keys: each finds its
share as it begins, by `share_out` in forward_schedule.py. Else the host deals out tiles as if sequences came in order
of their lengths, the longest first, to and fro: then every program has as many, and as much to do, whether sequences
are alike or each is a little shorter than the one before. Which sequence has which place in that order programs find
out as they begin: `longest_first` there.

Programs that are fewer than multiprocessors read as fast as all if the GPU has nothing else to run as they start, but
not if they start while the kernel before ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from . import config
from .forward_schedule import MOST_SEQUENCES
from .launch import Shares, entries, whole_tiles
from .schedule import Tile

# Bytes of K and V of a tile from which on programs share keys unless all sequences have as many, or all might wait for
# one that is longer. 64 sequences of 16 queries and up to 8k keys take 40 us for 70 where two are long, 114 for 119
# where lengths fall off, 267 for 250 where each is a little shorter than another; 16 of these 30 for 61, 41 for 62, 76
# for 80; but 16 of up to 2k keys 30 for 25.
LONG_TILE = 2 << 20
MOST_TILES = 4  # for each program, that are shared
# Else where whole tiles take this much longer, which is what pieces and their merging take, in blocks of keys. 1, 3,
# 5 sequences of 64 queries, 8 heads and 8k keys take 23 us for 78, 46 for 81, 70 for 85, and 9, 12 of these 120 for
# 182, 153 for 178; 7 of these would take 97 for 91, 4 of 2k keys 25 for 24 (`key_shares` in hopper-runs-h200.json).
PIECES_COST = 5.5
BLOCK = 64 << 10  # bytes of K and V
# So much longer a block takes where all programs have one; and half of them could read as fast as all of them do.
ALL_BUSY, READ_BY_HALF = 1.3, 2
# So many long tiles, for each multiprocessor, have a program each, if no two read the same keys: 9, 12, 14 sequences of
# 16 queries, 8 heads and 8k keys take 77 us for 83, 100 for 104, 115 for 122 by programs on all, 15 of these 123 for
# 121, 8 71 for 73; of lengths down to a 64th 51 for 48, 63 for 61, 69 for 69. Of 32 queries, 128 rows, 9, 10, 12, 14,
# 15 of 8k 90 for 87, 89 for 97, 105 for 112, 115 for 129, 123 for 128, of lengths down to a 64th 56 for 52, 58 for 56,
# 65 for 66, 75 for 75, 79 for 78; but 12 of 16k at D 64, where products take longer than reading, 139 for 115, and of
# 64 queries, two blocks of rows, 6 take 108 for 90. If all are alike they may be half as long: 12 of 2k keys take 30 us
# for 32, of 128 rows 31 for 32 (`bytes_in_flight` in hopper-runs-h200.json).
FEW_ROWS_SPREAD, SPREAD = (0.5, 0.9), (0.6, 0.95)


class SharedKeys(NamedTuple):
    """Place for what programs that share keys leave and say, and what they and `merge_shares_kernel` are told."""

    pieces: Tensor
    tiles: Tensor  # (tiles, 5), of those that are in pieces: see `share_out`
    shares: int  # of a line
    n_pieces: int  # about so many has a tile
    m_blocks: int  # blocks of rows of a head
    pieces_cost: int  # in blocks of keys


class Schedule(NamedTuple):
    """What each program does."""

    tiles: config.Tiles
    spread: bool  # programs, fewer than multiprocessors, start when these have nothing else to run
    table: Tensor  # (programs, rounds): `entries`, or place for them, which programs write
    dealt: Tensor | None = None  # what `longest_first` makes them of
    shared: SharedKeys | None = None

    @property
    def moving(self) -> dict[str, Tensor | None]:
        """What kernels are given, by their names for it."""
        pieces, tiles, *_ = self.shared or (None, None)
        return {"schedule": self.table, "pieces": pieces, "shared": tiles}

    @property
    def scratch(self) -> list[Tensor]:
        """What a run writes, and needs for itself."""
        if self.shared is not None:
            return [self.table, self.shared.pieces, self.shared.tiles]
        return [] if self.dealt is None else [self.table]


def schedule_of(spec: AttentionSpec, alike: bool, programs: int, device: torch.device) -> Schedule:
    """alike: all sequences have as many keys."""
    shared, spread = are_shared(spec, alike, programs), are_spread(spec, alike, programs)
    tiles = config.choose_cached(spec, shared and not spread)
    if shared:
        shares = spec.batch if spread else programs // lines_of(spec)
        table, shared_keys = keys_shared(spec, tiles, shares, device)
        return Schedule(tiles, spread, table, shared=shared_keys)
    in_order = not alike and 1 < spec.batch <= MOST_SEQUENCES.value
    lists = (dealt if in_order else whole_tiles)(spec, tiles, programs)
    table = entries(Shares(lists, [[] for _ in lists])).to(device)
    if in_order and max(map(len, lists)) > 1:  # where no program has two tiles any order will do
        return Schedule(tiles, spread, torch.empty_like(table), table)
    return Schedule(tiles, spread, table)


def dealt(spec: AttentionSpec, tiles: config.Tiles, programs: int) -> list[list[Tile]]:
    """The tiles of every program; in place of a sequence, its place in the order of lengths."""
    pack = config.heads_per_tile(spec, tiles)
    heads_k, group, m_blocks = spec.batch * spec.heads_k, spec.group // pack, m_blocks_of(spec)
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


def keys_shared(
    spec: AttentionSpec, tiles: config.Tiles, shares: int, device: torch.device
) -> tuple[Tensor, SharedKeys]:
    """Place for a schedule by which so many programs share each line, and what they need beside it."""
    lines = lines_of(spec)
    table = torch.empty((shares * lines, 2 * (spec.batch + 2)), dtype=torch.int64, device=device)
    pieces = torch.empty(2 * len(table) * tiles.rows * (tiles.head_dim_v + 2), dtype=torch.float32, device=device)
    in_pieces = torch.empty((min(spec.batch, shares) * lines, 5), dtype=torch.int32, device=device)
    cost = round(PIECES_COST * BLOCK * spec.seqlen_k / (bytes_of_keys(spec) * tiles.tile_n))
    n_pieces = shares if spec.batch == 1 else shares // spec.batch + 1
    return table, SharedKeys(pieces, in_pieces, shares, n_pieces, m_blocks_of(spec), cost)


def are_shared(spec: AttentionSpec, alike: bool, programs: int) -> bool:
    """Whether programs share keys: not where sequences are many, or have an edge on the left, as pieces have no mask
    there, or a head and a block of its rows has no two programs; and not where whole tiles are faster."""
    lines = lines_of(spec)
    n_tiles = spec.batch * lines
    if spec.window_left >= 0 or spec.batch > MOST_SEQUENCES.value or 2 * lines > programs:
        return False
    if not alike and spec.batch > 1 and bytes_of_keys(spec) >= LONG_TILE:
        return n_tiles <= MOST_TILES * programs
    rounds = -(-n_tiles // programs)
    shared = ALL_BUSY * max(n_tiles, READ_BY_HALF * spec.batch * spec.heads_k) / programs
    return bytes_of_keys(spec) / BLOCK * (rounds - shared) > PIECES_COST


def are_spread(spec: AttentionSpec, alike: bool, programs: int) -> bool:
    """Whether programs are as many as tiles, which then stay whole if they are alike, though fewer than could run."""
    few_rows = config.has_few_rows(spec)
    least, most = FEW_ROWS_SPREAD if few_rows else SPREAD
    as_many = least * programs < spec.batch * spec.heads_k < most * programs
    long = bytes_of_keys(spec) >= (LONG_TILE // 2 if alike else LONG_TILE)
    reading_counts = few_rows or max(spec.head_dim, spec.head_dim_v) > 64
    all_read_once = lines_of(spec) == spec.heads_k and spec.window_left < 0
    return as_many and long and reading_counts and all_read_once and not (alike and are_shared(spec, alike, programs))


def lines_of(spec: AttentionSpec) -> int:
    """Of key blocks: heads, times their blocks of rows."""
    return spec.heads_q // config.heads_per_tile(spec, config.choose(spec)) * m_blocks_of(spec)


def m_blocks_of(spec: AttentionSpec) -> int:
    """Blocks of rows of a head."""
    tiles = config.choose(spec)
    return -(-spec.seqlen_q * config.heads_per_tile(spec, tiles) // tiles.rows)


def bytes_of_keys(spec: AttentionSpec) -> int:
    """K and V of a tile, or as many as there may be."""
    return spec.seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
