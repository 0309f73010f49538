"""Versions of flashtile, or of what it runs on, timed in turns on one GPU: each in a process of its own, told when.

    python benchmarks/turns.py runs.json --case "128 full 8192" --case "192/128 causal 2048" \\
        --contender "old=/tmp/old/src" --contender "new=src" --contender "3.9=src:/tmp/triton-3.9"

A case is D, or D/Dv, a mask, S and perhaps Hq/Hk; about 16k tokens in all, hidden size 2048. A contender is a name and
what comes first in its PYTHONPATH; behind commas, other variables. Every result is checked against float64 before it
is timed. What drifts falls on all alike, as in one process, which could not hold two versions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flashtile import flash_attn_func
from flashtile.bench.cases import Case
from flashtile.bench.counting import Mode, flops, paper_pairs
from flashtile.bench.report import atomically, describe_machine
from flashtile.bench.timing import median_ms
from flashtile.testing import Result, Sample, make_inputs

TOKENS, HIDDEN = 16384, 2048
ROUND_MS = 20


def case_of(text: str, dtype: str = "bfloat16") -> Case:
    """The case that "D[/Dv] mask S [Hq/Hk]" names."""
    dims, mask, seqlen, *heads = text.split()
    dim, _, dim_v = dims.partition("/")
    heads_q, _, heads_k = heads[0].partition("/") if heads else (str(max(1, HIDDEN // int(dim))), "", "")
    if mask not in ("full", "causal"):
        raise ValueError(f"mask: got {mask!r} in {text!r}; want full or causal")
    batch = max(1, round(TOKENS / int(seqlen)))
    return Case.square(
        batch, int(seqlen), int(heads_q), int(dim), mask == "causal", dtype, int(heads_k or 0), int(dim_v or 0)
    )


class Version:
    """Another process, which times what it is told to."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        path, *others = rest.split(",")
        variables = dict(other.split("=", 1) for other in others)
        path = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "answer"], env={**os.environ, "PYTHONPATH": path, **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)


@contextmanager
def started(text: str) -> Iterator[Version]:
    version = Version(text)
    try:
        yield version
    finally:
        version.process.kill()
        version.process.wait()


def call_of(
    case: Case, mode: Mode, deterministic: bool, backend: str
) -> tuple[Callable[[], object], Callable[[], list[str]]]:
    """(what is timed; what is wrong with its result)."""
    inputs = make_inputs(case.spec, "cuda")
    inputs = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
    q, k, v = (x.detach().requires_grad_(mode == "bwd") for x in inputs[:3])

    def forward() -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=case.causal, deterministic=deterministic, backend=backend)

    def wrong() -> list[str]:
        out = forward()
        gradients = torch.autograd.grad(out, (q, k, v), inputs.dout) if mode == "bwd" else ()
        errors = Sample.of(case.spec, inputs, gradients=mode == "bwd").errors(Result(out.detach(), None, *gradients))
        return [str(error) for error in errors if not error.ok]

    if mode == "fwd":
        return forward, wrong
    out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True), wrong


def answer() -> None:
    """The other process: answers questions, a line of JSON each, until there are no more."""
    device = torch.device("cuda")
    asked, call, errors = "", None, [""]
    for line in sys.stdin:
        question = json.loads(line)
        if question == "machine":
            print(json.dumps(describe_machine(device)), flush=True)
            continue
        if line != asked:
            asked, call = line, None  # frees the tensors of the case before
            torch.cuda.empty_cache()
            call, wrong = call_of(Case(**question.pop("case")), **question)
            errors = wrong()
        reply = {"wrong": errors, "ms": None if errors else median_ms(call, device, ROUND_MS)}
        print(json.dumps(reply), flush=True)


def run(versions: list[Version], cases: list[Case], rounds: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """A row for each case: milliseconds of every version in every round."""
    for case in cases:
        question = {"case": dataclasses.asdict(case), **settings}
        times: dict[str, list[float]] = {version.name: [] for version in versions}
        wrong: dict[str, list[str]] = {}
        for _ in range(rounds):
            for version in random.sample(versions, len(versions)):
                if version.name in wrong:
                    continue
                reply = version.ask(question)
                if reply["wrong"]:
                    wrong[version.name] = reply["wrong"]
                else:
                    times[version.name].append(reply["ms"])
        counted = flops(case.spec, settings["mode"], paper_pairs(case.spec))
        yield {"case": case.label, **settings, "rounds_ms": times, "wrong": wrong, "flops": counted}


def over(first: list[float], other: list[float]) -> float:
    """How much faster `other` is: the median of what each round says, as in one the GPU is as hot for both."""
    return statistics.median([a / b for a, b in zip(first, other, strict=False)] or [math.nan])


def main(
    output: Path,
    case: Annotated[list[str], typer.Option()],
    contender: Annotated[list[str], typer.Option()],
    mode: str = "fwd",
    deterministic: bool = False,
    backend: str = "hopper",
    rounds: int = 15,
) -> None:
    """Prints TFLOP/s of the first contender and the others' share of it, and writes all times as JSON."""
    if mode not in ("fwd", "bwd"):
        raise typer.BadParameter(f"mode: got {mode!r}; want fwd or bwd")
    rows = []
    with ExitStack() as stack:
        versions = [stack.enter_context(started(text)) for text in contender]
        document: dict[str, Any] = {"machines": {version.name: version.ask("machine") for version in versions}}
        settings = {"mode": mode, "deterministic": deterministic, "backend": backend}
        for row in run(versions, [case_of(text) for text in case], rounds, **settings):
            rows.append(row)
            ms = row["rounds_ms"]
            row["over_first"] = {name: over(ms[versions[0].name], ms[name]) for name in ms}
            rates = [
                f"{name} {row['flops'] / statistics.median(x) / 1e9:.0f} ({row['over_first'][name]:.3f})"
                for name, x in ms.items()
                if x
            ]
            print(f"{row['case']:44} {mode} " + "  ".join(rates), *row["wrong"].items(), flush=True)
    atomically(output, lambda temporary: temporary.write_text(json.dumps({**document, "rows": rows}, indent=1)))


if __name__ == "__main__":
    random.seed(0)
    if sys.argv[1:] == ["answer"]:
        answer()
    else:
        typer.run(main)
