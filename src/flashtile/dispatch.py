"""Which backend runs a spec on a device: the first in `BACKENDS` that supports it, or the one asked for."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .backends import cpu, reference, triton
from .spec import AttentionSpec


class Backend(Protocol):
    """What a backend module offers; see flashtile.backends."""

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None: ...

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        spec: AttentionSpec,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


BACKENDS: dict[str, Backend] = {"triton": triton, "cpu": cpu, "reference": reference}
"""Fastest first: the order in which a call without `backend=` tries them."""


def choose(spec: AttentionSpec, device: torch.device, backend: str | None = None) -> Backend:
    """The backend module for `spec` on `device`; ValueError where the one asked for cannot take it."""
    if backend is not None:
        reason = BACKENDS[backend].supports(spec, device)
        if reason is not None:
            raise ValueError(f"backend: {backend!r} cannot run this call: {reason}")
        return BACKENDS[backend]
    for candidate in BACKENDS.values():
        if candidate.supports(spec, device) is None:
            return candidate
    raise AssertionError("the reference backend takes every spec")


def check_backend(backend: str | None) -> None:
    """ValueError unless `backend` is None or the name of a backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend: got {backend!r}; want one of {', '.join(map(repr, BACKENDS))}, or None to pick by device"
        )


def declined(spec: AttentionSpec, device: torch.device) -> dict[str, str | None]:
    """For every backend, in the order they are tried: None, or the reason why it declines."""
    return {name: backend.supports(spec, device) for name, backend in BACKENDS.items()}
