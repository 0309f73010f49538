"""Compiling the Triton kernels ahead of time, for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from flashtile.backends.append import append_spec
from flashtile.backends.compiler import compiled_for
from flashtile.backends.hopper.llvm_ir import for_roles
from flashtile.backends.launcher import KernelCall, Launcher
from flashtile.backends.triton import decode_launch
from flashtile.backends.triton.config import choose
from flashtile.backends.triton.launch import Kernel
from flashtile.cache import FP8, Arguments, CachedCall
from flashtile.spec import AttentionSpec


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a multiprocessor; registers and spills are known for NVIDIA alone."""

    shared: int
    registers: int | None = None
    stack: int | None = None

    @property
    def spills(self) -> bool:
        return bool(self.stack)


def compile_kernel(kernel: Kernel, spec: AttentionSpec, arch: str, *tensors: Tensor | None) -> tuple[Usage, object]:
    """Compiles what a call with these tensors would run on `arch`; returns its usage and Triton's object."""
    tiles = choose(kernel.role, spec, arch)
    launch = kernel.describe(spec, tiles, *tensors)
    assert launch.constants.keys() <= set(kernel.fn.arg_names)
    compiled = compiled_for(kernel.fn, (*tensors, *launch.arguments), tiles.options, arch)
    return _usage(compiled, arch), compiled


def compile_call(call: KernelCall, arch: str) -> tuple[Usage, object]:
    """Compiles what is launched on `arch`; returns its usage and Triton's object."""
    compiled = compiled_for(call.fn, call.arguments, call.options, arch)
    return _usage(compiled, arch), compiled


def calls_of(launcher: Launcher, spec: object, *tensors: Tensor | int | None) -> list[KernelCall]:
    """What a launcher prepares for these tensors."""
    seen = []
    module = sys.modules[type(launcher).__module__]
    with mock.patch.object(module, "prepared", lambda device, *calls: seen.extend(calls)):
        launcher.prepare(spec, tensors)
    return seen


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def of_a_call(spec: AttentionSpec) -> tuple[Tensor, ...]:
    """q, k, v, out and lse, on the meta device."""
    rows = (spec.seqlen_q, spec.heads_q), (spec.seqlen_k, spec.heads_k)
    q, out = (empty(spec.batch, *rows[0], dim, dtype=spec.dtype) for dim in (spec.head_dim, spec.head_dim_v))
    k, v = (empty(spec.batch, *rows[1], dim, dtype=spec.dtype) for dim in (spec.head_dim, spec.head_dim_v))
    return q, k, v, out, empty(spec.batch, spec.heads_q, spec.seqlen_q)


