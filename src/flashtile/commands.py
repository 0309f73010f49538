"""`flashtile demo | bench | verify | explain | tune`: arguments in, tables and files out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .bench.cases import DTYPES, SUITES, Case
from .bench.counting import Mode
from .bench.explain import explain as explain_spec
from .bench.explain import lines as explanation_lines
from .bench.host import measure as host_times
from .bench.plots import save_bars
from .bench.providers import PROVIDERS, default_names
from .bench.report import PREFIXES, Report, atomically, compare_reports, describe_machine
from .bench.runner import Effort, run, steps
from .bench.tables import print_explanation, print_host_times, print_ratios, print_report, print_verdicts
from .bench.timing import copy_bytes, gemm_flops
from .bench.verify import verify as verdicts_on
from .dispatch import declined
from .env import tuned_configs
from .spec import MAX_HEAD_DIM, AttentionSpec, check_tensors, checked_scale, checked_softcap, mask_window

app = typer.Typer(help="Exact FlashAttention for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Time attention: cases x providers.")
app.add_typer(bench, name="bench")

_SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_MODES: dict[str, tuple[Mode, ...]] = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; the GPU where there is one")]


@bench.callback(invoke_without_command=True)
def bench_group(
    context: typer.Context,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="two reports: speed-ups of the second over the first")
    ] = None,
) -> None:
    """Time attention, or compare two reports."""
    if compare is not None:
        console = wide_console()
        ratios = compare_reports(*(_load(path, "--compare") for path in compare))
        if not ratios:
            raise typer.BadParameter("the reports share no timed row", param_hint="--compare")
        print_ratios(console, ratios)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@bench.command()
def attention(
    suite: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(SUITES)}")] = "",
    mode: Annotated[str, typer.Option(help="fwd, bwd (the backward pass alone) or both")] = "both",
    providers: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(PROVIDERS)}")] = "",
    seqlens: Annotated[str, typer.Option(help="comma-separated lengths instead of the suite's")] = "",
    head_dims: Annotated[str, typer.Option(help="comma-separated head dims instead of the suite's")] = "",
    dtypes: Annotated[str, typer.Option(help="comma-separated dtypes instead of the suite's: bf16, fp16, fp32")] = "",
    device: DeviceOption = "",
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds; the result is their median")] = 5,
    hot: Annotated[bool, typer.Option("--hot", help="also time calls on end, on a GPU at its limit of power")] = False,
    gemm: Annotated[bool, typer.Option("--gemm", help="also time matrix products of as many FLOPs")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON report, written after every case")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG bar chart")] = None,
) -> None:
    """Time attention's forward and backward pass."""
    target = parse_device(device)
    suites = [
        _one_of(SUITES, name, "--suite") for name in _split(suite) or ["cpu" if target.type == "cpu" else "paper"]
    ]
    modes = _one_of(_MODES, mode, "--mode")
    if hot and target.type != "cuda":
        raise typer.BadParameter(f"got device {target}; want a GPU", param_hint="--hot")
    names = _split(providers) or default_names(target)
    for name in names:
        _one_of(PROVIDERS, name, "--providers")
    cases = [
        case
        for chosen in suites
        for case in chosen.cases(
            _integers(seqlens, "--seqlens"),
            _integers(head_dims, "--head-dims", most=256),
            [parse_dtype(name, "--dtypes") for name in _split(dtypes)],
        )
    ]
    for path, option in ((output, "--output"), (plot, "--plot")):
        _check_writable(path, option)
    console = wide_console()
    effort = Effort(rounds=rounds, paces=("cool", "hot") if hot else ("cool",), gemm=gemm)
    report = measure(console, cases, modes, names, target, effort, output)
    print_report(console, report)
    if plot is not None:
        save_bars(report, plot, _chart_title(report))
    _exit_if_ours_is_wrong(report)


