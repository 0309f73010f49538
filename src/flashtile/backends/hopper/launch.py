"""From a spec and tensors to a running Hopper kernel: tiles, TMA descriptors, schedule and arguments."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...spec import AttentionSpec
from ..launcher import KernelCall, Launcher, Run, multiprocessors_of, prepared
from . import compiling, config
from .forward import forward_kernel
from .forward_pieces import merge_kernel
from .forward_problem import PIECE_BITS, TAIL
from .schedule import Piece, Tile, schedule, with_pieces

LOG2E = 1.4426950408889634
# Rows of a tile that a program merges, and pieces at once, about as many as a tile has: 16 of two rows, where those are
# so many, four of four rows in most calls. One sequence of 16 queries and 8k keys takes 17.8 us, by four of four rows
# 20.5, by 16 of these 18.0, of one row 20.1; 16 of 64 queries whose lengths fall off 59 by four of four rows, 62 by
# eight, 71 by eight of two, 101 of one (`key_shares` in hopper-runs-h200.json).
MERGED_ROWS, MERGED_ROWS_OF_MANY = 4, 2
FEWEST_MERGED, MOST_MERGED = 4, 16
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


NO_CACHE = None, None, None, None
"""Where `forward_kernel` is told of tiles in pieces, lengths, first keys and places in a cache."""


class Shares(NamedTuple):
    """The tiles of every program, and what they have of tiles that they share."""

    lists: list[list[Tile]]
    pieces: list[list[Piece]]


def whole_tiles(spec: AttentionSpec, tiles: config.Tiles, programs: int) -> list[list[Tile]]:
    """Tiles of queries."""
    pack = config.heads_per_tile(spec, tiles)
    packed = replace(spec, heads_q=spec.heads_q // pack)
    return schedule(packed, tiles.rows // pack, tiles.warpgroups, tiles.tile_n, programs)


def shares(spec: AttentionSpec, tiles: config.Tiles, programs: int) -> Shares:
    """Tiles of queries, and pieces of them."""
    lists = whole_tiles(spec, tiles, programs)
    blocks = -(-spec.seqlen_k // tiles.tile_n)
    if tiles.tails and blocks > 1 and (spec.seqlen_k - 1) % tiles.tile_n < TAIL.value:
        blocks -= 1  # the keys past it come with the last
    return Shares(*with_pieces(spec, lists, blocks, 1, programs))


def entries(of: Shares) -> Tensor:
    """(programs, 2 * rounds) int64: how many tiles a program has, then head << 32 | m_block of each, with the sign if
    it is a piece. In the second half, of a piece, which it is, from 1 on, its first key block and its end."""
    rounds = 2 + max(len(tiles) + len(mine) for tiles, mine in zip(of.lists, of.pieces, strict=True))
    found = torch.zeros(len(of.lists), 2, rounds, dtype=torch.int64)  # a program reads one entry past its last
    n_pieces = 0
    for program, (tiles, mine) in enumerate(zip(of.lists, of.pieces, strict=True)):
        row = [head << 32 | m_block for head, m_block in tiles]
        for i, piece in enumerate(mine, 1 + len(tiles)):
            n_pieces += 1
            head, m_block = piece.tile
            row.append((head << 32 | m_block) - (1 << 63))
            found[program, 1, i] = (n_pieces << PIECE_BITS.value | piece.first) << PIECE_BITS.value | piece.end
        found[program, 0, : 1 + len(row)] = torch.tensor([len(row), *row])
    return found.flatten(1)


def shared_tiles(heads: int, rows: int, pieces: list[list[Piece]]) -> Tensor:
    """(tiles, 5) int32: batch, head, first row, first piece and how many pieces, of every tile of `rows` in pieces."""
    tile_of = [piece.tile for pieces_of in pieces for piece in pieces_of]
    found = [
        [*divmod(head, heads), block * rows, tile_of.index((head, block)), tile_of.count((head, block))]
        for head, block in dict.fromkeys(tile_of)
    ]
    return torch.tensor(found, dtype=torch.int32).view(-1, 5)


def programs_on(device: torch.device) -> int:
    """How many persistent programs run on a GPU: one on each multiprocessor."""
    return multiprocessors_of(device)


class ForwardKernel(Launcher):
    """`forward_kernel` with its tiles, descriptors and schedule, and `merge_kernel` where programs share tiles."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        *described, lse = tensors  # q, k, v, out
        tiles = config.choose(spec)
        of = shares(spec, tiles, programs_on(lse.device))
        tiles_of = entries(of).to(lse.device)
        descriptors = map(describe, described, boxes(spec, tiles))
        n_numbers = sum(map(len, of.pieces)) * tiles.rows * (tiles.head_dim_v + 2)

        def scratch() -> Tensor:
            """The pieces."""
            return torch.empty_strided((n_numbers,), (1,), dtype=torch.float32, device=lse.device)

        pieces = scratch()
        numbers = scalars(spec, tiles, rounds=tiles_of.shape[1])
        arguments = (*descriptors, lse, pieces, *NO_CACHE, spec.seqlen_k, tiles_of, *numbers)
        with compiling.for_hopper(OPTIONS, forward=True) as options:
            main = prepared(
                lse.device, KernelCall(forward_kernel, len(tiles_of), arguments, range(len(tensors) + 1), options)
            )
        if not n_numbers:
            return lambda *tensors: main(*tensors, pieces)
        merge = prepared(lse.device, merge_call(spec, tiles, of, pieces, tensors[3], lse))

        def launch(*tensors: Tensor) -> None:
            pieces = scratch()
            main(*tensors, pieces)
            merge(pieces, *tensors[3:])

        return launch


