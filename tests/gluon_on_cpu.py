"""Gluon kernels of the Hopper backend run on a CPU: every warp role is a thread, every barrier a barrier, and what the
hardware does asynchronously is done as late, or as early, as it may be.

Copies wait for a moment; products read shared memory when they are issued or when they are waited for, as a coin
falls. So a kernel that gives a slot back too early, or waits for the wrong phase, gives a wrong result here or stands
still, for which `run` has a time limit. Layouts, registers and the memory model are not looked at.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from gluon_values import Matrices, Matrix, Number, Pointer, Shared, registers

import flashtile.backends.hopper
from flashtile.backends.launcher import KernelCall

LOCK = threading.Condition()
HERE = threading.local()  # .program and, of one role, .threads, and .products and .stores in flight


class StoppedError(Exception):
    """Another role failed, or the time limit is over."""


def wait_until(ready: Any) -> None:
    """Holds LOCK while it looks."""
    with LOCK:
        while not ready():
            if HERE.program.stopped or time.monotonic() > HERE.program.deadline:
                HERE.program.stopped = True
                raise StoppedError
            LOCK.wait(0.5)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.count, self.missing, self.bytes, self.phase = 0, 0, 0, 0

    def arrive(self, arrivals: int, nbytes: int) -> None:
        with LOCK:
            self.missing -= arrivals
            self.bytes += nbytes
            assert self.missing >= 0, "more arrivals than a phase has"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase ^ 1
            LOCK.notify_all()


class Barriers:
    def __init__(self, depth: int) -> None:
        self.barriers = [Barrier() for _ in range(depth)]

    def index(self, i: int) -> Barrier:
        return self.barriers[int(i)]


class MBarrier:
    MBarrierLayout = staticmethod(lambda: "barriers")

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    @staticmethod
    def expect(barrier: Barrier, nbytes: int) -> None:
        barrier.arrive(1, nbytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(count, 0)

    @staticmethod
    def wait(barrier: Barrier, phase: int, pred: Any = True) -> None:
        if pred:
            wait_until(lambda: barrier.phase != phase)


class Descriptor:
    """A TMA descriptor: boxes of a tensor, zero outside, and not written there."""

    def __init__(self, tensor: torch.Tensor, box: list[int]) -> None:
        self.tensor, self.block_shape, self.dtype = tensor, box, tensor.dtype
        self.layout = SharedLayout(min(box[-1], 64), None, len(box), False)
        nbytes = tensor.element_size()
        for n in box:
            nbytes *= n
        self.block_type = SimpleNamespace(nbytes=nbytes)

    def corner(self, coordinates: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a box and the tensor overlap, in the tensor and in the box."""
        places = [
            (int(c), max(0, min(n, size - int(c))))
            for c, n, size in zip(coordinates, self.block_shape, self.tensor.shape, strict=True)
        ]
        return tuple(slice(c, c + n) for c, n in places), tuple(slice(0, n) for _, n in places)


def in_a_moment(work: Any) -> None:
    program = HERE.program

    def later() -> None:
        time.sleep(random.random() * 1e-3)
        HERE.program = program
        work()

    threading.Thread(target=later, daemon=True).start()


def load_async(descriptor: Descriptor, coordinates: list[Any], barrier: Barrier, buffer: Shared | Matrix) -> None:
    outer, inner = descriptor.corner(coordinates)

    def copy() -> None:
        box = torch.zeros(descriptor.block_shape, dtype=descriptor.dtype)
        box[inner] = descriptor.tensor[outer]
        buffer.store(box)
        barrier.arrive(0, -descriptor.block_type.nbytes)

    in_a_moment(copy)


def store_async(descriptor: Descriptor, coordinates: list[Any], buffer: Shared | Matrix, add: bool = False) -> None:
    outer, inner = descriptor.corner(coordinates)
    store = SimpleNamespace(read=False, done=False)
    HERE.stores.append(store)
    HERE.program.stores.append(store)

    def copy() -> None:
        with LOCK:
            box = buffer.view[inner].clone()
            store.read = True
            LOCK.notify_all()
        time.sleep(random.random() * 1e-3)
        with LOCK:
            descriptor.tensor[outer] = box + (descriptor.tensor[outer] if add else 0)
            store.done = True
            LOCK.notify_all()

    in_a_moment(copy)