def cached_call(case: AttentionSpec, stored: torch.dtype, page_size: int, terms: bool = False) -> CachedCall:
    """A call over a cache with one new key and rotary; with `terms` everything that may go into the softmax."""
    rows = (64, page_size) if page_size else (case.batch, case.seqlen_k)
    k, v = (empty(*rows, case.heads_k, dim, dtype=stored) for dim in (case.head_dim, case.head_dim_v))
    table = empty(case.batch, case.seqlen_k // page_size, dtype=torch.int32) if page_size else None
    lengths = empty(case.batch, dtype=torch.int32)
    scales = empty(case.batch, case.heads_k) if stored == FP8 else None
    slopes, sinks = empty(case.batch, case.heads_q), empty(case.heads_q, dtype=case.dtype)
    q = empty(case.batch, case.seqlen_q, case.heads_q, case.head_dim, dtype=case.dtype)
    new = (empty(case.batch, 1, case.heads_k, dim, dtype=case.dtype) for dim in (case.head_dim, case.head_dim_v))
    tables, terms_or_none = (empty(case.seqlen_k, 16) for _ in range(2)), (slopes, sinks) if terms else (None, None)
    given = Arguments(q, k, v, *new, *tables, lengths, None, None, table, *terms_or_none, scales, scales)
    return CachedCall(case, given, interleaved=True)


def compile_cached(call: CachedCall, arch: str, num_splits: int = 0) -> Iterator[tuple[Usage, object]]:
    """Usage and Triton's object of each kernel that a call over a cache runs on `arch`."""
    for launched in cached_calls(call, arch, num_splits):
        yield compile_call(launched, arch)


def cached_calls(call: CachedCall, arch: str, num_splits: int = 0) -> list[KernelCall]:
    """What such a call launches: the append, the decoding, and the merge if there is one."""
    of, q = call.spec, call.given.q
    decode = decode_launch.decode_spec(call, num_splits, arch, 132)
    parts = [empty(size) for size in decode.sizes_of_parts]
    out, lse = empty(*q.shape[:3], of.head_dim_v, dtype=q.dtype), empty(of.batch, of.heads_q, of.seqlen_q)
    moving = *call.given, call.cache.end, torch.empty_like(q), *parts, out, lse
    return calls_of(decode_launch.CACHED, (append_spec(call), decode), *moving)


def _usage(compiled: object, arch: str) -> Usage:
    if not arch.startswith("sm_"):
        return Usage(compiled.metadata.shared)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", report).group(1)) for word in ("REG", "STACK"))
    return Usage(compiled.metadata.shared, registers, stack)


def compile_hopper(spec: AttentionSpec, kernel: object = None) -> tuple[Usage, object]:
    """Compiles what a forward call on Hopper would run, or another kernel in its place."""
    from flashtile.backends.hopper import config, launch
    from flashtile.backends.hopper.forward import forward_kernel

    tiles = config.choose(spec)
    q, k, v, out, lse = of_a_call(spec)
    described = map(launch.describe, (q, k, v, out), launch.boxes(spec, tiles))
    table = empty(1, dtype=torch.int64)
    numbers = launch.scalars(spec, tiles, rounds=100)
    arguments = (*described, lse, lse, *launch.NO_CACHE, spec.seqlen_k, table, *numbers)
    return _compile_gluon(kernel or forward_kernel, arguments, forward=True)


def compile_hopper_cached(case: AttentionSpec, page_size: int = 0, alike: bool = False) -> list[tuple[Usage, object]]:
    """Compiles what a call over a cache on Hopper would run, and its merge if there is one; alike: sequences, else they
    have lengths of their own."""
    from flashtile.backends.hopper import cached_launch, cached_schedule

    call = cached_call(case, case.dtype, page_size)
    *_, out, lse = of_a_call(case)
    turned = torch.empty_like(call.given.q)
    given = call.given._replace(cache_seqlens=None) if alike else call.given
    moving = dict(zip(cached_launch.MOVING, (*given, case.seqlen_k, turned, out, lse), strict=True))
    schedule = cached_schedule.schedule_of(case, alike, 132, torch.device("meta"))
    moving |= schedule.moving
    cached = cached_launch.CachedSpec(case, page_size, call.seqlen_new, len(call.given.k_cache))
    launched = cached_launch.forward_call(cached, moving, {}, schedule)
    compiled = [_compile_gluon(launched.fn, launched.arguments, forward=True)]
    if schedule.shared is not None:
        merge = cached_launch.merge_call(cached, moving, schedule.tiles, schedule.shared)
        compiled.append(compile_call(merge, "sm_90"))
    return compiled


def compile_hopper_backward(spec: AttentionSpec) -> list[tuple[Usage, object]]:
    """Compiles the main kernels of what a backward call on Hopper would run: one, or that of the keys and that of the
    queries."""
    from flashtile.backends.hopper import backward_apart_launch, backward_launch, config, launch
    from flashtile.backends.hopper.backward import backward_kernel
    from flashtile.backends.hopper.backward_keys import keys_kernel
    from flashtile.backends.hopper.backward_queries import queries_kernel

    tiles = config.choose_backward(spec)
    q, k, v, out, lse = of_a_call(spec)
    rows, table = empty(tiles.tile_m), empty(1, dtype=torch.int32)
    of_keys = (
        *map(launch.describe, (q, out, k, v, k, v), backward_launch.boxes(tiles)),
        backward_launch.describe_rows(rows, tiles),
    )  # fmt: skip
    scalars = backward_launch.scalars(spec, tiles, rounds=100)
    if tiles.dq_apart:
        queries = config.choose_queries(spec)
        of_queries = map(launch.describe, (q, out, k, v, q), backward_apart_launch.query_boxes(queries))
        numbers = out, out, lse, None, rows, rows, empty(1, dtype=torch.int64)
        of_rows = backward_apart_launch.query_scalars(spec, queries, 100, out, None)
        return [
            _compile_gluon(keys_kernel, (*of_keys, rows, table, *scalars)),
            _compile_gluon(queries_kernel, (*of_queries, *numbers, *of_rows)),
        ]
    sums = backward_launch.describe_sums(empty(*backward_launch.sums_box(tiles)), tiles)
    ranks = empty(1, dtype=torch.int16) if spec.deterministic else None
    arguments = (*of_keys, sums, empty(1, dtype=spec.dtype), table, ranks, table, *scalars)
    return [_compile_gluon(backward_kernel, arguments)]


def _compile_gluon(kernel: Any, arguments: tuple, forward: bool = False) -> tuple[Usage, object]:
    """A kernel of the Hopper backend."""
    from flashtile.backends.hopper import compiling, launch

    with compiling.for_hopper(launch.OPTIONS, forward) as options:
        compiled = compiled_for(kernel, arguments, options, "sm_90")
    return _usage(compiled, "sm_90"), compiled


def machine_code(compiled: object) -> list[tuple[int, str]]:
    """Address and text of every instruction."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = subprocess.run([cuobjdump, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]


def barriers_by_threads(compiled: object) -> dict[int, set[int]]:
    """The named barriers at which so many threads meet; under 0 those of all threads of a program."""
    found: dict[int, set[int]] = {}
    for _, text in machine_code(compiled):
        if barrier := re.search(r"\bBAR\.\S+ (0x\w+)(?:, (0x\w+))?", text):
            name, threads = (int(x or "0", 16) for x in barrier.groups())
            found.setdefault(threads, set()).add(name)
    return found


def arguments_of_roles(compiled: object) -> tuple[set[int], set[int]]:
    """With what roles call their one function: numbers of warpgroups, and of barriers at which the warps of one meet,
    which before triton 3.9 are worked out of the former (`of_a_warpgroup`)."""
    module = for_roles(compiled.asm["llir"])
    kernel = re.search(r"(?ms)^define ptx_kernel .*?^}$", module)[0]

    def given(argument: str) -> set[int]:
        values = re.findall(r"\[ (\S+), ", re.search(rf"%argument{argument} = phi i32 (.*)", kernel)[1])
        made = dict(re.findall(r'(?m)^  (%\d+) = .*"mov\.b32 \$0, \$1;", "=r,r"\(i32 (\d+)\)', kernel))
        return {int(made.get(value, value)) for value in values}

    barriers = set(re.findall(r"cta\.sync\.aligned\.count\(i32 %(\d+), i32 128\)", module))
    return given("0"), set().union(*map(given, barriers))


def barriers_of_roles(compiled: object) -> list[tuple[int, int, bool]]:
    """Of what a program does before its roles, and of each role: the kernel's own barriers between its warps, those
    there are when Triton has added its own, and whether shared memory is allocated. Functions are inlined first."""
    from triton._C.libtriton import ir, nvidia, passes

    target = 90, compiled.metadata.ptx_version or 86
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttgir")
        path.write_text(compiled.asm["ttgir"].replace("noinline = true", "noinline = false"))
        module = ir.parse_mlir_module(str(path), context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, *target)
    manager.run(module, "up to shared memory")
    before = _roles(str(module))
    manager = ir.pass_manager(context)
    nvidia.passes.ttgpuir.add_membar(manager, *target)
    manager.run(module, "barriers")
    return [
        (own.count("ttg.barrier"), all_.count("ttg.barrier"), "allocation.offset" in own)
        for own, all_ in zip(before, _roles(str(module)), strict=True)
    ]


def _roles(module: str) -> list[str]:
    """The text of what is before the roles, and of each role, the default one's first."""
    return re.split(r"\n\s+(?:default \{|partition\d+\()", module)


def barriers_left_alone(compiled: object) -> list[str]:
    """Where in shared memory mbarriers are made that no instruction waits for or arrives at."""
    code = [text for _, text in machine_code(compiled) if "SYNCS" in text]
    at = {text: re.search(r"\[U?R\d+(?:\+UR(?:\d+|Z))?(?:\+(0x[0-9a-f]+))?\]", text) for text in code}
    places = {text: int(found.group(1) or "0", 16) for text, found in at.items() if found}
    made = sorted(place for text, place in places.items() if "EXCH" in text)
    used = {place for text, place in places.items() if "EXCH" not in text}  # of a ring the first slot is named
    assert made, "no barrier is made"
    for place in made:
        if place - 8 in used:
            used.add(place)
    return [hex(place) for place in made if place not in used]


def loops_with_products(compiled: object, products: int = 1) -> list[list[str]]:
    """The instructions of each innermost loop of so many products, from the shortest loop on."""
    code = machine_code(compiled)
    jumps = ((at, re.search(r"BRA.*?(0x[0-9a-f]+)", text)) for at, text in code)
    loops = [(int(jump.group(1), 16), at) for at, jump in jumps if jump and int(jump.group(1), 16) < at]
    bodies = {(start, end): [text for at, text in code if start <= at <= end] for start, end in loops}
    busy = {loop for loop, body in bodies.items() if sum("HGMMA" in text for text in body) >= products}
    # what waits for a barrier lies behind the code of all roles and jumps back into it: that is no loop
    busy = {loop for loop in busy if not any("USETMAXREG" in text for text in bodies[loop])}
    inner = [x for x in busy if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in busy)]
    return [bodies[loop] for loop in sorted(inner, key=lambda loop: loop[1] - loop[0])]


