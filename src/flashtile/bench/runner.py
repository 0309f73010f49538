"""The one runner: every provider on every case, its result judged first, then its memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..testing import Error, Inputs, Result, Sample, make_inputs
from .cases import Case
from .counting import Mode, flops, paper_pairs
from .providers import Attention, Provider
from .report import Row
from .timing import Pace, gemm_work, gemms, interleaved, with_peak_bytes

GEMM = "matrix product"
"""The provider of rows that say what matrix products of as many FLOPs as a case take."""

_FIRST_CALL_BYTES = 256 << 20  # far more than a first call's own memory: above it, that does not matter


@dataclass(frozen=True)
class Effort:
    """How long to look: `rounds` interleaved rounds of about `round_ms` milliseconds per provider and pace.

    gemm: at matrix products too, of as many FLOPs as the case, in the same rounds.
    """

    rounds: int = 5
    round_ms: float = 50.0
    paces: tuple[Pace, ...] = ("cool",)
    gemm: bool = False


@dataclass
class Contender:
    """A provider that is in the race for one case: its function, and the rows it earns."""

    name: str
    attention: Attention
    rows: dict[Mode, Row] = field(default_factory=dict)


def run(
    cases: Sequence[Case],
    modes: Sequence[Mode],
    providers: Mapping[str, Provider],
    device: torch.device,
    effort: Effort,
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """Rows of one case after the other; `on_step` hears what is being done, `steps` times in all."""
    for case in cases:
        yield _run_case(case, modes, providers, device, effort, on_step)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def steps(cases: Sequence[Case], providers: Mapping[str, Provider]) -> int:
    """How often `run` calls `on_step`: per case the truth, each provider's check, the timing."""
    return len(cases) * (len(providers) + 2)


def _run_case(
    case: Case,
    modes: Sequence[Mode],
    providers: Mapping[str, Provider],
    device: torch.device,
    effort: Effort,
    on_step: Callable[[str], None],
) -> list[Row]:
    on_step(f"{case.label}: float64")
    inputs, sample = problem_of(case, modes, device)
    contenders = []
    for name, provider in providers.items():
        on_step(f"{case.label}: checking {name}")
        contenders.append(checked(name, provider, case, modes, inputs, sample, device))
    on_step(f"{case.label}: timing")
    return [row for mode in modes for row in _timed(case, mode, contenders, inputs, device, effort)]


def problem_of(case: Case, modes: Sequence[Mode], device: torch.device) -> tuple[Inputs, Sample]:
    """The tensors of a case, and the truth about them."""
    inputs = make_inputs(case.spec, device)
    inputs = inputs._replace(dlse=torch.zeros_like(inputs.dlse))  # providers return no lse to send a gradient into
    return inputs, Sample.of(case.spec, inputs, gradients="bwd" in modes)


def checked(
    name: str,
    provider: Provider,
    case: Case,
    modes: Sequence[Mode],
    inputs: Inputs,
    sample: Sample,
    device: torch.device,
) -> Contender:
    """The contender with a row for each mode: errors and peak memory, or the reason why it is out."""
    spec = case.spec
    contender = Contender(name, _not_built)
    for mode in modes:
        row = Row(case, name, mode, flops(spec, mode, paper_pairs(spec)))
        try:
            reason = provider.declines(case, device, mode)
            if reason is None:
                if contender.attention is _not_built:
                    contender.attention = provider.build(case, device)
                row = _judged(row, contender.attention, inputs, sample, device)
        except Exception as error:  # whatever another library raises is why it has no number
            reason = _first_line(error)
        contender.rows[mode] = row if reason is None else replace(row, reason=reason)
    return contender


def _judged(row: Row, attention: Attention, inputs: Inputs, sample: Sample, device: torch.device) -> Row:
    """`row` with its errors, and its peak memory where the result is right."""

    def call() -> Result:
        return _forward(attention, inputs) if row.mode == "fwd" else _forward_backward(attention, inputs)

    result, extra = with_peak_bytes(call, device)
    row = replace(row, errors=tuple(_errors(result, row.mode, inputs, sample)))
    if row.wrong:
        return replace(row, reason="wrong result: " + "; ".join(str(e) for e in row.errors if not e.ok))
    del result
    if extra is not None and (device.type == "cuda" or extra < _FIRST_CALL_BYTES):
        _, extra = with_peak_bytes(call, device)
    return replace(row, extra_bytes=extra)


def _errors(result: Result, mode: Mode, inputs: Inputs, sample: Sample) -> list[Error]:
    like = (inputs.dout,) if mode == "fwd" else (inputs.dout, inputs.q, inputs.k, inputs.v)
    for tensor, expected in zip((x for x in result if x is not None), like, strict=True):
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(f"gave {tensor.dtype} {tuple(tensor.shape)}, not {expected.dtype} {tuple(expected.shape)}")
    return sample.errors(result)


def _timed(
    case: Case, mode: Mode, contenders: Sequence[Contender], inputs: Inputs, device: torch.device, effort: Effort
) -> list[Row]:
    """The rows of `mode` with their times; a contender that fails here (out of memory, say) gets the reason instead."""
    rows = {contender.name: contender.rows[mode] for contender in contenders}
    prepare: dict[str, Callable[[], Callable[[], object]]] = {
        c.name: partial(timed_call, mode, c.attention, inputs) for c in contenders if c.rows[mode].reason is None
    }
    if effort.gemm:
        spec, work = case.spec, gemm_work(device)
        count = max(1, round(flops(spec, mode, paper_pairs(spec)) / work))
        rows[GEMM] = Row(case, GEMM, mode, count * work)
        prepare[GEMM] = partial(gemms, count, device, spec.dtype)
    times, failures = interleaved(prepare, device, rounds=effort.rounds, round_ms=effort.round_ms, paces=effort.paces)
    for name, by_pace in times.items():
        rows[name] = replace(rows[name], rounds_ms={pace: tuple(ms) for pace, ms in by_pace.items()})
    for name, failure in failures.items():
        rows[name] = replace(rows[name], reason=_first_line(failure))
    return list(rows.values())


def timed_call(mode: Mode, attention: Attention, inputs: Inputs) -> Callable[[], object]:
    """What is timed: a forward pass, or the backward pass of one that has run."""
    if mode == "fwd":
        return lambda: _forward(attention, inputs)
    q, k, v = _leaves(inputs)
    out = attention(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)


def _forward(attention: Attention, inputs: Inputs) -> Result:
    with torch.no_grad():
        return Result(attention(inputs.q, inputs.k, inputs.v))


def _forward_backward(attention: Attention, inputs: Inputs) -> Result:
    q, k, v = _leaves(inputs)
    out = attention(q, k, v)
    return Result(out.detach(), None, *torch.autograd.grad(out, (q, k, v), inputs.dout))


def _leaves(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in inputs[:3])


def _not_built(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError("this provider was not built")


def _first_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
