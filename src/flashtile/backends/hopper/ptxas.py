"""How Triton compiles the Hopper kernels: by which ptxas, as 3.9 is the first to use that of CUDA 13 and has that of
CUDA 12, without their line numbers, and without fences but their own."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton

from ... import env
from ..compiler import instead

_PTXAS = threading.Lock()


@contextlib.contextmanager
def earlier_ptxas(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Within, Triton compiles for Hopper by the ptxas of CUDA 12 in its wheel, with the options it gives, and without
    line numbers and fences of its own.

    From 3.9 on it takes that of CUDA 13, which works out the addresses of operands at greater length. Of what kernels
    make by Triton 3.6, on an H200: forward D 96 0.92 -> 0.99, D 128 0.97 -> 0.99, D 192 causal 0.97 -> 1.00, backward
    D 192 causal 0.90 -> 1.02. Where there is no such ptxas, or the environment names another, nothing changes.
    """
    with _PTXAS, _without_line_numbers(), _without_more_fences():  # knobs are set for all threads
        if not _has_earlier_ptxas():
            yield options
            return
        nvidia = triton.knobs.nvidia
        compiler().get_ptxas_version(90)  # a part of the key in Triton's cache, remembered from the first kernel on
        with nvidia.scope():
            nvidia.ptxas_blackwell = nvidia.ptxas.path
            version = compiler().ptx_get_version(nvidia.ptxas.version)
            yield options | {"ptx_version": version}  # another key than by CUDA 13


@contextlib.contextmanager
def _without_line_numbers() -> Iterator[None]:
    """Within, Triton does not carry a kernel's lines along for profilers, which is 3 to 5 % of the time to compile
    one, if the environment says nothing of them."""
    compilation = triton.knobs.compilation
    with compilation.scope():
        if not env.names_line_info():
            compilation.disable_line_info = True
        yield


@contextlib.contextmanager
def _without_more_fences() -> Iterator[None]:
    """Within, Triton adds no fences between writes to shared memory and the copies or products that read it: the
    kernels have their own. By 3.6 it adds none to them. 3.9 takes two slots of a ring for one, and so adds one to each
    step of the backward pass, up to 2 % of its time; to look for them is 6 to 17 % of the time to compile."""
    passes, name = compiler().nvidia.passes.ttnvgpuir, "add_proxy_fence_insertion"
    with instead(passes, name, lambda manager, capability: None) if hasattr(passes, name) else contextlib.nullcontext():
        yield


def compiler() -> ModuleType:
    """Triton's for NVIDIA GPUs, which not every build has."""
    return importlib.import_module("triton.backends.nvidia.compiler")


def _has_earlier_ptxas() -> bool:
    """Whether Triton would take a ptxas of CUDA 13, by itself, and has one of CUDA 12."""
    if env.names_ptxas():
        return False
    try:
        used, other = compiler().get_ptxas(90), triton.knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):  # a later Triton has one alone
        return False
    return other.version.startswith("12.") and not used.version.startswith("12.")
