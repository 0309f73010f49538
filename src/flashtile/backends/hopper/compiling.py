"""How Triton compiles the Hopper kernels: by which ptxas, as 3.9 is the first to use that of CUDA 13 and has that of
CUDA 12, a function once for all warpgroups, without line numbers and vectors, and without fences and barriers but their
own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.compiler import compiler as triton_compiler

from ... import env
from ..compiler import instead
from .llvm_ir import for_roles

_COMPILING = threading.Lock()


@contextlib.contextmanager
def for_hopper(options: dict[str, Any], forward: bool = False) -> Iterator[dict[str, Any]]:
    """Within, Triton compiles the Hopper kernels as follows, with the options it gives. forward: those of that pass,
    which have all barriers they need, and whose steps are as long without vectors."""
    with (
        _COMPILING,  # knobs are set for all threads
        _known_by_what_is_done(),
        _without_line_numbers(),
        _without_more_fences(),
        _without_more_barriers() if forward else contextlib.nullcontext(),
        _without_vectors() if forward else contextlib.nullcontext(),
        _inlined_late(),
        _by_earlier_ptxas(options) as options,
    ):
        yield options


@contextlib.contextmanager
def _known_by_what_is_done() -> Iterator[None]:
    """Within, Triton's cache knows a kernel by this file and llvm_ir.py, too, as it is not made by its source alone."""
    theirs = triton_compiler.get_cache_invalidating_env_vars
    known = {"flashtile": _what_is_done()}
    with instead(triton_compiler, "get_cache_invalidating_env_vars", lambda: theirs() | known):
        yield


@functools.cache
def _what_is_done() -> str:
    """A hash of both files."""
    here = Path(__file__)
    return hashlib.sha256(here.read_bytes() + here.with_name("llvm_ir.py").read_bytes()).hexdigest()


@contextlib.contextmanager
def _by_earlier_ptxas(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Within, Triton compiles by the ptxas of CUDA 12 in its wheel, with these options and one more.

    From 3.9 on it takes that of CUDA 13, which works out the addresses of operands at greater length. Of what kernels
    make by Triton 3.6, on an H200: forward D 96 0.92 -> 0.99, D 128 0.97 -> 0.99, D 192 causal 0.97 -> 1.00, backward
    D 192 causal 0.90 -> 1.02. Where there is no such ptxas, or the environment names another, nothing changes.
    """
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
    with _where_there(compiler().nvidia.passes.ttnvgpuir, "add_proxy_fence_insertion", lambda *_: None):
        yield


@contextlib.contextmanager
def _without_more_barriers() -> Iterator[None]:
    """Within, Triton adds no barriers between the warps of a warpgroup that write and read the same shared memory.
    Where a kernel has its own it would find none to add, which tests/test_aot.py sees to, but in a function, whose
    arguments it does not look behind: five to each step of the forward pass. To look is a seventh of the time to
    compile. In 3.6 it is not a pass of its own."""
    with _where_there(compiler().nvidia.passes.ttgpuir, "add_membar", lambda *_: None):
        yield


@contextlib.contextmanager
def _without_vectors() -> Iterator[None]:
    """Within, LLVM makes no vectors of scalars, for which it looks at every sum, product and choice of a step: by 3.6
    half of its optimisation and an eighth of the time to compile a kernel. Hopper has no instructions for those of
    float32, and forward steps are as long. Backward ones are up to 4 % longer by 3.9, where D 96 spills; not timed."""
    llvm = compiler().llvm
    optimize, to_module = llvm.optimize_module, llvm.to_module
    says_so = "disable_slp_vectorizer" in (optimize.__doc__ or "")
    told = {"disable_slp_vectorizer": True} if says_so else {"arch": "sm_90"}  # which it knows to have none

    def without(module: Any, *level: Any, **more: Any) -> None:
        optimize(module, *level, **more | told)

    def for_nvidia(module: Any, context: Any) -> Any:
        module.set_attr("llvm.target_triple", ir.builder(module.context).get_string_attr("nvptx64-nvidia-cuda"))
        return to_module(module, context)

    with instead(llvm, "optimize_module", without), instead(llvm, "to_module", to_module if says_so else for_nvidia):
        yield


@contextlib.contextmanager
def _inlined_late() -> Iterator[None]:
    """Within, a function that Triton was told not to inline is inlined when PTX is written, in one place for all
    warpgroups that call it: see llvm_ir.py."""
    llvm, name = compiler().llvm, "translate_to_asm"
    theirs: Any = getattr(llvm, name, None)

    def translate(source: str, *rest: Any, **more: Any) -> Any:
        return theirs(for_roles(source), *rest, **more)

    with _where_there(llvm, name, translate):
        yield


def _where_there(module: Any, name: str, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`instead`, of a function that not every Triton has."""
    return instead(module, name, function) if hasattr(module, name) else contextlib.nullcontext()


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
