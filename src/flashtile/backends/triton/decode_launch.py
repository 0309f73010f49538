"""From a checked call over a cache to running kernels: how many programs share its keys, grid and arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...arch import arch_of
from ...cache import FP8, LENGTHS, Arguments, CachedCall
from ...spec import AttentionSpec
from .. import Attend
from ..append import AppendSpec, append_call, append_spec, places_of, queries_of
from ..launcher import (
    KernelCall,
    Launcher,
    Run,
    behind,
    call_of,
    empty_out,
    multiprocessors_of,
    prepared,
    results_of,
    rows_apart,
    strides,
)
from .decode import decode_kernel, merge_kernel
from .decode_config import (
    MANY_SEQUENCES,
    MOST_KEYS,
    ROWS,
    DecodeTiles,
    bytes_of_a_task,
    choose,
    enough,
    shares_of_whole_tasks,
    tasks_of,
    tasks_of_sequence,
    tile_m,
)
from .decode_shares import shares_of_line
from .launch import FLOAT32_TINY, exact, score_units

FEWEST_MERGED, MOST_MERGED = 8, 128  # parts of a row at a time: fewer leave threads idle, more go round again
# Numbers of a program that merges, one warp: 64 in each of its threads are 16 loads under way. Where programs are few,
# those of 32 dims take -2 to +4 %: less at 8 key heads, more at one (decode_merge_beside).
MERGED = 2048
# Bytes of shared memory that a program that merges asks for and does not use, on sm_90: at most, and in all where they
# lie evenly, which `decode_kernel` leaves of a multiprocessor's. Else many seem to find a place where that has no
# programs, on few multiprocessors, and to wait for one another: 1,32,1,8192 takes 6.8 us to 6.6, 2,32,8,1024 7.2 to
# 7.0, 1,32,8,1024 at D 256 7.7 to 7.4, 4,32,8,2048 13.5 to 13.2. With more, the programs of the next call find none
# beside them (decode_merge_beside).
MOST_BESIDE, ALL_BESIDE = 32 << 10, 76 << 10
# Bytes of K and V for each multiprocessor, by the cache's capacity, from which on shares of sequences whose lengths the
# host does not know start when the kernel before has ended. Steps one behind the other take up to 0.8 us more so of
# less, and where they split no tasks; from there on 64 and 32 sequences of 4k keys, 16 of 8k 246.2 us to 244.8, 125.9
# to 124.7, 124.8 to 123.7, 8 of 32k in pages of 16 252.6 to 248.2, 64 of up to 4k 194 to 134, of up to 64k 2404 to
# 1962, in one piece as long (`decode_early` in hopper-runs-h200.json).
MOST_EARLY = 3700 << 10


class DecodeSpec(NamedTuple):
    """What a prepared launch depends on. attention: of all sequences, its seqlen_k the cache's capacity."""

    attention: AttentionSpec
    page_size: int  # 0: not in pages
    seqlen_new: int
    arch: str
    tiles: DecodeTiles
    programs: int  # that share the keys, or have a piece of a task each; 0: each task has a program
    width: int  # lines of blocks, each of every so many-th task
    least: int  # blocks of a share
    multiprocessors: int  # of the GPU
    alike: bool  # sequences, as far as the host knows
    merges: bool = False  # whether tasks may be split: nobody knows of lengths on the device
    waits: bool = False  # `decode_kernel` does not start while the kernel before runs

    @property
    def tasks(self) -> int:
        return tasks_of(self.attention)

    @property
    def sizes_of_parts(self) -> tuple[int, int]:
        """Of two parts that each program may leave, if any may, for each row: Dv outputs, and m and l."""
        rows = 2 * self.programs * tile_m(self.attention) if self.merges else 0
        return rows * self.attention.head_dim_v, rows * 2

    @property
    def early(self) -> bool:
        """Whether kernels may start while the one before ends (programmatic dependent launches: from Hopper on)."""
        return self.arch.startswith("sm_") and int(self.arch[3:]) >= 90

    @property
    def one_block_each(self) -> bool:
        """Whether no program has more than one block of keys."""
        return self.tasks * -(-self.attention.seqlen_k // self.tiles.tile_n) <= (self.programs or self.tasks)

    @property
    def sums(self) -> int:
        """Those that `softmax_step` keeps of a row: of the eight columns of a product that each warp has side by side.

        Of one block alone they are added up at once; where there are no registers for them, at each block.
        """
        rows = tile_m(self.attention)
        room = rows == ROWS[0] or (rows == ROWS[1] and self.tiles.programs == 1)
        return min(8 * self.tiles.num_warps, self.tiles.tile_n) if room and not self.one_block_each else 1

    @property
    def line_each(self) -> bool:
        """Whether kernels are told that each task of a sequence has a line of its own.

        Without lengths not those of more rows than 16: 1,32,1,1024 then takes 6 % more, as more stands behind the wait.
        """
        told = not self.alike or tile_m(self.attention) == ROWS[0]
        return told and self.width == tasks_of_sequence(self.attention)

    @property
    def most_at_once(self) -> int:
        """Programs of `decode_kernel` that a multiprocessor has at most; 0: as many as find place.

        Programs that start early find places where others have ended: more in one than in another, and then all take
        as long as those, one alone 14.4 us for 11.8 at 1,32,1,32768. Of one block each, they gain more by starting.
        """
        return self.tiles.programs if self.early and not self.one_block_each else 0

    @property
    def shared(self) -> bool:
        """Whether programs have shares of lines."""
        return self.programs > 0 and not self.tiles.split

    @property
    def whole_if_alike(self) -> bool:
        """Whether programs have whole tasks, not shares, where all sequences turn out to have as many key blocks."""
        return self.tiles.whole_if_alike and self.shared and self.merges and self.tasks <= self.programs

    @property
    def split(self) -> bool:
        """Whether programs have pieces of tasks; these are whole if they are no longer than an equal share."""
        return self.tiles.split and self.programs > 0

    @property
    def in_order(self) -> bool:
        """Whether tasks of the longest sequences come first."""
        first_come = self.alike or self.programs > 0 or self.tasks <= self.multiprocessors
        return self.split or not (first_come or self.attention.batch > MANY_SEQUENCES)

    @property
    def launch_options(self) -> dict[str, bool]:
        """Of kernels that start early."""
        return {"launch_pdl": True} if self.early else {}


def decode_spec(call: CachedCall, num_splits: int, arch: str, multiprocessors: int) -> DecodeSpec:
    """The launch of a call: num_splits programs for each task, or with 0 as many as the multiprocessors run at once or,
    where tiles say so, one for each task.

    Where there are no lengths a merge that would find nothing is left out of shares too, and the search for a share's
    sequence: of 64,32,8,4096 that is 0.9 us of 245.1. Programs that may turn out to have whole tasks, or none, are as
    many as run, so that some lie between those that have one: 120 tasks of 15,32,8,4096 take 60.7 us, by 120 programs
    62.8 (`fifteen` of decode_whole_if_alike).
    """
    of, cache, tiles = call.spec, call.cache, choose(call, arch, multiprocessors, num_splits)
    of_sequence = tasks_of_sequence(of)
    whole = DecodeSpec(
        of, cache.page_size, cache.seqlen_new, arch, tiles, 0, of_sequence, tiles.least, multiprocessors, cache.alike
    )
    if num_splits:
        return whole if num_splits == 1 else whole._replace(programs=num_splits * whole.tasks, least=1, merges=True)
    most_of_a_task = -(-of.seqlen_k // (tiles.tile_n * tiles.least))
    most = multiprocessors * tiles.programs
    if tiles.split:
        return whole._replace(programs=whole.tasks + most, width=1, merges=True)
    if most_of_a_task <= 1 or tiles.whole:
        return whole
    width = width_for(of_sequence, most)
    of_a_line = whole.tasks // width
    at_once = most // width
    shares = min(at_once if tiles.whole_if_alike else shares_for(of_a_line, at_once), most_of_a_task * of_a_line)
    shared = whole._replace(programs=shares * width, width=width)
    if cache.alike and of_a_line % shares == 0:  # as many whole tasks for each
        return whole if shares == of_a_line else shared._replace(least=1)
    waits = not cache.alike and whole.tasks * bytes_of_a_task(call) >= MOST_EARLY * multiprocessors
    return shared._replace(merges=True, waits=waits)


@functools.cache
def width_for(tasks: int, most: int) -> int:
    """How many of a sequence's tasks lie side by side, in a line each with equally many programs of `most` in all."""
    return max(width for width in range(1, tasks + 1) if tasks % width == 0 and enough(most // width * width, most))


def shares_for(tasks: int, most: int) -> int:
    """How many programs share a line: `most`, or as many for each task, or as many tasks for each, if those do.

    If sequences are alike, shares then begin with tasks, and whole tasks are not merged.
    """
    even = most // tasks * tasks if tasks <= most else shares_of_whole_tasks(tasks, most)
    return even if enough(even, most) else most


def merge_tile(spec: DecodeSpec) -> tuple[int, int]:
    """(parts, dims) of a program that merges. It is one warp, as it is all latency, and warps that met would wait.

    The parts are all that a row has where lengths are alike, up to MOST_MERGED; tasks that are split are whole then.
    """
    of = spec.attention
    blocks = -(-of.seqlen_k // spec.tiles.tile_n)
    share, longer = shares_of_line.fn(spec.tasks // spec.width * blocks, spec.programs // spec.width, spec.least)
    if spec.split:
        most = 1
    elif blocks % share == 0 and longer == 0:
        most = blocks // share
    else:
        most = min((blocks - 2) // share + 2, blocks)
    parts = min(max(triton.next_power_of_2(most), FEWEST_MERGED), MOST_MERGED)
    return parts, min(triton.next_power_of_2(of.head_dim_v), MERGED // parts)


def in_pairs(spec: DecodeSpec, q: Tensor, *caches: Tensor) -> bool:
    """Whether float8 keys are loaded as pairs of dims: products in 16 bits, by PTX, and no pair lies apart."""
    even = all(n % 2 == 0 for x in caches for n in (x.shape[-1], *x.stride()[:-1], x.data_ptr()))
    return caches[0].dtype == FP8 and q.dtype != torch.float32 and spec.arch.startswith("sm_") and even


def window_of(spec: AttentionSpec) -> tuple[int | None, ...]:
    """(left, right) as kernels are told: None where all keys on that side are seen."""
    return tuple(size if size >= 0 else None for size in (spec.window_left, spec.window_right))


def decode_call(spec: DecodeSpec, moving: dict[str, Any]) -> KernelCall:
    """`decode_kernel`, from q, the cache and scales to parts, out and lse."""
    q, k, v = (moving[name] for name in ("q", "k_cache", "v_cache"))
    of, places = spec.attention, places_of(spec.page_size)
    if not spec.merges:
        moving = moving | {"acc": None, "sums": None}
    names = (
        queries_of(moving), "k_cache", "v_cache", "cache_seqlens", "cache_leftpad", places, "alibi_slopes",
        "sinks", "k_descale", "v_descale", "acc", "sums", "end", "out", "lse",
    )  # fmt: skip
    unit, cap_in = score_units(of)
    pairs = in_pairs(spec, q, k, v)
    least_dims = 32 if pairs else 16  # of a tile: half of it, or all, are the 16 that the matrix units want
    stride_vb, stride_vs, stride_vh = strides(v)
    strides_v = stride_vb, None if stride_vs == k.stride(1) else stride_vs, stride_vh
    scalars = (
        *strides(moving[names[0]]), *strides(k), *strides_v,
        *(rows_apart(moving[name]) for name in (places, "alibi_slopes", "k_descale", "v_descale")),
        of.batch, of.seqlen_q, of.heads_k, of.group, spec.seqlen_new, spec.width, spec.least,
        of.softmax_scale, max(abs(unit), FLOAT32_TINY), cap_in, *window_of(of),
        of.head_dim, of.head_dim_v,
        *(max(least_dims, triton.next_power_of_2(dim)) for dim in (of.head_dim, of.head_dim_v)),
        triton.next_power_of_2(of.batch), tile_m(of), spec.tiles.tile_n, spec.page_size,
        of.softcap > 0, exact(of), unit < 0, k.dtype == FP8 and q.dtype == torch.bfloat16, pairs, spec.sums,
        spec.shared, spec.line_each, spec.whole_if_alike, spec.in_order, spec.split, spec.early,
    )  # fmt: skip
    options = spec.tiles.options | ({} if spec.waits else spec.launch_options)
    call = call_of(decode_kernel, spec.programs or spec.tasks, moving, names, scalars, options)
    return call._replace(most_at_once=spec.most_at_once)


def merge_call(spec: DecodeSpec, moving: dict[str, Any]) -> KernelCall:
    """`merge_kernel`, from the parts and the lengths to out and lse."""
    of = spec.attention
    parts, dims = merge_tile(spec)
    names = "acc", "sums", "cache_seqlens", "cache_leftpad", "end", "out", "lse"
    scalars = (
        spec.programs // spec.width, of.batch, of.seqlen_q, of.heads_k, of.group, spec.seqlen_new, spec.width,
        spec.least, *window_of(of), of.head_dim_v, parts, dims, triton.next_power_of_2(of.batch),
        tile_m(of), spec.tiles.tile_n, spec.line_each, spec.whole_if_alike, spec.split, spec.early,
    )  # fmt: skip
    grid = of.batch * of.heads_q * of.seqlen_q * -(-of.head_dim_v // dims)
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True} | spec.launch_options
    shared = min(MOST_BESIDE, ALL_BESIDE // -(-grid // spec.multiprocessors)) if spec.arch == "sm_90" else 0
    return call_of(merge_kernel, grid, moving, names, scalars, options)._replace(shared=shared)


MOVING = (*Arguments._fields, "end", "turned", "acc", "sums", "out", "lse")
"""What a run takes: arguments, where keys end, turned queries, parts and results."""


class CachedPass(Launcher):
    """All kernels of a call over a cache: `append_kernel` if keys are new, `decode_kernel`, `merge_kernel` if tasks may
    be split."""

    def prepare(self, spec: tuple[AppendSpec | None, DecodeSpec], tensors: tuple) -> Run:
        append, decode = spec
        moving = dict(zip(MOVING, tensors, strict=True))
        if isinstance(moving["cache_seqlens"], int):
            moving["cache_seqlens"] = None  # what it says is in `end`
        calls = [] if append is None else [append_call(append, moving)]
        calls.append(decode_call(decode, moving))
        if decode.merges:
            calls.append(merge_call(decode, moving))
        return prepared(moving["q"].device, *calls)


CACHED = CachedPass()


def passes_over(call: CachedCall) -> str | None:
    """Why a call over a cache is left to kernels for one sequence."""
    if call.cache.k.stride(-1) != 1 or call.cache.v.stride(-1) != 1:
        return "it reads keys and values of a last stride of 1"
    apart = max(x.stride(1) for x in (call.cache.k, call.cache.v))
    if apart * MOST_KEYS >= 1 << 31:
        return f"keys or values lie {apart} numbers apart; it wants fewer than {(1 << 31) // MOST_KEYS}"
    arch = arch_of(call.cache.k.device)
    if call.cache.k.dtype == FP8 and arch is not None and arch.startswith("sm_8") and arch != "sm_89":
        return f"{arch} has no float8"
    return None


def attend_like(call: CachedCall, num_splits: int, wants_lse: bool) -> Attend:
    """attend(given) for arguments like those of this call, by Flash-Decoding: out, and lse if it is wanted.

    num_splits: see `decode_spec`. Each tensor costs the host a twentieth of a call: parts are one, with lse behind them
    if nobody wants it.
    """
    of, given, device = call.spec, call.given, call.given.q.device
    arch = arch_of(device)
    assert arch is not None, "a tensor on a GPU, and no GPU"
    decode = decode_spec(call, num_splits, arch, multiprocessors_of(device))
    out_like, lse_like = results_of(of, device)
    turned_like = torch.empty_like(given.q, memory_format=torch.contiguous_format) if call.rotary_dims else None
    n_acc, n_sums = decode.sizes_of_parts
    n_room = n_acc + n_sums + (0 if wants_lse else lse_like.numel())
    room_like = torch.empty(n_room, dtype=torch.float32, device=device)
    capacity, seqlen_new = of.seqlen_k, call.seqlen_new
    reads = *given, capacity, turned_like, room_like, room_like[n_acc:]
    writes = out_like, lse_like if wants_lse else room_like[n_acc + n_sums :]
    run = CACHED.run_for((append_spec(call), decode), reads, writes)
    empty_out(out_like, lse_like, turned_like, room_like)

    def attend(given: tuple) -> tuple[Tensor, Tensor | None]:
        lengths = given[LENGTHS]
        end = lengths + seqlen_new if isinstance(lengths, int) else capacity
        out, room = torch.empty_like(out_like), torch.empty_like(room_like)
        turned = None if turned_like is None else torch.empty_like(turned_like)
        lse = torch.empty_like(lse_like) if wants_lse else None
        lse_or_room = behind(room, n_acc + n_sums) if lse is None else lse
        run(*given, end, turned, room, behind(room, n_acc), out, lse_or_room)
        return out, lse

    return attend
