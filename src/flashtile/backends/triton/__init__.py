"""FlashAttention-2 in Triton, for every GPU Triton reaches (and, interpreted, for CPU tensors).

This module imports without triton; the kernels are loaded by the first call that runs one.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ... import env
from ...spec import AttentionSpec

_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETED = env.triton_interpret()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports(spec: AttentionSpec, device: torch.device) -> str | None:
    """Takes float16, bfloat16 and float32 on CUDA and ROCm devices."""
    if not _INSTALLED:
        return "triton is not installed"
    if device.type == "cpu" and not _INTERPRETED:
        return "it takes GPU tensors; TRITON_INTERPRET=1, set before triton is imported, runs it on CPU tensors"
    if device.type not in ("cpu", "cuda"):
        return f"it takes CUDA and ROCm tensors, these are on {device.type}"
    if spec.dtype not in _DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {spec.dtype}"
    return None


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 1; see flashtile.backends.triton.forward."""
    from .forward import forward

    return forward(spec, q, k, v)


def backward(
    spec: AttentionSpec, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2; see flashtile.backends.triton.backward."""
    from .backward import backward

    return backward(spec, dout, dlse, q, k, v, out, lse)
