"""Which tiles each program has of a call over a cache, whose lengths the host does not know.

Where tiles are few for the GPU, or one sequence may be much longer than others, programs share keys: each finds its
share as it begins, by `share_out` in forward_schedule.py. Else the host deals out tiles as if sequences came in order
of their lengths, the longest first, to and fro: then every program has as many, and as much to do, whether sequences
are alike or each is a little shorter than the one before. Which sequence has which place in that order programs find
out as they begin: `longest_first` there.
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

MOST_SHARED = 4  # tiles for each program


class Schedule(NamedTuple):
    """What each program does."""

    table: Tensor  # (programs, rounds): `entries`, or place for them, which programs write
    dealt: Tensor | None = None  # what `longest_first` makes them of
    pieces: Tensor | None = None  # place for these, where programs share keys
    shared: Tensor | None = None  # (tiles, 5): place for what `merge_kernel` is told of each
    m_blocks: int | None = None  # blocks of rows of a head, where programs share keys

    @property
    def scratch(self) -> list[Tensor]:
        """What a run needs for itself."""
        written = self.table if self.dealt is not None or self.shared is not None else None
        return [x for x in (written, self.pieces, self.shared) if x is not None]


def schedule_of(spec: AttentionSpec, alike: bool, programs: int, device: torch.device) -> Schedule:
    """alike: all sequences have as many keys."""
    shared = keys_shared(spec, alike, programs, device)
    if shared is not None:
        return shared
    tiles = config.choose(spec)
    in_order = not alike and 1 < spec.batch <= MOST_SEQUENCES.value
    lists = (dealt if in_order else whole_tiles)(spec, tiles, programs)
    table = entries(Shares(lists, [[] for _ in lists])).to(device)
    if in_order and max(map(len, lists)) > 1:  # where no program has two tiles any order will do
        return Schedule(torch.empty_like(table), table)
    return Schedule(table)


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


def keys_shared(spec: AttentionSpec, alike: bool, programs: int, device: torch.device) -> Schedule | None:
    """None where tiles are computed whole: sequences are many, or have an edge on the left, as pieces have no mask
    there; or that is faster."""
    tiles = config.choose(spec)
    pack = config.heads_per_tile(spec, tiles)
    m_blocks = -(-spec.seqlen_q * pack // tiles.rows)
    lines = spec.heads_q // pack * m_blocks  # of keys: a head and a block of its rows, of all sequences
    if spec.window_left >= 0 or spec.batch > MOST_SEQUENCES.value or 2 * lines > programs:
        return None
    programs = programs // lines * lines
    if spec.batch * lines > MOST_SHARED * programs:
        return None
    table = torch.empty((programs, 2 * (spec.batch + 2)), dtype=torch.int64, device=device)
    pieces = torch.empty(2 * programs * tiles.rows * (tiles.head_dim_v + 2), dtype=torch.float32, device=device)
    shared = torch.empty((spec.batch * lines, 5), dtype=torch.int32, device=device)
    return Schedule(table, pieces=pieces, shared=shared, m_blocks=m_blocks)
