"""benchmarks/turns.py: what cases and contenders name, how rounds are compared, and, on a GPU, decode steps timed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from flashtile.bench.cases import Case

ECHO = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps([os.environ["PYTHONPATH"], os.environ["X"], json.loads(line)]), flush=True)
"""
PATH = Path(__file__).parent.parent / "benchmarks/turns.py"
turns = importlib.util.module_from_spec(found := importlib.util.spec_from_file_location("turns_benchmark", PATH))
found.loader.exec_module(turns)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("128 full 8192", Case.square(2, 8192, 16, 128, False, "bfloat16")),
        ("64 causal 4097", Case.square(3, 4097, 32, 64, True, "bfloat16")),
        ("192/128 causal 2048 16/4", Case.square(8, 2048, 16, 192, True, "bfloat16", 4, 128)),
        ("128 full 65536", Case.square(1, 65536, 16, 128, False, "bfloat16")),
    ],
)
def test_a_case_is_named_by_few_words(text, case):
    assert turns.case_of(text) == case


def test_a_mask_of_another_name_is_refused():
    with pytest.raises(ValueError, match="mask: got 'masked' in '64 masked 512'; want full or causal"):
        turns.case_of("64 masked 512")


@pytest.fixture
def beside_decode(monkeypatch):
    """decode.py is found as it is by a script that lies beside it."""
    monkeypatch.syspath_prepend(PATH.parent)


@pytest.mark.parametrize("name", ["64,32,8,4096", "64,32,8,1024…65536, pages of 16", "8,32,8,32768, float8"])
def test_a_decode_step_is_named_as_by_its_own_benchmark(beside_decode, name):
    assert turns.asked(name, "decode", "flashtile", "cool") == (name, {"point": name, "provider": "flashtile"}, None)


def test_what_is_not_a_case_or_a_mode_is_refused(beside_decode):
    with pytest.raises(ValueError, match=r"case: got '64,32,8'; want one of '1,32,8,131072', .*, '64,32,8,4096'"):
        turns.asked("64,32,8", "decode", "flashtile", "cool")
    with pytest.raises(ValueError, match="mode: got 'both'; want fwd, bwd or decode"):
        turns.asked("64 full 512", "both", "flashtile-hopper", "cool")
    for mode, pace in (("fwd", "warm"), ("decode", "hot")):
        with pytest.raises(ValueError, match=f"pace: got '{pace}'; want cool or, but for decode, hot"):
            turns.asked("64 full 512", mode, "flashtile-hopper", pace)


@pytest.mark.gpu
def test_a_decode_step_is_checked_and_then_timed_as_often_as_asked(beside_decode):
    race = turns.DecodeRace("1,32,8,1024", "flashtile", torch.device("cuda"))
    assert [race.turn()["ms"] > 0 for _ in range(2)] == [True, True]


@pytest.mark.gpu
def test_a_decode_step_that_a_provider_gets_wrong_has_a_reason_and_no_time(beside_decode, monkeypatch):
    monkeypatch.setitem(turns.decode_benchmark().PYTORCH, "wrong", lambda step: torch.zeros_like(step.q))
    reply = turns.DecodeRace("1,32,8,1024", "wrong", torch.device("cuda")).turn()
    assert reply == {"reason": "ValueError: wrong by 1 of the largest |out|", "ms": None}


def test_speeds_are_said_as_the_mode_does():
    assert turns.speed(10**12, [2.0, 1.0, 4.0]) == "500"
    assert turns.speed(None, [0.2, 0.1, 0.4]) == "200.0 us"


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_case_is_checked_and_then_timed_as_often_as_asked(mode):
    race = turns.Race(
        Case.square(1, 64, 2, 32, True, "float32").to_json(), mode, "flashtile-cpu", "cool", torch.device("cpu")
    )
    for _ in range(2):
        reply = race.turn()
        assert reply["reason"] is None
        assert reply["ms"] > 0


def test_a_case_that_a_provider_cannot_run_has_a_reason_and_no_time():
    case = Case.square(1, 64, 2, 32, False, "bfloat16").to_json()
    reply = turns.Race(case, "fwd", "flashtile-hopper", "cool", torch.device("cpu")).turn()
    assert reply == {"reason": "it takes CUDA tensors, these are on cpu", "ms": None}


def test_versions_are_compared_round_by_round():
    hot = [1.0, 2.0, 3.0]  # the GPU slows down, for both alike
    assert turns.over(hot, [x / 1.25 for x in hot]) == 1.25


def test_a_contender_is_a_process_with_paths_and_variables_of_its_own(monkeypatch, tmp_path):
    script = tmp_path / "answer.py"
    script.write_text(ECHO)
    monkeypatch.setattr(turns, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", "behind")
    with turns.started("new=first,X=1") as version:
        assert version.name == "new"
        assert version.ask({"mode": "fwd"}) == ["first:behind", "1", {"mode": "fwd"}]


def test_a_contender_that_ends_is_named(monkeypatch, tmp_path):
    script = tmp_path / "answer.py"
    script.write_text("import sys\nsys.stdin.readline()\nsys.exit(3)")
    monkeypatch.setattr(turns, "__file__", str(script))
    with turns.started("broken=src") as version, pytest.raises(RuntimeError, match="broken ended with 3"):
        version.ask({})
