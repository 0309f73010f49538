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


def make_inputs(
    spec: AttentionSpec, device: torch.device | str = "cpu", *, seed: int = 0, amplitude: float = 1.0
) -> Inputs:
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


def errors(spec: AttentionSpec, inputs: Inputs, result: Result) -> list[Error]:
    """One `Error` for each output that `result` holds, judged in every row. See `Sample` for large problems."""
    return Sample.of(spec, inputs, size=max(spec.seqlen_q, spec.seqlen_k)).errors(result)


@dataclass(frozen=True)
class Sample:
    """What is right in some rows of a problem too large to materialise: out, lse, dq of the queries `rows` and
    dk, dv of the keys `keys`, in every batch and head.

    Make one with `Sample.of`, then judge any number of results with `errors`.
    """

    rows: Tensor  # (r,) indices of queries
    keys: Tensor  # (c,) indices of keys
    truth: Result
    baseline: Result
    dtype: torch.dtype

    @staticmethod
    def of(spec: AttentionSpec, inputs: Inputs, *, size: int = 128, gradients: bool = True, seed: int = 0) -> Sample:
        """Truth (float64) and baseline (`spec.dtype`) of `size` queries and keys; `gradients` adds dq, dk and dv.

        A query's row needs the keys alone. A key's gradients need lse and delta of every query, which
        are computed a block of rows at a time: memory stays O((Sq + Sk) size), time is one forward pass.
        """
        rows = _stratified(spec.seqlen_q, size, seed).to(inputs.q.device)
        keys = _stratified(spec.seqlen_k, size, seed + 1).to(inputs.q.device)
        truth = _standard_sample(spec, inputs, torch.float64, rows, keys, gradients)
        baseline = _standard_sample(spec, inputs, _baseline_dtype(spec.dtype), rows, keys, gradients)
        lse_baseline = _standard_sample(spec, inputs, torch.float32, rows, keys, gradients=False).lse
        return Sample(rows, keys, truth, baseline._replace(lse=lse_baseline), spec.dtype)

    def errors(self, result: Result) -> list[Error]:
        """One `Error` for each output that the whole `result` holds and the sample knows."""
        out, lse, dq, dk, dv = result
        ours = Result(
            out[:, self.rows],
            None if lse is None else lse[:, :, self.rows],
            None if dq is None else dq[:, self.rows],
            None if dk is None else dk[:, self.keys],
            None if dv is None else dv[:, self.keys],
        )
        return _compare(ours, self.truth, self.baseline, self.dtype)


def _stratified(length: int, size: int, seed: int) -> Tensor:
    """The first and the last of `length` indices and a random one from each of `size` equal ranges, sorted."""
    if length <= size + 2:
        return torch.arange(length)
    generator = torch.Generator().manual_seed(seed)
    edges = torch.linspace(0, length, size + 1, dtype=torch.float64)
    inside = edges[:-1] + torch.rand(size, generator=generator, dtype=torch.float64) * edges.diff()
    return torch.cat([torch.tensor([0, length - 1]), inside.long().clamp(0, length - 1)]).unique()


_BLOCK_SCORES = {"cpu": 1 << 23, "cuda": 1 << 27}  # held at a time while walking over all rows, 8 bytes each


