"""Reports as text: one table per quantity, a row per case and direction, a column per provider."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..testing import Error, Result
from .host import HostTime
from .report import PREFIXES, Ratio, Report, Row, compare_providers, geometric_mean
from .timing import Pace
from .verify import Verdict


def rate_unit(report: Report) -> tuple[str, float]:
    """What speeds are given in, and FLOP/s in one of it: TFLOP/s on a GPU, GFLOP/s on a CPU."""
    return ("GFLOP/s", 1e9) if report.machine["device"]["type"] == "cpu" else ("TFLOP/s", 1e12)


def print_report(console: Console, report: Report) -> None:
    """Errors, times, speeds and peak memory of `report`, the machine's rates, and why numbers are missing."""
    unit, scale = rate_unit(report)
    cells: dict[str, Callable[[Row], str | None]] = {
        "largest error against float64, and its share of the budget (2 × standard attention's + one rounding)": _error,
        "milliseconds, median": lambda row: _ms(row, "cool"),
        f"speed, {unit}": lambda row: _rate(row, "cool", scale),
        "peak extra memory, MiB (bwd: of a forward pass and its backward)": _mib,
    }
    if any("hot" in row.rounds_ms for row in report.rows):
        cells[f"speed of calls on end, on a hot GPU, {unit}"] = lambda row: _rate(row, "hot", scale)
    notes: list[str] = []
    for title, cell in cells.items():
        console.print(_pivot(report.rows, title, cell, notes))
    for number, note in enumerate(notes, 1):
        console.print(f"[{number}] {note}", markup=False)
    print_machine(console, report)


def print_machine(console: Console, report: Report) -> None:
    """The device, the rates measured in the same run, and how each provider fares against the first one."""
    unit, scale = rate_unit(report)
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    console.print(f"{machine['device']['name']} · {versions} · commit {machine['commit'] or 'unknown'}", markup=False)
    rates = ", ".join(
        f"{dtype}{prefix and f' ({pace})'} {rate / scale:.0f} {unit}"
        for pace, prefix in PREFIXES.items()
        for dtype, rate in machine.get(f"{prefix}gemm_flops", {}).items()
    )
    console.print(f"in this run: matrix product {rates} · copy {machine['copy_bytes'] / 1e9:.0f} GB/s", markup=False)
    providers = list(dict.fromkeys(row.provider for row in report.rows))
    for base in providers[1:]:
        ratios = compare_providers(report.rows, providers[0], base)
        for kind in dict.fromkeys(ratio.kind for ratio in ratios):
            summary = _summary([ratio for ratio in ratios if ratio.kind == kind])
            console.print(f"{providers[0]} over {base}, {kind}: {summary}", markup=False)


def print_ratios(console: Console, ratios: Sequence[Ratio]) -> None:
    """One line per row that two reports share, then geometric means per provider and direction, and over all."""
    table = Table(title="speed-up of the second report over the first", title_justify="left")
    for header in ("case", "provider", "direction"):
        table.add_column(header)
    for header in ("first ms", "second ms", "speed-up"):
        table.add_column(header, justify="right")
    for ratio in ratios:
        row = ratio.row
        times = (_ms(of, ratio.pace) for of in (ratio.base, row))
        table.add_row(row.case.label, row.provider, ratio.kind, *times, f"{ratio.speedup:.2f}x")
    console.print(table)
    for provider, kind in dict.fromkeys((ratio.row.provider, ratio.kind) for ratio in ratios):
        group = [ratio for ratio in ratios if (ratio.row.provider, ratio.kind) == (provider, kind)]
        console.print(f"{provider} {kind}: {_summary(group)}", markup=False)
    console.print(f"all: {_summary(ratios)}", markup=False)


