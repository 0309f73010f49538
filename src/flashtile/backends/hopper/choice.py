"""Which calls the Hopper kernels leave to others by themselves: what was measured on an H200, `cached_rows`,
`cached_chunks`, `few_queries` and `key_shares` in hopper-runs-h200.json."""

from __future__ import annotations

import torch

from ...cache import MANY_KEYS, CachedCall
from ...spec import AttentionSpec
from .cached_schedule import LONG_TILE, are_shared, are_spread, bytes_of_keys, lines_of
from .launch import programs_on

# Fewer floating-point operations make few tiles; the portable kernel's are smaller and fill more of the GPU.
WORTHWHILE = 8e9
# Of a key head, queries times group: up to so many rows most of a product is for rows that are not there. At D 96 and
# 192, whose keys Flash-Decoding's tiles pad, 16 rows and long tiles are faster even so: 64 sequences of 8 heads and 4k
# keys take 191 us for 206, 373 for 386, 16 of these 52 for 62, 97 for 102; of 1k keys 17.5 for 16.3, 29 for 31.
FEW_ROWS, PADDED = 16, (96, 192)
NARROW = 32  # rows
TILE = 64  # rows, of a tile of Flash-Decoding, which reads keys again for more
# Up to so many bytes of K and V of a tile one that is longer than others is soon read.
SOON_READ = 512 << 10
# Tiles for each multiprocessor beyond which narrow ones, but long ones, are left to Flash-Decoding, as it has whole
# tasks for them, too, of which the longest begin first, and another where one ends: 64 of 32 rows and 1k, 2k keys take
# 72 us for 72, 133 for 131, of unlike lengths 47 for 41, 78 for 71. Of one length those are as fast from the second
# round on. At head dims that they pad, or have tiles of 16 rows for, they take 1.03 to 1.6 times as long.
MANY, LONG = 3.3, 1 << 20
NARROW_TILES = 64, 128  # head dims
# Bytes of K and V of all tiles from which on even fewer are shared here: one sequence of 16 queries and 4k, 8k, 128k
# keys takes 13.4 us for 13.5, 17.9 for 18.7, 130 for 152, two of 2k 13.6 for 14.0, but one of 2k 11.8 for 10.9; of 64
# queries one of 2k and 4k 14.6 for 16.1, 17.3 for 23.4, of 1k 15.5 for 12.4. And of a tile so many pieces at most: 64k
# keys of one key head, whose only tile, of 4 queries and 32 heads, has 132, take 33 us for 27.
WORTH_SHARING, MOST_PIECES = 16 << 20, 16
MOST_IN_ORDER = 256  # sequences of which it finds the longest


def passes_on(spec: AttentionSpec, device: torch.device) -> str | None:
    """Why it leaves a call that it could take to the next backend."""
    few_queries, programs = spec.seqlen_k >= MANY_KEYS * spec.seqlen_q, programs_on(device)
    if few_queries and are_shared(spec, True, programs) and are_worth_sharing(spec, programs):
        return None
    pairs = spec.seqlen_q * spec.seqlen_k * (0.5 if spec.window_right >= 0 else 1.0)
    operations = 2 * spec.batch * spec.heads_q * pairs * (spec.head_dim + spec.head_dim_v)
    if operations < WORTHWHILE:
        return f"{operations / 1e9:.1f} GFLOP are too few to fill the GPU with its tiles: by itself it starts at 8"
    if few_queries:
        return _has_few_tiles(spec, bytes_of_keys(spec), least_tiles(spec), programs)
    return None


def passes_on_cached(call: CachedCall, num_splits: int) -> str | None:
    """Why it leaves a call over a cache that it could take to the next backend."""
    of, size, programs = call.spec, bytes_of_keys(call.spec), programs_on(call.given.q.device)
    alike = call.cache.alike or of.batch == 1
    if num_splits:
        return "it splits keys as it finds them, and how a tile is computed may depend on those before it"
    if is_narrow(of) and call.given.sinks is not None:
        return "sinks come in behind it, which takes longer than what it saves"
    many = tiles_of(of) > programs * (1 if alike else MANY) and (alike or of.batch <= MOST_IN_ORDER)
    if many and size <= LONG and has_narrow_tiles(of):
        return f"{tiles_of(of)} tiles are many, of which nobody splits any"
    shared = are_shared(of, alike, programs)
    if shared and are_worth_sharing(of, programs):
        return None
    waits = not alike and size > SOON_READ
    return _has_few_tiles(of, size, least_tiles(of, waits, shared, are_spread(of, alike, programs)), programs)