def spills_in_loops(compiled: object, products: int = 1) -> list[int]:
    """Loads and stores of spilled registers in each of those loops."""
    loops = loops_with_products(compiled, products)
    return [sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in body) for body in loops]


def overwritten_operands(compiled: object) -> list[str]:
    """Instructions that write a register which a product still reads; ptxas before 13.3 can make such code."""
    in_flight: list[set[int]] = []  # the operands of each group of products
    group: set[int] = set()
    found = []
    for at, text in machine_code(compiled):
        if product := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", text):
            group |= set(range(int(product.group(1)), int(product.group(1)) + 4))
        if "HGMMA" in text and "gsb0" in text:
            in_flight.append(group)
            group = set()
        elif waited := re.search(r"DEPBAR\.LE gsb0, (0x\d)", text):
            in_flight = in_flight[len(in_flight) - int(waited.group(1), 16) :]
        elif written := re.match(r"(?:@\S+ )?(?!ST|SYNCS|RED|HGMMA)(\S+) R(\d+)\b", text.strip()):
            width = 4 if ".128" in written.group(1) else 2 if re.search(r"\.64|WIDE", written.group(1)) else 1
            if group.union(*in_flight) & set(range(int(written.group(2)), int(written.group(2)) + width)):
                found.append(f"{at:x}: {text.strip()}")
    return found


