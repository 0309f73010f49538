"""Rotary position embedding, as flash_attn_with_kvcache applies it to queries and new keys."""

from __future__ import annotations

import torch
from torch import Tensor


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
