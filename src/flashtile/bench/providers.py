"""Who is measured: implementations of attention behind one signature, each with the reason why it cannot take a case.

A provider takes q (B, Sq, Hq, D), k and v (B, Sk, Hk, D), and returns out (B, Sq, Hq, D), differentiable by autograd.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import dispatch, interface
from ..backends import reference
from .cases import Case
from .counting import Mode

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """One implementation.

    declines: (case, device, mode) -> None, or the reason why it cannot run that.
    build: (case, device) -> the function; what may be prepared once (masks, compilation) is done here, untimed.
    """

    title: str
    declines: Callable[[Case, torch.device, Mode], str | None]
    build: Callable[[Case, torch.device], Attention]


def _flashtile(backend: str) -> Provider:
    def declines(case: Case, device: torch.device, mode: Mode) -> str | None:
        if mode != "fwd" and not dispatch.differentiates(dispatch.BACKENDS[backend], case.spec):
            return "it has no backward pass of its own"
        reason = dispatch.BACKENDS[backend].supports(case.spec, device)
        return reason or (_too_large(case, device, mode, torch.float32) if backend == "reference" else None)

    def build(case: Case, device: torch.device) -> Attention:
        return partial(interface.flash_attn_func, causal=case.causal, backend=backend)

    return Provider(f"flashtile ({backend})", declines, build)


def _standard(case: Case, device: torch.device) -> Attention:
    """The papers' baseline: S and P materialised by PyTorch in the case's dtype."""
    spec = case.spec
    unseen = ~reference.visible(spec, device) if case.causal else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if spec.group > 1:
            k, v = k.repeat_interleave(spec.group, 1), v.repeat_interleave(spec.group, 1)
        scores = (q * spec.softmax_scale) @ k.mT
        if unseen is not None:
            scores.masked_fill_(unseen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return attention


def _sdpa(
    title: str, forced: SDPBackend | None, declines: Callable[[Case, torch.device, Mode], str | None]
) -> Provider:
    def build(case: Case, device: torch.device) -> Attention:
        gqa = case.heads_q != case.heads_k

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa).transpose(1, 2)

        if forced is None:
            return attention
        backend = forced

        def forced_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attention(q, k, v)

        return forced_attention

    def all_declines(case: Case, device: torch.device, mode: Mode) -> str | None:
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "its causal mask is aligned to the top left corner"
        return declines(case, device, mode)

    return Provider(title, all_declines, build)


def _flex(case: Case, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch_config.donated_buffer = False  # its backward pass is timed again and again on one graph
    torch.compiler.reset()  # static shapes: each case compiles afresh, and does not run into the recompile limit
    compiled = torch.compile(flex_attention, dynamic=False)
    offset, block_mask = case.spec.offset, None
    if case.causal:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j <= i + offset

        block_mask = create_block_mask(visible, None, None, case.seqlen_q, case.seqlen_k, device=device)
    gqa = case.heads_q != case.heads_k

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa).transpose(1, 2)

    return attention


def _flash_attn_2(case: Case, device: torch.device) -> Attention:
    from flash_attn import flash_attn_func

    return partial(flash_attn_func, causal=case.causal)


def _flash_attn_4(case: Case, device: torch.device) -> Attention:
    from flash_attn.cute import flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=case.causal)
        return result[0] if isinstance(result, tuple) else result  # some versions return (out, lse)

    return attention


def _too_large(case: Case, device: torch.device, mode: Mode, dtype: torch.dtype) -> str | None:
    """Why S and P do not fit: forward holds about three matrices of B Hq Sq Sk, a training step five."""
    copies = 3 if mode == "fwd" else 5
    need = copies * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * dtype.itemsize
    free = free_bytes(device)
    return None if need <= 0.9 * free else f"S and P need about {need / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def free_bytes(device: torch.device) -> float:
    """Memory that can still be had on `device`, in bytes; infinite where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch holds in reserve can be had too
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _standard_declines(case: Case, device: torch.device, mode: Mode) -> str | None:
    return _too_large(case, device, mode, case.spec.dtype)


def _math_declines(case: Case, device: torch.device, mode: Mode) -> str | None:
    return _too_large(case, device, mode, torch.promote_types(case.spec.dtype, torch.float32))


def _takes_all(case: Case, device: torch.device, mode: Mode) -> str | None:
    return None


def _gpu_only(case: Case, device: torch.device, mode: Mode) -> str | None:
    return None if device.type == "cuda" else "needs a GPU"


def _flex_declines(case: Case, device: torch.device, mode: Mode) -> str | None:
    return None if device.type == "cuda" else "needs a GPU: on a CPU it has no backward pass"


def _gpu_half(case: Case, device: torch.device, mode: Mode) -> str | None:
    if case.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {case.dtype}"
    return _gpu_only(case, device, mode)


def _flash_declines(case: Case, device: torch.device, mode: Mode) -> str | None:
    return None if device.type == "cpu" else _gpu_half(case, device, mode)


def _package(module: str) -> Callable[[Case, torch.device, Mode], str | None]:
    """Declines where `module` of a flash-attn distribution is not importable."""

    def declines(case: Case, device: torch.device, mode: Mode) -> str | None:
        parent, _, _ = module.partition(".")
        found = importlib.util.find_spec(parent) and importlib.util.find_spec(module)
        return _gpu_half(case, device, mode) if found else "not installed"

    return declines


PROVIDERS: dict[str, Provider] = {
    "flashtile-hopper": _flashtile("hopper"),
    "flashtile-triton": _flashtile("triton"),
    "flashtile-cpu": _flashtile("cpu"),
    "flashtile-reference": _flashtile("reference"),
    "standard": Provider("standard attention", _standard_declines, _standard),
    "sdpa": _sdpa("PyTorch SDPA", None, _takes_all),
    "sdpa-math": _sdpa("PyTorch SDPA, math", SDPBackend.MATH, _math_declines),
    "sdpa-flash": _sdpa("PyTorch SDPA, flash", SDPBackend.FLASH_ATTENTION, _flash_declines),
    "sdpa-efficient": _sdpa("PyTorch SDPA, efficient", SDPBackend.EFFICIENT_ATTENTION, _gpu_only),
    "sdpa-cudnn": _sdpa("PyTorch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION, _gpu_half),
    "flex": Provider("FlexAttention", _flex_declines, _flex),
    "flash-attn-2": Provider("flash-attn 2", _package("flash_attn.flash_attn_interface"), _flash_attn_2),
    "flash-attn-4": Provider("flash-attn 4", _package("flash_attn.cute"), _flash_attn_4),
}
"""By the name that the command line and the JSON use."""


def default_names(device: torch.device) -> list[str]:
    """The providers worth comparing on `device` when none are named."""
    if device.type == "cpu":
        return ["flashtile-cpu", "standard", "sdpa-flash"]
    return [
        "flashtile-hopper",
        "flashtile-triton",
        "standard",
        "sdpa-flash",
        "sdpa-efficient",
        "sdpa-cudnn",
        "flex",
        "flash-attn-2",
        "flash-attn-4",
    ]
