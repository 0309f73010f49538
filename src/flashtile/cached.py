"""Attention over a cache of keys and values: the checks of a call, the cache's update, and who runs it.

Legend: B sequences, Sq queries and Sn new keys each; a cache is (rows, capacity, Hk, D) or, paged,
(pages, page_size, Hk, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import dispatch
from . import spec as checks
from .backends import Attend
from .cache import FP8, LENGTHS, Arguments, Cache, CachedCall
from .merge import with_sinks
from .spec import AttentionSpec


class Settings(NamedTuple):
    """What else flash_attn_with_kvcache is given."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    backend: str | None


class Prepared(NamedTuple):
    """What runs a call over a cache, and others of the same `_layout`, for which nothing is looked up again."""

    spec: AttentionSpec
    tidy: bool  # whether arguments are `tidied` as they come
    most: int  # keys that there may be before the new ones
    attend: Attend


PREPARED: dict[tuple | None, Prepared] = {}
"""By `_layout`."""
_MOST_PREPARED = 4096


def attention(given: tuple, settings: tuple, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of each sequence's queries over its keys and the new ones, which are written into the cache first.

    given, settings: `Arguments` and `Settings`, or tuples like them, which the host makes faster. lse may be None where
    it is not wanted. TypeError or ValueError where an argument is wrong, or the backend asked for cannot take the call;
    nothing is written then.
    """
    try:
        key = None if _has_numbers_to_check(given[0]) else _layout(given, settings, wants_lse)
        prepared = PREPARED.get(key)
    except (RuntimeError, TypeError):  # a tensor without strides; a list as window_size
        key = prepared = None
    if prepared is None:
        with torch.no_grad():
            return _first_attention(Arguments(*given), Settings(*settings), wants_lse, key)
    if not prepared.tidy:
        given = Arguments(*given).tidied(prepared.spec)
    lengths = given[LENGTHS]
    if type(lengths) is int and not 0 <= lengths <= prepared.most:
        checked(Arguments(*given), Settings(*settings))  # which says what is wrong
    return prepared.attend(given)


def _has_numbers_to_check(q: Tensor) -> bool:
    """Whether numbers in tensors are looked at in each call: not a GPU's."""
    return not isinstance(q, Tensor) or not q.is_cuda


def _layout(given: tuple, settings: tuple, wants_lse: bool) -> tuple | None:
    """What is the same in calls that differ in nothing but addresses, numbers in tensors and a length for all.

    None where an argument is of a kind that is not known to have an address, or is wrong.
    """
    key: list[Any] = [settings, wants_lse]
    for x in given:
        if x is None:
            key.append(None)
        elif type(x) is Tensor or type(x) is Parameter:
            key += (x.shape, x.is_contiguous() or x.stride(), x.data_ptr() & 15, x.dtype, x.device)
        elif type(x) is int:
            key.append(int)
        else:
            return None
    return tuple(key)


def _first_attention(
    given: Arguments, settings: Settings, wants_lse: bool, key: tuple | None
) -> tuple[Tensor, Tensor | None]:
    """`attention`, and what runs it is kept as `key`, unless that is None."""
    spec = checked(given, settings)
    tidied = given.tidied(spec)
    call = CachedCall(spec, tidied, settings.rotary_interleaved)
    backend = dispatch.decoder(call, settings.num_splits, given.q.device, settings.backend)
    if backend is None:
        return _one_after_the_other(call, settings.backend)
    attend = backend.attend_like(call, settings.num_splits, wants_lse)
    if key is not None:
        if len(PREPARED) >= _MOST_PREPARED:
            PREPARED.clear()
        tidy = all(ours is theirs for ours, theirs in zip(tidied, given, strict=True))
        PREPARED[key] = Prepared(spec, tidy, spec.seqlen_k - call.seqlen_new, attend)
    return attend(tidied)


def checked(given: Arguments, settings: Settings) -> AttentionSpec:
    """The spec of a call, its seqlen_k the cache's capacity, or the error that names what is wrong.

    Nothing is written before this returns.
    """
    q, k_cache, v_cache, k, v = given[:5]
    checks.check_splits(settings.num_splits)
    dispatch.check_backend(settings.backend)
    checks.check_like("q", q, q)
    window = checks.mask_window(settings.causal, settings.window_size)
    scale, softcap = checks.checked_scale(settings.softmax_scale, q.shape[3]), checks.checked_softcap(settings.softcap)
    _check_caches(q, k_cache, v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"k, v: got {'only v' if k is None else 'only k'}; want both or neither")
    batch, device, heads_q, heads_k = q.shape[0], q.device, q.shape[2], k_cache.shape[2]
    _check_places(batch, k_cache, given, device)
    for name, scales in (("k_descale", given.k_descale), ("v_descale", given.v_descale)):
        if scales is not None:
            _check_scales(name, scales, batch, heads_k, k_cache)
    cache = Cache(k_cache, v_cache, None, given.block_table, given.cache_seqlens, None, 0, None, None)
    if k is not None and v is not None:
        _check_new(q, k, v, cache)
        cache = cache._replace(seqlen_new=k.shape[1])
    if given.cache_seqlens is not None:
        _check_lengths(given.cache_seqlens, batch, cache)
    if given.cache_leftpad is not None:
        _check_leftpad(given.cache_leftpad, batch, cache)
    if given.sinks is not None:
        checks.check_numbers("sinks", given.sinks, ((heads_q,),), (torch.float32, q.dtype), device)
    if given.alibi_slopes is not None:
        shapes = (heads_q,), (batch, heads_q)
        checks.check_numbers("alibi_slopes", given.alibi_slopes, shapes, (torch.float32,), device)
    spec = AttentionSpec(
        batch, q.shape[1], cache.capacity, heads_q, heads_k, q.shape[3], v_cache.shape[3], q.dtype, scale, *window,
        softcap,
    )  # fmt: skip
    _check_rotary(spec, given, settings.rotary_interleaved)
    return spec


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


def _check_lengths(lengths: int | Tensor, batch: int, cache: Cache) -> None:
    if isinstance(lengths, int):
        return _check_length(lengths, cache)
    end = cache.capacity - cache.seqlen_new + 1
    return checks.check_index("cache_seqlens", lengths, (batch,), end, cache.k.device, _why(cache))


def _check_length(length: int, cache: Cache) -> None:
    room = cache.capacity - cache.seqlen_new
    if not 0 <= length <= room:
        raise ValueError(f"cache_seqlens: got {length}; want 0 to {room}{_why(cache)}")


def _why(cache: Cache) -> str:
    of = "the cache" if cache.block_table is None else f"block_table, {cache.block_table.shape[1]} pages wide,"
    return f": {of} has room for {cache.capacity} keys, {cache.seqlen_new} of them new"


def _check_leftpad(leftpad: Tensor, batch: int, cache: Cache) -> None:
    device = cache.k.device
    checks.check_index("cache_leftpad", leftpad, (batch,), cache.capacity + 1, device)
    most = cache.capacity - cache.seqlen_new if cache.seqlens is None else cache.seqlens
    if device.type == "cpu" and bool((leftpad > most).any()):
        raise ValueError("cache_leftpad: got more than cache_seqlens in a sequence; want at most that")


def _check_scales(name: str, scales: Tensor, batch: int, heads_k: int, cache: Tensor) -> None:
    if cache.dtype != FP8:
        raise ValueError(f"{name}: got scales for a cache of {cache.dtype}; want None, or a cache of {FP8}")
    checks.check_numbers(name, scales, ((heads_k,), (batch, heads_k)), (torch.float32,), cache.device)
    if cache.device.type == "cpu" and not bool((scales > 0).all()):
        raise ValueError(f"{name}: got scales from {scales.min().item()}; want positive ones")


def _check_rotary(spec: AttentionSpec, given: Arguments, interleaved: bool) -> None:
    q, k, cos, sin = given.q, given.k, given.rotary_cos, given.rotary_sin
    checks.check_flag("rotary_interleaved", interleaved)
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(
            f"rotary_cos, rotary_sin: got {'no rotary_sin' if sin is None else 'no rotary_cos'}; want both"
        )
    if k is None:
        raise ValueError("rotary_cos: got tables without k and v; want new keys to turn")
    behind = max(0, q.shape[1] - k.shape[1]) if spec.masked else 0  # positions of queries past the last key
    checks.check_rotary(cos, sin, spec.head_dim, spec.seqlen_k + behind, q)


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


def _one_after_the_other(call: CachedCall, backend: str | None) -> tuple[Tensor, Tensor]:
    q, cache = call.given.q, call.cache
    first, end = cache.spans(len(q))
    spans = list(zip(first.tolist(), end.tolist(), strict=True))
    forwards = [_forward_of(call, sequence, n - f, q.device, backend) for sequence, (f, n) in enumerate(spans)]
    q = call.append()
    outs = [q.new_empty(0, *q.shape[1:3], call.spec.head_dim_v)]
    lses = [q.new_empty(0, q.shape[2], q.shape[1], dtype=call.spec.lse_dtype)]
    for sequence, ((first, end), forward) in enumerate(zip(spans, forwards, strict=True)):
        k, v = cache.read(sequence, first, end)
        dtype = torch.promote_types(q.dtype, k.dtype)
        out, lse = forward(*(x.to(dtype) for x in (q[sequence : sequence + 1], k, v)))
        if call.sinks is not None:
            out, lse = with_sinks(out, lse, call.sinks)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