def merge_call(
    spec: AttentionSpec, tiles: config.Tiles, of: Shares, pieces: Tensor, out: Tensor, lse: Tensor
) -> KernelCall:
    """`merge_kernel`: from pieces to out and lse."""
    pack = config.heads_per_tile(spec, tiles)
    shared = shared_tiles(spec.heads_q // pack, tiles.rows // pack, of.pieces)
    programs, numbers, constants = merge_scalars(spec, tiles, len(shared), int(shared[:, -1].max()))
    arguments = pieces, out, lse, shared.to(lse.device), *numbers, *constants
    return KernelCall(merge_kernel, programs, arguments, range(3), OPTIONS)


def merge_scalars(spec: AttentionSpec, tiles: config.Tiles, n_tiles: int, n_pieces: int) -> tuple[int, tuple, tuple]:
    """Of a kernel that merges pieces: its programs, and numbers and constants that it is told; n_pieces: as many as a
    tile has, or about so many."""
    pack = config.heads_per_tile(spec, tiles)
    at_once = min(max(triton.next_power_of_2(n_pieces), FEWEST_MERGED), MOST_MERGED)
    dims = spec.head_dim_v, tiles.head_dim_v, triton.next_power_of_2(tiles.head_dim_v)
    at_a_time = (MERGED_ROWS if at_once < MOST_MERGED else MERGED_ROWS_OF_MANY) * max(128 // dims[-1], 1)
    row_blocks = -(-min(spec.seqlen_q * pack, tiles.rows) // at_a_time)
    constants = *dims, tiles.rows, pack, at_a_time, at_once
    return n_tiles * row_blocks, (spec.seqlen_q, spec.heads_q, row_blocks), constants


def steady(spec: AttentionSpec) -> bool:
    """Whether blocks without a mask take the maximum as it stands: float16 has no room for a P that grows past 1."""
    return spec.dtype == torch.bfloat16


def score_scalars(spec: AttentionSpec) -> tuple[float, float, float]:
    """(unit, natural, cap_in): scores in base 2 are s * unit, in base e s * natural, where s is q.k, with a soft cap
    tanh(q.k, cap_in), the kernels' tanh."""
    natural, cap_in = spec.score_factors
    return natural * LOG2E, natural, cap_in * 2 * LOG2E


class Stored(NamedTuple):
    """What `forward_kernel` is told of a cache, if there is one, beside its tensors."""

    stride_places: int | None = None
    seqlen_new: int | None = None
    page_size: int = 0  # not in pages
    dealt: Tensor | None = None  # what the schedule is made of, by the order of sequences' lengths
    batches: int | None = None
    m_blocks: int | None = None  # blocks of rows of a head, if programs share keys
    pieces_cost: int | None = None  # what those cost, in blocks of keys


def scalars(spec: AttentionSpec, tiles: config.Tiles, rounds: int, stored: Stored | None = None) -> tuple:
    """The arguments of `forward_kernel` after the tensors. Lengths on the device may leave any number of keys past the
    last whole block, which is then a block."""
    tails = tiles.tails and spec.window_left < 0 and spec.window_right < 0 and stored is None
    cache = stored or Stored()
    return (
        spec.seqlen_q, spec.heads_q, spec.group, spec.window_left, spec.window_right,
        rounds, *score_scalars(spec), cache.stride_places, cache.seqlen_new, cache.dealt,
        cache.batches, cache.m_blocks, cache.pieces_cost,
        tiles.warpgroups, tiles.tile_m, tiles.tile_n, tiles.q_stages, tiles.stages, tiles.parts, tiles.parts_v,
        spec.window_left >= 0, spec.window_right >= 0, spec.softcap > 0, steady(spec),
        tails, tiles.flat, tiles.o_awaited, tiles.q_kept, config.heads_per_tile(spec, tiles), stored is not None,
        cache.page_size, tiles.head_dim, tiles.head_dim_v, tiles.compute_registers, tiles.load_registers,
    )  # fmt: skip


def boxes(spec: AttentionSpec, tiles: config.Tiles) -> tuple[Box, ...]:
    """The blocks in which q, k, v and out are copied."""
    pack = config.heads_per_tile(spec, tiles)
    q, k = (tiles.tile_m // pack, pack), (tiles.tile_n, 1)
    dims, out_dims = tiles.head_dim // tiles.parts, tiles.head_dim_v // tiles.out_parts
    return (*q, dims), (*k, dims), (*k, tiles.head_dim_v // tiles.parts_v), (*q, out_dims)


FORWARD = ForwardKernel()
