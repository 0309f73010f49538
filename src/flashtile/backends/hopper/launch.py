"""From a spec and tensors to a running Hopper kernel: tiles, TMA descriptors, schedule and arguments."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...spec import AttentionSpec
from .. import Forward
from ..launcher import Launcher, StreamLaunch, forward_pass, forward_pass_like, prepared
from . import config, ptxas
from .forward import forward_kernel
from .schedule import Tile, schedule

LOG2E = 1.4426950408889634
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # triton 3.10 fuses no longer unless told to


Box = tuple[int, int, int]
"""(rows, heads, dims) of what is copied at a time."""


@functools.cache
def layout(box: Box, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block (1, rows, heads, dims) lies in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, *box], element)


def describe(x: Tensor, box: Box) -> TensorDescriptor:
    """Blocks (1, rows, heads, dims) of x (B, S, H, D): what lies outside is read as zero and not written."""
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, *box], layout(box, x.dtype))


def table(spec: AttentionSpec, tiles: config.Tiles, programs: int) -> Tensor:
    """(programs, rounds) int64: how many tiles a program has, then (batch * Hq / pack + head) << 32 | m_block each."""
    pack = config.heads_per_tile(spec, tiles)
    packed = replace(spec, heads_q=spec.heads_q // pack)
    return entries(schedule(packed, tiles.rows // pack, tiles.warpgroups, tiles.tile_n, programs))


def programs_on(device: torch.device) -> int:
    """How many persistent programs run on a GPU: one on each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def entries(lists: list[list[Tile]]) -> Tensor:
    """(programs, rounds) int64: how many tiles a program has, then head << 32 | m_block each."""
    rounds = 2 + max(map(len, lists))  # a program reads one entry past its last
    rows = [[len(x), *(head << 32 | m_block for head, m_block in x), *[0] * (rounds - 1 - len(x))] for x in lists]
    return torch.tensor(rows, dtype=torch.int64)


class ForwardKernel(Launcher):
    """`forward_kernel` with its tiles, descriptors and schedule."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> StreamLaunch:
        *described, lse = tensors  # q, k, v, out
        tiles = config.choose(spec)
        tiles_of = table(spec, tiles, programs_on(lse.device)).to(lse.device)
        descriptors = map(describe, described, boxes(spec, tiles))
        arguments = (*descriptors, lse, tiles_of, *scalars(spec, tiles, rounds=tiles_of.shape[1]))
        with ptxas.earlier_ptxas(OPTIONS, tiles.earlier_ptxas) as options:
            return prepared(forward_kernel, lse.device, len(tiles_of), arguments, len(tensors), options)


def steady(spec: AttentionSpec) -> bool:
    """Whether blocks without a mask take the maximum as it stands: float16 has no room for a P that grows past 1."""
    return spec.dtype == torch.bfloat16


def scalars(spec: AttentionSpec, tiles: config.Tiles, rounds: int) -> tuple:
    """The arguments of `forward_kernel` after the tensors."""
    natural, cap_in = spec.score_factors
    return (
        spec.seqlen_q, spec.seqlen_k, spec.heads_q, spec.group, spec.window_left, spec.window_right,
        rounds, natural * LOG2E, natural, cap_in,
        tiles.warpgroups, tiles.tile_m, tiles.tile_n, tiles.q_stages, tiles.stages, tiles.parts, tiles.parts_v,
        spec.window_left >= 0, spec.window_right >= 0, spec.softcap > 0, steady(spec),
        tiles.tails and spec.window_left < 0 and spec.window_right < 0, tiles.flat, tiles.wait_half_way, tiles.q_kept,
        config.heads_per_tile(spec, tiles), tiles.compute_registers, tiles.load_registers,
    )  # fmt: skip


def boxes(spec: AttentionSpec, tiles: config.Tiles) -> tuple[Box, ...]:
    """The blocks in which q, k, v and out are copied."""
    pack = config.heads_per_tile(spec, tiles)
    q, k = (tiles.tile_m // pack, pack), (tiles.tile_n, 1)
    dims, out_dims = tiles.head_dim // tiles.parts, tiles.head_dim_v // tiles.out_parts
    return (*q, dims), (*k, dims), (*k, tiles.head_dim_v // tiles.parts_v), (*q, out_dims)


FORWARD = ForwardKernel()


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q and lse (B, Hq, Sq) in float32."""
    return forward_pass(FORWARD, spec, q, k, v)


def forward_like(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """`forward` for tensors that lie like these."""
    return forward_pass_like(FORWARD, spec, q, k, v)
