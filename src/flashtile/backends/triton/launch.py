"""From a spec and tensors to a running kernel, cheaply: what was compiled for a problem is remembered.

Triton's own call re-derives its specialisation from every argument, 20-40 us each time. Here the first call
of a problem goes that way; later calls of the same spec, strides and pointer alignment go straight to the
compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...arch import arch_of
from ...spec import AttentionSpec
from .config import Role, Tiles, choose

MAX_REMEMBERED = 4096  # problems per kernel; each costs about a kilobyte
LOG2E = 1.4426950408889634
FLOAT32_TINY = torch.finfo(torch.float32).tiny
NOT_SPECIALIZED = ("heads_q", "heads_k", "group", "window_left", "window_right")  # a value of 1 or 16 makes no variant


@dataclass(frozen=True)
class Launch:
    """One launch: its grid, and the arguments after the tensors in the kernel's order."""

    grid: int
    scalars: tuple[int | float, ...]
    constants: dict[str, Any]

    @property
    def arguments(self) -> tuple:
        return (*self.scalars, *self.constants.values())


class Kernel:
    """A Triton kernel together with the function that derives its launch from (spec, tiles, *tensors)."""

    def __init__(self, role: Role, fn: Any, describe: Callable[..., Launch]) -> None:
        self.role = role
        self.fn = fn
        self.describe = describe
        self._compiled: dict[tuple, tuple[Callable[..., None], tuple]] = {}

    def __call__(self, spec: AttentionSpec, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> None:
        """Runs on the current stream of the inputs' device; does nothing for an empty grid.

        `outputs` are fresh, their layouts a function of the spec and the inputs' layouts.
        """
        device = inputs[0].device  # type: ignore[union-attr]
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(spec, device, inputs, outputs)
        return self._run(spec, device, inputs, outputs)

    def _run(self, spec: AttentionSpec, device: torch.device, inputs: tuple, outputs: tuple) -> None:
        key = (spec, device.index, *[x if x is None else (x.stride(), x.data_ptr() & 15) for x in inputs])
        known = self._compiled.get(key)
        if known is not None:
            run, arguments = known
            run(*inputs, *outputs, *arguments, stream=_current_stream(device.index))
            return
        arch = arch_of(device)
        assert arch is not None, "a tensor on a GPU, and no GPU"
        tiles = choose(self.role, spec, arch)
        launch = self.describe(spec, tiles, *inputs, *outputs)
        if launch.grid == 0:
            return
        compiled = self.fn[(launch.grid,)](*inputs, *outputs, *launch.arguments, **tiles.options)
        if compiled is not None:  # the interpreter compiles nothing
            if len(self._compiled) >= MAX_REMEMBERED:
                self._compiled.clear()
            self._compiled[key] = compiled[(launch.grid, 1, 1)], launch.arguments


def _current_stream(device_index: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device_index)


def dense_rows(x: Tensor) -> Tensor:
    """x itself if its last dimension has stride 1, else a contiguous copy: kernels read any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, sequence and head."""
    return x.stride(0), x.stride(1), x.stride(2)


def exact(spec: AttentionSpec) -> bool:
    """Whether kernels scale q before the product and shift scores before anything else; capped scores are small."""
    return spec.dtype == torch.float32 and spec.softcap == 0


def score_units(spec: AttentionSpec) -> tuple[float, float]:
    """(unit, cap_in): scores in base 2 are s * unit, where s is q.k, with a soft cap tanh(q.k * cap_in)."""
    if spec.softcap > 0:
        return spec.softcap * LOG2E, spec.softmax_scale / spec.softcap
    return (LOG2E if exact(spec) else spec.softmax_scale * LOG2E), 0.0


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
