"""The public functions: flash-attn 2.8's signatures, with keyword-only additions after them.

Nothing here imports a kernel; a call is checked by `spec`, and run by the op in `ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cached, dispatch, ops, spec


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(softmax_scale * Q K^T) V, without ever storing S or P (FlashAttention-2).

    Differentiable in q, k and v (Algorithm 2), and through lse when it is returned.

    Args:
        q: (B, Sq, Hq, D), float16, bfloat16, float32 or float64; any strides, D from 1 to 256.
        k: (B, Sk, Hk, D), same dtype and device. Hq must be a multiple of Hk: query head h reads key/value
            head h // (Hq / Hk) (MQA and GQA, section 3.1.2).
        v: (B, Sk, Hk, Dv); Dv from 1 to 256, may differ from D.
        dropout_p: must be 0.0; dropout is not implemented.
        softmax_scale: factor on Q K^T before the softmax; None means 1 / sqrt(D).
        causal: query i sees key j only if j <= i + Sk - Sq (aligned to the bottom right corner).
        window_size: (left, right); query i sees keys i + Sk - Sq - left ... i + Sk - Sq + right; -1 leaves a
            side open. With causal=True the right side is 0.
        softcap: if positive, scores become softcap * tanh(scores / softcap).
        alibi_slopes: must be None; ALiBi is not implemented.
        deterministic: the backward pass gives bitwise the same gradients in every run.
        return_attn_probs: flash-attn's way to ask for lse: returns (out, lse, empty tensor).
        return_lse: returns (out, lse).
        backend: "hopper", "triton", "cpu" or "reference"; None picks by device.

    Returns:
        out (B, Sq, Hq, Dv) in the dtype of q. lse, where asked for, is the natural log-sum-exp of each row's
        scores, (B, Hq, Sq), float32 (float64 for float64 inputs). A query that sees no key gets out = 0,
        lse = -inf and zero gradients.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what is wanted.
        NotImplementedError: dropout_p or alibi_slopes is used.
    """
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, backend)
    wants_lse = return_lse or return_attn_probs
    attend = _call_of_op if ops.needs_op(q, k, v) else _plain_call
    found = attend(q, k, v, settings, wants_lse)
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`flash_attn_func` with k and v stacked in one tensor.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, Hk, D); kv[:, :, 0] is k and kv[:, :, 1] is v, read in place.

    The other arguments, the result and the errors are those of `flash_attn_func`.
    """
    spec.check_packed("kv", kv, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, return_lse=return_lse, backend=backend,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`flash_attn_func` with q, k and v stacked in one tensor.

    Args:
        qkv: (B, S, 3, H, D); qkv[:, :, 0] is q, then k, then v, read in place.

    The other arguments, the result and the errors are those of `flash_attn_func`.
    """
    spec.check_packed("qkv", qkv, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, return_lse=return_lse, backend=backend,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Attention of new queries over a cache of keys and values, to which new ones are added first. Not differentiable.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (rows, capacity, Hk, D) and (rows, capacity, Hk, Dv); with block_table
            (pages, page_size, Hk, D), page_size a power of two. In the dtype of q, or both float8_e4m3fn.
        k, v: (B, Sn, Hk, D) and (B, Sn, Hk, Dv) in the dtype of q, written into the cache in place behind what is
            there; both or neither.
        rotary_cos, rotary_sin: (positions, R), 2 R <= D, as many positions as a sequence may have keys: k is turned by
            its positions, and so is q where there is a mask; without one all queries have the position of the first
            new key. Needs k and v.
        cache_seqlens: where the keys of each sequence end before the new ones, (B,) int32 or one number, which is
            faster, but stays as it is in a CUDA graph; None: the cache is full, but for the new keys.
        cache_batch_idx: (B,) int32, the row of each sequence; None: sequence b has row b.
        cache_leftpad: (B,) int32, where in its row a sequence begins.
        block_table: (B, pages of a sequence) int32, where the pages of each sequence are.
        softmax_scale, causal, window_size, softcap, backend: as in `flash_attn_func`, with Sk each sequence's own.
        rotary_interleaved: whether rotary turns dims (2 i, 2 i + 1) together, or (i, R + i).
        alibi_slopes: (Hq,) or (B, Hq) float32: -slope |i + Sk - Sq - j| is added to the score of query i and key j,
            behind scale and soft cap.
        num_splits: 1: on a GPU one program has all keys of a sequence and key head, and no result depends on the other
            sequences. n, up to 128: n programs for each of those share the keys of all, evenly. 0: as many programs
            as the GPU has room for share them, or on Hopper, if queries are many, the forward pass has all.
        return_softmax_lse: returns (out, lse).
        sinks: (Hq,), float32 or the dtype of q: a logit of each head that is in every softmax and has no value, so
            that P = exp(scores) / (exp(sink) + sum exp(scores)). lse counts it.
        k_descale, v_descale: (Hk,) or (B, Hk) float32, positive: keys and values are what a float8 cache holds times
            this; new ones are divided by it, and end at ±448 times it. None: 1.

    Returns:
        out (B, Sq, Hq, Dv) in the dtype of q; lse (B, Hq, Sq), where asked for. A query that sees no key gets out = 0
        and lse = -inf, or its sink.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, and the cache is as it was. Numbers in
            tensors on a GPU are not looked at, so that a call may be captured in a CUDA graph: there new keys that do
            not fit are not written, keys past the cache are not read, and pages past it are the caller's to avoid.
    """
    given = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, sinks, k_descale, v_descale,
    )  # fmt: skip
    settings = softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits, backend
    found: tuple[Tensor, Tensor | None]
    if ops.is_observed():
        found = ops.attention_with_kvcache(cached.Arguments(*given), cached.Settings(*settings))
    else:
        found = cached.attention(given, settings, return_softmax_lse)
    return found if return_softmax_lse else found[0]


_KNOWN: dict[tuple, ops.Known] = {}
_MOST_KNOWN = 4096


def _call_of_op(q: Tensor, k: Tensor, v: Tensor, settings: tuple, wants_lse: bool) -> Any:
    """out, or (out, lse) if lse is wanted."""
    found = ops.attention(*_checked(q, k, v, *settings))
    return found if wants_lse else found[0]


def _plain_call(q: Tensor, k: Tensor, v: Tensor, settings: tuple, wants_lse: bool) -> Any:
    """`_call_of_op` without the op; a problem that was checked before goes straight to its backend."""
    try:
        key = (
            q.shape, q.is_contiguous() or q.stride(), q.data_ptr() & 15, q.dtype, q.device,
            k.shape, k.is_contiguous() or k.stride(), k.data_ptr() & 15, k.dtype, k.device,
            v.shape, v.is_contiguous() or v.stride(), v.data_ptr() & 15, v.dtype, v.device,
            settings, wants_lse,
        )  # fmt: skip
        known = _KNOWN.get(key)
    except (RuntimeError, TypeError):  # a tensor without strides; a list as window_size
        return _call_of_op(q, k, v, settings, wants_lse)
    if known is None:
        if q.is_meta:
            return _call_of_op(q, k, v, settings, wants_lse)
        *arguments, backend = _checked(q, k, v, *settings)
        checked = spec.AttentionSpec.of(*arguments)
        choice = dispatch.choose(checked, q.device, backend)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = ops.Known(checked, choice, choice.forward_like(checked, q, k, v), wants_lse)
    return ops.plain_attention(q, k, v, known)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    backend: str | None,
) -> tuple:
    """The op's arguments, or the error that names what is wrong."""
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}; dropout is not implemented, want 0.0")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: ALiBi is not implemented, want None")
    dispatch.check_backend(backend)
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    spec.check_tensors(q, k, v)
    spec.check_flag("deterministic", deterministic)
    window_left, window_right = spec.mask_window(causal, window_size)
    scale = spec.checked_scale(softmax_scale, q.shape[3])
    return q, k, v, scale, window_left, window_right, spec.checked_softcap(softcap), deterministic, backend


def _autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on for its device, as for torch's own attention; float64 stays."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.is_meta:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x
