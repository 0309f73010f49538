"""Compiling Triton kernels for the arguments of a launch, by way of `triton.compile`.

A kernel that is called asks Triton's driver what GPU there is, and that driver a C compiler makes first, for every new
cache. PyTorch knows, too: so that nothing here needs a C compiler. Nor does what Triton is have to be read from all of
its files, 0.15 to 0.4 s of a process's first call: a wheel's record says it.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache as triton_cache

ELEMENTS = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_MULTIPLE, _NEAR = ("tt.divisibility", 16), ("tt.pointer_range", 32)
_COMPILING = threading.Lock()


def target_of(arch: str) -> GPUTarget:
    """The compiler's name for "sm_90", "gfx942" ..."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


class Described(NamedTuple):
    """A kernel, and what it is compiled for."""

    fn: Any
    kinds: tuple[str, ...]  # the type of each argument, or "constexpr"
    constants: tuple[tuple[int, Any], ...]  # which argument, and its value
    promises: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]  # which argument, and what is true of its value

    @property
    def source(self) -> ASTSource:
        make = GluonASTSource if self.fn.is_gluon() else ASTSource
        signature = dict(zip(self.fn.arg_names, self.kinds, strict=True))
        constants = {(index,): value for index, value in self.constants}
        return make(self.fn, signature, constants, {(i,): [list(x) for x in promised] for i, promised in self.promises})


def described(fn: Any, arguments: tuple, arch: str) -> Described:
    """A kernel for arguments like these, as Triton itself would describe it."""
    kinds, constants, promises = [], [], []
    for index, (parameter, value) in enumerate(zip(fn.params, arguments, strict=True)):
        varies = not parameter.do_not_specialize  # whether an integer's value may make a variant
        if parameter.is_constexpr or value is None or (varies and type(value) is int and value == 1):
            kinds.append("constexpr")
            constants.append((index, value))
            continue
        kinds.append(_kind(value))
        if varies and (promised := tuple(_promises(value, arch))):
            promises.append((index, promised))
    return Described(fn, tuple(kinds), tuple(constants), tuple(promises))


def _promises(value: Any, arch: str) -> Iterator[tuple[str, int]]:
    """What is true of an address or an integer, and makes faster code."""
    number = value.data_ptr() if isinstance(value, Tensor) else value
    if type(number) is int and number % 16 == 0:
        yield _MULTIPLE
    if isinstance(value, Tensor) and arch.startswith("gfx") and lies_near(value):
        yield _NEAR


def lies_near(x: Tensor) -> bool:
    """Whether places in a tensor's memory are 32-bit numbers of bytes."""
    return x.untyped_storage().nbytes() < 1 << 31


def compiled_for(fn: Any, arguments: tuple, options: dict[str, Any], arch: str) -> Any:
    """Triton's kernel for arguments like these, which is remembered."""
    return _compiled(described(fn, arguments, arch), tuple(options.items()), arch)


@functools.cache
def _compiled(of: Described, options: tuple[tuple[str, Any], ...], arch: str) -> Any:
    with _COMPILING, _without_collection(), _known_by_its_wheel():
        return triton.compile(of.source, target=target_of(arch), options=dict(options))


def _kind(value: Any) -> str:
    """The type of an argument."""
    if isinstance(value, Tensor):
        return "*" + ELEMENTS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if type(value) is int:
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return f"tensordesc<{ELEMENTS[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Within, Python does not look for garbage in cycles, if it did before: 2 to 5 % of the time to compile a
    Hopper kernel, most of whose objects stay until it has ended."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _known_by_its_wheel() -> Iterator[None]:
    """Within, Triton's cache knows this Triton by `contents_of_wheel`, if that says what it is."""
    contents = _contents_of_triton()
    with contextlib.nullcontext() if contents is None else instead(triton_cache, "triton_key", lambda: contents):
        yield


@functools.cache
def _contents_of_triton() -> str | None:
    try:
        return contents_of_wheel(distribution("triton"), Path(triton.__file__).parent)
    except PackageNotFoundError:
        return None


def contents_of_wheel(wheel: Distribution, package: Path) -> str | None:
    """One text for all files of an installed package, by the hashes in its wheel's record; None unless it lies where
    that says, and each file is as long as then and no newer than the record, which is written last."""
    rows = [row for row in csv.reader((wheel.read_text("RECORD") or "").splitlines()) if len(row) == 3]
    files = [row for row in rows if row[0].startswith(f"{package.name}/") and row[1]]
    records = [name for name, *_ in rows if name.endswith(".dist-info/RECORD")]
    if not files or len(records) != 1 or Path(str(wheel.locate_file(package.name))).resolve() != package.resolve():
        return None
    try:
        written = os.stat(str(wheel.locate_file(records[0]))).st_mtime_ns
        found = [(os.stat(str(wheel.locate_file(name))), size) for name, _, size in files]
    except OSError:
        return None
    if any(str(file.st_size) != size or file.st_mtime_ns > written for file, size in found):
        return None
    return f"{package.name} " + hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


@contextlib.contextmanager
def instead(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within, another function takes the place of a module's, in this thread alone; one such at a time."""
    theirs, thread = getattr(module, name), threading.get_ident()

    @functools.wraps(theirs)
    def either(*arguments: Any, **named: Any) -> Any:
        return (function if threading.get_ident() == thread else theirs)(*arguments, **named)

    setattr(module, name, either)
    try:
        yield
    finally:
        setattr(module, name, theirs)
