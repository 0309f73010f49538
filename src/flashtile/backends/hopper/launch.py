"""From a spec and tensors to a running Hopper kernel: schedule, TMA descriptors, what was compiled for a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...spec import AttentionSpec
from . import config
from .forward import forward_kernel
from .schedule import schedule

LOG2E = 1.4426950408889634
MAX_REMEMBERED = 4096  # problems, each with its compiled kernel and its schedule on the device


@functools.cache
def layout(rows: int, dims: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block (1, rows, 1, dims) lies in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, dims], element)


def describe(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """Blocks (1, rows, 1, dims) of x (B, S, H, D): what lies outside is read as zero and not written."""
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    rows, dims = box
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, dims], layout(rows, dims, x.dtype))


def _like(known: TensorDescriptor, x: Tensor | None) -> TensorDescriptor:
    """The descriptor of another tensor that lies like one described before, without the checks."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(known.__dict__, base=x)
    return descriptor


def _table(spec: AttentionSpec, tiles: config.Tiles, device: torch.device) -> Tensor:
    """(programs, rounds) int64: how many tiles a program has, then (batch * Hq + head) << 32 | m_block each."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    lists = schedule(spec, tiles.rows, tiles.tile_n, programs)
    rounds = 2 + max(map(len, lists))  # a program reads one entry past its last
    rows = [[len(x), *(head << 32 | m_block for head, m_block in x), *[0] * (rounds - 1 - len(x))] for x in lists]
    return torch.tensor(rows, dtype=torch.int64).to(device)


@dataclass(frozen=True)
class _Known:
    """What a problem whose tensors lie alike runs: compiled kernel, descriptors without a tensor, other arguments."""

    run: Callable[..., None]
    descriptors: tuple[TensorDescriptor, ...]
    table: Tensor
    arguments: tuple


class PersistentKernel:
    """A kernel with what was compiled and scheduled for each problem."""

    def __init__(self) -> None:
        self._known: dict[tuple, _Known] = {}

    def _prepare(self, spec: AttentionSpec, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple, Tensor, tuple]:
        """The kernel, descriptors of `tensors`, the schedule, and the arguments after it."""
        raise NotImplementedError

    def _launch(self, spec: AttentionSpec, tensors: tuple[Tensor, ...], free: int, pointer: Tensor) -> None:
        """Runs on the current stream of the tensors' device; the layouts of the first `free` are the caller's."""
        device = pointer.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(spec, device, tensors, free, pointer)
        return self._run(spec, device, tensors, free, pointer)

    def _run(self, spec: AttentionSpec, device: int, tensors: tuple[Tensor, ...], free: int, pointer: Tensor) -> None:
        key = (spec, device, *[x.stride() for x in tensors[:free]])
        known = self._known.get(key)
        if known is not None:
            arguments = (*map(_like, known.descriptors, tensors), pointer, known.table, *known.arguments)
            stream = triton.runtime.driver.active.get_current_stream(device)
            known.run(*arguments, stream=stream)
            return
        fn, descriptors, table, others = self._prepare(spec, tensors)
        compiled = fn[(len(table),)](*descriptors, pointer, table, *others, num_warps=4)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        without = tuple(_like(descriptor, None) for descriptor in descriptors)
        self._known[key] = _Known(compiled[(len(table), 1, 1)], without, table, others)


class ForwardKernel(PersistentKernel):
    """`forward_kernel`."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """out and lse are fresh and contiguous."""
        self._launch(spec, (q, k, v, out), 3, lse)

    def _prepare(self, spec: AttentionSpec, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple, Tensor, tuple]:
        tiles = config.choose(spec)
        table = _table(spec, tiles, tensors[0].device)
        descriptors = tuple(map(describe, tensors, boxes(tiles)))
        return forward_kernel, descriptors, table, scalars(spec, tiles, rounds=table.shape[1])


def score_units(spec: AttentionSpec) -> tuple[float, float]:
    """(unit, cap_in): scores in base 2 are s * unit, where s is q.k, with a soft cap tanh(q.k * cap_in)."""
    if spec.softcap > 0:
        return spec.softcap * LOG2E, spec.softmax_scale / spec.softcap
    return spec.softmax_scale * LOG2E, 0.0


def scalars(spec: AttentionSpec, tiles: config.Tiles, rounds: int) -> tuple:
    """The arguments of `forward_kernel` after the tensors."""
    return (
        spec.seqlen_q, spec.seqlen_k, spec.heads_q, spec.group, spec.window_left, spec.window_right,
        rounds, *score_units(spec), tiles.warpgroups, tiles.tile_m, tiles.tile_n, tiles.q_stages, tiles.stages,
        spec.window_left >= 0, spec.window_right >= 0, spec.softcap > 0,
        tiles.compute_registers, tiles.load_registers,
    )  # fmt: skip


def boxes(tiles: config.Tiles) -> tuple[tuple[int, int], ...]:
    """(rows, dims) of the blocks in which q, k, v and out are copied."""
    q, k, out_dims = (tiles.tile_m, tiles.head_dim), (tiles.tile_n, tiles.head_dim), tiles.head_dim // tiles.out_parts
    return q, k, k, (tiles.tile_m, out_dims)


FORWARD = ForwardKernel()


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q and lse (B, Hq, Sq) in float32."""
    out = q.new_empty((spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v))
    lse = q.new_empty((spec.batch, spec.heads_q, spec.seqlen_q), dtype=torch.float32)
    FORWARD(spec, q, k, v, out, lse)
    return out, lse
