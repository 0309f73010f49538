"""From a spec and tensors to gradients where dQ has a kernel of its own: those of queries and of keys, launched."""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec import AttentionSpec
from ..launcher import KernelCall, Launcher, Run, prepared
from . import compiling, config
from .backward_keys import keys_kernel
from .backward_launch import (
    ADD,
    boxes,
    describe_rows,
    ordered,
    piece_bytes,
    prepare_sums,
    row_blocks,
    scalars,
    table,
)
from .backward_queries import queries_kernel
from .compat import SINCE_3_9
from .launch import OPTIONS, Box, Shares, describe, entries, programs_on, score_scalars, shared_tiles
from .order import Order
from .schedule import schedule, with_pieces


def query_boxes(tiles: config.QueryTiles) -> tuple[Box, ...]:
    """The blocks in which `queries_kernel` copies q, dout, k, v and dq."""
    width, width_v = tiles.head_dim // tiles.parts, tiles.head_dim_v // tiles.parts_v
    q, dout = (tiles.tile_m, 1, width), (tiles.tile_m, 1, width_v)
    return q, dout, (tiles.tile_n, 1, width), (tiles.tile_n, 1, width_v), q


def query_shares(spec: AttentionSpec, tiles: config.QueryTiles, programs: int) -> Shares:
    """Tiles of queries, and pieces of them, no more than the memory of dQ would hold in the dtype of q."""
    lists = schedule(spec, tiles.rows, tiles.warpgroups, tiles.tile_n, programs)
    dq_bytes = spec.batch * spec.seqlen_q * spec.heads_q * spec.head_dim * spec.dtype.itemsize
    most = dq_bytes // query_piece_bytes(tiles)
    return Shares(*with_pieces(spec, lists, -(-spec.seqlen_k // tiles.tile_n), 1, programs, most))


def query_piece_bytes(tiles: config.QueryTiles) -> int:
    """dQ of a tile in float32."""
    return 4 * tiles.rows * tiles.head_dim


def in_turns(spec: AttentionSpec, tiles: config.QueryTiles) -> bool:
    """Whether the warpgroups of `queries_kernel` take turns: at D 256 by triton 3.9, if there is a mask. S = 8k with
    1024 keys to the left +2.4 % on an H200, to both sides +0.9 %, causal 0 to +0.5 %, full -1.5 to -2.5 %; by 3.6
    windows -1 %."""
    masked = spec.window_left >= 0 or spec.window_right >= 0
    return tiles.turns or (SINCE_3_9 and masked and tiles.head_dim > 128)


def query_scalars(
    spec: AttentionSpec, tiles: config.QueryTiles, rounds: int, dout: Tensor, dlse: Tensor | None
) -> tuple:  # fmt: skip
    """The arguments of `queries_kernel` after the tensors."""
    keys = config.choose_backward(spec)
    padded = row_blocks(spec, keys) * keys.tile_m
    return (
        *dout.stride()[:3], *((0, 0, 0) if dlse is None else dlse.stride()),
        spec.seqlen_q, spec.seqlen_k, spec.heads_q, spec.group, spec.window_left, spec.window_right, rounds,
        padded, spec.batch * spec.heads_q * padded, *score_scalars(spec), spec.softmax_scale,
        spec.head_dim_v, tiles.tile_m, tiles.tile_n, tiles.key_stages, tiles.value_stages, tiles.parts, tiles.parts_v,
        in_turns(spec, tiles), spec.window_left >= 0, spec.window_right >= 0, spec.softcap > 0,
        tiles.compute_registers, tiles.load_registers,
    )  # fmt: skip


def prepare_queries(spec: AttentionSpec, tensors: tuple, of: Shares) -> Run:
    """`queries_kernel`: from q, dout, k, v to dq, and pieces of it, and from out, dout, lse and dlse to rows."""
    matrices, (_, dout, _, dlse, rows, _) = tensors[:5], tensors[5:]
    tiles = config.choose_queries(spec)
    tiles_of = entries(of).to(rows.device)
    described = map(describe, matrices, query_boxes(tiles))
    arguments = (*described, *tensors[5:], tiles_of, *query_scalars(spec, tiles, tiles_of.shape[1], dout, dlse))
    with compiling.for_hopper(OPTIONS) as options:
        return prepared(rows.device, KernelCall(queries_kernel, len(tiles_of), arguments, range(len(tensors)), options))


def prepare_keys(spec: AttentionSpec, tensors: tuple, of: Order) -> Run:
    """`keys_kernel`: from q, dout, k, v to dk, dv, and pieces of them; it reads rows."""
    *matrices, rows, pieces = tensors
    tiles = config.choose_backward(spec)
    tiles_of = table(spec, tiles, of).to(rows.device)
    described = (*map(describe, matrices, boxes(tiles)), describe_rows(rows, tiles), pieces)
    arguments = (*described, tiles_of, *scalars(spec, tiles, rounds=tiles_of.shape[1]))
    with compiling.for_hopper(OPTIONS) as options:
        return prepared(rows.device, KernelCall(keys_kernel, len(tiles_of), arguments, range(len(tensors)), options))


class ApartBackwardPass(Launcher):
    """All, from dout, dlse, q, k, v, out and lse to dq, dk and dv: one launch to look up."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        dout, dlse, q, k, v, out, lse, dq, dk, dv = tensors
        tiles = config.choose_backward(spec)
        queries, programs = config.choose_queries(spec), programs_on(q.device)
        of_dq, of_dk = query_shares(spec, queries, programs), ordered(spec, tiles, programs)
        in_pieces = max(
            sum(map(len, of_dq.pieces)) * query_piece_bytes(queries), sum(map(len, of_dk.pieces)) * piece_bytes(tiles)
        )  # fmt: skip
        sizes = 2 * spec.batch * spec.heads_q * row_blocks(spec, tiles) * tiles.tile_m, in_pieces // 4

        def scratch() -> list[Tensor]:
            """rows and pieces, see backward_rows.py."""
            return [torch.empty_strided((n,), (1,), dtype=torch.float32, device=q.device) for n in sizes]

        rows, pieces = scratch()
        of_queries = prepare_queries(spec, (q, dout, k, v, dq, out, dout, lse, dlse, rows, pieces), of_dq)
        shared = shared_tiles(spec.heads_q, queries.rows, of_dq.pieces)
        add_dq = prepare_sums(spec, pieces, dq, None, shared, queries.rows, (queries.head_dim, 0))
        of_keys = prepare_keys(spec, (q, dout, k, v, dk, dv, rows, pieces), of_dk)
        add = ADD.prepare(spec, (pieces, dk, dv), of_dk)

        def launch(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            dq: Tensor, dk: Tensor, dv: Tensor,
        ) -> None:  # fmt: skip
            rows, pieces = scratch()
            of_queries(q, dout, k, v, dq, out, dout, lse, dlse, rows, pieces)
            add_dq(pieces, dq, None)
            of_keys(q, dout, k, v, dk, dv, rows, pieces)
            add(pieces, dk, dv)

        return launch


APART_BACKWARD = ApartBackwardPass()
