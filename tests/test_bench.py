"""The benchmark room: counts against brute force, the gate, the clocks, reports and charts."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from flashtile import flash_attn_func, testing
from flashtile.backends import reference
from flashtile.bench import counting, host, providers, report, timing
from flashtile.bench.cases import SUITES, Case
from flashtile.bench.plots import save_bars
from flashtile.bench.providers import PROVIDERS, Provider
from flashtile.bench.report import Report, Row, compare_providers, compare_reports, describe_machine, geometric_mean
from flashtile.bench.runner import Effort, run, steps
from flashtile.spec import AttentionSpec
from flashtile.testing import Error, Inputs, Result, Sample, make_inputs

CPU = torch.device("cpu")
QUICK = Effort(rounds=2, round_ms=1)
SMALL = Case.square(2, 64, 2, 16, causal=True, dtype="float32")

MASKS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 9, "window_right": 4},
    "left window, causal": {"window_left": 20, "window_right": 0},
    "left window alone": {"window_left": 5},
    "the key on the diagonal": {"window_left": 0, "window_right": 0},
}
SHAPES = [(64, 64), (50, 77), (77, 50), (1, 40), (40, 1), (0, 8), (8, 0)]


def spec_of(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float32, **mask) -> AttentionSpec:
    return AttentionSpec(2, seqlen_q, seqlen_k, 4, 2, 16, 24, dtype, 0.25, **mask)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", SHAPES)
def test_pairs_and_tiles_equal_brute_force(lengths, mask):
    spec = spec_of(*lengths, **mask)
    seen = reference.visible(spec, CPU)
    assert counting.visible_pairs(spec) == seen.sum().item()
    for tile_m, tile_n in [(16, 16), (32, 8), (7, 13), (128, 128)]:
        kinds = {"full": 0, "masked": 0, "skipped": 0}
        for m in range(0, spec.seqlen_q, tile_m):
            for n in range(0, spec.seqlen_k, tile_n):
                tile = seen[m : m + tile_m, n : n + tile_n]
                whole = tile.all() and n + tile_n <= spec.seqlen_k
                kinds["full" if whole else "masked" if tile.any() else "skipped"] += 1
        assert counting.count_tiles(spec, tile_m, tile_n) == counting.Tiles(**kinds)


def test_flops_are_the_papers():
    full, causal = (Case.square(2, 512, 4, 64, causal, "bfloat16").spec for causal in (False, True))
    whole = 4 * 512 * 512 * 64 * 4 * 2
    assert counting.flops(full, "fwd", counting.paper_pairs(full)) == whole
    assert counting.flops(causal, "fwd", counting.paper_pairs(causal)) == whole / 2
    assert counting.flops(full, "bwd", counting.paper_pairs(full)) == 2.5 * whole
    window = replace(full, window_left=10)
    assert counting.paper_pairs(window) == counting.visible_pairs(window)


def test_bytes_of_both_algorithms():
    spec = Case.square(1, 128, 2, 32, causal=False, dtype="float16").spec
    tensor, square, lse = 128 * 2 * 32 * 2, 2 * 128 * 128 * 2, 2 * 128 * 4
    assert counting.least_bytes(spec, "fwd") == 4 * tensor + lse
    assert counting.least_bytes(spec, "bwd") == 8 * tensor + lse
    assert counting.standard_bytes(spec, "fwd") == 4 * tensor + 4 * square
    assert counting.standard_bytes(spec, "bwd") == 8 * tensor + 7 * square
    tiles = counting.count_tiles(spec, 64, 32)
    assert counting.tile_bytes(spec, tiles, 32) == 2 * tensor + lse + 2 * (2 * tensor)  # K and V for two row blocks


def attend_by_autograd(spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype) -> Result:
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs[:3])
    out, lse = reference.attend(spec, q, k, v)
    loss = (out * inputs.dout.to(dtype)).sum() + (lse * inputs.dlse.to(dtype)).masked_fill(lse.isinf(), 0).sum()
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v)))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_sample_agrees_with_the_whole_problem(lengths, mask, softcap):
    spec = spec_of(*lengths, torch.bfloat16, softcap=softcap, **mask)
    inputs = make_inputs(spec)
    exact, low = (attend_by_autograd(spec, inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    for size in (12, 100):
        for error in Sample.of(spec, inputs, size=size).errors(exact):
            assert error.error < 1e-12, error
    for error in Sample.of(spec, inputs, size=100).errors(low._replace(lse=None)):
        assert error.ok, error  # the baseline itself is right


def test_sample_spans_blocks_of_rows(monkeypatch):
    monkeypatch.setitem(testing._BLOCK_SCORES, "cpu", 4 * 2 * 60 * 7)  # seven rows at a time
    spec = spec_of(60, 60, window_right=0)
    inputs = make_inputs(spec)
    for error in Sample.of(spec, inputs, size=12).errors(attend_by_autograd(spec, inputs, torch.float64)):
        assert error.error < 1e-12, error


def test_sample_covers_both_ends_and_every_stretch():
    sample = Sample.of(spec_of(1000, 500), make_inputs(spec_of(1000, 500)), size=20, gradients=False)
    rows = sample.rows.tolist()
    assert rows[0] == 0
    assert rows[-1] == 999
    assert max(b - a for a, b in pairwise(rows)) <= 100


def run_one(providers, case=SMALL, modes=("fwd", "bwd")) -> dict[tuple[str, str], Row]:
    heard: list[str] = []
    (rows,) = run([case], modes, providers, CPU, QUICK, heard.append)
    assert len(heard) == steps([case], providers)
    return {(row.provider, row.mode): row for row in rows}


def build_as(change):
    """A provider that runs flashtile's reference and then changes the result."""

    def build(case, device):
        return lambda q, k, v: change(flash_attn_func(q, k, v, causal=case.causal, backend="reference"))

    return Provider("changed", lambda case, device, mode: None, build)


