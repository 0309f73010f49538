"""Calls over a cache by the Hopper forward kernel: chunks of a prompt, and many sequences of a few queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...cache import LENGTHS, Arguments, CachedCall
from ...merge import with_sinks
from ...spec import AttentionSpec
from .. import Attend
from ..append import AppendSpec, append_call, append_spec, places_of, queries_of
from ..launcher import KernelCall, Launcher, Run, call_of, empty_out, prepared, results_of, rows_apart
from . import compiling, config
from .cached_schedule import Schedule, SharedKeys, schedule_of
from .forward import forward_kernel
from .forward_pieces import merge_shares_kernel
from .launch import OPTIONS, Box, Stored, boxes, describe, merge_scalars, programs_on, scalars

SINKS = Arguments._fields.index("sinks")
SWIZZLED = 64  # numbers of 16 bits of a row that lie together in shared memory, at most


class CachedSpec(NamedTuple):
    """What a prepared launch depends on. attention: of all sequences, its seqlen_k the cache's capacity."""

    attention: AttentionSpec
    page_size: int  # 0: not in pages
    seqlen_new: int
    rows: int  # of the cache, or pages


EARLY = OPTIONS | {"launch_pdl": True}  # it starts while the kernel before ends: `await_kernel_before`
MOVING = (*Arguments._fields, "end", "turned", "out", "lse")
"""What a run takes: arguments, where keys end, turned queries and results."""


class CachedForward(Launcher):
    """`append_kernel` if keys are new, `forward_kernel`, and `merge_shares_kernel` where programs share keys."""

    def prepare(self, spec: tuple[AppendSpec | None, CachedSpec], tensors: tuple) -> Run:
        append, cached = spec
        moving = dict(zip(MOVING, tensors, strict=True))
        device = moving["q"].device
        if isinstance(moving["cache_seqlens"], int):
            moving["cache_seqlens"] = None  # what it says is in `end`
        alike = moving["cache_seqlens"] is None and moving["cache_leftpad"] is None
        runs = [] if append is None else [prepared(device, append_call(append, moving))]
        schedule = schedule_of(cached.attention, alike, programs_on(device), device)
        moving |= schedule.moving
        with compiling.for_hopper(OPTIONS if schedule.spread else EARLY, forward=True) as options:
            runs.append(prepared(device, forward_call(cached, moving, options, schedule)))
        if schedule.shared is not None:
            runs.append(prepared(device, merge_call(cached, moving, schedule.tiles, schedule.shared)))
        scratch = schedule.scratch
        kept = [] if scratch else [schedule.table]
        empty_out(*scratch)

        def launch(*tensors: Tensor | int | None) -> None:
            given = (*tensors, *map(torch.empty_like, scratch), *kept)
            for run in runs:
                run(*given)

        return launch


def forward_call(spec: CachedSpec, moving: dict[str, Any], options: dict[str, Any], schedule: Schedule) -> KernelCall:
    """`forward_kernel`, from queries and the cache to out and lse, or to pieces of them."""
    of, places, tiles, table = spec.attention, places_of(spec.page_size), schedule.tiles, schedule.table
    described = queries_of(moving), "k_cache", "v_cache", "out"
    names = *described, "lse", "pieces", "shared", "cache_seqlens", "cache_leftpad", places, "end", "schedule"
    from_place = rows_apart(moving[places]), spec.seqlen_new, spec.page_size
    told = (None, None) if schedule.shared is None else (schedule.shared.m_blocks, schedule.shared.pieces_cost)
    stored = Stored(*from_place, schedule.dealt, of.batch, *told)
    boxes_of = zip(described, cached_boxes(of, tiles, spec.page_size), strict=True)
    moving = moving | {name: describe(moving[name], box) for name, box in boxes_of}
    numbers = scalars(of, tiles, rounds=table.shape[1], stored=stored)
    return call_of(forward_kernel, len(table), moving, names, numbers, options)


def merge_call(spec: CachedSpec, moving: dict[str, Any], tiles: config.Tiles, shared: SharedKeys) -> KernelCall:
    """`merge_shares_kernel`, from pieces to out and lse; it looks at the lengths where all tiles may be whole."""
    of = spec.attention
    programs, numbers, constants = merge_scalars(of, tiles, len(shared.tiles), shared.n_pieces)
    known = spec.seqlen_new, of.batch, shared.shares, shared.pieces_cost
    most = max(triton.next_power_of_2(of.batch), 32) if 1 < of.batch <= shared.shares else 0
    names = "pieces", "out", "lse", "shared", "cache_seqlens", "cache_leftpad", "end"
    others = *numbers, *known, *constants, tiles.tile_n, most
    return call_of(merge_shares_kernel, programs, moving, names, others, EARLY)


def cached_boxes(spec: AttentionSpec, tiles: config.Tiles, page_size: int) -> tuple[Box, ...]:
    """The blocks in which q, k, v and out are copied: of pages smaller than a block of keys a page each, as wide as
    rows lie together."""
    q, *of_keys, out = boxes(spec, tiles)
    if 0 < page_size < tiles.tile_n:
        of_keys = [(page_size, 1, min(dims, SWIZZLED)) for *_, dims in of_keys]
    return q, *of_keys, out


CACHED = CachedForward()


def attend_like(call: CachedCall, num_splits: int, wants_lse: bool) -> Attend:
    """attend(given) for arguments like those of this call, by Algorithm 1 of FlashAttention-3, of all keys or in shares
    of them. Sinks come in behind it, by PyTorch."""
    of, given, cache, seqlen_new = call.spec, call.given, call.cache, call.seqlen_new
    out_like, lse_like = results_of(of, given.q.device)
    turned_like = torch.empty_like(given.q, memory_format=torch.contiguous_format) if call.rotary_dims else None
    spec = append_spec(call), CachedSpec(of, cache.page_size, seqlen_new, len(cache.k))
    run = CACHED.run_for(spec, (*given, of.seqlen_k, turned_like), (out_like, lse_like))
    empty_out(out_like, lse_like, turned_like)

    def attend(given: tuple) -> tuple[Tensor, Tensor | None]:
        lengths = given[LENGTHS]
        end = lengths + seqlen_new if isinstance(lengths, int) else of.seqlen_k
        turned = None if turned_like is None else torch.empty_like(turned_like)
        out, lse = torch.empty_like(out_like), torch.empty_like(lse_like)
        run(*given, end, turned, out, lse)
        return (out, lse) if given[SINKS] is None else with_sinks(out, lse, given[SINKS])

    return attend
