"""Attention over a cache of keys and values: the checks of a call, the cache's update, and who runs it.

Legend: B sequences, Sq queries and Sn new keys each; a cache is (rows, capacity, Hk, D) or, paged,
(pages, page_size, Hk, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from . import dispatch
from . import spec as checks
from .cache import FP8, Cache, CachedCall, Rotary
from .merge import with_sinks
from .spec import AttentionSpec


@dataclass(frozen=True)
class Arguments:
    """What came to flash_attn_with_kvcache beside q, the caches, k and v; see there."""

    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


def checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, given: Arguments, settings: tuple
) -> CachedCall:
    """The call, or the error that names what is wrong; nothing is written before this returns.

    settings: (softmax_scale, window_left, window_right, softcap), checked.
    """
    _check_caches(q, k_cache, v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"k, v: got {'only v' if k is None else 'only k'}; want both or neither")
    batch, device, heads_q, heads_k = q.shape[0], q.device, q.shape[2], k_cache.shape[2]
    _check_places(batch, k_cache, given, device)
    descales = [
        _per_head(name, scales, batch, heads_k, k_cache)
        for name, scales in (("k_descale", given.k_descale), ("v_descale", given.v_descale))
    ]
    rows, table, leftpad = map(_dense, (given.cache_batch_idx, given.block_table, given.cache_leftpad))
    cache = Cache(k_cache, v_cache, rows, table, None, leftpad, 0, *descales)
    if k is not None and v is not None:
        _check_new(q, k, v, cache)
        cache = replace(cache, seqlen_new=k.shape[1])
    cache = replace(cache, seqlens=_lengths(given.cache_seqlens, batch, cache))
    if cache.leftpad is not None:
        _check_leftpad(cache.leftpad, batch, cache)
    if given.sinks is not None:
        checks.check_numbers("sinks", given.sinks, ((heads_q,),), (torch.float32, q.dtype), device)
    slopes = given.alibi_slopes
    if slopes is not None:
        checks.check_numbers("alibi_slopes", slopes, ((heads_q,), (batch, heads_q)), (torch.float32,), device)
        slopes = slopes.contiguous().expand(batch, heads_q)
    spec = AttentionSpec(
        batch, q.shape[1], cache.capacity, heads_q, heads_k, q.shape[3], v_cache.shape[3], q.dtype, *settings
    )
    return CachedCall(spec, cache, slopes, _dense(given.sinks))


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.check_heads(name, cache, q)
        if cache.dtype not in (q.dtype, FP8):
            raise TypeError(f"{name}: got {cache.dtype}; want the dtype of q, {q.dtype}, or {FP8}")
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache: got head_dim {k_cache.shape[3]}; want the head_dim of q, {q.shape[3]}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {tuple(v_cache.shape)}; want {tuple(k_cache.shape[:3])} as in k_cache before head_dim"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: got {v_cache.dtype}; want the dtype of k_cache, {k_cache.dtype}")
    if k_cache.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"q: got {q.shape[2]} heads; want a positive multiple of the heads of k_cache, {k_cache.shape[2]}"
        )


def _check_places(batch: int, k_cache: Tensor, given: Arguments, device: torch.device) -> None:
    if given.block_table is not None:
        checks.check_index("block_table", given.block_table, (batch, None), k_cache.shape[0], device)
        if k_cache.shape[1] < 1 or k_cache.shape[1] & (k_cache.shape[1] - 1):
            raise ValueError(f"k_cache: got pages of {k_cache.shape[1]} keys; want a power of two")
        for name, other in (("cache_batch_idx", given.cache_batch_idx), ("cache_leftpad", given.cache_leftpad)):
            if other is not None:
                raise ValueError(f"{name}: got a tensor together with block_table; want one of them")
    elif given.cache_batch_idx is not None:
        checks.check_index("cache_batch_idx", given.cache_batch_idx, (batch,), k_cache.shape[0], device)
    elif k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got batch {k_cache.shape[0]}; want the batch of q, {batch}")


def _check_new(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> None:
    checks.check_tensors(q, k, v)
    for name, new, kept in (("k", k, cache.k), ("v", v, cache.v)):
        if new.shape[2:] != kept.shape[2:]:
            raise ValueError(
                f"{name}: got {tuple(new.shape[2:])} heads and dims; want the cache's, {tuple(kept.shape[2:])}"
            )
    if k.shape[1] > cache.capacity:
        raise ValueError(f"k: got {k.shape[1]} new keys; want at most {cache.capacity}, what a sequence may have")


def _lengths(cache_seqlens: int | Tensor | None, batch: int, cache: Cache) -> Tensor | int | None:
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int):
        room = cache.capacity - cache.seqlen_new
        if not 0 <= cache_seqlens <= room:
            raise ValueError(f"cache_seqlens: got {cache_seqlens}; want 0 to {room}{_why(cache)}")
        return cache_seqlens
    end = cache.capacity - cache.seqlen_new + 1
    checks.check_index("cache_seqlens", cache_seqlens, (batch,), end, cache.k.device, _why(cache))
    return cache_seqlens.contiguous()


def _why(cache: Cache) -> str:
    of = "the cache" if cache.block_table is None else f"block_table, {cache.block_table.shape[1]} pages wide,"
    return f": {of} has room for {cache.capacity} keys, {cache.seqlen_new} of them new"


def _check_leftpad(leftpad: Tensor, batch: int, cache: Cache) -> None:
    device = cache.k.device
    checks.check_index("cache_leftpad", leftpad, (batch,), cache.capacity + 1, device)
    most = cache.capacity - cache.seqlen_new if cache.seqlens is None else cache.seqlens
    if device.type == "cpu" and bool((leftpad > most).any()):
        raise ValueError("cache_leftpad: got more than cache_seqlens in a sequence; want at most that")


def _per_head(name: str, scales: Tensor | None, batch: int, heads_k: int, cache: Tensor) -> Tensor | None:
    """(B, Hk) scales of a float8 cache."""
    if scales is None:
        return None
    if cache.dtype != FP8:
        raise ValueError(f"{name}: got scales for a cache of {cache.dtype}; want None, or a cache of {FP8}")
    checks.check_numbers(name, scales, ((heads_k,), (batch, heads_k)), (torch.float32,), cache.device)
    if cache.device.type == "cpu" and not bool((scales > 0).all()):
        raise ValueError(f"{name}: got scales from {scales.min().item()}; want positive ones")
    return scales.contiguous().expand(batch, heads_k)


def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def checked_rotary(
    call: CachedCall, q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Rotary | None:
    """The rotary tables, None where there are none, or the error that names what is wrong."""
    checks.check_flag("rotary_interleaved", interleaved)
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        raise ValueError(
            f"rotary_cos, rotary_sin: got {'no rotary_sin' if sin is None else 'no rotary_cos'}; want both"
        )
    if k is None:
        raise ValueError("rotary_cos: got tables without k and v; want new keys to turn")
    behind = max(0, q.shape[1] - k.shape[1]) if call.masked else 0  # positions of queries past the last key
    checks.check_rotary(cos, sin, call.spec.head_dim, call.cache.capacity + behind, q)
    return Rotary(cos, sin, interleaved)


def run(
    call: CachedCall, q: Tensor, k: Tensor | None, v: Tensor | None, rotary: Rotary | None, num_splits: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of each sequence's queries over its keys and the new ones, which are written into the cache first.

    ValueError where the backend asked for cannot take the call; nothing is written then.
    """
    decoding = dispatch.decoder(call, q.device, backend)
    if decoding is not None:
        if k is not None and v is not None:
            q = decoding.append(call, q, k, v, rotary)
        return decoding.decode(call, q, num_splits)
    first, end = call.cache.spans(len(q))
    spans = list(zip(first.tolist(), end.tolist(), strict=True))
    forwards = [_forward_of(call, sequence, n - f, q.device, backend) for sequence, (f, n) in enumerate(spans)]
    if k is not None and v is not None:
        q = call.append(q, k, v, rotary)
    return _one_after_the_other(call, q, spans, forwards)


