"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from flashtile import dispatch
from flashtile.backends import reference
from flashtile.bench import verify
from flashtile.bench.explain import explain, lines
from flashtile.bench.providers import PROVIDERS, Provider
from flashtile.bench.roofline import ceiling
from flashtile.commands import app
from flashtile.plan import Plan
from flashtile.spec import AttentionSpec

TINY = [
    "bench",
    "attention",
    "--device",
    "cpu",
    "--rounds",
    "1",
    "--suite",
    "demo",
    "--seqlens",
    "64",
    "--head-dims",
    "16",
]


def call(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    """The rates of the machine are not what is tested here, and take a second."""
    monkeypatch.setattr("flashtile.commands.gemm_flops", lambda device, dtype, pace="cool": 1e11)
    monkeypatch.setattr("flashtile.commands.copy_bytes", lambda device: 1e10)
    monkeypatch.setattr("flashtile.bench.roofline.gemm_flops", lambda device, dtype, pace="cool": 1e11)
    monkeypatch.setattr("flashtile.bench.roofline.copy_bytes", lambda device: 1e10)


def test_bench_writes_a_report_and_a_chart(tmp_path):
    report, chart = tmp_path / "new" / "r.json", tmp_path / "c.png"
    text = call(*TINY, "--providers", "flashtile-cpu,sdpa,flash-attn-4", "--output", report, "--plot", chart)
    rows = json.loads(report.read_text())["rows"]
    assert {(row["provider"], row["mode"]) for row in rows} == {
        (provider, mode) for provider in ("flashtile-cpu", "sdpa", "flash-attn-4") for mode in ("fwd", "bwd")
    }
    assert "speed, GFLOP/s" in text
    assert "matrix product" in text
    assert "[1] flash-attn-4: takes float16" in text or "[1] flash-attn-4: not installed" in text
    assert "flashtile-cpu over sdpa, bwd: geometric mean" in text
    assert chart.stat().st_size > 5000
    assert "speed-up of the second" in call("bench", "--compare", report, report)
    again = tmp_path / "again.png"
    assert "speed, GFLOP/s" in call("bench", "show", report, "--plot", again)
    assert again.stat().st_size > 5000


def test_bench_shows_a_wrong_result_and_fails(tmp_path, monkeypatch):
    def build(case, device):
        return lambda q, k, v: PROVIDERS["sdpa"].build(case, device)(q, k, v) * 1.1

    monkeypatch.setitem(PROVIDERS, "flashtile-cpu", Provider("wrong", lambda case, device, mode: None, build))
    text = call(*TINY, "--mode", "fwd", "--providers", "flashtile-cpu", "--output", tmp_path / "r.json", status=1)
    assert "WRONG" in text
    assert "wrong result: out" in text
    assert all(
        row["ms"] is None and row["tflops"] is None for row in json.loads((tmp_path / "r.json").read_text())["rows"]
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "nonsense"], "--suite"),
        (["--mode", "sideways"], "--mode"),
        (["--providers", "sdpa,nobody"], "--providers"),
        (["--seqlens", "12,x"], "--seqlens"),
        (["--seqlens", "0"], "--seqlens"),
        (["--head-dims", "300"], "--head-dims"),
        (["--dtypes", "int8"], "--dtypes"),
        (["--device", "toaster"], "--device"),
        (["--device", "cuda:99"], "--device"),
        (["--rounds", "0"], "--rounds"),
        (["--device", "cpu", "--hot"], "--hot"),
    ],
)
def test_bench_refuses_bad_arguments_by_name(tmp_path, arguments, named):
    output = tmp_path / "folder" / "r.json"
    assert named in call("bench", "attention", *arguments, "--output", output, status=2)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_checked_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    assert "--output" in call(*TINY, "--output", tmp_path, status=2)
    assert "--plot" in call(*TINY, "--plot", tmp_path / "file" / "chart.png", status=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure with")
def test_host_times_need_a_gpu():
    assert "GPU" in call("bench", "host", status=2)


@pytest.mark.gpu
def test_host_times_of_small_calls(tmp_path):
    text = call("bench", "host", "--rounds", 1, "--output", tmp_path / "host.json")
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert {"flashtile", "flashtile, new keys", "sdpa", "sdpa, transposed"} < {row["provider"] for row in rows}
    assert all(row["graph_us"] > 0 and row["host_us"] > 0 for row in rows)
    assert all(row["step_us"] > row["host_us"] for row in rows if not row["case"].startswith("decode"))
    assert "CUDA graph" in text


def test_compare_refuses_what_is_no_report(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert "--compare" in call("bench", "--compare", bad, bad, status=2)
    assert "--compare" in call("bench", "--compare", tmp_path / "none.json", bad, status=2)
    assert "REPORT" in call("bench", "show", bad, status=2)


def test_demo_on_tiny_sizes(tmp_path):
    text = call("demo", "--device", "cpu", "--seqlens", "64", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "demo.png").stat().st_size > 5000
    rows = json.loads((tmp_path / "out" / "demo.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3  # masks, directions, providers
    assert all(row["ms"] is not None and row["errors"] for row in rows)
    order = [text.index(part) for part in ("error against float64", "milliseconds", "speed,", "peak extra memory")]
    assert order == sorted(order)


def few_problems(monkeypatch):
    problems = {name: verify.PROBLEMS[name] for name in ("one query", "causal, more queries: rows without keys")}
    monkeypatch.setattr(verify, "PROBLEMS", problems)


def test_verify_passes(monkeypatch):
    few_problems(monkeypatch)
    text = call("verify", "--device", "cpu")
    assert "right" in text
    assert "WRONG" not in text


@pytest.mark.parametrize("breaks", [False, True])
def test_verify_fails_over_budget_or_on_an_error(monkeypatch, breaks):
    def forward(spec, q, k, v):
        if breaks:
            raise RuntimeError("boom")
        out, lse = reference.forward(spec, q, k, v)
        return out * 1.2, lse

    wrong = SimpleNamespace(supports=lambda spec, device: None, forward=forward, backward=reference.backward)
    few_problems(monkeypatch)
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", wrong)
    text = call("verify", "--device", "cpu", status=1)
    assert ("RuntimeError: boom" if breaks else "WRONG") in text


def planned(monkeypatch):
    plan = Plan("tiles of 32 x 16", grid=6, tile_m=32, tile_n=16)
    backend = SimpleNamespace(supports=lambda spec, device: None, plan=lambda spec, device: plan)
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", backend)


def test_explain_counts_like_brute_force(monkeypatch):
    planned(monkeypatch)
    spec = AttentionSpec(2, 70, 90, 4, 2, 16, 24, torch.float32, 0.25, window_right=0)
    seen = reference.visible(spec, torch.device("cpu"))
    answer = explain(spec, torch.device("cpu"))
    assert answer.pairs == seen.sum().item()
    assert answer.forward.flops == 2 * 2 * 4 * seen.sum().item() * (16 + 24)
    assert answer.backward.flops == 2 * 2 * 4 * seen.sum().item() * (3 * 16 + 2 * 24)
    tiles = [seen[m : m + 32, n : n + 16] for m in range(0, 70, 32) for n in range(0, 90, 16)]
    assert answer.tiles.total == len(tiles)
    assert answer.tiles.skipped == sum(not tile.any() for tile in tiles)
    assert answer.forward.roofline_ms == pytest.approx(
        1e3 * max(answer.forward.flops / 1e11, answer.forward.least_bytes / 1e10)
    )


def test_explain_prints_the_plan_where_there_is_one(monkeypatch):
    arguments = ("explain", 2, 70, 90, 4, 2, 16, "--dtype", "fp32", "--causal", "--dv", 24, "--device", "cpu")
    planned(monkeypatch)
    text = call(*arguments)
    assert "tiles of 32 x 16" in text
    assert "6 programs" in text
    assert "masked" in text


def test_explain_says_why_the_backward_pass_goes_elsewhere(monkeypatch):
    planned(monkeypatch)
    spec = AttentionSpec(2, 70, 90, 4, 2, 16, 24, torch.float32, 0.25)
    assert "backward" not in dict(lines(explain(spec, torch.device("cpu"))))
    monkeypatch.setattr(dispatch.BACKENDS["cpu"], "leaves_backward", lambda spec: "no order", raising=False)
    assert dict(lines(explain(spec, torch.device("cpu"))))["backward"] == "goes elsewhere: no order"


def test_explain_of_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    text = call("explain", 2, 4096, 4096, 32, 8, 128, "--causal", "--device", "cuda")
    assert "it takes CPU tensors" in text
    assert "assumed" in text
    limits = ceiling(torch.device("cuda"), torch.bfloat16)
    assert limits.milliseconds(989e12, 0) == pytest.approx(1000)


def test_explain_says_how_keys_of_few_queries_are_split(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    text = call("explain", 1, 1, 8192, 32, 8, 128, "--device", "cuda")
    assert "128 keys, 4 warps" in text
    assert "128 programs" in text
    assert "64 of 4 × 128" in text  # of a group's rows 16 lie in a tile


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((1, 64, 64, 8, 3, 64), "q: got 8 heads"),
        ((1, 64, 64, 8, 8, 300), "head_dim 300"),
        ((1, 64, 64, 8, 8, 64, "--dtype", "int8"), "--dtype"),
        ((1, 64, 64, 8, 8, 64, "--window-left", "-5"), "window_size"),
        ((1, 64, 64, 8, 8, 64, "--softcap", "-1"), "softcap"),
        ((1, 64, 64, 8, 8, 64, "--device", "moon"), "--device"),
        ((1, 64, 64, 8, 8), "HEAD_DIM"),
    ],
)
def test_explain_refuses_bad_arguments_by_name(arguments, named):
    assert named.lower() in call("explain", *arguments, status=2).lower()


@pytest.mark.parametrize("package", ["typer", "rich", "matplotlib"])
def test_without_the_extra_it_says_how_to_install_it(package):
    blocked = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['flashtile', 'demo']"
    code = f"{blocked}; from flashtile.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "flashtile[bench]"' in done.stderr
    assert package in done.stderr
    assert "Traceback" not in done.stderr
