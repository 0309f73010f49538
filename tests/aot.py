"""Compiling the Triton kernels ahead of time, for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from flashtile.backends.compiler import ELEMENTS, compiled_for, target_of
from flashtile.backends.launcher import Launcher
from flashtile.backends.triton.config import choose
from flashtile.backends.triton.launch import Kernel
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


def compile_launch(launcher: Launcher, spec: object, arch: str, *tensors: Tensor | None) -> tuple[Usage, object]:
    """Compiles what a launcher would prepare for these tensors on `arch`; returns its usage and Triton's object."""
    fn, arguments, options = launch_for(launcher, spec, *tensors)
    compiled = compiled_for(fn, arguments, options, arch)
    return _usage(compiled, arch), compiled


def launch_for(launcher: Launcher, spec: object, *tensors: Tensor | None) -> tuple[Any, tuple, dict[str, Any]]:
    """The kernel, arguments and options of what a launcher prepares for these tensors."""
    seen = []
    with mock.patch.object(sys.modules[type(launcher).__module__], "prepared", lambda *args: seen.append(args)):
        launcher.prepare(spec, tensors)
    ((fn, _, _, arguments, _, options, *_),) = seen
    return fn, arguments, options


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
    scalars = launch.scalars(spec, tiles, rounds=100)
    return _compile_gluon(
        kernel or forward_kernel, spec, launch.boxes(spec, tiles), {"lse_ptr": "*fp32", "pieces_ptr": "*fp32"}, "*i64",
        scalars, tiles.earlier_ptxas,
    )  # fmt: skip


def compile_hopper_backward(spec: AttentionSpec) -> list[tuple[Usage, object]]:
    """Compiles the main kernels of what a backward call on Hopper would run: one, or that of the keys and that of the
    queries."""
    from flashtile.backends.hopper import backward_apart_launch, backward_launch, config
    from flashtile.backends.hopper.backward import backward_kernel
    from flashtile.backends.hopper.backward_keys import keys_kernel
    from flashtile.backends.hopper.backward_queries import queries_kernel

    tiles = config.choose_backward(spec)
    scalars, boxes = backward_launch.scalars(spec, tiles, rounds=100), backward_launch.boxes(tiles)
    others = {"rows_desc": f"tensordesc<fp32[{tiles.tile_m}],{backward_launch.plain_layout(1)!r}>"}
    if tiles.dq_apart:
        queries = config.choose_queries(spec)
        dout = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, device="meta")
        of_queries = backward_apart_launch.query_scalars(spec, queries, 100, dout, None)
        element, pieces = f"*{ELEMENTS[spec.dtype]}", {"pieces_ptr": "*fp32"}
        numbers = {"out_ptr": element, "dout_ptr": element, "lse_ptr": "*fp32", "dlse_ptr": None, "rows_ptr": "*fp32"}
        numbers |= pieces
        query_boxes = backward_apart_launch.query_boxes(queries)
        return [
            _compile_gluon(keys_kernel, spec, boxes, others | pieces, "*i32", scalars, tiles.earlier_ptxas),
            _compile_gluon(queries_kernel, spec, query_boxes, numbers, "*i64", of_queries),
        ]
    sums = f"tensordesc<fp32{list(backward_launch.sums_box(tiles))},{backward_launch.plain_layout(2)!r}>"
    ranks = "*i16" if spec.deterministic else None
    others |= {"sums_desc": sums, "pieces_ptr": f"*{ELEMENTS[spec.dtype]}", "added_ptr": "*i32", "ranks_ptr": ranks}
    return [_compile_gluon(backward_kernel, spec, boxes, others, "*i32", scalars, tiles.earlier_ptxas)]


def _compile_gluon(
    kernel: Any, spec: AttentionSpec, boxes: tuple, others: dict[str, str | None], schedule: str, scalars: tuple,
    pays: bool = True,
) -> tuple[Usage, object]:  # fmt: skip
    """A kernel of the Hopper backend: descriptors of `boxes`, other pointers, the schedule, scalars and constants."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from flashtile.backends.hopper import launch, ptxas

    element = ELEMENTS[spec.dtype]
    signature, constants = {}, {}
    for name, box in zip(kernel.arg_names, boxes, strict=False):
        signature[name] = f"tensordesc<{element}{[1, *box]},{launch.layout(box, spec.dtype)!r}>"
    signature |= {name: kind or "constexpr" for name, kind in others.items()} | {"schedule_ptr": schedule}
    constants |= {name: None for name, kind in others.items() if kind is None}
    for parameter, value in zip(kernel.params[len(signature) :], scalars, strict=True):
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else "fp32" if value != int(value) else "i32"
        if parameter.is_constexpr:
            constants[parameter.name] = value
    signature |= {name: "fp32" for name in ("unit", "natural", "cap_in", "softmax_scale") if name in signature}
    source = GluonASTSource(kernel, signature, constants, {})
    with ptxas.earlier_ptxas(launch.OPTIONS, pays) as options:
        compiled = triton.compile(source, target=target_of("sm_90"), options=options)
    return _usage(compiled, "sm_90"), compiled


def machine_code(compiled: object) -> list[tuple[int, str]]:
    """Address and text of every instruction."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = subprocess.run([cuobjdump, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]


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
    from flashtile.backends.hopper.ptxas import earlier_ptxas

    with earlier_ptxas({}, compiled.metadata.ptx_version is not None):  # the one that compiled it
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

    def like(heads: int, seqlen: int, dim: int) -> Tensor:
        return torch.empty(spec.batch, seqlen, heads, dim, dtype=spec.dtype, device="meta")

    q, k = like(spec.heads_q, spec.seqlen_q, spec.head_dim), like(spec.heads_k, spec.seqlen_k, spec.head_dim)
    v, out = like(spec.heads_k, spec.seqlen_k, spec.head_dim_v), like(spec.heads_q, spec.seqlen_q, spec.head_dim_v)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=torch.float32, device="meta")
    found = {
        "forward": (FORWARD, (q, k, v, out, lse)),
        "dq": (DQ, (q, k, v, out, out, lse, None, lse, lse, q)),
        "dkdv": (DKDV, (q, k, v, None, out, None, None, lse, lse, k, v)),
    }
    if config.has_tiles("gradients", spec, arch):
        found["gradients"] = GRADIENTS, (q, k, v, out, out, lse, None, q, k, v)
    return found
