"""Rotary position embedding, as flash_attn_with_kvcache applies it to queries and new keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import AttentionSpec


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x with its first 2 R dims turned: pairs (x0, x1) to (x0 cos - x1 sin, x0 sin + x1 cos), in float32 at least.

    Args:
        x: (B, S, H, D).
        cos, sin: (positions, R), 2 R <= D.
        positions: (B, S), the row of cos and sin for each token.
        interleaved: pairs are dims (2 i, 2 i + 1); else (i, R + i).
    """
    width, dtype = cos.shape[1], torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[positions].unsqueeze(2).to(dtype) for table in (cos, sin))  # (B, S, 1, R)
    turning, rest = x[..., : 2 * width].to(dtype), x[..., 2 * width :]
    first, second = turning.unflatten(-1, (width, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = first * cos - second * sin, first * sin + second * cos
    together = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((together.to(x.dtype), rest), -1)


def check_rotary(cos: Tensor, sin: Tensor, spec: AttentionSpec, positions: int, like: Tensor) -> None:
    """Raises unless cos and sin are tables (at least `positions`, R) for a head dim of at least 2 R."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            raise TypeError(
                f"{name}: got {getattr(table, 'dtype', type(table).__name__)}; want a floating-point tensor"
            )
        if table.dim() != 2 or table.shape != cos.shape or not 0 < 2 * table.shape[1] <= spec.head_dim:
            raise ValueError(
                f"{name}: got shape {tuple(table.shape)}; want (positions, R), both tables alike, R from 1 to "
                f"{spec.head_dim // 2}"
            )
        if table.device != like.device:
            raise ValueError(f"{name}: is on {table.device}; want the device of q, {like.device}")
        if table.shape[0] < positions:
            raise ValueError(
                f"{name}: got {table.shape[0]} positions; want {positions}, as many as a sequence may have keys"
            )