@bench.command()
def host(
    output: Annotated[Path | None, typer.Option(help="JSON")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds; the result is their median")] = 9,
) -> None:
    """Host time of one small call on a GPU, bfloat16: forward, and forward and backward, B=1, S=128 to 512, 8 heads;
    and of a decode step, B=8, 1k keys."""
    device = parse_device("")
    if device.type != "cuda":
        raise typer.BadParameter("host time is measured with a GPU, and there is none", param_hint="bench host")
    _check_writable(output, "--output")
    found = host_times(device, rounds)
    print_host_times(wide_console(), found)
    if output is not None:
        document = {**describe_machine(device), "rows": [row._asdict() for row in found]}
        atomically(output, lambda temporary: temporary.write_text(json.dumps(document, indent=1)))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for demo.json and demo.png")] = Path("out"),
    seqlens: Annotated[str, typer.Option(help="comma-separated lengths instead of 512 to 8192 (16384 on a GPU)")] = "",
    device: DeviceOption = "",
) -> None:
    """Attention forward and backward against standard attention and PyTorch's: errors, then speed and memory."""
    target = parse_device(device)
    lengths = _integers(seqlens, "--seqlens")
    cases = SUITES["demo" if target.type == "cpu" else "paper"].cases(lengths)
    report_path, chart_path = out / "demo.json", out / "demo.png"
    for path in (report_path, chart_path):
        _check_writable(path, "--out")
    ours = next(name for name, reason in declined(cases[0].spec, target).items() if reason is None)
    console = wide_console()
    names = (f"flashtile-{ours}", "standard", "sdpa")
    report = measure(console, cases, ("fwd", "bwd"), names, target, Effort(rounds=3), report_path)
    print_report(console, report)
    save_bars(report, chart_path, _chart_title(report))
    console.print(f"wrote {report_path} and {chart_path}", markup=False)
    _exit_if_ours_is_wrong(report)


@app.command()
def verify(device: DeviceOption = "") -> None:
    """Errors of every backend against float64 on this machine; status 1 where one is over its budget."""
    target = parse_device(device)
    console = wide_console()
    verdicts = list(verdicts_on(target))
    print_verdicts(console, verdicts)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


Size = Annotated[int, typer.Argument(min=0)]


@app.command()
def explain(
    batch: Size,
    seqlen_q: Size,
    seqlen_k: Size,
    heads_q: Size,
    heads_k: Size,
    head_dim: Size,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dv: Annotated[int | None, typer.Option(min=0, help="value head dim; that of q and k if not given")] = None,
    window_left: Annotated[int, typer.Option(help="keys seen to the left; -1 is all")] = -1,
    window_right: Annotated[int, typer.Option(help="keys seen to the right; -1 is all")] = -1,
    softcap: float = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; it need not be on this machine")] = "",
) -> None:
    """Which backend would run a problem and why the others decline; tiles, FLOPs, HBM bytes, roofline time."""
    target = parse_device_name(device) if device else parse_device("")
    name = parse_dtype(dtype, "--dtype")
    value_dim = head_dim if dv is None else dv
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_k, head_dim),
        (batch, seqlen_k, heads_k, value_dim),
    )
    try:
        q, k, v = (torch.empty(shape, dtype=DTYPES[name], device="meta") for shape in shapes)
        check_tensors(q, k, v)
        left, right = mask_window(causal, (window_left, window_right))
        scale, cap = checked_scale(None, head_dim), checked_softcap(softcap)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    spec = AttentionSpec.of(q, k, v, softmax_scale=scale, window_left=left, window_right=right, softcap=cap)
    print_explanation(wide_console(), explanation_lines(explain_spec(spec, target)))


