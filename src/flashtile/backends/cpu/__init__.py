"""FlashAttention-2 in tiled torch ops, for CPU tensors: O(N) extra memory, readable next to the paper."""

from __future__ import annotations

import torch

from ...spec import AttentionSpec
from .backward import backward
from .decode import attend_like, passes_over
from .forward import forward

__all__ = ["attend_like", "backward", "forward", "passes_over", "supports"]


def supports(spec: AttentionSpec, device: torch.device) -> str | None:
    """Takes every spec on a CPU."""
    return None if device.type == "cpu" else f"it takes CPU tensors, these are on {device.type}"
