"""From a spec and tensors to gradients where one kernel computes all three: those of the backward pass, launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...spec import AttentionSpec
from ..launcher import KernelCall, Launcher, Run, prepared
from . import compiling, config
from .backward import backward_kernel
from .backward_pieces import add_kernel
from .backward_problem import END, FIELDS, FIRST, PIECE, ROUND, TURN, WRITTEN
from .backward_rows import begin_kernel, finish_kernel
from .backward_sums import SUMS_WIDTH
from .launch import OPTIONS, Box, describe, programs_on, score_scalars, shared_tiles
from .order import Order, order
from .schedule import backward_schedule, begins_with_zeros, scattered, tile_fields, turn_of, with_pieces

ADDED_NUMBERS = 1024  # of a tile in pieces, by a program that adds them up; an estimate


def row_blocks(spec: AttentionSpec, tiles: config.BackwardTiles) -> int:
    """Blocks of queries of one head."""
    return -(-spec.seqlen_q // tiles.tile_m)


@functools.cache
def plain_layout(rank: int) -> gl.NVMMASharedLayout:
    """How float32 lies in shared memory as in global memory: a block of shifts or deltas, or a half of dQ."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def sums_box(tiles: config.BackwardTiles) -> tuple[int, int]:
    """What of dQ of a step is added at a time, in rows of the sums."""
    return tiles.tile_m * tiles.head_dim // tiles.dq_parts // SUMS_WIDTH.value, SUMS_WIDTH.value


def boxes(tiles: config.BackwardTiles) -> tuple[Box, ...]:
    """The blocks in which q, dout, k, v, dk and dv are copied."""
    width, width_v = tiles.head_dim // tiles.parts, tiles.head_dim_v // tiles.parts_v
    q, dout = (tiles.tile_m, 1, width), (tiles.tile_m, 1, width_v)
    k, v = (tiles.box_keys, 1, width), (tiles.box_keys, 1, width_v)
    dk, dv = ((tiles.box_keys, 1, columns) for columns in tiles.sum_columns)
    return q, dout, k, v, dk, dv


def ordered(spec: AttentionSpec, tiles: config.BackwardTiles, programs: int) -> Order:
    """The tiles of every program, and the order in which they add to dQ if it must not change."""
    if spec.deterministic and not tiles.dq_apart:
        return order(spec, tiles.keys, tiles.tile_m, programs)
    return in_any_order(spec, tiles, programs)


def piece_bytes(tiles: config.BackwardTiles) -> int:
    """dK and dV of a tile in float32."""
    return 4 * tiles.keys * (tiles.head_dim + tiles.head_dim_v)