@app.command()
def tune(
    head_dims: Annotated[str, typer.Option(help="comma-separated head dims")] = "64,128",
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32")] = "bf16",
    seqlen: Annotated[int, typer.Option(min=16, help="length to measure at, 16k tokens in all")] = 4096,
) -> None:
    """Measure tile sizes on this GPU and keep the fastest for later runs."""
    console = wide_console()
    device = parse_device("")
    spec_dtype = DTYPES[parse_dtype(dtype, "--dtype")]
    problems = [
        AttentionSpec(max(1, 16384 // seqlen), seqlen, seqlen, 16, 16, dim, dim, spec_dtype, dim**-0.5, -1, right)
        for dim in _integers(head_dims, "--head-dims", MAX_HEAD_DIM)
        for right in (-1, 0)
    ]
    reason = declined(problems[0], device)["triton"]
    if reason is not None or device.type == "cpu":
        raise typer.BadParameter(f"tuning needs a GPU: {reason or 'this is the interpreter'}", param_hint="--dtype")
    from .arch import arch_of
    from .backends.triton.config import save_tuned
    from .backends.triton.tune import tune as measure

    arch = arch_of(device)
    assert arch is not None
    for spec in problems:
        for key, tiles in measure(spec, device):
            save_tuned(arch, {key: tiles})
            console.print(f"{arch} {key}: {tiles}", markup=False)
    console.print(f"kept in {tuned_configs()}", markup=False)


def wide_console() -> Console:
    """A console wide enough for the tables where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@bench.command()
def show(
    report: Annotated[Path, typer.Argument(help="JSON report")],
    plot: Annotated[Path | None, typer.Option(help="PNG bar chart")] = None,
) -> None:
    """Print a report again, and draw it."""
    loaded = _load(report, "REPORT")
    _check_writable(plot, "--plot")
    print_report(wide_console(), loaded)
    if plot is not None:
        save_bars(loaded, plot, _chart_title(loaded))


def measure(
    console: Console,
    cases: Sequence[Case],
    modes: Sequence[Mode],
    names: Sequence[str],
    device: torch.device,
    effort: Effort,
    output: Path | None,
) -> Report:
    """Runs `cases` under a progress bar; `output` holds a complete report of the cases done so far at any time."""
    providers = {name: PROVIDERS[name] for name in names}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("matrix product and copy", total=1 + steps(cases, providers))
        gemm = {
            f"{PREFIXES[pace]}gemm_flops": {
                dtype: gemm_flops(device, DTYPES[dtype], pace) for dtype in ("float32", "bfloat16")
            }
            for pace in effort.paces
        }
        machine = {**describe_machine(device), **gemm, "copy_bytes": copy_bytes(device)}
        report = Report(machine, ())
        progress.advance(task)

        def on_step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        for rows in run(cases, modes, providers, device, effort, on_step):
            report = Report(machine, (*report.rows, *rows))
            if not console.is_terminal:
                console.print(f"measured {rows[0].case.label}", markup=False)
            if output is not None:
                report.save(output)
    return report


def parse_device(name: str) -> torch.device:
    """The device called `name`, which must be here; the GPU, or the CPU where there is none, for an empty name."""
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = parse_device_name(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"{name!r} is not on this machine", param_hint="--device")
    return device


def parse_device_name(name: str) -> torch.device:
    """The device called `name`, whether it is here or not."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"got {name!r}; want cpu, cuda or cuda:N", param_hint="--device")
    return device


def parse_dtype(name: str, option: str) -> str:
    """torch's name of the dtype `name`, which may be short (bf16)."""
    full = _SHORT_DTYPES.get(name, name)
    if full not in DTYPES:
        raise typer.BadParameter(f"got {name!r}; want one of {', '.join([*DTYPES, *_SHORT_DTYPES])}", param_hint=option)
    return full


def _chart_title(report: Report) -> str:
    return f"Attention speed on {report.machine['device']['name']}"


def _exit_if_ours_is_wrong(report: Report) -> None:
    """Status 1 where a flashtile backend gave a wrong result."""
    if any(row.wrong and row.provider.startswith("flashtile-") for row in report.rows):
        raise typer.Exit(1)


def _load(path: Path, option: str) -> Report:
    try:
        return Report.load(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_of(table, name: str, option: str):
    if name not in table:
        raise typer.BadParameter(f"got {name!r}; want {', '.join(table)}", param_hint=option)
    return table[name]


def _integers(text: str, option: str, most: int | None = None) -> list[int]:
    try:
        numbers = [int(part) for part in _split(text)]
    except ValueError:
        raise typer.BadParameter(f"got {text!r}; want integers separated by commas", param_hint=option) from None
    for number in numbers:
        if number < 1 or (most is not None and number > most):
            limit = "" if most is None else f" to {most}"
            raise typer.BadParameter(f"got {number}; want integers from 1{limit}", param_hint=option)
    return numbers


def _check_writable(path: Path | None, option: str) -> None:
    """Makes the folder of `path`, so that a run does not end in an error about it."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; want a file", param_hint=option)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{path.parent}: {error.strerror}", param_hint=option) from error
