"""Launches of compiled kernels straight through the CUDA driver, for less host time than Triton's own launcher.

Triton reads every argument of every launch, and encodes a tensor map for each descriptor. Here the parameters of a
launch are laid out once, as the driver reads them; a call writes the tensors' addresses into them. What was prepared
for a problem is remembered.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arch import arch_of
from ..spec import AttentionSpec
from . import Backward, Forward
from .compiler import compiled_for, lies_near

Run = Callable[..., None]
"""run(*inputs, *outputs): launches on the current stream of the tensors' device."""

Inputs = tuple[Tensor | int | None, ...]
"""What a kernel reads, as tensors or addresses, and numbers that are others in each call."""

MAX_REMEMBERED = 4096  # problems per kernel; each costs a few kilobytes

_NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_NO_INTERLEAVE, _PROMOTE_TO_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0
_MOST_SHARED_BYTES = 97  # CUdevice_attribute: of a program that asks for them
_SHARED_BYTES_UNASKED = 48 << 10
_PREFER_SHARED, _DYNAMIC_SHARED_BYTES = 1, 8  # CUfunc_cache, CUfunction_attribute


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, its union of 64 bytes as numbers."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class Launcher(ABC):
    """A kernel, with a launch prepared for each problem: a spec (any key), and what the tensors are that it reads."""

    def __init__(self) -> None:
        self._runs: dict[tuple, Run] = {}

    @abstractmethod
    def prepare(self, spec: Any, tensors: tuple) -> Run:
        """The launch for tensors that lie like these (some may be None), on their device, which is current."""

    def run_for(self, spec: Any, inputs: Inputs, outputs: tuple[Tensor, ...]) -> Run:
        """run(*inputs, *outputs) for tensors that lie like these, and other numbers.

        `outputs` are fresh, their layouts a function of the spec and the inputs' layouts.
        """
        device = outputs[0].device
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        key = (spec, device, *[x if x is None else (x.dtype, x.stride(), x.data_ptr() & 15) for x in tensors])
        if torch.version.hip:  # where kernels are compiled for that, too
            key += tuple(x is None or lies_near(x) for x in tensors)
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= MAX_REMEMBERED:
                self._runs.clear()
            with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
                run = self._runs[key] = self.prepare(spec, (*inputs, *outputs))
        return run

    def __call__(self, spec: Any, inputs: Inputs, outputs: tuple[Tensor, ...]) -> None:
        """Runs on the current stream of the tensors' device."""
        self.run_for(spec, inputs, outputs)(*inputs, *outputs)


def forward_pass(launcher: Launcher, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), contiguous, of a kernel that writes them from q, k and v."""
    out, lse = results_of(spec, q.device)
    launcher(spec, (q, k, v), (out, lse))
    return out, lse


def forward_pass_like(launcher: Launcher, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """`forward_pass` for tensors that lie like these: with nothing left to look up, for the sake of small calls."""
    out_like, lse_like = results = results_of(spec, q.device)
    run = launcher.run_for(spec, (q, k, v), results)
    empty_out(*results)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(out_like), torch.empty_like(lse_like)
        run(q, k, v, out, lse)
        return out, lse

    return forward


def backward_pass(
    launcher: Launcher, spec: AttentionSpec, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, laid out as torch.empty_like(q), (k) and (v), of kernels that write them from all the others."""
    gradients = _gradients(q, k, v)
    launcher(spec, (dout, dlse, q, k, v, out, lse), gradients)
    return gradients