def in_any_order(spec: AttentionSpec, tiles: config.BackwardTiles, programs: int) -> Order:
    """Tiles, and pieces of them, no more than the memory of dQ holds in the dtype of q."""
    n_blocks, zeros = -(-spec.seqlen_k // tiles.keys), begins_with_zeros(spec) and not tiles.dq_apart
    places = range(n_blocks) if zeros or tiles.dq_apart else scattered(n_blocks)
    if zeros:  # close together, but no two at one block: D 128, S = 64k took 0.98 of the time of 2 blocks apart
        turns = [place % row_blocks(spec, tiles) for place in places]
    else:
        turns = [turn_of(spec, place, tiles.keys, tiles.tile_m) for place in places]
    lists = backward_schedule(spec, tiles.keys, tiles.tile_m, programs)
    dq_bytes = spec.batch * spec.seqlen_q * spec.heads_q * spec.head_dim * spec.dtype.itemsize
    lists, pieces = with_pieces(
        spec, lists, row_blocks(spec, tiles), spec.group, programs, dq_bytes // piece_bytes(tiles)
    )  # fmt: skip
    together = min(map(len, lists)) if zeros and tiles.together else 0
    return Order(lists, turns, None, pieces, zeros, together)


def table(spec: AttentionSpec, tiles: config.BackwardTiles, of: Order) -> Tensor:
    """(programs, rounds, FIELDS) int32: how many tiles a program has, then the tiles, and its pieces of others."""
    n_blocks, n_steps = -(-spec.seqlen_k // tiles.keys), spec.group * row_blocks(spec, tiles)
    counts = spec.batch * spec.heads_q * row_blocks(spec, tiles)  # behind what is said of so many blocks of dQ
    fields = [
        tile_fields(spec, place % n_blocks, tiles.keys, tiles.tile_m, turn, place * n_steps)
        for place, turn in enumerate(of.turns)
    ]
    width = FIELDS.value
    padding = [0] * (width - 2 - len(fields[0]))
    of_place = [field + padding for field in fields]
    rounds = max(len(tiles_of) + len(pieces_of) for tiles_of, pieces_of in zip(of.lists, of.pieces, strict=True))
    found = torch.zeros(len(of.lists), 1 + rounds, width, dtype=torch.int32)
    n_pieces = 0
    for program, (tiles_of, pieces_of) in enumerate(zip(of.lists, of.pieces, strict=True)):
        all_of = [*tiles_of, *(piece.tile for piece in pieces_of)]
        rows = [[*divmod(head, spec.heads_k), *of_place[place]] for head, place in all_of]
        for i in range(1, of.together):
            rows[i][ROUND.value] = counts + i
        for row, piece in zip(rows[len(tiles_of) :], pieces_of, strict=True):
            n_pieces += 1
            row[FIRST.value], row[END.value], row[TURN.value], row[PIECE.value] = piece.first, piece.end, 0, n_pieces
        found[program, 0, 0] = len(rows)
        found[program, 1 : 1 + len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return found


def prepare_sums(
    spec: AttentionSpec, pieces: Tensor, dx: Tensor, dv: Tensor | None, shared: Tensor, rows: int, dims: tuple[int, int]
) -> Run:
    """`add_kernel`: from pieces to dx, which is dK or dQ, and dv, of tiles of `rows` that are so wide; nothing where
    none has pieces."""
    strides_v, dim_v = ((0, 0, 0), 0) if dv is None else (dv.stride()[:3], dv.shape[3])
    arguments = (
        pieces, dx, dv, shared.to(dx.device), *dx.stride()[:3], *strides_v, dx.shape[1], spec.softmax_scale,
        dx.shape[3], dim_v, *dims, rows, ADDED_NUMBERS,
    )  # fmt: skip
    grid = len(shared) * (rows * sum(dims) // ADDED_NUMBERS)
    return prepared(dx.device, KernelCall(add_kernel, grid, arguments, range(3), OPTIONS))


def scalars(spec: AttentionSpec, tiles: config.BackwardTiles, rounds: int) -> tuple:
    """The arguments of `backward_kernel` after the tensors."""
    unit, _, cap_in = score_scalars(spec)
    return (
        spec.heads_q, spec.group, row_blocks(spec, tiles), spec.batch * spec.heads_q, rounds,
        unit, cap_in, spec.softmax_scale, tiles.tile_m, tiles.stages, tiles.key_stages,
        tiles.value_stages,
        spec.window_left >= 0, spec.window_right >= 0, spec.softcap > 0, tiles.masked,
        tiles.compute_registers, tiles.load_registers,
        tiles.parts, tiles.parts_v, tiles.k_kept, tiles.v_kept,
        *(() if tiles.dq_apart else (tiles.dq_parts, tiles.together)),
    )  # fmt: skip


def describe_sums(sums: Tensor, tiles: config.BackwardTiles) -> TensorDescriptor:
    """The sums of dQ in the blocks in which they are added to."""
    rows, width = sums_box(tiles)
    return TensorDescriptor(sums, [sums.numel() // width, width], [width, 1], [rows, width], plain_layout(2))


def describe_rows(rows: Tensor, tiles: config.BackwardTiles) -> TensorDescriptor:
    """Shifts and deltas in blocks of queries."""
    return TensorDescriptor(rows, [rows.numel()], [1], [tiles.tile_m], plain_layout(1))


class BackwardKernel:
    """`backward_kernel`: from q, dout, k, v to dk, dv, and pieces of them; it reads rows, adds to sums and says in
    added what is there."""

    def prepare(self, spec: AttentionSpec, tensors: tuple, of: Order) -> Run:
        matrices, (rows, sums, pieces, added) = tensors[:6], tensors[6:]
        tiles = config.choose_backward(spec)
        tiles_of = table(spec, tiles, of).to(rows.device)
        ranks = None if of.ranks is None else of.ranks.to(rows.device)
        described = (
            *map(describe, matrices, boxes(tiles)), describe_rows(rows, tiles), describe_sums(sums, tiles), pieces,
            added, ranks,
        )  # fmt: skip
        arguments = (*described, tiles_of, *scalars(spec, tiles, rounds=tiles_of.shape[1]))
        # tiles in order wait for one another, so that they run all at once or not at all
        options = OPTIONS | {"launch_cooperative_grid": True} if ranks is not None else OPTIONS
        with compiling.for_hopper(options) as options:
            return prepared(
                rows.device, KernelCall(backward_kernel, len(tiles_of), arguments, range(len(tensors)), options)
            )


class RowsKernel:
    """A kernel over all blocks of queries, and the function that derives its arguments from (spec, tiles, *tensors)."""

    def __init__(self, fn: Any, arguments: Callable[..., tuple]) -> None:
        self.fn = fn
        self.arguments = arguments

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        tiles = config.choose_backward(spec)
        grid = spec.batch * spec.heads_q * row_blocks(spec, tiles)
        arguments = (*tensors, *self.arguments(spec, tiles, *tensors))
        return prepared(tensors[-1].device, KernelCall(self.fn, grid, arguments, range(len(tensors)), OPTIONS))


def begin_arguments(
    spec: AttentionSpec, tiles: config.BackwardTiles, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None,
    rows: Tensor, added: Tensor,
) -> tuple:  # fmt: skip
    """The arguments of `begin_kernel` after the tensors."""
    return (
        *dout.stride()[:3], *((0, 0, 0) if dlse is None else dlse.stride()),
        spec.heads_q, spec.seqlen_q, row_blocks(spec, tiles), spec.batch * spec.heads_q, spec.score_factors[0],
        spec.head_dim_v, triton.next_power_of_2(tiles.head_dim_v), tiles.tile_m,
    )  # fmt: skip


def finish_arguments(
    spec: AttentionSpec, tiles: config.BackwardTiles, dq: Tensor, sums: Tensor, added: Tensor
) -> tuple:
    """The arguments of `finish_kernel` after the tensors."""
    return (
        *dq.stride()[:3], spec.heads_q, spec.seqlen_q, row_blocks(spec, tiles), spec.softmax_scale,
        spec.head_dim, tiles.tile_m, tiles.head_dim // tiles.parts, tiles.parts,
    )  # fmt: skip


class PiecesKernel:
    """`add_kernel`: from pieces to dk and dv."""

    def prepare(self, spec: AttentionSpec, tensors: tuple, of: Order) -> Run:
        pieces, dk, dv = tensors
        tiles = config.choose_backward(spec)
        shared = shared_tiles(spec.heads_k, tiles.keys, of.pieces)
        return prepare_sums(spec, pieces, dk, dv, shared, tiles.keys, (tiles.head_dim, tiles.head_dim_v))


BEGIN = RowsKernel(begin_kernel, begin_arguments)
MAIN = BackwardKernel()
ADD = PiecesKernel()
FINISH = RowsKernel(finish_kernel, finish_arguments)


class BackwardPass(Launcher):
    """All three, from dout, dlse, q, k, v, out and lse to dq, dk and dv: one launch to look up, for the sake of small
    calls."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        tiles = config.choose_backward(spec)
        device, n_rows = tensors[-1].device, spec.batch * spec.heads_q * row_blocks(spec, tiles) * tiles.tile_m

        of = ordered(spec, tiles, programs_on(device))
        sizes = [
            (2 * n_rows, torch.float32), (n_rows * tiles.head_dim, torch.float32),
            (n_rows // tiles.tile_m + of.together, torch.int32),
        ]  # fmt: skip

        def scratch() -> list[Tensor]:
            """rows, sums and added."""
            return [torch.empty_strided((n,), (1,), dtype=dtype, device=device) for n, dtype in sizes]

        dout, dlse, q, k, v, out, lse, dq, dk, dv = tensors
        rows, sums, added = scratch()
        begin = BEGIN.prepare(spec, (out, dout, lse, dlse, rows, added))
        # the memory of dq holds the pieces until dq is written
        main = MAIN.prepare(spec, (q, dout, k, v, dk, dv, rows, sums, dq, added), of)
        add = ADD.prepare(spec, (dq, dk, dv), of)
        finish = FINISH.prepare(spec, (dq, sums, added))

        def launch(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            dq: Tensor, dk: Tensor, dv: Tensor,
        ) -> None:  # fmt: skip
            rows, sums, added = scratch()
            begin(out, dout, lse, dlse, rows, added)
            if of.zeros:
                sums.zero_()
                added.fill_(WRITTEN.value)
            main(q, dout, k, v, dk, dv, rows, sums, dq, added)
            add(dq, dk, dv)
            finish(dq, sums, added)

        return launch


BACKWARD = BackwardPass()
