"""How Flash-Decoding runs on each architecture: blocks of keys, warps, loads in flight, programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...cache import CachedCall
from ...spec import AttentionSpec
from .config import padded_dim, table_of

MOST_KEYS = 256  # of a block: places in it are 32-bit numbers, which limits how far apart keys may lie


@dataclass(frozen=True)
class DecodeTiles:
    """Blocks of tile_n keys on num_warps warps, num_stages deep in flight, `programs` of them on a multiprocessor.

    least: blocks of a program's share, below which more programs are not worth what merging costs. whole: programs have
    no shares, but a task each; split: or a piece of one, if it is longer than an equal share. whole_if_alike: a task
    each only where all sequences turn out to be as long, which the device finds out.
    """

    tile_n: int
    num_warps: int
    num_stages: int
    programs: int
    least: int
    whole: bool = False
    split: bool = False
    whole_if_alike: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_n", "num_warps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0 or value & (value - 1):
                raise ValueError(f"{name}: got {value!r}; want a power of two")
        if not 16 <= self.tile_n <= MOST_KEYS:
            raise ValueError(f"tile_n: got {self.tile_n}; want 16, for the matrix units, to {MOST_KEYS}")
        for name in ("num_stages", "programs", "least"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}; want 1 or more")

    def __str__(self) -> str:
        return f"{self.tile_n} keys, {self.num_warps} warps, {self.num_stages} stages"

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's launch options; multiply-add fusion is named because its default differs between releases."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


class Key(NamedTuple):
    """What the best tiles depend on: bytes per element of the cache, the head dim's tile, rows of a tile, how much
    there is to do."""

    itemsize: int
    dim: int  # see padded_dim
    rows: int
    load: str  # one of LOADS

    @staticmethod
    def of(call: CachedCall, multiprocessors: int, num_splits: int = 0) -> Key:
        of = call.spec
        return Key(call.cache.k.dtype.itemsize, padded_dim(of), tile_m(of), load_of(call, multiprocessors, num_splits))


def tasks_of_sequence(spec: AttentionSpec) -> int:
    """How many tiles of rows: a key head has one, or more where its group has many rows."""
    return spec.heads_k * -(-spec.seqlen_q * spec.group // tile_m(spec))


def tasks_of(spec: AttentionSpec) -> int:
    """Those of all sequences."""
    return spec.batch * tasks_of_sequence(spec)


ROUND = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}  # programs of a multiprocessor, which have a task each
LOADS = ("short", "scattered", *ROUND, "one_filled", "two_filled", "split", "one_if_alike", "few", "even", "many")
BLOCK = 32 << 10  # bytes of K and V of a block of those of many
SHORT = 4 * BLOCK  # of all tasks for each multiprocessor
PLENTY = 10 * BLOCK  # of all tasks for each multiprocessor
LONG = 64 * BLOCK  # of a task, from which on a multiprocessor's one program may begin and end many of them
UNEVEN = 16 * BLOCK  # of a task, for each round of two, up to which one that is longer than others keeps no GPU waiting
HALF_A_ROUND, MOST_OF_A_ROUND, MOST_OF_THE_LAST = 0.51, 0.6, 0.65  # whole tasks, of those that a GPU runs at once
MOST_OF_A_LONG_ROUND, NEARLY_ALL_OF_ROUNDS = 0.7, 0.9  # the same of long ones, in one round and in several
FILLED = 0.8  # the same of one round, from which on, but for a full one, less in flight is better
FULL_ROUNDS = 0.95  # the same of two rounds of two, in which long ones are split
MOST_SPLIT, LONGEST_SPLIT = 128, 128 * BLOCK  # sequences, and bytes of a task, up to which that is so
HARDLY_BEGUN, NEARLY_FULL, MOST_OF_TWO = 0.05, 0.9, 0.7  # of short ones, of the last round of many of three, or two
MANY_ROUNDS = 6  # of three, from which on the last one does not count
MANY_SEQUENCES = 256  # above which it takes long to find a share's among them
EVEN = 4  # programs of a multiprocessor, which pay where tasks end as shares do


def bytes_of_a_task(call: CachedCall) -> int:
    """K and V of one head and sequence, by the cache's capacity."""
    of = call.spec
    return of.seqlen_k * (of.head_dim + of.head_dim_v) * call.cache.k.dtype.itemsize