def print_host_times(console: Console, times: Sequence[HostTime]) -> None:
    """A row per case and provider: the microseconds of a `HostTime`."""
    table = Table(title="microseconds per call", title_justify="left")
    for header in ("case", "provider"):
        table.add_column(header)
    for header in ("host", "CUDA graph", "forward and backward"):
        table.add_column(header, justify="right")
    for case, provider, *times_us in times:
        table.add_row(case, provider, *("–" if time is None else f"{time:.1f}" for time in times_us))
    console.print(table)


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """A row per problem, dtype and backend: each output's error and its share of the budget."""
    table = Table(title="errors against float64, and their share of the budget", title_justify="left")
    for header in ("problem", "dtype", "backend"):
        table.add_column(header)
    for name in Result._fields:
        table.add_column(name, justify="right")
    table.add_column("")
    for verdict in verdicts:
        found = {error.name: _one_error(error) for error in verdict.errors}
        cells = [found.get(name, "–") for name in Result._fields]
        end = "right" if verdict.ok else "[bold red]WRONG[/]" if verdict.failure is None else "[bold red]FAILED[/]"
        table.add_row(verdict.problem, str(verdict.dtype).removeprefix("torch."), verdict.backend, *cells, end)
    console.print(table)
    for verdict in verdicts:
        if verdict.failure is not None:
            console.print(f"{verdict.backend}, {verdict.problem}, {verdict.dtype}: {verdict.failure}", markup=False)
    right = sum(verdict.ok for verdict in verdicts)
    console.print(f"{right} of {len(verdicts)} right", markup=False)


def print_explanation(console: Console, pairs: Sequence[tuple[str, str]]) -> None:
    """Two columns: what, and the answer."""
    grid = Table.grid(padding=(0, 2))
    for what, text in pairs:
        grid.add_row(Text(what, style="bold"), Text(text))
    console.print(grid)


def _summary(ratios: Sequence[Ratio]) -> str:
    speedups = [ratio.speedup for ratio in ratios]
    return (
        f"geometric mean {geometric_mean(speedups):.2f}x, least {min(speedups):.2f}x, "
        f"most {max(speedups):.2f}x over {len(speedups)} rows"
    )


def _pivot(rows: Sequence[Row], title: str, cell: Callable[[Row], str | None], notes: list[str]) -> Table:
    """A table of `cell` of each row; what all cases share stands in the title, why a cell is empty goes to `notes`."""
    parts = [row.case.parts for row in rows]
    shared = [len(set(column)) == 1 for column in zip(*parts, strict=True)]
    common = " ".join(part for part, same in zip(parts[0], shared, strict=True) if same) if parts else ""
    table = Table(title=f"{title}\n{common}", title_justify="left", title_style="bold")
    table.add_column("case", no_wrap=True)
    table.add_column("direction")
    providers = list(dict.fromkeys(row.provider for row in rows))
    for provider in providers:
        table.add_column(provider, justify="right")
    by_key = {row.key: row for row in rows}
    for case, mode in dict.fromkeys((row.case, row.mode) for row in rows):
        name = " ".join(part for part, same in zip(case.parts, shared, strict=True) if not same)
        found = [by_key.get((case, provider, mode)) for provider in providers]
        table.add_row(
            name or case.label, mode, *("–" if row is None else _or_note(cell(row), row, notes) for row in found)
        )
    return table


def _or_note(text: str | None, row: Row, notes: list[str]) -> str:
    """The text, or a reference to the note that says why there is none; a wrong result is never overlooked."""
    if row.reason is None or (text is not None and not row.wrong):
        return text or "–"
    note = f"{row.provider}: {row.reason}"
    if note not in notes:
        notes.append(note)
    mark = f"\\[{notes.index(note) + 1}]"
    return f"[bold red]WRONG {text or ''}[/] {mark}" if row.wrong else f"– {mark}"


def _error(row: Row) -> str | None:
    """The output that uses most of its budget: name, error and share."""
    if not row.errors:
        return None
    worst = max(row.errors, key=_share)
    return f"{worst.name} {_one_error(worst)}"


def _one_error(error: Error) -> str:
    share = _share(error)
    return f"{error.error:.1e} {share:.0%}" if math.isfinite(share) else f"{error.error:.1e}"


def _share(error: Error) -> float:
    """Error over budget: above 1, or infinite, where it is wrong."""
    if error.ok:
        return error.error / error.budget if error.budget else 0.0
    share = error.error / error.budget if error.budget else math.inf
    return math.inf if math.isnan(share) else share


def _rate(row: Row, pace: Pace, scale: float) -> str | None:
    rate = row.flops_per_second(pace)
    return None if rate is None else f"{rate / scale:.1f}" if rate < 100 * scale else f"{rate / scale:.0f}"


def _ms(row: Row, pace: Pace) -> str | None:
    ms = row.median_ms(pace)
    return None if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _mib(row: Row) -> str | None:
    return None if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
