"""What a run measured, as data: rows, the machine they come from, JSON, and ratios between rows."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..testing import Error
from .cases import Case
from .counting import Mode
from .timing import Pace

SCHEMA = 1
PREFIXES: dict[Pace, str] = {"cool": "", "hot": "hot_"}
"""What stands before the name of a time or a rate, by the pace at which it was taken."""


@dataclass(frozen=True)
class Row:
    """One provider on one case in one direction.

    A row has a speed only when its result was checked and right; otherwise `reason` says what is the matter.
    """

    case: Case
    provider: str
    mode: Mode
    flops: float
    rounds_ms: Mapping[Pace, tuple[float, ...]] = field(default_factory=dict)  # milliseconds per call, one per round
    extra_bytes: int | None = None
    errors: tuple[Error, ...] = ()
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        return not all(error.ok for error in self.errors)

    def median_ms(self, pace: Pace = "cool") -> float | None:
        """The median of the rounds."""
        rounds = self.rounds_ms.get(pace)
        return statistics.median(rounds) if rounds else None

    def flops_per_second(self, pace: Pace = "cool") -> float | None:
        ms = self.median_ms(pace)
        return None if ms is None else self.flops / (ms * 1e-3)

    @property
    def key(self) -> tuple[Case, str, Mode]:
        return self.case, self.provider, self.mode

    def to_json(self) -> dict[str, Any]:
        times: dict[str, Any] = {}
        for pace, prefix in PREFIXES.items():
            rate = self.flops_per_second(pace)
            times[f"{prefix}ms"] = self.median_ms(pace)
            times[f"{prefix}rounds_ms"] = list(self.rounds_ms.get(pace, ()))
            times[f"{prefix}tflops"] = None if rate is None else rate / 1e12
        return {
            "case": self.case.to_json(),
            "provider": self.provider,
            "mode": self.mode,
            "flops": self.flops,
            **times,
            "extra_bytes": self.extra_bytes,
            "errors": [
                {"name": e.name, "error": _finite(e.error), "budget": _finite(e.budget), "ok": e.ok}
                for e in self.errors
            ],
            "reason": self.reason,
        }

    @staticmethod
    def from_json(row: dict[str, Any]) -> Row:
        def number(value: float | None) -> float:
            return math.nan if value is None else value

        errors = tuple(Error(e["name"], number(e["error"]), number(e["budget"])) for e in row["errors"])
        rounds = {pace: tuple(row.get(f"{prefix}rounds_ms", ())) for pace, prefix in PREFIXES.items()}
        return Row(
            Case(**row["case"]), row["provider"], row["mode"], row["flops"],
            {pace: ms for pace, ms in rounds.items() if ms}, row["extra_bytes"], errors, row["reason"],
        )  # fmt: skip


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: null stands for both."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Report:
    """The rows of one run and the machine they were measured on."""

    machine: dict[str, Any]
    rows: tuple[Row, ...]

    def save(self, path: Path) -> None:
        """Writes JSON atomically: `path` holds the old document or the whole new one."""
        document = {"schema": SCHEMA, **self.machine, "rows": [row.to_json() for row in self.rows]}
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        atomically(path, lambda temporary: temporary.write_text(text))

    @staticmethod
    def load(path: Path) -> Report:
        """The report at `path`; ValueError where it is no report of this schema."""
        try:
            document = json.loads(path.read_text())
            if document.pop("schema") != SCHEMA:
                raise ValueError(f"want schema {SCHEMA}")
            rows = tuple(Row.from_json(row) for row in document.pop("rows"))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: not a flashtile benchmark report: {error}") from error
        return Report(document, rows)


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary file beside `path` (same suffix), then renames it to `path`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".flashtile-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and date: what a number needs beside it to mean something."""
    packages = (
        "triton", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python", "nvidia-cudnn-frontend",
    )  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": _describe_device(device),
        "versions": {
            "flashtile": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
            **{name: _version(name) for name in packages},
        },
    }


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": device.type,
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "type": device.type,
        "name": models[0] if models else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The git commit this package runs from, "+changes" where files differ; None outside a checkout of it."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # fails when installed inside some other checkout
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Ratio:
    """How much faster `row` is than `base` at a pace: above 1, row is the faster one."""

    base: Row
    row: Row
    pace: Pace

    @property
    def speedup(self) -> float:
        base, rate = self.base.flops_per_second(self.pace), self.row.flops_per_second(self.pace)
        assert base is not None
        assert rate is not None
        return rate / base

    @property
    def kind(self) -> str:
        """Direction and, unless it is cool, pace."""
        return self.row.mode if self.pace == "cool" else f"{self.row.mode}, {self.pace}"


def compare_reports(base: Report, new: Report) -> list[Ratio]:
    """One ratio for each row and pace with a speed in both reports."""
    known = {row.key: row for row in base.rows}
    return [
        Ratio(known[row.key], row, pace)
        for row in new.rows
        if row.key in known
        for pace in row.rounds_ms
        if pace in known[row.key].rounds_ms
    ]


def compare_providers(rows: Iterable[Row], provider: str, base: str) -> list[Ratio]:
    """One ratio for each case, direction and pace at which both providers of the run have a speed."""
    by_key = {row.key: row for row in rows}
    return [
        Ratio(other, row, pace)
        for row in by_key.values()
        if row.provider == provider and (other := by_key.get((row.case, base, row.mode))) is not None
        for pace in row.rounds_ms
        if pace in other.rounds_ms
    ]


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