def load_of(call: CachedCall, multiprocessors: int, num_splits: int = 0) -> str:
    """Short: at most so many bytes, by the cache's capacity; else one to eight, or split, as `whole_tasks` says, unless
    more splits are asked for; else scattered over pages smaller than a block of many; else few tasks, or long ones, or
    plenty that are known to be alike, whose blocks are twice as large, or one_if_alike, if a whole one for each
    multiprocessor would use most of them; else so many that whole ones fill a GPU evenly; else many."""
    tasks, page_size = tasks_of(call.spec), call.cache.page_size or MOST_KEYS
    block = BLOCK // (2 * padded_dim(call.spec) * call.cache.k.dtype.itemsize)  # keys
    if tasks * bytes_of_a_task(call) <= SHORT * multiprocessors:
        return "short"
    whole = whole_tasks(call, multiprocessors) if num_splits < 2 else None
    if page_size < block:
        fills = not call.cache.alike and tasks > ROUND["two"] * multiprocessors
        return whole if whole and fills else "scattered"
    if whole and (whole != "one" or page_size >= 2 * block):
        return whole
    plenty = call.cache.alike and tasks * bytes_of_a_task(call) >= PLENTY * multiprocessors
    if page_size >= 2 * block and (tasks <= multiprocessors or bytes_of_a_task(call) >= LONG or plenty):
        fill_most = MOST_OF_A_LONG_ROUND * multiprocessors <= tasks <= multiprocessors
        return "one_if_alike" if fill_most and num_splits < 2 and not call.cache.alike else "few"
    most = EVEN * multiprocessors
    return "even" if enough(shares_of_whole_tasks(tasks, most), most) else "many"


def whole_tasks(call: CachedCall, multiprocessors: int) -> str | None:
    """The load in which programs have a task each, by how many of them a multiprocessor has, if that is better than
    equal shares, as nothing is merged and no sequence looked for; or split, as `are_split` says. None if not.

    Where sequences are alike that is if they run in one round, most of it used, or half if they are short and of 16
    rows, but at D 256, or in several, as `many_rounds` says; in 16 bits. A round of one or two that is filled, but not
    quite, has tiles of its own.
    """
    tasks, size, few_rows = tasks_of(call.spec), bytes_of_a_task(call), tile_m(call.spec) == ROWS[0]
    most_of = {load: n * multiprocessors for load, n in ROUND.items()}
    if call.cache.alike and call.cache.k.dtype.itemsize == 1:
        return None
    narrow = few_rows and padded_dim(call.spec) <= 128
    if not call.cache.alike:
        whole = tasks_in_order(tasks, size, call.spec.batch, most_of, narrow)
        return whole or ("split" if are_split(call, tasks, most_of) else None)
    for load in ("one", "two"):
        if narrow and FILLED * most_of[load] <= tasks < most_of[load]:
            return f"{load}_filled"
    if size >= LONG:
        return long_tasks(tasks, most_of) if few_rows else None
    least = HALF_A_ROUND if narrow and size <= UNEVEN else MOST_OF_A_ROUND
    for load in ("one", "two", "four", "eight"):
        if least * most_of[load] <= tasks <= most_of[load]:
            return load
    if tasks <= most_of["eight"]:
        return None
    return many_rounds(tasks, most_of) if narrow else "three"


