"""Versions of flashtile, or of what it runs on, timed in turns on one GPU: each in a process of its own, told when.

    python benchmarks/turns.py runs.json --case "128 full 8192" --case "192/128 causal 2048" \\
        --contender "old=../old/src" --contender "new=src" --contender "3.9=src:../triton-3.9"

A case is D, or D/Dv, a mask, S and perhaps Hq/Hk, in the paper's setting; with --mode decode a point of decode.py, such
as "64,32,8,4096, pages of 16". A contender is a name and what comes first in its PYTHONPATH; behind commas, other
variables. Every result is checked against float64 before it is timed. What drifts falls on all alike, as in one
process, which could not hold two versions.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from flashtile.bench.cases import SUITES, Case
from flashtile.bench.counting import Mode, flops, paper_pairs
from flashtile.bench.providers import PROVIDERS
from flashtile.bench.report import atomically, describe_machine
from flashtile.bench.runner import checked, problem_of, timed_call
from flashtile.bench.timing import PACES, Pace

ROUND_MS = 20


def case_of(text: str) -> Case:
    """The case that "D[/Dv] mask S [Hq/Hk]" names, in the paper's setting."""
    dims, mask, seqlen, *heads = text.split()
    if mask not in ("full", "causal"):
        raise ValueError(f"mask: got {mask!r} in {text!r}; want full or causal")
    dim, _, dim_v = dims.partition("/")
    case = SUITES["paper"].make(int(seqlen), int(dim), mask == "causal", "bfloat16")
    if heads:
        heads_q, _, heads_k = heads[0].partition("/")
        case = replace(case, heads_q=int(heads_q), heads_k=int(heads_k or heads_q))
    return replace(case, head_dim_v=int(dim_v or 0))


class Asked(NamedTuple):
    """A case as it is told to other processes."""

    label: str
    question: dict[str, Any]
    flops: int | None  # None: decoding, of which the time is said


def asked(text: str, mode: str, provider: str, pace: str) -> Asked:
    """What a case's text means in a mode."""
    if pace not in (["cool"] if mode == "decode" else PACES):
        raise ValueError(f"pace: got {pace!r}; want cool or, but for decode, hot")
    if mode == "decode":
        points = [point.name for point in decode_benchmark().POINTS]
        if text not in points:
            raise ValueError(f"case: got {text!r}; want one of {', '.join(map(repr, points))}")
        return Asked(text, {"point": text, "provider": provider}, None)
    if mode not in ("fwd", "bwd"):
        raise ValueError(f"mode: got {mode!r}; want fwd, bwd or decode")
    case = case_of(text)
    question = {"case": case.to_json(), "mode": mode, "provider": provider, "pace": pace}
    return Asked(f"{case.label} {mode} {pace}", question, flops(case.spec, mode, paper_pairs(case.spec)))


def decode_benchmark() -> Any:
    """decode.py, which lies beside this file."""
    return importlib.import_module("decode")


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

    def ask(self, question: object) -> dict[str, Any]:
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


class Race:
    """One case in the other process: checked once, then timed as often as it is asked for."""

    def __init__(self, case: dict[str, Any], mode: Mode, provider: str, pace: Pace, device: torch.device) -> None:
        self.device, self.pace, of = device, pace, Case(**case)
        inputs, sample = problem_of(of, [mode], device)
        contender = checked(provider, PROVIDERS[provider], of, [mode], inputs, sample, device)
        self.reason = contender.rows[mode].reason
        self.call = None if self.reason else timed_call(mode, contender.attention, inputs)

    def turn(self) -> dict[str, Any]:
        return {"reason": self.reason, "ms": self.call and PACES[self.pace](self.call, self.device, ROUND_MS)}


class DecodeRace:
    """The same of a decode step: the graph that decode.py times."""

    def __init__(self, point: str, provider: str, device: torch.device) -> None:
        decode = decode_benchmark()
        (of,) = (x for x in decode.POINTS if x.name == point)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        steps = decode.steps_of_graph(of, decode.make_caches([of], device, 3 * l2_bytes), l2_bytes)
        self.reason, self.ms = None, lambda: None
        try:
            _, graph = decode.checked(of.providers[provider], steps)
            count = decode.replays(graph)
            self.ms = lambda: decode.replay_ms(graph, count) / len(steps)
        except Exception as failure:  # whatever another library raises is why it has no time
            self.reason = decode.reason_of(failure)

    def turn(self) -> dict[str, Any]:
        return {"reason": self.reason, "ms": self.ms()}


def answer() -> None:
    """The other process: answers questions, a line of JSON each, until there are no more."""
    device = torch.device("cuda")
    last, race = "", None
    for line in sys.stdin:
        question = json.loads(line)
        if question == "machine":
            print(json.dumps(describe_machine(device)), flush=True)
            continue
        if race is None or line != last:
            last, race = line, None  # frees the tensors of the case before
            torch.cuda.empty_cache()
            race = (DecodeRace if "point" in question else Race)(**question, device=device)
        print(json.dumps(race.turn()), flush=True)


def run(versions: list[Version], cases: list[Asked], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each case: milliseconds of every version in every round, or why it has none."""
    for case in cases:
        times: dict[str, list[float]] = {version.name: [] for version in versions}
        reasons: dict[str, str] = {}
        for _ in range(rounds):
            for version in random.sample(versions, len(versions)):
                if version.name not in reasons:
                    reply = version.ask(case.question)
                    if reply["reason"]:
                        reasons[version.name] = reply["reason"]
                    else:
                        times[version.name].append(reply["ms"])
        yield {**case.question, "label": case.label, "flops": case.flops, "rounds_ms": times, "reasons": reasons}


def over(first: list[float], other: list[float]) -> float:
    """How much faster `other` is: the median of what each round says, as in one the GPU is as hot for both."""
    return statistics.median([a / b for a, b in zip(first, other, strict=False)] or [math.nan])


def speed(flops: int | None, ms: list[float]) -> str:
    """TFLOP/s or, of a decode step, its microseconds."""
    median = statistics.median(ms)
    return f"{flops / median / 1e9:.0f}" if flops else f"{median * 1e3:.1f} us"


def main(
    output: Path,
    case: Annotated[list[str], typer.Option()],
    contender: Annotated[list[str], typer.Option()],
    mode: str = "fwd",
    provider: str = "",
    rounds: int = 15,
    pace: str = "cool",
) -> None:
    """Prints what each contender takes and, in brackets, how fast that is beside the first; writes all times as JSON.

    provider: flashtile-hopper or, decoding, flashtile, unless another is named. pace: cool or, of calls on end, hot.
    """
    provider = provider or ("flashtile" if mode == "decode" else "flashtile-hopper")
    try:
        cases = [asked(text, mode, provider, pace) for text in case]
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    rows = []
    with ExitStack() as stack:
        versions = [stack.enter_context(started(text)) for text in contender]
        document: dict[str, Any] = {"machines": {version.name: version.ask("machine") for version in versions}}
        for row in run(versions, cases, rounds):
            rows.append(row)
            ms = row["rounds_ms"]
            row["over_first"] = {name: over(ms[versions[0].name], ms[name]) for name in ms}
            speeds = [f"{name} {speed(row['flops'], x)} ({row['over_first'][name]:.3f})" for name, x in ms.items() if x]
            print(f"{row['label']:48} " + "  ".join(speeds), *row["reasons"].items(), flush=True)
    atomically(output, lambda temporary: temporary.write_text(json.dumps({**document, "rows": rows}, indent=1)))


if __name__ == "__main__":
    random.seed(0)
    if sys.argv[1:] == ["answer"]:
        answer()
    else:
        typer.run(main)