def test_host_times_are_of_the_mask_that_the_case_names(monkeypatch):
    asked = {"flashtile": [], "sdpa": []}

    def recorded(name, mask, attend):
        def call(*tensors, **options):
            asked[name].append(options[mask])
            return attend(*tensors, **options)

        return call

    monkeypatch.setattr(host, "flash_attn_func", recorded("flashtile", "causal", host.flash_attn_func))
    for module in (host, providers):
        sdpa = recorded("sdpa", "is_causal", module.scaled_dot_product_attention)
        monkeypatch.setattr(module, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(host, "_graph", lambda call: SimpleNamespace(replay=call))
    monkeypatch.setattr(host, "_us", lambda call, device, calls=1: (call(), 1.0)[1])
    monkeypatch.setattr(host, "_decode_steps", lambda device: {})
    for causal in (False, True):
        monkeypatch.setattr(host, "CASES", (Case.square(1, 32, 2, 16, causal, "float32"),))
        for masks in asked.values():
            masks.clear()
        times = host.measure(torch.device("cpu"), 1)
        assert [time.provider for time in times] == ["flashtile", "sdpa", "sdpa, transposed"]
        assert asked == {"flashtile": [causal] * 3, "sdpa": [causal] * 6}


def test_decode_steps_whose_host_time_is_measured_are_the_same(monkeypatch):
    monkeypatch.setattr(host, "DECODING", (2, 40, 4, 2, 16))
    steps = {name: step() for name, step in host._decode_steps(CPU).items()}
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-2)
    close(steps["flashtile"], steps["sdpa"].transpose(1, 2))
    close(steps["flashtile, new keys"], steps["sdpa, new keys"].transpose(1, 2))
    assert (steps["flashtile, lengths"] - steps["flashtile"]).abs().max() > 2e-2


def test_matrix_products_of_as_many_flops_as_a_case(monkeypatch):
    monkeypatch.setattr(timing, "gemm_size", lambda device: 64)
    (rows,) = run([SMALL], ("fwd", "bwd"), {"sdpa": PROVIDERS["sdpa"]}, CPU, replace(QUICK, gemm=True))
    found = {(row.provider, row.mode): row for row in rows}
    assert set(found) == {(name, mode) for name in ("sdpa", "matrix product") for mode in ("fwd", "bwd")}
    for mode in ("fwd", "bwd"):
        attention, products = found["sdpa", mode], found["matrix product", mode]
        assert products.flops % (2 * 64**3) == 0
        assert abs(products.flops - attention.flops) <= 64**3 or products.flops == 2 * 64**3
        assert len(products.rounds_ms["cool"]) == QUICK.rounds


def test_a_right_provider_gets_speed_memory_and_errors():
    rows = run_one({"standard": PROVIDERS["standard"], "sdpa": PROVIDERS["sdpa"]})
    assert set(rows) == {(name, mode) for name in ("standard", "sdpa") for mode in ("fwd", "bwd")}
    for row in rows.values():
        assert row.median_ms() is not None
        assert row.median_ms() > 0
        assert len(row.rounds_ms["cool"]) == QUICK.rounds
        assert row.reason is None
        assert not row.wrong
    assert [e.name for e in rows["sdpa", "fwd"].errors] == ["out"]
    assert [e.name for e in rows["sdpa", "bwd"].errors] == ["out", "dq", "dk", "dv"]