def many_rounds(tasks: int, most_of: dict[str, int]) -> str | None:
    """The same of narrow short tasks that are alike, more than a round of eight has: three on a multiprocessor, if the
    last round is nearly full or hardly begun, or rounds are many; two, if most of their last is used."""
    of_three, of_two = (tasks / most_of[load] for load in ("three", "two"))
    if of_three >= MANY_ROUNDS or not HARDLY_BEGUN < of_three % 1 < NEARLY_FULL:
        return "three"
    return "two" if of_two % 1 >= MOST_OF_TWO else None


def long_tasks(tasks: int, most_of: dict[str, int]) -> str | None:
    """The same of long tasks of 16 rows that are alike: one or two on a multiprocessor, in one round, most of it used,
    or in several that are nearly full."""
    load, used = fullest(("one", "two"), tasks, most_of)
    return load if used >= (MOST_OF_A_LONG_ROUND if tasks <= most_of[load] else NEARLY_ALL_OF_ROUNDS) else None


def tasks_in_order(tasks: int, size: int, batch: int, most_of: dict[str, int], narrow: bool) -> str | None:
    """The same of tasks of at most `size` bytes whose lengths the host does not know, by how many a round has.

    The longest are begun first, if sequences are not too many to look through, and short ones fill up what those leave.
    So it is where there are many rounds, or most of the last is used if all are as long; if no task may be so long that
    all wait for it, the longer the more there are. Only narrow ones have place for more than two beside one another.
    """
    rounds_of_two = round(tasks / most_of["two"]) if batch <= MANY_SEQUENCES else 1
    if size > UNEVEN * max(rounds_of_two, 1) or size >= LONG:
        return None
    if tasks <= most_of["one"]:
        return "one" if tasks >= MOST_OF_A_ROUND * most_of["one"] else None
    if tasks > most_of["eight"] or batch > MANY_SEQUENCES:
        return "three"
    loads: tuple[str, ...] = ("two", "three", "four") if narrow else ("two",)
    if tasks <= most_of["four"]:
        loads = loads[:2]  # of half the bytes in flight: alone, at the end of their only round, four leave some unused
    load, used = fullest(loads, tasks, most_of)
    return load if used >= MOST_OF_THE_LAST else None


def are_split(call: CachedCall, tasks: int, most_of: dict[str, int]) -> bool:
    """Whether tasks that are too long to be whole, in order, are split where they are longer than an equal share: of 16
    rows and D 128 in 16 bits, if those that are not split fill two rounds of two."""
    full = FULL_ROUNDS * most_of["two"] <= tasks / 2 <= most_of["two"]
    few = call.spec.batch <= MOST_SPLIT and bytes_of_a_task(call) <= LONGEST_SPLIT
    measured = (call.cache.k.dtype.itemsize, padded_dim(call.spec), tile_m(call.spec)) == (2, 128, ROWS[0])
    return full and few and measured


