"""From a spec and tensors to a running kernel: tiles, grid and arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...arch import arch_of
from ...spec import AttentionSpec
from ..launcher import KernelCall, Launcher, Run, prepared
from .config import Role, Tiles, choose

LOG2E = 1.4426950408889634
FLOAT32_TINY = torch.finfo(torch.float32).tiny
# a value of 1 or 16 makes no variant
NOT_SPECIALIZED = ("programs_before", "heads_q", "heads_k", "batch", "group", "window_left", "window_right")


@dataclass(frozen=True)
class Launch:
    """One launch: its grid, and the arguments after the tensors in the kernel's order."""

    grid: int
    scalars: tuple[int | float | None, ...]
    constants: dict[str, Any]

    @property
    def arguments(self) -> tuple:
        return (*self.scalars, *self.constants.values())


class Kernel(Launcher):
    """A Triton kernel together with the function that derives its launch from (spec, tiles, *tensors)."""

    def __init__(self, role: Role, fn: Any, describe: Callable[..., Launch]) -> None:
        super().__init__()
        self.role = role
        self.fn = fn
        self.describe = describe

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        device = tensors[-1].device
        arch = arch_of(device)
        assert arch is not None, "a tensor on a GPU, and no GPU"
        tiles = choose(self.role, spec, arch)
        launch = self.describe(spec, tiles, *tensors)
        arguments = (*tensors, *launch.arguments)
        return prepared(device, KernelCall(self.fn, launch.grid, arguments, range(len(tensors)), tiles.options))


def dense_rows(x: Tensor) -> Tensor:
    """x itself if its last dimension has stride 1, else a contiguous copy: kernels read any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def exact(spec: AttentionSpec) -> bool:
    """Whether kernels scale q before the product and shift scores before anything else; capped scores are small."""
    return spec.dtype == torch.float32 and spec.softcap == 0


def score_units(spec: AttentionSpec) -> tuple[float, float]:
    """(unit, cap_in): scores in base 2 are s * unit, where s is q.k, with a soft cap tanh(q.k * cap_in)."""
    factor, cap_in = spec.score_factors
    return (LOG2E if exact(spec) else factor * LOG2E), cap_in


def constants(spec: AttentionSpec, tiles: Tiles) -> dict[str, Any]:
    """The compile-time arguments every kernel has: each combination is a variant of its own."""
    return {
        "D": spec.head_dim,
        "DV": spec.head_dim_v,
        # the powers of two, at least the matrix units' 16, that hold them
        "TILE_D": max(16, triton.next_power_of_2(spec.head_dim)),
        "TILE_DV": max(16, triton.next_power_of_2(spec.head_dim_v)),
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "HAS_LEFT": spec.window_left >= 0,
        "HAS_RIGHT": spec.window_right >= 0,
        "SOFTCAP": spec.softcap > 0,
        "EXACT": exact(spec),
    }
