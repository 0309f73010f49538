"""Which backend runs a spec on a device: the first in `BACKENDS` that supports it, or the one asked for."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .backends import Backward, Forward, cpu, hopper, reference, triton
from .cache import CachedCall
from .spec import AttentionSpec


class Backend(Protocol):
    """What every backend module offers; see flashtile.backends for what some offer besides."""

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None: ...

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


BACKENDS: dict[str, Backend] = {"hopper": hopper, "triton": triton, "cpu": cpu, "reference": reference}
"""Fastest first: the order in which a call without `backend=` tries them."""


class Choice(NamedTuple):
    """The backends of one problem. out and lse mean the same to all, so that passes may run on different ones."""

    fastest: Backend  # for the forward pass, where it can read the tensors as they lie
    otherwise: Backend | None  # where it cannot; None: that is an error
    differentiable: Any  # for the backward pass, where it can read them: a Backend that has one

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse); ValueError where the backend asked for cannot read q, k or v as they lie in memory."""
        return self._reading(q, k, v).forward(spec, q, k, v)

    def forward_like(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward:
        """`forward` for tensors of the same strides, and of the same alignment to 16 bytes."""
        return _like(self._reading(q, k, v), "forward", spec, q, k, v)

    def _reading(self, q: Tensor, k: Tensor, v: Tensor) -> Backend:
        backend = self.fastest
        if (refusal := getattr(backend, "refusal", None)) and (reason := refusal(q, k, v)):
            if self.otherwise is None:
                raise ValueError(f"backend: {name_of(backend)!r} cannot run this call: {reason}")
            return self.otherwise
        return backend

    def backward(
        self, spec: AttentionSpec, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dq, dk, dv)."""
        return self.backward_of(q, k, v).backward(spec, dout, dlse, q, k, v, out, lse)

    def backward_like(
        self, spec: AttentionSpec, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor,
    ) -> Backward:  # fmt: skip
        """`backward` for tensors of the same strides, and of the same alignment to 16 bytes."""
        return _like(self.backward_of(q, k, v), "backward", spec, dout, dlse, q, k, v, out, lse)

    def backward_of(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The backend for the backward pass of q, k and v as they lie in memory."""
        refusal = getattr(self.differentiable, "refusal", None)
        if self.otherwise is not None and refusal and refusal(q, k, v):
            return self.otherwise
        return self.differentiable


def _like(backend: Backend, name: str, spec: AttentionSpec, *tensors: Tensor | None) -> Any:
    """A pass of a backend, by its name, for a spec and for tensors that lie like these."""
    prepare = getattr(backend, f"{name}_like", None)
    prepared = None if prepare is None else prepare(spec, *tensors)
    return partial(getattr(backend, name), spec) if prepared is None else prepared


def choose(spec: AttentionSpec, device: torch.device, backend: str | None = None) -> Choice:
    """The backends for `spec` on `device`; ValueError where the one asked for cannot take it.

    By itself a backend may pass on what it could take; one without a backward pass leaves that to the next.
    """
    if backend is not None and (reason := BACKENDS[backend].supports(spec, device)) is not None:
        raise ValueError(f"backend: {backend!r} cannot run this call: {reason}")
    able = [BACKENDS[name] for name, reason in declined(spec, device).items() if reason is None]
    fastest = able[0] if backend is None else BACKENDS[backend]
    otherwise = next(candidate for candidate in able if not hasattr(candidate, "refusal")) if backend is None else None
    differentiable = next(candidate for candidate in (fastest, *able) if differentiates(candidate, spec))
    return Choice(fastest, otherwise, differentiable)


def decoder(call: CachedCall, num_splits: int, device: torch.device, backend: str | None = None) -> Any:
    """The backend for a call over a cache as a whole, a Backend that has `attend_like`; None where none takes it."""

    def takes(candidate: Any) -> bool:
        if not hasattr(candidate, "attend_like") or candidate.supports(call.spec, device) is not None:
            return False
        passes_on = getattr(candidate, "passes_on_cached", None)
        willing = backend is not None or passes_on is None or passes_on(call, num_splits) is None
        return willing and candidate.passes_over(call) is None

    return next(filter(takes, BACKENDS.values() if backend is None else [BACKENDS[backend]]), None)


def with_alibi(backend: str | None) -> Any:
    """The backend for one sequence's forward pass with ALiBi; ValueError where another was asked for."""
    if backend not in (None, "reference"):
        raise ValueError(f"backend: {backend!r} cannot run this call: it has no alibi_slopes there")
    return reference


def differentiates(backend: Backend, spec: AttentionSpec) -> bool:
    """Whether the backward pass of a spec that `backend` supports is its own."""
    leaves_backward = getattr(backend, "leaves_backward", None)
    return hasattr(backend, "backward") and (leaves_backward is None or leaves_backward(spec) is None)


def name_of(backend: Backend) -> str:
    """The name by which `backend=` asks for a backend."""
    return next(name for name, module in BACKENDS.items() if module is backend)


def check_backend(backend: str | None) -> None:
    """ValueError unless `backend` is None or the name of a backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend: got {backend!r}; want one of {', '.join(map(repr, BACKENDS))}, or None to pick by device"
        )


def declined(spec: AttentionSpec, device: torch.device) -> dict[str, str | None]:
    """For every backend, in the order they are tried: None, or why a call without `backend=` does not go to it."""

    def reason(backend: Backend) -> str | None:
        passes_on = getattr(backend, "passes_on", None)
        return backend.supports(spec, device) or (None if passes_on is None else passes_on(spec, device))

    return {name: reason(backend) for name, backend in BACKENDS.items()}