def backward_pass_like(
    launcher: Launcher, spec: AttentionSpec, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> Backward:  # fmt: skip
    """`backward_pass` for tensors that lie like these: with nothing left to look up, for the sake of small calls."""
    run = launcher.run_for(spec, (dout, dlse, q, k, v, out, lse), _gradients(q, k, v))

    def backward(
        dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _gradients(q, k, v)
        run(dout, dlse, q, k, v, out, lse, *gradients)
        return gradients

    return backward


def results_of(spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), not yet written."""
    out = torch.empty((spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v), dtype=spec.dtype, device=device)
    lse = torch.empty((spec.batch, spec.heads_q, spec.seqlen_q), dtype=torch.float32, device=device)
    return out, lse


def behind(x: Tensor, numbers: int) -> Tensor | int:
    """The memory so many numbers behind the beginning of a tensor that lies in one piece, as a launch takes it."""
    return x.data_ptr() + numbers * x.element_size() if x.is_cuda else x[numbers:]


def empty_out(*tensors: Tensor | None) -> None:
    """Frees the memory of tensors: what stays is how they lie, which the host asks for faster than by numbers."""
    for x in tensors:
        if x is not None:
            x.untyped_storage().resize_(0)


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def prepared(
    fn: Any, device: torch.device, grid: int, arguments: tuple, moving: int, options: dict, alone: bool = False
) -> Run:
    """The launch of a Triton kernel, as `launch_of` describes it; of an empty grid, nothing."""
    if grid == 0:
        return lambda *tensors: None
    if device.type == "cpu":  # the interpreter compiles nothing
        others = arguments[moving:]
        return lambda *tensors: fn[(grid,)](*tensors, *others, **options)
    arch = arch_of(device)
    assert arch is not None, "a tensor on a GPU, and no GPU"
    return launch_of(compiled_for(fn, arguments, options, arch), device, grid, arguments, moving, alone)


def launch_of(
    compiled: Any, device: torch.device, grid: int, arguments: tuple, moving: int, alone: bool = False
) -> Run:
    """The launch of a kernel that Triton compiled for `arguments`, on `device`.

    Tensors, or their addresses, take the place of the first `moving` arguments, which are tensors, their descriptors,
    or None; each must lie in memory as the one before. A number among them, of which the kernel makes no variants, is
    another in each call. The other arguments stay. alone: each program has so much shared memory that no other fits
    beside it on a multiprocessor, if the launch goes straight through the driver.
    """
    driver = _driver()
    if driver is not None and (loaded := _loaded(compiled, driver, device.index, alone)):
        function, shared = loaded
        parameters = Parameters(driver, compiled.src.signature, arguments, moving)
        if parameters.sizes == _sizes(driver, function):
            return _through_driver(driver, compiled, function, shared, device.index, grid, parameters)
    return _through_triton(compiled[(grid, 1, 1)], device.index, arguments, moving)


def _is_plain(metadata: Any) -> bool:
    """Whether a launch is no more than a grid, parameters, and perhaps cooperative or dependent on the one before."""
    special = ("num_ctas", "global_scratch_size", "profile_scratch_size")
    return [int(getattr(metadata, name, 0)) for name in special] == [1, 0, 0]


@functools.cache
def _loaded(compiled: Any, driver: ctypes.CDLL, device_index: int, alone: bool) -> tuple[int, int] | None:
    """The function of a kernel, and the bytes of shared memory to launch it with; Triton would load it by what a C
    compiler makes first. None of a kernel whose launch is not plain, or that wants more shared memory than there is:
    Triton says so.
    """
    if not _is_plain(compiled.metadata):
        return None
    device, most, shared = ctypes.c_int(), ctypes.c_int(), compiled.metadata.shared
    driver.cuDeviceGet(ctypes.byref(device), device_index)
    driver.cuDeviceGetAttribute(ctypes.byref(most), _MOST_SHARED_BYTES, device)
    if shared > most.value:
        return None
    if alone:
        shared = max(shared, most.value // 2 + 1)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.cuModuleLoadData(ctypes.byref(module), compiled.kernel)
    if status == _NO_CONTEXT:
        _make_current(driver, device_index)
        status = driver.cuModuleLoadData(ctypes.byref(module), compiled.kernel)
    status = status or driver.cuModuleGetFunction(ctypes.byref(function), module, compiled.name.encode())
    if shared > _SHARED_BYTES_UNASKED:
        status = status or driver.cuFuncSetCacheConfig(function, _PREFER_SHARED)
        status = status or driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared)
    if status:
        raise RuntimeError(f"{compiled.name}: loading it: {_message(driver, status)}")
    assert function.value is not None
    return function.value, shared


def _through_triton(run: Callable[..., None], device_index: int, arguments: tuple, moving: int) -> Run:
    described = [None if x is None or isinstance(x, Tensor | int) else _of(x, None) for x in arguments[:moving]]
    others = arguments[moving:]
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def launch(*tensors: Tensor | None) -> None:
        alike = (x if like is None else _of(like, x) for like, x in zip(described, tensors, strict=True))
        with contextlib.nullcontext() if current_device() == device_index else torch.cuda.device(device_index):
            run(*alike, *others, stream=stream_of(device_index))

    return launch


def _of(descriptor: Any, tensor: Tensor | None) -> Any:
    """The descriptor of another tensor that lies alike, without the checks of a new one."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__, base=tensor)
    return other


def _through_driver(
    driver: ctypes.CDLL, compiled: Any, function: int, shared: int, device_index: int, grid: int, parameters: Parameters
) -> Run:
    threads = compiled.metadata.num_warps * compiled.metadata.warp_size
    config = _Config((grid, 1, 1), (threads, 1, 1), shared)
    wanted = {
        _COOPERATIVE: compiled.metadata.launch_cooperative_grid,
        _PROGRAMMATIC_STREAM_SERIALIZATION: compiled.metadata.launch_pdl,
    }
    attributes = [_Attribute(name, 0, (1,)) for name, is_wanted in wanted.items() if is_wanted]
    config.attributes = (_Attribute * len(attributes))(*attributes)
    config.n_attributes = len(attributes)
    kernel = ctypes.c_void_p.from_param(function)
    call = (ctypes.byref(config), kernel, ctypes.byref(parameters.addresses), None)  # nothing left to convert
    launch_kernel, replace_address = driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress
    pointers, numbers, maps, lock = parameters.pointers, parameters.numbers, parameters.maps, threading.Lock()
    described = [(i, *x) for i, x in enumerate(maps)]
    last = [0] * len(maps)  # addresses: often the same memory again, for which the driver need not be called
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    kept = compiled, parameters  # alive as long as the launch

    def launch(*tensors: Any) -> None:
        if current_device() != device_index:  # what torch.cuda.current_device asks
            with torch.cuda.device(device_index):
                launch(*tensors)
            return
        with lock:  # until the driver has copied the parameters
            for index, pointer in pointers:
                x = tensors[index]
                pointer.value = x if type(x) is int else x.data_ptr()
            for index, number in numbers:
                number.value = tensors[index]
            for i, index, tensor_map in described:
                address = tensors[index].data_ptr()
                if address != last[i]:
                    replace_address(tensor_map, ctypes.c_void_p(address))
                    last[i] = address
            config.stream = stream_of(device_index)
            status = launch_kernel(*call)
            if status == _NO_CONTEXT:  # the first of this thread that the driver hears
                _make_current(driver, device_index)
                status = launch_kernel(*call)
        if status:
            raise RuntimeError(f"{kept[0].name}: cuLaunchKernelEx: {_message(driver, status)}")

    return launch


class Parameters:
    """A kernel's parameters as the driver reads them.

    addresses: of each parameter, in the kernel's order.
    pointers, maps: (index of a moving argument, what holds its address).
    numbers: (index of a moving argument that is a number, what holds it).
    sizes: in bytes, of each parameter.
    values, fixed: what must stay alive.
    """

    def __init__(self, driver: ctypes.CDLL, signature: dict[str, str], arguments: tuple, moving: int) -> None:
        self.pointers: list[tuple[int, ctypes.c_void_p]] = []
        self.maps: list[tuple[int, ctypes.c_void_p]] = []
        self.numbers: list[tuple[int, Any]] = []
        self.fixed = arguments[moving:]
        values: list[Any] = []
        for index, (kind, argument) in enumerate(zip(signature.values(), arguments, strict=True)):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                tensor_map = _tensor_map(driver, argument)
                self.maps.append((index, ctypes.c_void_p(ctypes.addressof(tensor_map))))
                values += [tensor_map, *map(ctypes.c_int32, argument.shape), *map(ctypes.c_int64, argument.strides)]
            elif kind.startswith("*"):
                values.append(ctypes.c_void_p(argument.data_ptr()))
                if index < moving:
                    self.pointers.append((index, values[-1]))
            else:
                values.append(_NUMBERS[kind](argument))
                if index < moving:
                    self.numbers.append((index, values[-1]))
        values += [ctypes.c_void_p(), ctypes.c_void_p()]  # the scratch memory of Triton and of its profiler
        self.values = values
        self.sizes = [ctypes.sizeof(value) for value in values]
        self.addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def _tensor_map(driver: ctypes.CDLL, descriptor: Any) -> Any:
    """A CUtensorMap of what a Gluon TensorDescriptor describes."""
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    tensor_map = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT)
    itemsize, swizzle = descriptor.base.element_size(), descriptor.layout.swizzle_byte_width
    rank = len(descriptor.shape)
    *outer, width = descriptor.block_shape
    box = [*outer, min(width, swizzle // itemsize) if swizzle else width]  # wider blocks are copied in several
    status = driver.cuTensorMapEncodeTiled(
        tensor_map, _MAP_TYPES[descriptor.base.dtype], rank, ctypes.c_void_p(descriptor.base.data_ptr()),
        (ctypes.c_uint64 * rank)(*reversed(descriptor.shape)),
        (ctypes.c_uint64 * rank)(*(stride * itemsize for stride in reversed(descriptor.strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE, {0: 0, 32: 1, 64: 2, 128: 3}[swizzle], _PROMOTE_TO_128_BYTES, _ZEROS_OUTSIDE,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {_message(driver, status)}: {descriptor}")
    return tensor_map


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver; None where there is none, or an old one."""
    if torch.version.cuda is None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        used = (driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress, driver.cuFuncGetParamInfo)
    except (OSError, AttributeError):
        return None
    return driver if all(used) else None


def _make_current(driver: ctypes.CDLL, device_index: int) -> None:
    """Makes the context that PyTorch uses on a device this thread's."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(device), device_index)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)


def _sizes(driver: ctypes.CDLL, function: int) -> list[int]:
    """Of each parameter of a loaded kernel, in bytes."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes


def _message(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    return f"error {status}, {(text.value or b'unknown').decode()}"