def serializes_products(compiled: object) -> bool:
    """Whether ptxas says (C7510 to C7515) that it waits for each wgmma product before it goes on."""
    from flashtile.backends.hopper.compiling import for_hopper

    with for_hopper({}) if compiled.metadata.ptx_version else nullcontext():  # the one that compiled it
        ptxas = get_ptxas(90).path
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [ptxas, "--gpu-name", "sm_90a", "--verbose", ptx, "--output-file", ptx.with_suffix(".cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return "instructions are serialized" in report


def kernels_and_tensors(spec: AttentionSpec, arch: str) -> dict[str, tuple[Kernel, tuple[Tensor | None, ...]]]:
    """Every kernel that a forward and backward pass may run, with the tensors it would get, on the meta device."""
    from flashtile.backends.triton import config
    from flashtile.backends.triton.backward import DKDV, DQ, GRADIENTS
    from flashtile.backends.triton.forward import FORWARD

    q, k, v, out, lse = of_a_call(spec)
    found = {
        "forward": (FORWARD, (q, k, v, out, lse)),
        "dq": (DQ, (q, k, v, out, out, lse, None, lse, lse, q)),
        "dkdv": (DKDV, (q, k, v, None, out, None, None, lse, lse, k, v)),
    }
    if config.has_tiles("gradients", spec, arch):
        found["gradients"] = GRADIENTS, (out, None, q, k, v, out, lse, q, k, v)
    return found
