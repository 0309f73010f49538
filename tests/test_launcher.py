"""What reaches a kernel: without a GPU, by a driver that records what it is handed."""

# ruff: noqa: ARG002, N802 -- the CUDA driver's names and parameters

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from flashtile import flash_attn_func  # noqa: E402
from flashtile.backends import launcher  # noqa: E402

MAP = 128  # bytes of a tensor map
MOST_SHARED = 2000  # bytes of a multiprocessor's shared memory
ATTRIBUTE = 72  # of a launch attribute: four of its number, four of padding, 64 of its value
SIGNATURE = {
    "q_desc": "tensordesc<bf16[1, 64, 1, 128],...>", "dlse_ptr": "constexpr", "lse_ptr": "*fp32", "end": "i32",
    "table_ptr": "*i64", "seqlen": "i32", "stride": "i64", "unit": "fp32", "ONE": "constexpr",
}  # fmt: skip


class Driver:
    """Stands in for the CUDA driver: tensor maps hold what they were encoded from."""

    def __init__(self, sizes, most_shared=MOST_SHARED):
        self.most_shared = most_shared
        self.function_sizes, self.launches, self.attributes, self.status, self.context = sizes, [], [], 0, 1000
        self.shared_bytes, self.load_status = None, 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device.value) == (97, 13)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        value._obj.value = self.most_shared
        return 0

    def cuModuleLoadData(self, module, binary):
        if self.context is None:
            return 201
        module._obj.value = {b"cubin": 12}[binary]
        return self.load_status

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = {(12, b"kernel"): 1234}[module.value, name]
        return 0

    def cuFuncSetCacheConfig(self, function, preferred):
        assert (function.value, preferred) == (1234, 1)  # CU_FUNC_CACHE_PREFER_SHARED
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        assert (function.value, attribute) == (1234, 8)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared_bytes = value
        return 0

    def cuTensorMapEncodeTiled(self, tensor_map, kind, rank, address, shape, strides, box, steps, *modes):
        words = (address.value, kind, *shape, *strides[: rank - 1], *box)
        ctypes.memmove(tensor_map, (ctypes.c_uint64 * len(words))(*words), 8 * len(words))
        return 0

    def cuTensorMapReplaceAddress(self, tensor_map, address):
        ctypes.memmove(tensor_map.value, ctypes.byref(ctypes.c_uint64(address.value)), 8)
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        assert function.value == 1234
        if index.value == len(self.function_sizes):
            return 1
        size._obj.value = self.function_sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        if self.context is None:
            return 201
        config = config._obj
        parameters = [ctypes.string_at(*x) for x in zip(addresses._obj, self.function_sizes, strict=True)]
        self.launches.append((list(config.grid), list(config.block), config.shared_bytes, config.stream, parameters))
        memory = ctypes.string_at(config.attributes, ATTRIBUTE * config.n_attributes)
        self.attributes.append([memory[i : i + ATTRIBUTE] for i in range(0, len(memory), ATTRIBUTE)])
        return self.status

    def cuDeviceGet(self, device, index):
        device._obj.value = 10 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 * device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of luck"


@pytest.fixture
def arguments():
    """What a kernel of SIGNATURE takes: 4 that move, 5 that stay."""
    q = torch.zeros(2, 300, 4, 128, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, 1, 128], gl.bfloat16)
    descriptor = TensorDescriptor(q, list(q.shape), list(q.stride()), [1, 64, 1, 128], layout)
    return descriptor, None, torch.zeros(5), 9, torch.arange(7), 300, 1 << 40, 0.125, 1


SIZES = [MAP, *[4] * 4, *[8] * 4, 8, 4, 8, 4, 8, 4, 8, 8]