def store_wait(pending: int) -> None:
    wait_until(lambda: all(store.read for store in HERE.stores[: len(HERE.stores) - pending]))


class Product:
    """A product in flight. Until it is waited for nobody may look at it."""

    def __init__(self, a: Any, b: Shared | Matrix, acc: Any, use_acc: Any) -> None:
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, bool(use_acc), None
        self.shape = acc.shape
        self.type = SimpleNamespace(layout=None)
        if random.random() < 0.5:
            self.operands = self.read()
        else:
            self.operands = None

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.a.view if isinstance(self.a, Shared | Matrix) else self.a
        return a.float().clone(), self.b.view.float().clone()

    def finish(self) -> None:
        a, b = self.operands or self.read()
        self.value = registers(a @ b)
        if self.use_acc:
            self.value = self.value + (self.acc.value if isinstance(self.acc, Product) else self.acc)


def warpgroup_mma(a: Any, b: Shared | Matrix, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    HERE.products.append(product)
    return product


def warpgroup_mma_wait(pending: int, deps: tuple) -> Any:
    if random.random() < 0.1:  # let the others get ahead
        time.sleep(random.random() * 3e-3)
    while len(HERE.products) > pending:
        HERE.products.pop(0).finish()
    values = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
    return values if len(values) > 1 else values[0]


def inline_asm(text: str, constraints: str, arguments: list[Any], **_: Any) -> Any:
    if text.startswith(("bar.sync", "bar.arrive")):
        name, threads = (int(x) for x in arguments)
        named = HERE.program.named.setdefault(name, Barrier())
        with LOCK:
            if named.count == 0:
                named.count = named.missing = threads
            phase = named.phase
        named.arrive(HERE.threads, 0)
        if text.startswith("bar.sync"):
            wait_until(lambda: named.phase != phase)
    elif "cas.b32" in text:
        pointer, written = arguments
        with LOCK:
            mine = int(pointer.tensor[pointer.at]) == 0
            if mine:
                pointer.tensor[pointer.at] = 1
        wait_until(lambda: mine or pointer.tensor[pointer.at] == written)
        return int(mine)
    elif "st.release" in text:
        pointer, written = arguments
        with LOCK:
            pointer.tensor[pointer.at] = written
            LOCK.notify_all()
    elif text.startswith("ld.acquire"):
        return registers(arguments[0].tensor[arguments[0].at])
    elif "ld.acquire" in text:
        pointer, count = arguments
        wait_until(lambda: pointer.tensor[pointer.at] == count)
    elif "ld.relaxed" in text:
        pointer, count, _looks = arguments  # it would go on after some looks in any case
        assert pointer.tensor[pointer.at] <= count
    elif "cp.async.bulk.wait_group 0;" in text:
        wait_until(lambda: all(store.done for store in HERE.stores))
        HERE.stores.clear()
    elif "red.relaxed.gpu" in text:  # behind a fence or not
        with LOCK:
            (pointer,) = arguments
            pointer.tensor[pointer.at] += 1
            LOCK.notify_all()
    elif text.startswith("mov.b32 $0, $1;"):
        return arguments[0]
    elif "%laneid" in text:
        return registers(torch.arange(32))
    elif text.startswith("bar.warp.sync 0xffffffff; fence"):
        pass
    elif "fma.rn.f32 x, $1, $2, $3; ex2" in text:
        x, factor, summand = (torch.as_tensor(argument, dtype=torch.float64) for argument in arguments)
        return registers(torch.exp2((x * factor + summand).float()))
    elif "rcp.approx" in text:
        x, factor = arguments
        return registers(1 - 2 / (1 + torch.exp2(x * factor)))
    elif text.startswith("lg2.approx"):
        return torch.log2(arguments[0])
    elif text.startswith("cvt.rn."):
        dtype = torch.bfloat16 if "bf16x2" in text else torch.float16
        low, high = (x.to(dtype).to(torch.int16, bitcast=True).to(torch.int32) for x in arguments)
        return (low & 0xFFFF) | (high << 16)
    else:
        raise NotImplementedError(text)
    return None


def allocate_shared(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape[0])
    if getattr(layout, "rank", None) == 2 and len(shape) == 3:
        rows, columns = shape[1:][::-1] if layout.transposed else shape[1:]
        strips = shape[0] * columns // layout.swizzle_byte_width
        x = torch.full((strips, rows, layout.swizzle_byte_width), float("nan"))
        return Matrices(x.to(dtype), shape, layout.transposed)
    return Shared(torch.full([int(n) for n in shape], float("nan")).to(dtype))


def gl_load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> torch.Tensor:
    if mask is None:
        return registers(pointer.tensor[torch.as_tensor(pointer.at)].clone())
    return registers(torch.where(mask, pointer.tensor[torch.where(mask, pointer.at, 0)], other))


def gl_store(pointer: Pointer, x: torch.Tensor | int, mask: torch.Tensor | None = None) -> None:
    at, x = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(x))
    mask = torch.full(x.shape, True) if mask is None else mask
    pointer.tensor[at[mask]] = torch.Tensor(x[mask]).to(pointer.tensor.dtype)


