"""The problems every backend must solve, and the backends that run here."""

from __future__ import annotations

import pytest
import torch

from flashtile.spec import AttentionSpec

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

RUNS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted", marks=pytest.mark.interpreter),
    pytest.param("triton", "cuda", id="triton-gpu", marks=pytest.mark.gpu),
    pytest.param("hopper", "cuda", id="hopper", marks=[pytest.mark.gpu, pytest.mark.hopper]),
]
"""(backend, device)"""

FLOAT32_RUNS = [run for run in RUNS if run.id != "hopper"]
"""Those that take float32, in which most behaviour is tested."""


def spec(
    seqlens=(64, 64), heads=(2, 2), dims=(64, 64), dtype=FLOAT, *, batch=2, scale=None, left=-1, right=-1, softcap=0.0
) -> AttentionSpec:
    """A spec from pairs: (Sq, Sk), (Hq, Hk), (D, Dv)."""
    scale = dims[0] ** -0.5 if scale is None else scale
    return AttentionSpec(batch, *seqlens, *heads, *dims, dtype, scale, left, right, softcap)


CASES = {
    # dtypes
    "float16": spec(dtype=HALF),
    "bfloat16": spec(dtype=BF16),
    "float32": spec(dtype=FLOAT),
    "float64": spec(dtype=DOUBLE),
    # masks
    "causal": spec((100, 100), right=0),
    "causal-bf16": spec((200, 200), dtype=BF16, right=0),
    "causal-more-keys": spec((33, 90), right=0),
    "causal-more-queries": spec((90, 33), right=0),
    "window": spec((150, 150), left=20, right=7),
    "window-left-only": spec((100, 130), left=9),
    "window-right-only": spec((130, 100), right=9),
    "window-of-one-key": spec((70, 70), left=0, right=0),
    "window-rows-without-keys": spec((120, 40), left=3, right=0),
    # lengths
    "one-query": spec((1, 100)),
    "few-queries": spec((3, 500), (8, 2), dims=(64, 64), dtype=HALF, right=0),
    "few-queries-bf16": spec((16, 700), (4, 2), dims=(128, 128), dtype=BF16, right=0),
    "few-queries-float32": spec((5, 300), (4, 4), dims=(40, 24), right=0),
    "few-queries-window": spec((4, 400), (8, 1), dims=(96, 96), dtype=HALF, left=90, right=3),
    "few-queries-softcap": spec((2, 300), (4, 2), dims=(64, 64), dtype=HALF, softcap=3.0, scale=-0.4),
    "few-tiles": spec((70, 1500), (4, 2), dims=(64, 64), dtype=BF16, batch=1, right=0),
    "few-tiles-D-256": spec((30, 1100), (2, 1), dims=(256, 256), dtype=BF16, batch=1),
    "one-key": spec((100, 1), right=0),
    "one-pair": spec((1, 1)),
    "one-key-float16": spec((100, 1), dtype=HALF, right=0),
    "one-pair-float16": spec((1, 1), dtype=HALF),
    "odd-lengths": spec((67, 131), dtype=HALF),
    "long": spec((300, 1000), (1, 1), dtype=BF16, batch=1),
    "one-key-past-a-block": spec((300, 257), (4, 2), dtype=BF16),
    "a-few-keys-past-a-block": spec((200, 400), (2, 1), (128, 128), HALF, left=200),
    "empty-batch": spec(batch=0),
    "no-queries": spec((0, 20)),
    "no-keys": spec((20, 0)),
    # heads
    "gqa": spec((80, 80), (6, 2), dtype=HALF, right=0),
    "mqa": spec((40, 100), (4, 1), dtype=BF16),
    "gqa-window": spec((100, 70), (4, 2), left=11, right=30),
    # head dims
    "D-1": spec(dims=(1, 1)),
    "D-7-Dv-3": spec(dims=(7, 3), right=0),
    "D-40": spec(dims=(40, 40), dtype=HALF),
    "D-96": spec(dims=(96, 96), dtype=BF16, right=0),
    "D-128": spec(dims=(128, 128), dtype=BF16, right=0),
    "D-80-Dv-72": spec(dims=(80, 72), dtype=BF16),
    "D-192": spec(dims=(192, 192), dtype=BF16, right=0),
    "D-192-Dv-128": spec(dims=(192, 128), dtype=BF16),
    "D-64-Dv-256": spec(dims=(64, 256), dtype=HALF),
    "D-256": spec(dims=(256, 256), dtype=BF16, right=0),
    "D-256-float32": spec((40, 40), dims=(256, 256)),
    # numerics
    "scale": spec(scale=0.7, dtype=HALF),
    "scale-negative": spec(scale=-0.3, right=0),
    "scale-zero": spec(scale=0.0, left=30),
    "softcap": spec(softcap=2.0, right=0),
    "softcap-bf16": spec(softcap=15.0, dtype=BF16),
    "softcap-negative-scale": spec(softcap=1.5, scale=-0.4),
}

AMPLITUDES = {
    # scores of about +-10^4: one key takes all of the softmax
    "hostile-scores": (spec((90, 90), scale=1.0, right=0), 1000.0),
    "hostile-scores-bf16": (spec((90, 90), dtype=BF16, scale=1.0), 1000.0),
}

EVERY_CASE = {name: (case, 1.0) for name, case in CASES.items()} | AMPLITUDES
"""name: (spec, amplitude of q)"""


def takes(run: str, case: AttentionSpec) -> bool:
    """Whether a backend computes a case at all; test_dispatch tests that it says so."""
    if run == "hopper":
        dims = (case.head_dim, case.head_dim_v)
        shapes = not any(dim % 8 for dim in dims) and min(case.seqlen_q, case.seqlen_k) > 0
        return case.dtype in (HALF, BF16) and shapes and case.batch > 0 and case.softmax_scale > 0
    unsupported = {"triton-interpreted": (BF16, DOUBLE), "triton-gpu": (DOUBLE,)}
    return case.dtype not in unsupported.get(run, ())


def on_every_backend(cases: dict[str, tuple]) -> list:
    """pytest parameters (backend, device, *case) for all pairs of a backend and a case, a spec first, that it takes."""
    return [
        pytest.param(
            *run.values,
            *case,
            id=f"{run.id}-{name}",
            marks=run.marks,
        )
        for run in RUNS
        for name, case in cases.items()
        if takes(run.id, case[0])
    ]