@pytest.fixture
def compiled():
    metadata = {"num_warps": 12, "warp_size": 32, "shared": 1000, "num_ctas": 1, "launch_pdl": False}
    scratch = {"launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}

    class Compiled(SimpleNamespace):
        __hash__ = object.__hash__

        def __getitem__(self, grid):
            self.launchers.append(grid)
            return lambda *arguments, stream=None: self.calls.append((grid, arguments, stream))

    return Compiled(
        metadata=SimpleNamespace(**metadata, **scratch), src=SimpleNamespace(signature=SIGNATURE), kernel=b"cubin",
        name="kernel", launchers=[], calls=[],
    )  # fmt: skip


def on_a_gpu(monkeypatch, driver):
    monkeypatch.setattr("flashtile.backends.driver._driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False)


def three_calls(monkeypatch, compiled, arguments):
    monkeypatch.setattr(launcher, "compiled_for", lambda *of: compiled)
    monkeypatch.setattr(launcher, "arch_of", lambda device: "sm_90")
    first = launcher.KernelCall(compiled, 132, arguments, range(4), {})
    return first, first._replace(grid=0), first._replace(grid=7, moves=(4, 1, 2, 3))


def run_of(monkeypatch, driver, compiled, arguments, **options):
    on_a_gpu(monkeypatch, driver)
    call = launcher.KernelCall(None, 132, arguments, range(4), {}, **options)
    return launcher.run_of([compiled], (call,), torch.device("cuda", 3))


def test_the_driver_gets_the_parameters_of_each_call(monkeypatch, compiled, arguments):
    driver = Driver(SIZES)
    run = run_of(monkeypatch, driver, compiled, arguments)
    calls = [(torch.ones(2, 300, 4, 128, dtype=torch.bfloat16), torch.ones(5), end) for end in (10, 1 << 30)]
    calls = [calls[i] for i in (0, 1, 1, 0)]
    for i, (q, lse, end) in enumerate(calls):
        run(q, None, lse.data_ptr() if i == 1 else lse, end)  # an address, too
    for (q, lse, end), (grid, block, shared, stream, parameters) in zip(calls, driver.launches, strict=True):
        assert (grid, block, shared, stream) == ([132, 1, 1], [384, 1, 1], 1000, 80)
        tensor_map, *others = parameters
        words = list((ctypes.c_uint64 * 16).from_buffer_copy(tensor_map))
        shape, strides, box = [128, 4, 300, 2], [2 * 128, 2 * 512, 2 * 153600], [64, 1, 64, 1]
        assert words[:13] == [q.data_ptr(), 9, *shape, *strides, *box]
        whole = [int.from_bytes(x, "little") for x in others]
        assert whole[:8] == [2, 300, 4, 128, 153600, 512, 128, 1]
        assert whole[8:13] == [lse.data_ptr(), end, arguments[4].data_ptr(), 300, 1 << 40]
        assert ctypes.c_float.from_buffer_copy(others[13]).value == 0.125
        assert whole[14:] == [0, 0]  # scratch
    assert compiled.launchers == []  # which Triton makes by a C compiler
    assert driver.attributes == [[]] * 4


def test_kernels_of_one_run_are_launched_in_order_each_with_what_it_takes(monkeypatch, compiled, arguments):
    """The third takes the last of the run's arguments in the place of the first; the second has no programs."""
    driver = Driver(SIZES)
    on_a_gpu(monkeypatch, driver)
    run = launcher.prepared(torch.device("cuda", 3), *three_calls(monkeypatch, compiled, arguments))
    q, other, lse = (*(torch.ones(2, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2)), torch.ones(5))
    run(q, None, lse, 8, other)
    for x, grid, (of_launch, *_, parameters) in zip((q, other), (132, 7), driver.launches, strict=True):
        tensor_map, lse_ptr, end = (int.from_bytes(parameters[i][:8], "little") for i in (0, 9, 10))
        assert (of_launch[0], tensor_map, lse_ptr, end) == (grid, x.data_ptr(), lse.data_ptr(), 8)


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_so_are_those_that_triton_launches(monkeypatch, compiled, arguments, device):
    on_a_gpu(monkeypatch, driver=None)
    run = launcher.prepared(torch.device(device), *three_calls(monkeypatch, compiled, arguments))
    q, other, lse = (*(torch.ones(2, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2)), torch.ones(5))
    run(q, None, lse, 8, other)
    for x, n, (grid, (descriptor, dlse, *others), _) in zip((q, other), (132, 7), compiled.calls, strict=True):
        assert (grid[0], dlse, others[1:]) == (n, None, [8, *arguments[4:]])
        assert descriptor.base is x
        assert others[0] is lse


@pytest.mark.parametrize(("option", "number"), [("launch_cooperative_grid", 2), ("launch_pdl", 6)])
def test_a_launch_may_wait_for_all_of_its_programs_or_for_those_of_the_one_before(
    monkeypatch, compiled, arguments, option, number
):
    setattr(compiled.metadata, option, True)
    driver = Driver(SIZES)
    run = run_of(monkeypatch, driver, compiled, arguments)
    for _ in range(2):
        run(arguments[0].base, None, *arguments[2:4])
    ((attribute,), again) = driver.attributes
    kind, padding, allowed, *others = (ctypes.c_int * (ATTRIBUTE // 4)).from_buffer_copy(attribute)
    assert (kind, padding, allowed) == (number, 0, 1)  # a CUlaunchAttributeID
    assert not any(others)
    assert again == [attribute]
    assert compiled.calls == []


@pytest.mark.parametrize(
    ("of_the_kernel", "asked", "of_the_launch"),
    [(1000, {"most_at_once": 1}, 1001), (1001, {"most_at_once": 1}, 1001), (500, {"most_at_once": 3}, 501),
     (1000, {"shared": 1500}, 1500), (1000, {"shared": 500}, 1000)],
    ids=["alone", "alone in any case", "of three", "so much at least", "more than that"],
)  # fmt: skip
def test_a_program_may_have_more_shared_memory_than_it_uses(
    monkeypatch, compiled, arguments, of_the_kernel, asked, of_the_launch
):
    """So that no other, or not too many, find a place beside it."""
    compiled.metadata.shared = of_the_kernel
    driver = Driver(SIZES)
    run = run_of(monkeypatch, driver, compiled, arguments, **asked)
    run(arguments[0].base, None, *arguments[2:4])
    ((_, _, shared, _, _),) = driver.launches
    assert shared == of_the_launch


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [(SIZES[:-1], {}), (SIZES, {"global_scratch_size": 64}), (SIZES, {"num_ctas": 2}),
     (SIZES, {"shared": MOST_SHARED + 1}), (None, {})],
    ids=["other parameters", "scratch memory", "clusters", "more shared memory than there is", "no driver"],
)  # fmt: skip
def test_what_the_driver_cannot_be_handed_goes_through_triton(monkeypatch, compiled, arguments, sizes, changes):
    vars(compiled.metadata).update(changes)
    driver = None if sizes is None else Driver(sizes)
    run = run_of(monkeypatch, driver, compiled, arguments)
    q, lse = torch.ones(2, 300, 4, 128, dtype=torch.bfloat16), torch.ones(5)
    run(q, None, lse, 8)
    ((grid, (descriptor, dlse, *others), stream),) = compiled.calls
    old = arguments[0]
    assert (grid, stream, dlse) == ((132, 1, 1), 80, None)
    assert descriptor.base is q
    assert (descriptor.shape, descriptor.strides, descriptor.layout) == (old.shape, old.strides, old.layout)
    assert others[0] is lse
    assert others[1:] == [8, *arguments[4:]]


@pytest.mark.parametrize(("shared", "asked"), [(48 << 10, None), (100 << 10, 100 << 10)])
def test_a_kernel_may_have_more_shared_memory_than_every_function(monkeypatch, compiled, arguments, shared, asked):
    compiled.metadata.shared = shared
    driver = Driver(SIZES, most_shared=200 << 10)
    run_of(monkeypatch, driver, compiled, arguments)
    assert driver.shared_bytes == asked


def test_a_thread_may_load_a_kernel_before_it_has_a_context(monkeypatch, compiled, arguments):
    driver = Driver(SIZES)
    driver.context = None
    run_of(monkeypatch, driver, compiled, arguments)
    assert driver.context == 100 * (10 + 3)


def test_a_kernel_that_cannot_be_loaded_says_so(monkeypatch, compiled, arguments):
    driver = Driver(SIZES)
    driver.load_status = 200
    with pytest.raises(RuntimeError, match="kernel: loading it: error 200, out of luck"):
        run_of(monkeypatch, driver, compiled, arguments)


def test_the_first_launch_of_a_thread_makes_the_context_current(monkeypatch, compiled, arguments):
    driver = Driver(SIZES)
    run = run_of(monkeypatch, driver, compiled, arguments)
    driver.context = None
    run(arguments[0].base, None, *arguments[2:4])
    assert driver.context == 100 * (10 + 3)
    assert len(driver.launches) == 1


def test_a_launch_that_fails_says_so(monkeypatch, compiled, arguments):
    driver = Driver(SIZES)
    run = run_of(monkeypatch, driver, compiled, arguments)
    driver.status = 700
    with pytest.raises(RuntimeError, match="kernel: cuLaunchKernelEx: error 700, out of luck"):
        run(arguments[0].base, None, *arguments[2:4])


def test_a_launch_is_prepared_for_each_layout_and_dtype():
    prepared = []

    class Counted(launcher.Launcher):
        def prepare(self, spec, tensors):
            prepared.append(spec)
            return lambda *tensors: None

    counted, out = Counted(), torch.zeros(1)
    table = torch.zeros(4, 4, dtype=torch.int32)
    for x in (table, table.clone(), None, table.t(), table[:, 1:], table.long()):
        for end in (3, 4):
            counted("spec", (x, end), (out,))
    assert len(prepared) == 5


def test_no_tensor_of_the_first_call_is_kept(monkeypatch, compiled, arguments):
    """A prepared launch lives on; the memory of the tensors that it was prepared with does not."""
    import weakref

    for driver in (Driver(SIZES), None):
        q = torch.zeros(2, 300, 4, 128, dtype=torch.bfloat16)
        old = arguments[0]
        descriptor = TensorDescriptor(q, old.shape, old.strides, old.block_shape, old.layout)
        gone = weakref.ref(q)
        run = run_of(monkeypatch, driver, compiled, (descriptor, *arguments[1:]))
        del q, descriptor
        assert gone() is None
        assert callable(run)


FIRST_CALLS = """
import torch
from flashtile import flash_attn_func, flash_attn_with_kvcache
q = torch.randn(1, 2048, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for backend in ("hopper", "triton"):
    flash_attn_func(q, q, q, backend=backend).sum().backward()
with torch.no_grad():
    flash_attn_with_kvcache(q[:, :1], q.detach().clone(), q.detach().clone(), q[:, :1], q[:, :1], cache_seqlens=1000)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.hopper
def test_first_calls_need_no_c_compiler(tmp_path):
    failing = {**os.environ, "CC": "false", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True, env=failing)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.gpu
def test_a_new_thread_may_be_the_first_to_launch():
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    wanted = flash_attn_func(q, q, q)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(flash_attn_func, q, q, q).result(), wanted)
