"""Which calls the Hopper kernels leave to others by themselves: what was measured on an H200, `cached_rows`,
`cached_chunks` and `few_queries` in hopper-runs-h200.json."""

from __future__ import annotations

import torch

from ...cache import MANY_KEYS, CachedCall
from ...spec import AttentionSpec
from .config import choose
from .launch import programs_on

# Fewer floating-point operations make few tiles; the portable kernel's are smaller and fill more of the GPU.
WORTHWHILE = 8e9
# Of a key head, queries times group: up to so many rows most of a product is for rows that are not there. At D 96 and
# 192, whose keys Flash-Decoding's tiles pad, 16 rows and long tiles are faster even so: 64 sequences of 8 heads and 4k
# keys take 191 us for 206, 373 for 386, 16 of these 52 for 62, 97 for 102; of 1k keys 17.5 for 16.3, 29 for 31.
FEW_ROWS, PADDED = 16, (96, 192)
NARROW = 32  # rows
# Up to so many bytes of K and V of a tile one that is longer than others is soon read.
SOON_READ = 512 << 10
# Tiles for each multiprocessor beyond which narrow ones, but long ones, are left to Flash-Decoding, as it has whole
# tasks for them, too, of which the longest begin first, and another where one ends: 64 of 32 rows and 1k, 2k keys take
# 72 us for 72, 133 for 131, of unlike lengths 47 for 41, 78 for 71. Of one length those are as fast from the second
# round on. At head dims that they pad, or have tiles of 16 rows for, they take 1.03 to 1.6 times as long.
MANY, LONG = 3.3, 1 << 20
NARROW_TILES = 64, 128  # head dims
MOST_IN_ORDER = 256  # sequences of which it finds the longest


def passes_on(spec: AttentionSpec, device: torch.device) -> str | None:
    """Why it leaves a call that it could take to the next backend."""
    pairs = spec.seqlen_q * spec.seqlen_k * (0.5 if spec.window_right >= 0 else 1.0)
    operations = 2 * spec.batch * spec.heads_q * pairs * (spec.head_dim + spec.head_dim_v)
    if operations < WORTHWHILE:
        return f"{operations / 1e9:.1f} GFLOP are too few to fill the GPU with its tiles: by itself it starts at 8"
    if spec.seqlen_k >= MANY_KEYS * spec.seqlen_q:
        return _has_few_tiles(spec, bytes_of_keys(spec), False, programs_on(device))
    return None


def passes_on_cached(call: CachedCall, num_splits: int) -> str | None:
    """Why it leaves a call over a cache that it could take to the next backend."""
    of, size, programs = call.spec, bytes_of_keys(call.spec), programs_on(call.given.q.device)
    alike = call.cache.alike or of.batch == 1
    if num_splits:
        return "it does not split keys, and how a tile is computed may depend on those before it"
    if is_narrow(of) and call.given.sinks is not None:
        return "sinks come in behind it, which takes longer than what it saves"
    many = tiles_of(of) > programs * (1 if alike else MANY) and (alike or of.batch <= MOST_IN_ORDER)
    if many and size <= LONG and has_narrow_tiles(of):
        return f"{tiles_of(of)} tiles are many, of which nobody splits any"
    return _has_few_tiles(of, size, not alike, programs)


def _has_few_tiles(of: AttentionSpec, size: int, unlike: bool, programs: int) -> str | None:
    """Whether rows are so few, or tiles, that it is better to share keys out; unlike: one sequence may be longer than
    others."""
    few_rows = of.seqlen_q * of.group <= FEW_ROWS and (of.head_dim not in PADDED or size < 2 * SOON_READ)
    waits = unlike and not (is_narrow(of) and size <= SOON_READ)
    if few_rows or tiles_of(of) < least_tiles(of, waits) * programs:
        rows = of.seqlen_q * of.group
        return f"{rows} rows for each of {of.heads_k} key heads of {of.batch} sequences are few for its tiles"
    return None


def least_tiles(of: AttentionSpec, waits: bool) -> float:
    """Tiles for each multiprocessor from which on whole ones are faster than keys split among programs; waits: all may
    wait for the tiles of one sequence.

    Of 8 heads and 8k keys, 64 rows: 5, 6, 8 sequences take 60 us for 60, 62 for 72, 67 for 89, 32 rows: 6, 7 of these
    62 for 58, 62 for 65. Of lengths from there down to a 64th, 64 rows: 8, 12 take 61 for 55, 70 for 76, and where all
    are as long 67 for 89, 99 for 131; 32 rows: 12 of 8k 68 for 62, and 100 for 102, 112 of one head 74 for 71, and 112
    for 122, 24 of 2k and 8 heads 34 for 40, and 58 for 65. The fewer tiles there are, the sooner a sequence three times
    as long as most is one that all wait for.
    """
    if not waits:
        return 0.4 if is_narrow(of) else 0.3
    if not is_narrow(of):
        return 0.7
    return 1.2 if has_narrow_tiles(of) else 0.8


def is_narrow(of: AttentionSpec) -> bool:
    """Whether Flash-Decoding takes about as long as reading keys."""
    return of.seqlen_q * of.group <= NARROW


def has_narrow_tiles(of: AttentionSpec) -> bool:
    """Whether Flash-Decoding has tiles for just these rows and dims."""
    return is_narrow(of) and of.head_dim == of.head_dim_v in NARROW_TILES


def tiles_of(spec: AttentionSpec) -> int:
    """How many tiles of rows."""
    return spec.batch * spec.heads_k * -(-spec.seqlen_q * spec.group // choose(spec).rows)


def bytes_of_keys(spec: AttentionSpec) -> int:
    """K and V of a tile, or as many as there may be."""
    return spec.seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
