"""Which tiles each program has of a call over a cache, whose lengths the host does not know.

The host deals out tiles as if sequences came in order of their lengths, the longest first, to and fro: then every
program has as many, and as much to do, whether sequences are alike or each is a little shorter than the one before.
Which sequence has which place in that order programs find out as they begin: `longest_first` in forward_cache.py.
"""

from __future__ import annotations

from torch import Tensor

from ...spec import AttentionSpec
from . import config
from .forward_cache import MOST_SEQUENCES
from .launch import Shares, entries, whole_tiles
from .schedule import Tile


def schedule_of(spec: AttentionSpec, alike: bool, programs: int) -> tuple[Tensor, bool]:
    """`entries`, and whether they are of sequences in the order of their lengths, which is to be found. Where no
    program has two tiles any order will do."""
    tiles = config.choose(spec)
    in_order = not alike and 1 < spec.batch <= MOST_SEQUENCES.value
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
