"""Hopper kernels whose warps dawdle: each stops for up to some microseconds wherever it meets others.

    python tests/slow_warps.py 192 128

runs both passes for D 192, Dv 128 by a copy of flashtile with such kernels, in several processes at a time, and prints
what is wrong: what is right only as long as warps are as fast as they are, and nobody interrupts them. Found so: NaN
where a barrier that nobody used and a buffer had the same memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

DAWDLE = '''"""A stop of another length each time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def dawdle():
    """Up to 4 microseconds, by the low bits of the clock and the warp."""
    gl.inline_asm_elementwise(
        """{
        .reg .u32 t, w;
        mov.u32 t, %clock;
        mov.u32 w, %warpid;
        mad.lo.u32 t, w, 2654435761, t;
        mul.lo.u32 t, t, 2246822519;
        shr.u32 t, t, 21;
        nanosleep.u32 t;
        mov.b32 $0, $1;
        }""",
        "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1,
    )
'''
PROCESSES = 3  # whose kernels the GPU interrupts for one another
LONGEST = 600  # seconds, after which a process waits for what does not come
CHECKED = "checked\n"
BEFORE = r"arrive\(|meet\(|fence_async_shared\(\)|tma\.store_wait\(|arrived\(\)|say_written\(|count_added\("
BEHIND = r"mbarrier\.wait\(|meet\(|fence_async_shared\(\)|writes = is_first\("


def meeting(package: Path) -> list[Path]:
    """The files of kernels, in which warps meet; in compat.py are but other names for how they do."""
    return [path for path in (package / "backends/hopper").glob("*.py") if path.name != "compat.py"]


def make_slow(package: Path) -> int:
    """Patches a copy of flashtile; returns in how many places."""
    places = 0
    (package / "backends/hopper/dawdle.py").write_text(DAWDLE)
    for path in meeting(package):
        text = path.read_text()
        text, before = re.subn(rf"(?m)^( +)(?=(?:{BEFORE}))", r"\1dawdle()\n\1", text)
        text, behind = re.subn(rf"(?m)^( +)((?:{BEHIND}).*)$", r"\1\2\n\1dawdle()", text)
        if before + behind:
            text = re.sub(r"(?m)^from \.", "from .dawdle import dawdle\nfrom .", text, count=1)
            path.write_text(text)
        places += before + behind
    return places


def mistakes(dims: tuple[int, int], causal: bool, deterministic: bool) -> list[str]:
    """What is wrong of both passes: errors against float64, and what is not the same when done again."""
    import torch
    from cases import BF16, spec

    from flashtile import dispatch
    from flashtile.testing import Result, Sample, make_inputs

    case = spec((2000, 2000), (16, 4), dims, BF16, right=0 if causal else -1)
    inputs = make_inputs(case, "cuda")
    case = replace(case, deterministic=deterministic)
    choice = dispatch.choose(case, inputs.q.device, "hopper")
    out, lse = choice.forward(case, *inputs[:3])
    first = Result(out, lse, *choice.backward(case, inputs.dout, inputs.dlse, *inputs[:3], out, lse))
    sample = Sample.of(case, inputs)
    found = [str(error) for error in sample.errors(first) if not error.ok]
    for again in range(100):
        repeated = choice.forward(case, *inputs[:3])
        gradients = choice.backward(case, inputs.dout, inputs.dlse, *inputs[:3], out, lse)
        for name, ours in zip(Result._fields, (*repeated, *gradients), strict=True):
            if name == "dq" and not deterministic:
                off = [str(error) for error in sample.errors(first._replace(dq=ours)) if not error.ok]
            else:
                off = [] if torch.equal(ours, getattr(first, name)) else [f"{name} has other bits"]
            found += [f"run {again}: {what}" for what in off]
    return [f"{dims}, causal {causal}, deterministic {deterministic}: {what}" for what in found[:5]]


def run(dims: tuple[int, int]) -> list[str]:
    """What this file says of some dims by a copy of flashtile with slow warps, in processes that share the GPU."""
    import flashtile

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "flashtile"
        shutil.copytree(Path(flashtile.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        assert make_slow(package) > 10
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, __file__, "check", *map(str, dims)]
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        return [said(process) for process in running]


def said(process: subprocess.Popen[str]) -> str:
    """What it prints, with its errors unless it only checked; or that it has not ended."""
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"not done after {LONGEST} s"
    return out if out == CHECKED else out + err


def main() -> None:
    checks, dims = sys.argv[1] == "check", tuple(map(int, sys.argv[-2:]))
    if not checks:
        print(*run(dims))
        return
    for causal in (False, True):
        for deterministic in (False, True):
            for mistake in mistakes(dims, causal, deterministic):
                print(mistake)
    print(CHECKED, end="")


if __name__ == "__main__":
    main()