def _standard_sample(
    spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype, rows: Tensor, keys: Tensor, gradients: bool
) -> Result:
    """Standard attention in `dtype`, section 2.2's chain rule written out, for the queries `rows` and keys `keys`."""
    q, k, v, dout, dlse = (x.detach().to(dtype) for x in inputs)
    heads_first = Inputs(  # (B, Hq, S, D): k and v once for each query head
        q.transpose(1, 2),
        k.transpose(1, 2).repeat_interleave(spec.group, 1),
        v.transpose(1, 2).repeat_interleave(spec.group, 1),
        dout.transpose(1, 2),
        dlse,
    )
    out, lse, delta = _standard_rows(spec, heads_first, rows)
    if not gradients:
        return Result(out.transpose(1, 2), lse)
    all_keys = torch.arange(spec.seqlen_k, device=rows.device)
    _, ds = _standard_gradient(spec, heads_first, rows, all_keys, lse, delta)
    dq = ds @ heads_first.k

    step = max(1, _BLOCK_SCORES[rows.device.type] // max(1, spec.batch * spec.heads_q * spec.seqlen_k))
    blocks = torch.arange(spec.seqlen_q, device=rows.device).split(step)
    walked = [_standard_rows(spec, heads_first, block)[1:] for block in blocks]
    every_lse, every_delta = (torch.cat(parts, 2) for parts in zip(*walked, strict=True))
    every_row = torch.arange(spec.seqlen_q, device=rows.device)
    p, ds = _standard_gradient(spec, heads_first, every_row, keys, every_lse, every_delta)
    dk, dv = ds.mT @ heads_first.q, p.mT @ heads_first.dout
    dk, dv = (x.unflatten(1, (spec.heads_k, spec.group)).sum(2) for x in (dk, dv))
    return Result(out.transpose(1, 2), lse, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


def _standard_rows(spec: AttentionSpec, x: Inputs, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, Hq, r, Dv), lse (B, Hq, r) and delta = rowsum(dO o O) of the queries `rows`, which are sorted.

    rowsum(P o dP) is the same number but cancels better where a row sees few keys; the baseline takes the form that
    every flash algorithm must use, or it would call them wrong there.
    """
    ranges = [spec.visible_keys(int(row)) for row in (*rows[:1], *rows[-1:])]
    end = max((end for _, end in ranges), default=0)
    first = min((first for first, _ in ranges), default=end)
    keys = torch.arange(first, end, device=rows.device)
    scores = _standard_scores(spec, x.q[:, :, rows], x.k[:, :, first:end])
    seen = _visible(spec, rows, keys)
    empty = ~seen.any(-1)
    scores = scores.masked_fill_(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse.masked_fill(empty, 0.0)[..., None]).exp_()
    out = p @ x.v[:, :, first:end]
    return out, lse, (x.dout[:, :, rows] * out).sum(-1)


def _standard_gradient(
    spec: AttentionSpec, x: Inputs, rows: Tensor, keys: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """P and dS / dscore of the queries `rows` against `keys`, (B, Hq, r, c) each, from lse and delta of the rows."""
    scores = _standard_scores(spec, x.q[:, :, rows], x.k[:, :, keys])
    unseen = ~_visible(spec, rows, keys)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).masked_fill_(unseen, float("-inf")).exp_()
    ds = x.dout[:, :, rows] @ x.v[:, :, keys].mT
    ds = ds.sub_(delta[..., None]).add_(x.dlse[:, :, rows, None]).mul_(p)
    if spec.softcap > 0:
        ds = ds * (1 - (scores / spec.softcap).square())
    return p, ds.mul_(spec.softmax_scale)


def _standard_scores(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * spec.softmax_scale
    return spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap > 0 else scores


def _visible(spec: AttentionSpec, rows: Tensor, keys: Tensor) -> Tensor:
    """(r, c) bool: True where query rows[i] sees key keys[j]."""
    i, j = rows[:, None] + spec.offset, keys[None, :]
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device)
    if spec.window_left >= 0:
        seen &= j >= i - spec.window_left
    if spec.window_right >= 0:
        seen &= j <= i + spec.window_right
    return seen


def _baseline_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose error stands for PyTorch's own: there is no truth above float64, so float32's is scaled."""
    return torch.float32 if dtype == torch.float64 else dtype


def _compare(result: Result, truth: Result, baseline: Result, dtype: torch.dtype) -> list[Error]:
    """lse is judged as what it is, a float32 output (float64 for float64), the others in `dtype`."""
    found = []
    for name, ours, exact, low in zip(Result._fields, result, truth, baseline, strict=True):
        if ours is None or exact is None or low is None:
            continue
        judged_in = torch.float32 if name == "lse" and dtype != torch.float64 else dtype
        scale = torch.finfo(judged_in).eps / torch.finfo(_baseline_dtype(judged_in)).eps
        found.append(
            Error(name, _largest_error(ours, exact), budget(_largest_error(low, exact) * scale, exact, judged_in))
        )
    return found


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
