"""Is every backend right on this machine? Errors against float64 over problems that reach every feature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .. import dispatch, ops
from ..spec import AttentionSpec
from ..testing import Error, Inputs, Result, Sample, make_inputs


def _problem(shape: tuple[int, ...], **features) -> AttentionSpec:
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v = shape
    scale = head_dim**-0.5
    sizes = (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v)
    return AttentionSpec(*sizes, dtype=torch.float32, softmax_scale=scale, **features)


PROBLEMS: dict[str, AttentionSpec] = {
    "full": _problem((2, 256, 256, 4, 4, 64, 64)),
    "causal": _problem((1, 512, 512, 4, 4, 128, 128), window_right=0),
    "causal, ragged, grouped heads": _problem((2, 300, 300, 4, 2, 64, 64), window_right=0),
    "causal, more keys, one key head": _problem((1, 70, 333, 8, 1, 128, 128), window_right=0),
    "causal, more queries: rows without keys": _problem((1, 200, 77, 2, 1, 64, 64), window_right=0),
    "window of 50 and 20 keys": _problem((1, 300, 300, 2, 2, 96, 96), window_left=50, window_right=20),
    "softcap": _problem((1, 128, 256, 2, 2, 32, 32), softcap=5.0),
    "odd dims, D and Dv differ": _problem((1, 130, 130, 2, 2, 40, 72), window_right=0),
    "D = 256": _problem((1, 192, 192, 2, 2, 256, 256), window_right=0),
    "one query": _problem((2, 1, 500, 4, 2, 64, 64), window_right=0),
    "deterministic": _problem((1, 256, 256, 4, 2, 64, 64), window_right=0, deterministic=True),
}
"""By what they exercise; each is run in every dtype that a backend takes."""


@dataclass(frozen=True)
class Verdict:
    """One backend on one problem: the errors of out, lse, dq, dk and dv, or why there is no result."""

    problem: str
    dtype: torch.dtype
    backend: str
    errors: tuple[Error, ...] = ()
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and all(error.ok for error in self.errors)


def verify(device: torch.device) -> Iterator[Verdict]:
    """A verdict for every problem, dtype and backend that supports them on `device`."""
    for problem, any_spec in PROBLEMS.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            spec = replace(any_spec, dtype=dtype)
            backends = [name for name, x in dispatch.BACKENDS.items() if x.supports(spec, device) is None]
            inputs = make_inputs(spec, device)
            sample = Sample.of(spec, inputs, size=max(spec.seqlen_q, spec.seqlen_k))  # all of it
            for backend in backends:
                yield _judge(problem, spec, backend, inputs, sample)


def _judge(problem: str, spec: AttentionSpec, backend: str, inputs: Inputs, sample: Sample) -> Verdict:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    s = spec
    settings = (s.softmax_scale, s.window_left, s.window_right, s.softcap, s.deterministic, backend)
    try:
        out, lse = ops.attention(q, k, v, *settings)
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    except Exception as error:  # a backend that breaks is a verdict too
        return Verdict(problem, spec.dtype, backend, failure=f"{type(error).__name__}: {error}")
    result = Result(out.detach(), lse.detach(), *grads)
    return Verdict(problem, spec.dtype, backend, tuple(sample.errors(result)))