def are_worth_sharing(of: AttentionSpec, programs: int) -> bool:
    """Whether it is faster than Flash-Decoding where programs share keys, however few the tiles are."""
    few_pieces = programs // tiles_of(of) <= MOST_PIECES
    return not is_narrow(of) and few_pieces and tiles_of(of) * bytes_of_keys(of) >= WORTH_SHARING


def _has_few_tiles(of: AttentionSpec, size: int, least: float, programs: int) -> str | None:
    """Whether rows are so few, or tiles, that Flash-Decoding is faster; least: tiles for each multiprocessor."""
    few_rows = _rows(of) <= FEW_ROWS and (of.head_dim not in PADDED or size < 2 * SOON_READ)
    if few_rows or tiles_of(of) < least * programs:
        return f"{_rows(of)} rows for each of {of.heads_k} key heads of {of.batch} sequences are few for its tiles"
    return None


def least_tiles(of: AttentionSpec, waits: bool = False, shared: bool = False, spread: bool = False) -> float:
    """Tiles for each multiprocessor from which on it is faster; waits: all may wait for the tiles of one sequence;
    shared: programs share keys; spread: they are as many as tiles.

    Whole tiles of 8 heads and 8k keys, 32 rows: 6, 7 sequences take 62 us for 58, 62 for 65. Of lengths from there down
    to a 64th 12 take 68 for 62, and where all are as long 100 for 102, 112 of one head 74 for 71, and 112 for 122, 24
    of 2k and 8 heads 34 for 40, and 58 for 65. The fewer tiles there are, the sooner a sequence three times as long as
    most is one that all wait for. Shares of 32 rows: 12 of 8k 61 us for 60, 16 of these, two of which are long, 29 for
    41, where lengths fall off 41 for 42, but of one head 128 of 16k 20 for 18, 60 for 65, 137 for 137, of 4k 46 for 45.
    64 rows and up to 1k keys: 2, 3, 4, 8 sequences 11.7 us for 11.4, 11.8 for 13.3, 12.0 for 13.9, 13.3 for 21, where
    one is eight times as long as the others 4 and 8 take 11.6 for 10.4 and 12.1 for 13.5; up to 2k 8 take 22 for 32, or
    18.9 for 15.9. 256 rows: 2 of 512 keys 9.5 for 14.0, 4 of 2k 24 for 48, where one is long 24 for 25. 32 rows, by as
    many programs as tiles: 80, 96, 112 sequences of one head and 8k keys 84 us for 88, 99 for 105, 113 for 120, of
    lengths down to a 64th 55 for 52, 62 for 60, 70 for 69; by all 16 of 8 heads 127 for 131.
    Longer tiles that nobody shares, those of a window, keep the limits of before there were shares: they have not been
    timed since.
    """
    if is_narrow(of):
        if not waits:
            return 0.4
        if spread or (shared and bytes_of_keys(of) > LONG_TILE):
            return 0.67
        return 1.2 if has_narrow_tiles(of) else 0.8
    if bytes_of_keys(of) > LONG and not shared:
        return 0.7 if waits else 0.3
    return 0.45 if waits and not shared and _rows(of) <= TILE else 0.2


def _rows(of: AttentionSpec) -> int:
    """Of a key head."""
    return of.seqlen_q * of.group


def is_narrow(of: AttentionSpec) -> bool:
    """Whether Flash-Decoding takes about as long as reading keys."""
    return _rows(of) <= NARROW


def has_narrow_tiles(of: AttentionSpec) -> bool:
    """Whether Flash-Decoding has tiles for just these rows and dims."""
    return is_narrow(of) and of.head_dim == of.head_dim_v in NARROW_TILES


def tiles_of(spec: AttentionSpec) -> int:
    """How many tiles of rows."""
    return spec.batch * lines_of(spec)