def _forward_of(
    call: CachedCall, sequence: int, n_keys: int, device: torch.device, backend: str | None
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """forward(q, k, v) -> (out, lse) of one sequence; keys stored as float8 are computed with in float32 at least."""
    dtype = torch.promote_types(call.spec.dtype, torch.float32) if call.cache.k.dtype == FP8 else call.spec.dtype
    spec = replace(call.spec, batch=1, seqlen_k=n_keys, dtype=dtype)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[sequence : sequence + 1]
        return partial(dispatch.with_alibi(backend).forward, spec, alibi_slopes=slopes)
    return partial(dispatch.choose(spec, device, backend if n_keys else None).forward, spec)


def _one_after_the_other(
    call: CachedCall, q: Tensor, spans: list[tuple[int, int]], forwards: list
) -> tuple[Tensor, Tensor]:
    outs = [q.new_empty(0, *q.shape[1:3], call.spec.head_dim_v)]
    lses = [q.new_empty(0, q.shape[2], q.shape[1], dtype=call.spec.lse_dtype)]
    for sequence, ((first, end), forward) in enumerate(zip(spans, forwards, strict=True)):
        k, v = call.cache.read(sequence, first, end)
        dtype = torch.promote_types(q.dtype, k.dtype)
        out, lse = forward(*(x.to(dtype) for x in (q[sequence : sequence + 1], k, v)))
        if call.sinks is not None:
            out, lse = with_sinks(out, lse, call.sinks)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