def gl_sum(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.sum(axis)


def gl_min(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.amin(axis)


def gl_max(x: torch.Tensor, axis: int) -> torch.Tensor:
    """As the hardware does it: of what is a number."""
    return x.masked_fill(x.isnan(), float("-inf")).amax(axis) if x.is_floating_point() else x.amax(axis)


def fma(*numbers: Any) -> torch.Tensor:
    a, b, c = (torch.as_tensor(x, dtype=torch.float32).double() for x in numbers)
    return registers((a * b + c).float())


def warp_specialize(roles: list, warps: list[int], _registers: list[int]) -> None:
    program = HERE.program

    def run(role: Any, arguments: tuple, n_warps: int) -> None:
        HERE.program, HERE.products, HERE.stores, HERE.threads = program, [], [], 32 * n_warps
        try:
            role(*arguments)
            assert not HERE.products, "products in flight at the end"
        except StoppedError:
            pass
        except BaseException as error:
            program.errors.append(error)
            program.stopped = True

    sizes = [4, *warps]
    threads = [threading.Thread(target=run, args=(*role, n), daemon=True) for role, n in zip(roles, sizes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def identity(x: Any) -> Any:
    return x


def jit(fn: Any = None, **_: Any) -> Any:
    return identity if fn is None else fn


def call_now(function: Any, arguments: tuple, **_: Any) -> Any:
    return function(*arguments)


def builtin(fn: Any) -> Any:
    return functools.partial(fn, _generator=SimpleNamespace(call_JitFunction=call_now))


def _stub(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace()


def associative_scan(x: torch.Tensor, axis: int, combine: Any) -> torch.Tensor:
    return torch.stack(list(itertools.accumulate(x.unbind(axis), combine)), axis)


class SharedLayout:
    """How matrices lie in shared memory. The swizzle is as wide as it says in columns, whatever their dtype."""

    get_default_for = staticmethod(_stub)
    element_bitwidth = None

    def __init__(self, swizzle_byte_width: int, _bits: Any, rank: int, transposed: bool) -> None:
        self.swizzle_byte_width, self.rank, self.transposed = swizzle_byte_width, rank, transposed


class Language:
    """gluon.language, as far as the kernels use it."""

    constexpr = tensor = staticmethod(identity)
    shared_memory_descriptor = Shared
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    int64, int32, int16, uint32 = torch.int64, torch.int32, torch.int16, torch.int64
    to_tensor = Number
    static_range, exp, exp2, log, log2 = range, torch.exp, torch.exp2, torch.log, torch.log2
    abs, zeros_like = torch.abs, torch.zeros_like
    load, store, sum, min, max = map(staticmethod, (gl_load, gl_store, gl_sum, gl_min, gl_max))
    allocate_shared_memory, warp_specialize = map(staticmethod, (allocate_shared, warp_specialize))
    inline_asm_elementwise = staticmethod(inline_asm)
    SliceLayout = NVMMADistributedLayout = DotOperandLayout = staticmethod(_stub)
    BlockedLayout = SwizzledSharedLayout = staticmethod(_stub)
    NVMMASharedLayout = SharedLayout
    pointer_type = staticmethod(identity)
    num_warps = staticmethod(lambda: 4)
    program_id = staticmethod(lambda _axis: HERE.program.id)
    num_programs = staticmethod(lambda _axis: HERE.program.of)
    convert_layout = staticmethod(lambda x, _layout: x)
    zeros = staticmethod(lambda shape, dtype, _layout: registers(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, x, dtype, _layout: registers(torch.full(shape, x, dtype=dtype)))
    arange = staticmethod(lambda start, end, _layout: registers(torch.arange(start, end)))
    where = staticmethod(lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b))
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))
    split = staticmethod(lambda x: (x[..., 0], x[..., 1]))
    fma = staticmethod(fma)
    associative_scan = staticmethod(associative_scan)
    barrier = staticmethod(lambda: None)  # of the threads of a role, which is one thread here
    broadcast = staticmethod(torch.broadcast_tensors)
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))


def _modules() -> dict[str, ModuleType]:
    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(names)
        return made

    gluon = "triton.experimental.gluon"
    language = Language
    tma = SimpleNamespace(
        async_load=load_async, async_store=store_async, store_wait=store_wait,
        async_atomic_add=functools.partial(store_async, add=True),
    )  # fmt: skip
    hopper = module(
        gluon + ".language.nvidia.hopper", tma=tma, mbarrier=MBarrier, warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait, fence_async_shared=lambda: None,
    )  # fmt: skip
    parts = {"jit": jit, "constexpr_function": identity, "aggregate": identity, "language": language}
    return {
        "triton.experimental": module("triton.experimental", gluon=module(gluon, **parts)),
        gluon: module(gluon, **parts),
        gluon + ".language": module(gluon + ".language"),
        gluon + ".language._core": module(gluon + ".language._core", builtin=builtin),
        gluon + ".language.nvidia": module(gluon + ".language.nvidia", hopper=hopper),
        gluon + ".language.nvidia.hopper": hopper,
        "triton.language": module("triton.language", core=None),
        "triton.language.extra.cuda": module(
            "triton.language.extra.cuda", gdc_wait=lambda: None, gdc_launch_dependents=lambda: None
        ),
    }


def load(name: str) -> ModuleType:
    """A module of the Hopper backend, over this file's Gluon."""
    fake = _modules()
    package = ModuleType("emulated")
    package.__path__ = [str(Path(flashtile.backends.hopper.__file__).parent)]
    kept = {key: sys.modules.get(key) for key in fake}
    sys.modules |= fake | {"emulated": package}
    try:
        return importlib.import_module(f"emulated.{name}")
    finally:
        for key, known in kept.items():
            if known is None:
                del sys.modules[key]
            else:
                sys.modules[key] = known


def run(kernel: Any, programs: int, arguments: tuple, seconds: float = 60.0, together: bool = False) -> None:
    """All programs of a kernel, one after the other or at the same time, begun in any order; TimeoutError where roles
    wait for each other for ever."""
    begun = [
        SimpleNamespace(id=i, of=programs, named={}, errors=[], stores=[], stopped=False, deadline=0.0)
        for i in range(programs)
    ]

    def run_one(program: SimpleNamespace) -> None:
        program.deadline = time.monotonic() + seconds
        HERE.program = program
        kernel(*arguments)
        wait_until(lambda: program.stopped or all(store.done for store in program.stores))

    if together:
        threads = [threading.Thread(target=run_one, args=(x,), daemon=True) for x in random.sample(begun, programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for program in begun:
        if not together:
            run_one(program)
        if program.errors:
            raise program.errors[0]
        if program.stopped:
            raise TimeoutError(f"program {program.id} stands still")


def run_call(module: str, call: KernelCall) -> None:
    """A launch of a kernel of a module of the Hopper backend."""
    arguments = (Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in call.arguments)
    run(getattr(load(module), call.fn.__name__), call.grid, tuple(arguments))
