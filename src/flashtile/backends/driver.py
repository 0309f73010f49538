"""The CUDA driver, as launches need it: its structures, the parameters of kernels as it reads them, tensor maps."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .launcher import KernelCall, Run

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


def through_driver(kernels: list[Any], calls: tuple[KernelCall, ...], device_index: int) -> Run | None:
    """The launches of `launcher.run_of`; None where there is no such driver, or Triton must see to one of them."""
    driver = _driver()
    if driver is None:
        return None
    moved, launches = Moved(), []
    for kernel, call in zip(kernels, calls, strict=True):
        launch = _plain_launch(driver, kernel, call, device_index, moved)
        if launch is None:
            return None
        launches.append(launch)
    return _run_of(driver, launches, device_index, moved)


class Moved:
    """What holds the moving arguments of a run for all of its kernels: addresses, numbers, and tensor maps' addresses,
    of which a kernel may have another for the same tensor; each behind the argument's index."""

    def __init__(self) -> None:
        self.pointers: dict[int, ctypes.c_void_p] = {}
        self.numbers: dict[int, Any] = {}
        self.maps: list[tuple[int, ctypes.c_void_p]] = []


class _Launch(NamedTuple):
    """What cuLaunchKernelEx is called with, of which config is part; what is kept must live as long."""

    name: str
    config: _Config
    call: tuple
    kept: tuple


def _plain_launch(
    driver: ctypes.CDLL, kernel: Any, call: KernelCall, device_index: int, moved: Moved
) -> _Launch | None:
    """None of a kernel that `_loaded` has none of, or that has other parameters than are known here."""
    loaded = _loaded(kernel, driver, device_index, call.most_at_once)
    if loaded is None:
        return None
    function, shared = loaded
    parameters = Parameters(driver, kernel.src.signature, call, moved)
    if parameters.sizes != _sizes(driver, function):
        return None
    threads = kernel.metadata.num_warps * kernel.metadata.warp_size
    config = _Config((call.grid, 1, 1), (threads, 1, 1), max(shared, call.shared))
    wanted = {
        _COOPERATIVE: kernel.metadata.launch_cooperative_grid,
        _PROGRAMMATIC_STREAM_SERIALIZATION: kernel.metadata.launch_pdl,
    }
    attributes = [_Attribute(name, 0, (1,)) for name, is_wanted in wanted.items() if is_wanted]
    config.attributes = (_Attribute * len(attributes))(*attributes)
    config.n_attributes = len(attributes)
    pointer = ctypes.c_void_p.from_param(function)
    asked = (ctypes.byref(config), pointer, ctypes.byref(parameters.addresses), None)  # nothing left to convert
    return _Launch(kernel.name, config, asked, (kernel, parameters))


def _is_plain(metadata: Any) -> bool:
    """Whether a launch is no more than a grid, parameters, and perhaps cooperative or dependent on the one before."""
    special = ("num_ctas", "global_scratch_size", "profile_scratch_size")
    return [int(getattr(metadata, name, 0)) for name in special] == [1, 0, 0]


@functools.cache
def _loaded(compiled: Any, driver: ctypes.CDLL, device_index: int, most_at_once: int) -> tuple[int, int] | None:
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
    if most_at_once:
        shared = max(shared, most.value // (most_at_once + 1) + 1)
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


def _run_of(driver: ctypes.CDLL, launches: list[_Launch], device_index: int, moved: Moved) -> Run:
    launch_kernel, replace_address = driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress
    pointers, numbers, lock = list(moved.pointers.items()), list(moved.numbers.items()), threading.Lock()
    described = [(i, *x) for i, x in enumerate(moved.maps)]
    last = [0] * len(described)  # addresses: often the same memory again, for which the driver need not be called
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def run(*tensors: Any) -> None:
        if current_device() != device_index:  # what torch.cuda.current_device asks
            with torch.cuda.device(device_index):
                run(*tensors)
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
            stream = stream_of(device_index)
            for name, config, call, _ in launches:
                config.stream = stream
                status = launch_kernel(*call)
                if status == _NO_CONTEXT:  # the first of this thread that the driver hears
                    _make_current(driver, device_index)
                    status = launch_kernel(*call)
                if status:
                    raise RuntimeError(f"{name}: cuLaunchKernelEx: {_message(driver, status)}")

    return run


class Parameters:
    """A kernel's parameters as the driver reads them; those that move lie in `moved`, where other kernels find them.

    addresses: of each parameter, in the kernel's order.
    sizes: in bytes, of each parameter.
    values, fixed: what must stay alive.
    """

    def __init__(self, driver: ctypes.CDLL, signature: dict[str, str], call: KernelCall, moved: Moved) -> None:
        self.fixed = call.arguments[len(call.moves) :]
        moves = (*call.moves, *(None for _ in self.fixed))
        values: list[Any] = []
        for kind, argument, index in zip(signature.values(), call.arguments, moves, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                tensor_map = _tensor_map(driver, argument)
                values += [tensor_map, *map(ctypes.c_int32, argument.shape), *map(ctypes.c_int64, argument.strides)]
                if index is not None:
                    moved.maps.append((index, ctypes.c_void_p(ctypes.addressof(tensor_map))))
            elif kind.startswith("*"):
                values.append(_held(moved.pointers, index, ctypes.c_void_p(argument.data_ptr())))
            else:
                values.append(_held(moved.numbers, index, _NUMBERS[kind](argument)))
        values += [ctypes.c_void_p(), ctypes.c_void_p()]  # the scratch memory of Triton and of its profiler
        self.values = values
        self.sizes = [ctypes.sizeof(value) for value in values]
        self.addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def _held(held: dict[int, Any], index: int | None, value: Any) -> Any:
    """What holds an argument: if it moves, the same for all kernels."""
    return value if index is None else held.setdefault(index, value)


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
