"""The portable backward pass in one launch and in two: which it is, and that gradients are right either way."""

from __future__ import annotations

import importlib

import pytest
import torch
from cases import BF16, FLOAT, HALF, spec

from flashtile.backends import reference
from flashtile.backends.triton import config
from flashtile.testing import Result, errors, make_inputs

backward = importlib.import_module("flashtile.backends.triton.backward")  # the package's name for it is the function's

CASES = {
    "full": spec((70, 50), (2, 2), (64, 64), HALF, batch=2),
    "causal, float32": spec((60, 80), (2, 1), (32, 48), FLOAT, right=0),
    "group": spec((33, 70), (6, 2), (64, 64), HALF, batch=1, right=0),
    "window": spec((90, 90), (2, 2), (72, 40), HALF, batch=1, left=20, right=5),
    "softcap": spec((50, 60), (2, 1), (64, 64), HALF, batch=1, softcap=4.0),
    "rows without keys": spec((80, 30), (1, 1), (64, 64), FLOAT, right=0),
    "one of each": spec((1, 1), (2, 1), (64, 64), HALF),
}


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [0, 10_000], ids=["two launches", "one launch"])
def test_gradients_are_right(name, programs, device, monkeypatch):
    monkeypatch.setattr(backward, "programs_at_once", lambda device: programs)
    monkeypatch.setattr(backward, "BACKWARD", backward.BackwardPass())  # which remembers no launch
    case = CASES[name]
    q, k, v, dout, dlse = inputs = make_inputs(case, device)
    out, lse = reference.forward(case, q, k, v)
    found = []
    for given in (dlse, None):
        dq, dk, dv = backward.backward(case, dout, given, q, k, v, out, lse)
        expected = inputs._replace(dlse=torch.zeros_like(dlse) if given is None else dlse)
        found += [str(e) for e in errors(case, expected, Result(out, lse, dq, dk, dv)) if not e.ok]
    assert found == []


def test_few_programs_are_one_launch(monkeypatch):
    monkeypatch.setattr(backward, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(backward, "programs_at_once", lambda device: 264)
    of = {
        seqlen: backward.at_once(spec((seqlen, seqlen), (8, 8), (64, 64), BF16, batch=1), torch.device("cuda"))
        for seqlen in (128, 512, 1024)
    }
    assert of == {128: True, 512: True, 1024: False}


def test_not_every_architecture_has_that_kernel(monkeypatch):
    monkeypatch.setattr(backward, "arch_of", lambda device: "sm_80")
    assert not backward.at_once(spec((128, 128), (1, 1), (64, 64), BF16, batch=1), torch.device("cuda"))
    assert config.has_tiles("dq", spec(dtype=BF16), "sm_80")
