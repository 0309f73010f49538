"""FlashAttention-3 in Gluon, for Hopper (sm_90a).

Where triton is missing or too old, this module imports all the same, and declines every call.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ...arch import arch_of
from ...cache import CachedCall
from ...plan import Plan
from ...spec import AttentionSpec
from .. import Backward, Forward
from . import order
from .config import choose, choose_backward


def _triton_version() -> tuple[int, ...]:
    """(3, 6), or () where there is none."""
    if importlib.util.find_spec("triton") is None:
        return ()
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


_TRITON = _triton_version()
_INSTALLED = _TRITON >= (3, 6)  # from where on Gluon has what the kernels use

if _INSTALLED:
    from ..launcher import Launcher, backward_pass, backward_pass_like, forward_pass, forward_pass_like
    from .backward_apart_launch import APART_BACKWARD
    from .backward_launch import BACKWARD
    from .cached_launch import attend_like
    from .cached_schedule import schedule_of
    from .choice import passes_on, passes_on_cached
    from .few_queries import FEW_QUERIES, are_few
    from .launch import FORWARD, programs_on, shares

__all__ = [
    "attend_like", "backward", "backward_like", "forward", "forward_like", "leaves_backward", "passes_on",
    "passes_on_cached", "passes_over", "plan", "refusal", "supports",
]  # fmt: skip

LEAST_PAGE = 8  # rows, of which TMA can copy so many to where K and V lie swizzled
# Its tanh is within 2.5e-7, near zero too: lse of larger caps would be less exact than float32 makes it.
LARGEST_SOFTCAP = 64.0
# The backward pass divides lse, which may be in the thousands, by the factor of the scores.
LEAST_FACTOR = 1e-30


def supports(spec: AttentionSpec, device: torch.device) -> str | None:
    """Takes float16 and bfloat16 on Hopper."""
    if not _INSTALLED:
        return "it needs triton 3.6 or newer"
    if device.type != "cuda":
        return f"it takes CUDA tensors, these are on {device.type}"
    arch = arch_of(device)
    if arch != "sm_90":
        return f"it needs compute capability 9.0, this is {arch or 'no GPU'}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {spec.dtype}"
    if spec.head_dim % 8 or spec.head_dim_v % 8:
        return f"TMA wants rows of a multiple of 16 bytes, not {spec.head_dim} and {spec.head_dim_v} numbers"
    if _TRITON == (3, 8) and choose(spec).parts == 3:
        return f"triton 3.8 does not see pairs of its buffers of {spec.head_dim} dims; 3.7 and 3.9 do"
    if spec.softmax_scale <= 0:
        return f"its running maximum wants a positive softmax_scale, not {spec.softmax_scale}"
    if spec.softcap > LARGEST_SOFTCAP:
        return f"its tanh, within 2.5e-7, serves a softcap of up to {LARGEST_SOFTCAP:g}, not {spec.softcap:g}"
    if 0 in (spec.batch, spec.seqlen_q, spec.seqlen_k):
        return "TMA cannot describe an empty tensor"
    return None


def passes_over(call: CachedCall) -> str | None:
    """Why a call over a cache is left to kernels for one sequence."""
    cache, given = call.cache, call.given
    if cache.k.dtype != given.q.dtype:
        return f"it reads keys in the dtype of q, not {cache.k.dtype}"
    if call.alibi_slopes is not None:
        return "it has no ALiBi slopes"
    if 0 < cache.page_size < LEAST_PAGE:
        return f"TMA wants pages of {LEAST_PAGE} keys at least, not {cache.page_size}"
    return refusal(cache.k, cache.v) if call.rotary_dims else refusal(given.q, cache.k, cache.v)


def leaves_backward(spec: AttentionSpec) -> str | None:
    """Why the backward pass of a spec that it supports goes to another backend."""
    if spec.deterministic and (reason := order.refuses(spec, choose_backward(spec))) is not None:
        return reason
    if spec.score_factors[0] < LEAST_FACTOR:
        return f"it takes lse / {spec.score_factors[0]}, which float32 may not hold"
    return None


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q and lse (B, Hq, Sq) in float32."""
    return forward_pass(_forward_launcher(spec, q), spec, q, k, v)


def forward_like(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """`forward` for tensors that lie like these."""
    return forward_pass_like(_forward_launcher(spec, q), spec, q, k, v)


def _forward_launcher(spec: AttentionSpec, q: Tensor) -> Launcher:
    return FEW_QUERIES if are_few(spec, programs_on(q.device)) else FORWARD


def backward(
    spec: AttentionSpec,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k and v, of tensors without a `refusal`; dK and dV are the same bits in every run, and
    dQ of a deterministic spec or where it has a kernel of its own."""
    if dout is None:
        dout = torch.zeros_like(out)
    elif refusal(dout) is not None:
        dout = dout.clone(memory_format=torch.contiguous_format)
    return backward_pass(_backward_launcher(spec), spec, dout, dlse, q, k, v, out, lse)


def backward_like(spec: AttentionSpec, dout: Tensor | None, dlse: Tensor | None, *others: Tensor) -> Backward | None:
    """`backward` for tensors that lie like these, None if it copies dout first."""
    if dout is None or refusal(dout) is not None:
        return None
    return backward_pass_like(_backward_launcher(spec), spec, dout, dlse, *others)


def _backward_launcher(spec: AttentionSpec) -> Launcher:
    return APART_BACKWARD if choose_backward(spec).dq_apart else BACKWARD


def refusal(*tensors: Tensor) -> str | None:
    """Why TMA cannot read tensors (B, S, H, D) where they lie; None if it can."""
    for x in tensors:
        if x.data_ptr() % 16:
            return f"TMA wants tensors aligned to 16 bytes, one starts {x.data_ptr() % 16} bytes past"
        if (reason := _stride_refusal(x.shape, x.stride())) is not None:
            return reason
    return None


@functools.lru_cache(maxsize=4096)
def _stride_refusal(shape: torch.Size, strides: tuple[int, ...]) -> str | None:
    if strides[3] != 1:
        return f"TMA wants a last stride of 1, one tensor has {strides[3]}"
    for size, stride in zip(shape[:3], strides, strict=False):
        if size > 1 and (stride <= 0 or stride % 8):
            return f"TMA wants strides of a multiple of 16 bytes, one tensor has strides {strides}"
    return None


def plan(spec: AttentionSpec, device: torch.device) -> Plan:
    """The forward launch."""
    tiles, programs = choose(spec), programs_on(device)
    if are_few(spec, programs):
        schedule = schedule_of(spec, True, programs, torch.device("meta"))
        tiles, programs = schedule.tiles, len(schedule.table)
    else:
        programs = len(shares(spec, tiles, programs).lists)
    return Plan(str(tiles), programs, tiles.rows, tiles.tile_n)