@pytest.mark.parametrize("change", [lambda out: out * 1.01, lambda out: out * float("nan")], ids=["1% off", "nan"])
def test_a_wrong_result_gets_no_speed(change):
    for row in run_one({"wrong": build_as(change)}).values():
        assert row.wrong
        assert row.median_ms() is None
        assert row.flops_per_second() is None
        assert not row.rounds_ms
        assert row.extra_bytes is None
        assert row.reason is not None
        assert row.reason.startswith("wrong result: out")


def test_a_wrong_gradient_costs_the_backward_speed_alone():
    class DoublesGradient(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            return grad * 2

    rows = run_one({"wrong": build_as(DoublesGradient.apply)})
    assert rows["wrong", "fwd"].median_ms() is not None
    assert rows["wrong", "bwd"].median_ms() is None
    assert {e.name for e in rows["wrong", "bwd"].errors if not e.ok} == {"dq", "dk", "dv"}


def test_a_result_of_another_dtype_or_shape_is_no_result():
    rows = run_one({"double": build_as(lambda out: out.double()), "flat": build_as(lambda out: out.flatten(2))})
    assert "gave torch.float64" in rows["double", "fwd"].reason
    assert "gave torch.float32 (2, 64, 32)" in rows["flat", "fwd"].reason
    assert all(row.median_ms() is None for row in rows.values())


def test_a_provider_that_raises_or_declines_says_why():
    def broken(case, device):
        raise RuntimeError("no such kernel\nand a long trace")

    rows = run_one(
        {
            "broken": Provider("broken", lambda case, device, mode: None, broken),
            "shy": Provider(
                "shy", lambda case, device, mode: "not today" if mode == "bwd" else None, PROVIDERS["sdpa"].build
            ),
        }
    )
    assert rows["broken", "fwd"].reason == "RuntimeError: no such kernel"
    assert rows["shy", "fwd"].median_ms() is not None
    assert rows["shy", "bwd"].reason == "not today"


def test_every_provider_runs_or_declines_on_a_cpu():
    rows = run_one(PROVIDERS, Case.square(1, 48, 4, 16, causal=True, dtype="float32", heads_k=2))
    for (name, _), row in rows.items():
        assert (row.median_ms() is None) == (row.reason is not None), name
        assert not row.wrong, row
    assert rows["flash-attn-2", "fwd"].reason is not None
    assert rows["sdpa-cudnn", "fwd"].reason == "takes float16 and bfloat16, not float32"


def test_standard_attention_declines_what_does_not_fit():
    huge = Case.square(64, 1 << 20, 64, 64, causal=False, dtype="float32")
    assert "GiB" in PROVIDERS["standard"].declines(huge, CPU, "fwd")
    assert "GiB" in PROVIDERS["sdpa-math"].declines(huge, CPU, "bwd")


def test_suites_are_the_papers_setting():
    cases = SUITES["paper"].cases()
    assert len(cases) == 6 * 2 * 2
    for case in cases:
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q * case.head_dim == 2048
    for suite in SUITES.values():
        made = suite.cases()
        assert len(set(made)) == len(made)
    assert [c.seqlen_q for c in SUITES["cpu"].cases([128], [32], ["float16"])] == [128, 128]


def test_values_may_be_narrower_than_keys():
    case = Case.square(1, 64, 2, 24, True, "float32", head_dim_v=16)
    assert case.label == "B=1 S=64 H=2 D=24/16 causal float32"
    rows = run_one({name: PROVIDERS[name] for name in ("flashtile-cpu", "standard", "sdpa-math")}, case)
    assert [row.reason for row in rows.values()] == [None] * 6
    assert all(error.ok for row in rows.values() for error in row.errors)


def test_a_contender_that_fails_while_timed_leaves_the_race():
    calls = iter(range(100))

    def fails_later():
        if next(calls) > 0:
            raise RuntimeError("out of luck")
        return lambda: None

    prepare = {"good": lambda: lambda: time.sleep(1e-3), "bad": fails_later}
    times, failures = timing.interleaved(prepare, CPU, rounds=3, round_ms=1)
    assert list(times) == ["good"]
    assert all(ms >= 1 for ms in times["good"]["cool"])
    assert str(failures["bad"]) == "out of luck"


def test_a_cpu_has_no_hot_pace():
    with pytest.raises(ValueError, match="device: got cpu; want a GPU"):
        timing.hot_ms(lambda: None, CPU, 1)


@pytest.mark.parametrize("call_ms", [0.02, 1.4, 47.0, 376.0])
def test_hot_calls_follow_on_as_few_as_heat_the_gpu(call_ms, monkeypatch):
    """0.8 s after a rest a GPU at its limit of power slows down for a while: long calls are to be done by then."""
    counts: list[int] = []

    def on_end_ms(call, count):
        counts.append(count)
        return call_ms * (3 if len(counts) == 1 else 1)  # the first call takes longer

    monkeypatch.setattr(timing, "_on_end_ms", on_end_ms)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.hot_ms(lambda: None, torch.device("cuda"), 50) == call_ms
    assert 200 <= (sum(counts[:-1]) + 2) * call_ms < 200 + 4 * call_ms
    assert 50 <= counts[-1] * call_ms < 50 + call_ms


@pytest.mark.gpu
def test_a_long_call_is_as_long_cool_as_hot():
    device = torch.device("cuda")
    x = torch.ones(1 << 29, device=device)
    times, failures = timing.interleaved(
        {"copy": lambda: lambda: x.clone()}, device, rounds=2, round_ms=10, paces=("cool", "hot")
    )
    assert failures == {}
    cool, hot = (min(times["copy"][pace]) for pace in timing.PACES)
    assert 0.8 <= cool / hot <= 1.25


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability(), reason="no CPU")
def test_peak_memory_of_a_call():
    size = 96 << 20

    def call():
        torch.ones(size, dtype=torch.int8)  # freed before the call ends
        return torch.ones(size // 4, dtype=torch.int8)

    result, peak = timing.with_peak_bytes(call, CPU)
    assert result.numel() == size // 4
    if peak is not None:
        assert size * 0.95 <= peak <= size * 1.2


def a_report(speed: float = 1.0, provider: str = "sdpa") -> Report:
    rounds: dict[timing.Pace, tuple[float, ...]] = {"cool": (2 / speed, 2 / speed), "hot": (2.5 / speed,)}
    row = Row(SMALL, provider, "fwd", 1e9, rounds, 1024, (Error("out", 1e-7, 1e-6),))
    wrong = Row(SMALL, "wrong", "fwd", 1e9, errors=(Error("out", math.nan, 1e-6),), reason="wrong result")
    slow = replace(row, case=replace(SMALL, causal=False), rounds_ms={"cool": (8 / speed,)}, mode="bwd")
    machine = {**describe_machine(CPU), "gemm_flops": {"float32": 1e11}, "copy_bytes": 1e10}
    return Report(machine, (row, wrong, slow))


def test_report_survives_a_round_trip(tmp_path):
    path, before = tmp_path / "report.json", a_report()
    before.save(path)
    after = Report.load(path)
    assert after.machine == before.machine
    assert (after.rows[0], after.rows[2]) == (before.rows[0], before.rows[2])
    assert after.rows[1].wrong  # a NaN error stays wrong
    document = json.loads(path.read_text())
    assert document["schema"] == report.SCHEMA
    assert document["rows"][0]["tflops"] == pytest.approx(1e9 / 2e-3 / 1e12)
    assert [row["hot_ms"] for row in document["rows"]] == [2.5, None, None]
    assert {"date", "commit", "device", "versions", "gemm_flops", "copy_bytes"} <= set(document)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 99, "rows": []}', '{"schema": 1, "rows": [{}]}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a flashtile benchmark report"):
        Report.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report.atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_comparisons():
    ratios = compare_reports(a_report(), a_report(speed=2.0))
    assert [(ratio.kind, ratio.speedup) for ratio in ratios] == [("fwd", 2.0), ("fwd, hot", 2.0), ("bwd", 2.0)]
    assert compare_reports(a_report(), a_report(provider="other")) == []
    rows = (*a_report().rows, *a_report(speed=4.0, provider="ours").rows)
    assert [ratio.speedup for ratio in compare_providers(rows, "ours", "sdpa")] == [4.0, 4.0, 4.0]
    twice = tuple(replace(row, flops=2 * row.flops) for row in a_report(provider="twice").rows)
    ratios = compare_providers((*a_report().rows, *twice), "twice", "sdpa")
    assert [ratio.speedup for ratio in ratios] == [2.0, 2.0, 2.0]  # of work, in the same time
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_chart_of_a_report(tmp_path):
    path = tmp_path / "chart.png"
    save_bars(a_report(), path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    save_bars(Report(a_report().machine, ()), path, "nothing was timed")
    assert list(tmp_path.iterdir()) == [path]
