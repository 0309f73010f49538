"""What differs between the Gluon of Triton 3.6 and of later releases, under one name each."""

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_PTXAS = threading.Lock()


@contextlib.contextmanager
def earlier_ptxas(options: dict[str, Any], pays: bool = True) -> Iterator[dict[str, Any]]:
    """Within, if it pays, Triton compiles for Hopper by the ptxas of CUDA 12 in its wheel, with the options it gives.

    From 3.9 on it takes that of CUDA 13, which works out the addresses of operands at greater length. Of what kernels
    make by Triton 3.6, on an H200: forward D 96 0.92 -> 0.99, D 128 0.97 -> 0.99, D 192 causal 0.97 -> 1.00, backward
    D 192 causal 0.90 -> 1.02. Where there is no such ptxas, or the environment names another, nothing changes.
    """
    with _PTXAS:  # what is set within is set for all threads
        if not (pays and _has_earlier_ptxas()):
            yield options
            return
        nvidia = triton.knobs.nvidia
        compiler().get_ptxas_version(90)  # a part of the key in Triton's cache, remembered from the first kernel on
        with nvidia.scope():
            nvidia.ptxas_blackwell = nvidia.ptxas.path
            version = compiler().ptx_get_version(nvidia.ptxas.version)
            yield options | {"ptx_version": version}  # another key than by CUDA 13


def compiler() -> ModuleType:
    """Triton's for NVIDIA GPUs, which not every build has."""
    return importlib.import_module("triton.backends.nvidia.compiler")


def _has_earlier_ptxas() -> bool:
    """Whether Triton would take a ptxas of CUDA 13, by itself, and has one of CUDA 12."""
    if "TRITON_PTXAS_BLACKWELL_PATH" in os.environ:
        return False
    try:
        used, other = compiler().get_ptxas(90), triton.knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):  # a later Triton has one alone
        return False
    return other.version.startswith("12.") and not used.version.startswith("12.")


if hasattr(tma, "async_atomic_add"):
    add_async = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def add_async(tensor_desc, coord, src, _semantic=None):
        """A copy from shared memory that adds to what is there; in 3.6 it has no Python function."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def seen_as(buffer, desc):
        """Shared memory as a block of another descriptor."""
        return buffer.reinterpret(desc.dtype, desc.block_shape, desc.layout)

else:

    @gluon.jit
    def seen_as(buffer, desc):
        """Shared memory as a block of another descriptor."""
        return buffer._reinterpret(desc.dtype, desc.block_shape, desc.layout)
