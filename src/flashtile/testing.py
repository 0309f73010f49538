"""Inputs and error budgets: how tests, benchmarks and users decide that a result is right.

A result is right when its largest error against float64 is at most twice the largest error that standard
attention makes in the same dtype with PyTorch's own operations, plus one rounding of the largest value.
No tolerance is picked by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import reference
from .spec import AttentionSpec


class Result(NamedTuple):
    """What one forward and backward pass gives; None where it was not computed."""

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Inputs(NamedTuple):
    """One problem: q, k, v and the gradients that flow into out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


@dataclass(frozen=True)
class Error:
    """The largest error of one output against float64, and the largest one that is right."""

    name: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # a NaN error is not

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e} (budget {self.budget:.1e})"


def make_inputs(spec: AttentionSpec, device: torch.device | str = "cpu", *, seed: int = 0, amplitude: float = 1.0) -> Inputs:
    """Random normal q, k, v, dout and dlse for `spec`; `amplitude` multiplies q, and with it the scores."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    s = spec
    return Inputs(
        (normal(s.batch, s.seqlen_q, s.heads_q, s.head_dim) * amplitude).to(s.dtype),
        normal(s.batch, s.seqlen_k, s.heads_k, s.head_dim).to(s.dtype),
        normal(s.batch, s.seqlen_k, s.heads_k, s.head_dim_v).to(s.dtype),
        normal(s.batch, s.seqlen_q, s.heads_q, s.head_dim_v).to(s.dtype),
        normal(s.batch, s.heads_q, s.seqlen_q).to(s.lse_dtype),
    )


def standard_attention(spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype) -> Result:
    """Standard attention in `dtype`, its gradients by autograd: float64 is the truth, `spec.dtype` the baseline."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs[:3])
    out, lse = reference.attend(spec, q, k, v)
    # lse is -inf in rows without keys: leave those out of the scalar, their gradient is zero
    loss = (out * inputs.dout.to(dtype)).sum() + (lse * inputs.dlse.to(dtype)).masked_fill(lse.isinf(), 0).sum()
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v)))


def errors(spec: AttentionSpec, inputs: Inputs, result: Result) -> list[Error]:
    """One `Error` for each output that `result` holds.

    Both judges materialise S, so this is for small problems; see `errors_of_rows` for large ones.
    """
    truth = standard_attention(spec, inputs, torch.float64)
    baseline = standard_attention(spec, inputs, spec.dtype)
    return [
        Error(name, _largest_error(ours, exact), budget(_largest_error(low, exact), exact, spec.dtype))
        for name, ours, exact, low in zip(Result._fields, result, truth, baseline, strict=True)
        if ours is not None
    ]


def budget(baseline_error: float, exact: Tensor, dtype: torch.dtype) -> float:
    """Twice the baseline's error plus one rounding of the largest value, in `dtype`."""
    finite = exact[exact.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return 2 * baseline_error + torch.finfo(dtype).eps * largest


def _largest_error(ours: Tensor, exact: Tensor) -> float:
    """max |ours - exact|, 0 where both are the same infinity, NaN where only one is finite."""
    if exact.numel() == 0:
        return 0.0
    ours = ours.to(exact.dtype)
    return torch.where(ours == exact, 0.0, (ours - exact).abs()).max().item()
