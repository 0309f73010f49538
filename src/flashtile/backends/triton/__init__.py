"""FlashAttention-2 in Triton, for every GPU Triton reaches (and, interpreted, for CPU tensors).

Where triton is not installed this module imports all the same, and declines every call.
"""

from __future__ import annotations

import importlib.util

import torch

from ... import env
from ...arch import arch_of
from ...plan import Plan
from ...spec import AttentionSpec
from .config import choose, table_of

_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETED = env.triton_interpret()
ASSUMED = 132  # multiprocessors of a GPU that is not there
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

if _INSTALLED:
    from ..launcher import multiprocessors_of
    from . import few_queries
    from .backward import backward, backward_like
    from .decode_launch import attend_like, passes_over
    from .forward import forward, forward_like

__all__ = [
    "attend_like", "backward", "backward_like", "forward", "forward_like", "passes_over", "plan",
    "supports",
]  # fmt: skip


def supports(spec: AttentionSpec, device: torch.device) -> str | None:
    """Takes float16, bfloat16 and float32 on CUDA and ROCm devices."""
    if not _INSTALLED:
        return "triton is not installed"
    if device.type == "cpu" and not _INTERPRETED:
        return "it takes GPU tensors; TRITON_INTERPRET=1, set before triton is imported, runs it on CPU tensors"
    if device.type not in ("cpu", "cuda"):
        return f"it takes CUDA and ROCm tensors, these are on {device.type}"
    arch = arch_of(device)
    if arch is not None and arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"it needs compute capability 8.0 or newer, this is {arch}"
    if _INTERPRETED and spec.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 as integers"
    if spec.dtype not in _DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {spec.dtype}"
    return None


def plan(spec: AttentionSpec, device: torch.device) -> Plan:
    """The forward launch; for a GPU that is not there, what an sm_90 would run."""
    arch = arch_of(device)
    where = table_of(arch) if arch else "sm_90, assumed"
    multiprocessors = multiprocessors_of(device) if arch else ASSUMED
    if few_queries.are_few(spec, multiprocessors):
        return few_queries.plan(spec, arch or "sm_90", multiprocessors, where)
    tiles = choose("forward", spec, arch or "sm_90")
    grid = -(-spec.seqlen_q // tiles.tile_m) * spec.heads_q * spec.batch
    return Plan(f"{tiles} ({where})", grid, tiles.tile_m, tiles.tile_n)
