"""Which backend runs where, and the reasons why others do not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import BF16, CASES, DOUBLE, RUNS, spec, takes

from flashtile import dispatch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_by_device():
    case = spec()
    assert dispatch.choose(case, CPU).fastest is dispatch.BACKENDS["cpu"]
    assert dispatch.choose(case, GPU).fastest is dispatch.BACKENDS["triton"]
    assert dispatch.choose(case, torch.device("meta")).fastest is dispatch.BACKENDS["reference"]


def test_float64_goes_to_the_reference_on_a_gpu():
    assert dispatch.choose(spec(dtype=DOUBLE), GPU).fastest is dispatch.BACKENDS["reference"]


@pytest.mark.parametrize(("backend", "device"), RUNS)
def test_a_backend_takes_every_case_or_says_why_not(backend, device, request):
    run = request.node.callspec.id
    for name, case in CASES.items():
        reason = dispatch.BACKENDS[backend].supports(case, torch.device(device))
        assert (reason is None) == takes(run, case), f"{name}: {reason}"


@pytest.mark.interpreter
def test_the_interpreter_declines_bfloat16():
    reason = dispatch.declined(replace(spec(), dtype=BF16), CPU)["triton"]
    assert "bfloat16" in reason


def test_a_cpu_without_triton_is_enough():
    """The package imports, runs and explains itself where triton is not installed."""
    program = """
import sys, importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
sys.modules["triton"] = None
import torch, flashtile
from flashtile import dispatch
q = torch.randn(1, 9, 2, 8, requires_grad=True)
flashtile.flash_attn_func(q, q, q, causal=True).sum().backward()
from flashtile.spec import AttentionSpec
declined = dispatch.declined(AttentionSpec.of(q, q, q, softmax_scale=1.0), torch.device("cuda"))
print(declined["triton"], declined["hopper"], sep=", ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "triton is not installed, it needs triton 3.6 or newer", done.stderr