def fullest(loads: tuple[str, ...], tasks: int, most_of: dict[str, int]) -> tuple[str, float]:
    """The load whose rounds tasks fill most, of these the one that runs most at once, and how much of them is used."""
    used = {load: tasks / (-(-tasks // most_of[load]) * most_of[load]) for load in loads}
    load = max(used, key=lambda load: (used[load], most_of[load]))
    return load, used[load]


def shares_of_whole_tasks(tasks: int, most: int) -> int:
    """Programs, `most` or fewer, if each has as many tasks as another, or the last one fewer."""
    return -(-tasks // -(-tasks // most))


def enough(programs: int, most: int) -> bool:
    """Whether so few do, of so many that could run: all but a sixteenth at most, an estimate."""
    return 16 * programs >= 15 * most


ROWS = (16, 32, 64)  # the least that the matrix units take ... the most that registers hold beside a block of keys


def tile_m(spec: AttentionSpec) -> int:
    """Rows of a tile: the queries of a group, so far as registers hold them; a wide head leaves room for few."""
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return ROWS[0]
    return next((rows for rows in ROWS if rows >= spec.seqlen_q * spec.group), ROWS[-1])


Table = dict[Key, DecodeTiles]
Loads = dict[str, DecodeTiles]


def _table(rows: Mapping[tuple[int, int], DecodeTiles | Loads | tuple[DecodeTiles | Loads, ...]]) -> Table:
    """A table from (itemsize, dim): tiles, or those for 16, 32 and 64 rows; of either, those for each load."""
    table: Table = {}
    for key, tiles in rows.items():
        for n, of_rows in zip(ROWS, tiles if isinstance(tiles, tuple) else (tiles,) * len(ROWS), strict=True):
            for load in LOADS:
                table[Key(*key, n, load)] = of_rows[load] if isinstance(of_rows, dict) else of_rows
    return table


# A multiprocessor's share of an H200's 4.8 TB/s is 36 bytes a nanosecond, and a load under way takes about one
# microsecond: 36 KB must be in flight, and three times that leaves room for what is uneven. A block of 64 keys at D 128
# is 32 KiB of K and V in 16 bits, as is one of 128 keys in 8; with 3 stages two of them are in flight, in each of two
# programs. With 8 warps registers hold one program, which has more stages.
# Measured on an H200, at (B, Hq, Hk, Sk), in decode-tiles-h200.json and decode-h200.json:
# - (2, 128), 16 and 32 rows, few tasks or long ones: 128 keys on 4 warps, 1 program, take 1885 us at 64 lengths from 1k
#   to 64k, 64 keys on 4 warps, 2 programs (those of many) 1937; 240.9 to 242.5 at 64,32,8,4096, 239.2 to 243.0 at
#   8,32,8,32768, 154.5 to 158.1 at 40,32,8,4096, 131.1 to 133.4 at 64 lengths up to 4k; on 8 warps as long, or longer
#   where rows are 32: 40.5 us to 43.7 at 16,32,1,16384 (many: 41.6), 70.4 to 78.8 (72.0) at 8,128,4,16384. Where tasks
#   are many and short it is the other way: 131.7 to 127.3 at 128,32,8,1024, 488 to 483 at 256,32,8,2048, 45.4 to 43.6
#   at 64 lengths up to 1k. Of 16 other tiles, with more keys in flight, fewer, or as many, each takes 0 to 27 % longer
#   at 64,32,8,4096 and 8,32,8,32768; 128 keys on 2 warps 25 and 55 % (decode_tiles_of_few_warps).
#   Shares of many in blocks of 32 keys, by 2 or 4 warps, 2 or 3 programs, take -3 to +29 % (decode_finer_blocks).
#   least 1, not 4: 1,32,8,1024 falls from 10.4 us to 8.1 (2: 8.9); 1,32,1,65536 takes 18.8 us with either.
#   Without lengths, and more tasks than multiprocessors, few take 0 to 10 % less than many at 17 to 78 sequences of 8
#   heads and 1k to 3k keys, of D 64 and 256, and at 140 to 300 of one head, 32 rows; at 17, 18 and 36 of 512 keys 8, 3
#   and 1 % more, at 38 to 78 2 to 10 less (decode_few_without_lengths).
# - (2, 128), 16 rows, even: 32 keys on 2 warps, 4 programs take 66.6 us at 64,32,8,1024, what is best of many 67.7;
#   126.7 to 127.3 at 128,32,8,1024, 127.4 to 128.1 at 64,32,8,2048, 43.1 to 43.6 at 64 lengths up to 1k; but 103.6 to
#   98.5 at 96,32,8,1024, whose tasks they would divide (there).
# - (2, 128), 16 rows, without lengths, a task for each program against shares (decode_whole_tasks): one 18.5 us to 16.7
#   at 12,32,8,1024, 30.3 to 28.2 at 12,32,8,2048, 19.4 to 19.1 at 16,32,8,1024 by 8 warps for 4; two 30.3 to 27.4 at
#   24,32,8,1024; four 53.1 to 49.3 at 48,32,8,1024, 62.4 to 58.0 at 56; eight, of one warp, which meets none, 124.9 to
#   123.0 at 128,32,8,1024, 95.2 to 94.1 at 96, 114.9 to 108.6 at 112, 182.9 to 181.6 at 96,32,8,2048. In many rounds of
#   4k keys shares are 0 to 6 % faster. Of 1k (decode_many_rounds) three 140.8 to 136.6 us at 144, 152.7 to 144.6 at
#   150, 195.6 to 192.4 at 200, 306.9 to 299.4 at 320, but 157.3 to 162.4 at 160, 172.9 to 178.2 at 176; two 157.3 to
#   155.2 at 160, 216.6 to 211.7 at 224, 247.6 to 242.2 at 256, but 135.1 to 138.8 at 136, 172.9 to 174.9 at 176. With
#   lengths: one at 16,32,8,1024 20.4 to 19.3 us, at 16 lengths up to 1k 17.4 to 15.7, at 12 and 14 -12 and -15 %,
#   ragged +5 and +7 %. HALF_A_ROUND (decode_rounds_partly_full): one 14.7 to 14.0 at 9,32,8,1024, four 41.2 to 39.3 at
#   36, eight 76.7 to 75.5 at 72; at D 64 one 10.5 to 8.4 at 9, two 14.8 to 13.6 at 18; but of 2k keys one 23.3 to 24.5
#   at 9, two 38.5 to 41.2 at 17, and of 32 rows two 29.0 to 31.0 at 144,32,1,1024. Long ones (decode_long_tasks): one
#   102 to 98 us at 13,32,8,8192, 57.4 to 54.9 at 14,32,8,4096, but 79.6 to 86.5 at 10,32,8,8192, 167 to 171 at
#   11,32,8,16384, in three rounds 141 to 163 at 36,32,8,4096 and, nearly full, 180.6 to 179.8 at 48; two 95.6 to 94.2
#   at 24, 127.6 to 122.5 at 33, 240 to 237 at 64, of two rounds 91 % 236.8 to 234.3 at 60, of three 89 % 338 to 347 at
#   88; at D 64 one 54.1 to 51.0 at 13,32,8,8192, at D 256 103 to 98 at 13,32,8,4096.
# - FILLED (decode_rounds_filled), 16 rows, without lengths, against one and two: (2, 128) 64 keys on 4 warps, 4 stages,
#   one 16.8 to 16.2 us at 14,32,8,1024, 55.8 to 54.5 at 14,32,8,4096, 33.5 to 33.2 at 16,32,8,2048, but 48.2 to 53.3 at
#   12,32,8,4096; 32 keys on 2 warps, 4 stages, two 111.8 to 107.7 at 28,32,8,4096, 242.4 to 241.0 at 32,32,8,8192, but,
#   three, 99.4 to 102.9 at 26,32,8,4096, and of a full round 124.9 to 126.0 at 33. (2, 64) 128 keys on 4 warps, one
#   31.7 to 31.2 at 15,32,8,4096; 64 on 2, two 16.7 to 16.6 at 28,32,8,1024, 224.5 to 212.9 at 28,32,8,16384.
# - (2, 128), 16 rows, with lengths, the longest first, against shares (decode_longest_first): two 37.7 to 34.5 us at
#   32,32,8,1024, 66.4 to 65.9 at 64 and, up to 1k, 42.8 to 36.1; three 97.1 to 95.1 at 96 and 57.2 to 52.3; four 127.2
#   to 124.8 at 128 and 74.5 to 67.0. UNEVEN: two 65.7 to 64.4 at 32,32,8,2048, but up to 2k 40.5 to 42.9.
#   MOST_OF_THE_LAST (decode_rounds_partly_full): two 31.1 to 27.9 at 24 and 19.4 to 19.5 up to 1k, but 26.6 to 25.0 at
#   20 and 17.4 to 18.1; three 78.8 to 75.2 at 72 and 46.4 to 42.5.
#   32 rows: two 49.0 to 35.9 us at 240,32,1,1024, 75.8 to 66.0 at 400, 138 to 119 at 800; with lengths 76.8 to 69.0 at
#   400 and, up to 1k, 52.2 to 42.5, at 1600 sequences, among which each share looks for its own, 353 to 206.
# - (2, 64) and (2, 256), blocks of as many bytes, against the tiles of before, one for all loads, without lengths
#   (decode_other_dims): D 64 short 5.6 to 4.7 us at 1,32,8,1024, few 23.1 to 21.4 at 4,32,8,8192, whole tasks 13.1 to
#   10.9, 30.4 to 26.5, 66.4 to 63.5 at 16, 48, 128 sequences of 1k; 64,32,8,4096 in pages of 16, scattered, 140.8 to
#   128.5; 32 rows 33.5 to 24.2 at 240,32,1,1024, 97.6 to 61.6 at 800. D 256 short 13.0 to 7.7 at 1,32,8,1024, few 477
#   to 470 at 8,32,8,32768, one 38.0 to 34.3, two 55.7 to 52.0, and 381 to 388 in many rounds of 200 sequences. There
#   few have 8 warps, as 4, which are as fast, spill by triton 3.9, and four are few, in shares: 16 keys on 2 warps
#   spill so too, and whole tasks on the tiles of few take 96.6 us for 96.3 at 48,32,8,1024, and at 400,32,1,1024, where
#   shares of them have not been timed, 191 for 179 before.
# - (2, 128), 16 rows, with lengths, split, against shares (decode_pieces): 244.2 to 242.9 us at 64,32,8,4096, 245.9 to
#   243.9 in pages of 256, ragged 129.1 to 127.4, 130.9 to 127.9 and, in pages of 16, 132.1 to 128.0; over 3k 182.2 to
#   180.4, ragged 100.0 to 96.4, over 8k 477.9 to 479.8, ragged 248.4 to 246.8; two of 4k among 64 23.1 to 21.5; but
#   229.4 to 231.5 at 60, ragged 189.2 to 191.1 at 96, 490 to 518 at 256, 134.5 to 141.0 at 256 of 2 heads; at D 64 242
#   to 249 over 8k, 475 to 494 over 16k.
# - One task for each multiprocessor, whole if alike, against shares (decode_whole_if_alike): (2, 128) 29.7 to 26.7 us
#   at 12,32,8,2048, 51.5 to 48.4 at 12,32,8,4096, 109.4 to 106.5 at 14,32,8,8192, 44.2 to 46.5 at 10,32,8,4096; on 4
#   warps 94 to 112 at 12,32,8,8192. 32 rows 36.4 to 33.9 at 100,32,1,2048. (2, 64) 57.9 to 54.7 at 13,32,8,8192, where
#   tasks that are known to be whole take less on 4 warps, but with both loops those spill. (2, 256) 52.9 to 50.4 at
#   12,32,8,2048. On the tiles of one, for those of few, ragged ones in shares take -2 to +1 %.
# - (1, 128), 16 rows: 64 keys on 2 warps, which meet at fewer barriers, 4 programs. At 8,32,8,32768 they take 132.8 us,
#   128 keys on 4 warps, 2 programs 137.1, six others 139 to 231, at 64,32,8,4096 126.7 to 138 and more
#   (decode_tiles_flat_loop in hopper-runs-h200.json). With a loop for each task the former took 144 us to 153 in pages
#   of 256, 164 to 180 in pages of 16, where 16 keys on one warp took 149: no row. Whole tasks of theirs take -3 to
#   +18 % against shares (decode_whole_tasks) without lengths; with them, the longest first, two 25.1 to 21.5 us at
#   32,32,8,1024, 38.5 to 41.0 at 64 and, up to 1k, 30.3 to 25.8, three 41.2 to 34.6 at 96 up to 1k, four 52.7 to 44.2
#   at 128 (decode_longest_first).
# - (2, 128), 16 and 32 rows: short lines are best with a program on each multiprocessor, which makes fewer parts: 13.1
#   us to 14.6 at 1,32,1,32768, 10.3 to 10.7 at 1,32,1,16384.
# - (2, 128), 16 rows, where each key of a block looks up its page: 32 keys, 2 warps, 3 stages, 4 programs take 247.1 us
#   at 8,32,8,32768 in pages of 16, 128 keys on 8 warps 316.1, what is best of many 248.5; 246.3 to 248.6 (many) at
#   64,32,8,4096, 68.4 to 70.4 at 64,32,8,1024, as long at the 64 lengths. In pages of 64 128 keys on 8 warps take 281.4
#   us at 8,32,8,32768, on 4 306.2 at 64,32,8,4096, where what is best of many takes 244.4, and 32 keys 243.3 to 247.7
#   (decode_tiles_in_lines, decode_tiles_of_few_warps in hopper-runs-h200.json).
# - 64 rows, 8192 keys (decode_tiles_of_64_rows): 64 keys on 4 warps, 2 stages, 2 programs, at 16, 64 and 1024 queries
#   of one sequence, against 8 warps, 4 to 6 stages, 1 program: (2, 128) 18.8, 39.9 and 467 us for 21.9, 63.2 and 842,
#   by triton 3.9 19.0, 41.7 and 495 for 23.3, 68.5 and 950; (2, 64) 12.0, 28.7 and 375 for 17.5, 52.1 and 756. At D 128
#   they spill up to 24 bytes by triton 3.6, up to 120 by 3.9; seven others, shared out too, take 18.2 to 28.8, 46.1 to
#   80.9 and 594 to 1130. 8 and 64 sequences of 16 queries 88.0 and 574, with three stages 110 and 710. (1, 128) 128
#   keys on 8 warps, 2 stages 23.3, 67.5 and 1004 for 25.4, 77.1 and 1075; as (2, 128) 20.0, 48.9 and 612, but they
#   spill 40 to 88 bytes, and by 3.9, by which they were not timed, 232 to 264.
# All else is reasoned as above, and not measured.
# Loads of 32 rows, or at D 256: eight's own tiles spill, three find no registers, filled rounds are never asked for.
AS_TWO = ("one_filled", "two_filled", "three", "eight")


def _by_load(block: int, as_many: tuple[str, ...] = (), as_two: tuple[str, ...] = (), **others: DecodeTiles) -> Loads:
    """Those of a cache in 16 bits, from a block's keys: some loads have the tiles of many or of two, or others."""
    tiles = {
        "short": DecodeTiles(block, 4, 3, 1, 1), "scattered": DecodeTiles(block // 2, 2, 3, 4, 1),
        "few": DecodeTiles(2 * block, 4, 3, 1, 1), "even": DecodeTiles(block // 2, 2, 3, EVEN, 1),
        "many": DecodeTiles(block, 4, 3, 2, 1), "one": DecodeTiles(2 * block, 8, 3, 1, 1, whole=True),
        "two": DecodeTiles(block, 4, 3, 2, 1, whole=True), "three": DecodeTiles(block, 4, 3, 3, 1, whole=True),
        "four": DecodeTiles(block // 2, 2, 3, 4, 1, whole=True),
        "eight": DecodeTiles(max(block // 4, 16), 1, 3, 8, 1, whole=True),
        "one_filled": DecodeTiles(block, 4, 4, 1, 1, whole=True),
        "two_filled": DecodeTiles(block // 2, 2, 4, 2, 1, whole=True),
        "one_if_alike": DecodeTiles(2 * block, 8, 3, 1, 1, whole_if_alike=True),
    }  # fmt: skip
    return tiles | dict.fromkeys(("split", *as_many), tiles["many"]) | dict.fromkeys(as_two, tiles["two"]) | others


SM_90 = _table({
    (1, 64): (DecodeTiles(128, 4, 4, 2, 4), DecodeTiles(64, 8, 6, 1, 4), DecodeTiles(64, 8, 6, 1, 4)),
    (1, 128): (
        dict.fromkeys(LOADS, DecodeTiles(64, 2, 3, 4, 1)) | {
            "two": DecodeTiles(128, 4, 3, 2, 1, whole=True), "three": DecodeTiles(128, 4, 3, 3, 1, whole=True),
            "four": DecodeTiles(64, 2, 3, 4, 1, whole=True),
        },
        DecodeTiles(64, 8, 6, 1, 4), DecodeTiles(128, 8, 2, 1, 1),
    ),
    (1, 256): DecodeTiles(16, 4, 6, 3, 16),
    (2, 64): (
        _by_load(128, ("even",), one=DecodeTiles(256, 4, 3, 1, 1, whole=True)),
        _by_load(128, ("scattered", "even"), AS_TWO), DecodeTiles(64, 4, 2, 2, 1),
    ),
    (2, 128): (
        _by_load(64, split=DecodeTiles(64, 4, 3, 2, 1, whole=True, split=True)),
        _by_load(64, ("scattered", "even"), (*AS_TWO, "four")), DecodeTiles(64, 4, 2, 2, 1),
    ),
    (2, 256): _by_load(32, ("scattered", "even"), AS_TWO,
                       **dict.fromkeys(("short", "few", "four"), DecodeTiles(64, 8, 3, 1, 1))),
    (4, 64): (DecodeTiles(64, 8, 3, 2, 4), DecodeTiles(32, 8, 4, 1, 8), DecodeTiles(32, 8, 4, 1, 8)),
    (4, 128): (DecodeTiles(32, 8, 3, 2, 8), DecodeTiles(32, 8, 3, 1, 8), DecodeTiles(32, 8, 2, 1, 8)),
    (4, 256): DecodeTiles(16, 8, 4, 1, 16),
})  # fmt: skip

# Not measured: tiles that neither spill nor exceed the shared memory (163 KiB, 99 KiB, 64 KiB, 64 KiB) when compiled
# ahead of time; of 64 rows, too.
SM_80 = SM_90 | {key: DecodeTiles(64, 8, 4, 1, 4) for key in SM_90 if key[:3] == (2, 128, ROWS[-1])} | _table({
    (4, 128): (DecodeTiles(32, 8, 2, 2, 8), DecodeTiles(32, 8, 2, 2, 8), DecodeTiles(16, 8, 2, 2, 8)),
})  # fmt: skip
SMALL = _table(
    {(itemsize, dim): DecodeTiles(32 if dim > 128 else 64, 8, 2, 2, 4) for itemsize in (1, 2) for dim in (64, 128, 256)}
    | {(4, dim): DecodeTiles(16 if dim > 128 else 32, 8, 2, 2, 8) for dim in (64, 128, 256)}
)

# Small, so that small caches have many blocks, and tasks that are split.
INTERPRETER = _table({(size, dim): DecodeTiles(16, 1, 1, 6, 1) for size in (1, 2, 4) for dim in (64, 128, 256)})

TABLES = {
    "sm_80": SM_80, "sm_90": SM_90, "sm_120": SMALL, "gfx942": SMALL, "gfx1201": SMALL, "interpreter": INTERPRETER,
}  # fmt: skip


def choose(call: CachedCall, arch: str, multiprocessors: int, num_splits: int = 0) -> DecodeTiles:
    """The tiles for a call on `arch`, all of whose tasks are split if num_splits is more than 1."""
    return TABLES[table_of(arch)][Key.of(call, multiprocessors, num_splits)]
