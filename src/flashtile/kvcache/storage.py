"""What both caches share: the K and V tensors, and the checks on what is asked of them and written to them.

Legend: S new tokens, Hk key/value heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(
    rows: int, length: int, heads_k: int, head_dim: int, head_dim_v: int | None, dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k (rows, length, Hk, D) and v (rows, length, Hk, Dv); Dv is D where head_dim_v is None.

    Both are zero: a kernel may multiply the rows behind a sequence's end by a probability of 0, and 0 × NaN is NaN.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, count in (("heads_k", heads_k), ("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        check_count(name, count, 1)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}; want a floating-point dtype")
    k = torch.zeros(rows, length, heads_k, head_dim, dtype=dtype, device=device)
    v = torch.zeros(rows, length, heads_k, head_dim_v, dtype=dtype, device=device)
    return k, v


def check_count(name: str, count: int, least: int) -> None:
    """Raises unless `count` is an int >= least."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name}: got {count!r}; want an int")
    if count < least:
        raise ValueError(f"{name}: got {count}; want an int >= {least}")


def check_tokens(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, layout: tuple[str, ...]) -> None:
    """Raises unless k and v are tokens that the cache can hold: layout + (Hk, D) and layout + (Hk, Dv).

    Args:
        layout: the names of the dimensions in front of the heads, ("batch", "seqlen") or ("seqlen",).
    """
    for name, tokens, cache in (("k", k, cache_k), ("v", v, cache_v)):
        if not isinstance(tokens, Tensor):
            raise TypeError(f"{name}: got {type(tokens).__name__}; want a torch.Tensor")
        if tokens.dim() != len(layout) + 2:
            raise ValueError(
                f"{name}: got shape {tuple(tokens.shape)}; "
                f"want {len(layout) + 2} dimensions ({', '.join(layout)}, heads, head_dim)"
            )
        if tokens.dtype != cache.dtype:
            raise TypeError(f"{name}: got {tokens.dtype}; want the dtype of the cache, {cache.dtype}")
        if tokens.device != cache.device:
            raise ValueError(f"{name}: is on {tokens.device}; want the device of the cache, {cache.device}")
        if tokens.shape[-2] != cache.shape[2]:
            raise ValueError(f"{name}: got {tokens.shape[-2]} heads; want the heads of the cache, {cache.shape[2]}")
        if tokens.shape[-1] != cache.shape[3]:
            raise ValueError(
                f"{name}: got head_dim {tokens.shape[-1]}; want the head_dim of the cache's {name}, {cache.shape[3]}"
            )
    for dim, what in enumerate(layout):
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"v: got {what} {v.shape[dim]}; want the {what} of k, {k.shape[dim]}")
