"""What the backward pass does for each row of queries before and after its main kernel, in plain Triton.

Legend: out, dout (B, Sq, Hq, Dv), dq (B, Sq, Hq, D), lse, dlse (B, Hq, Sq) · rows: (2, B, Hq, row_blocks * TILE_M), the
shifts and the deltas · sums: (B, Hq, row_blocks, PARTS, TILE_M * WIDTH) float32, PARTS parts of the dims of dQ as
`by_thread` in backward_sums.py orders them · added: (B, Hq, row_blocks) int32: see backward_sums.py.
"""

import triton
import triton.language as tl


@triton.jit
def place(row_blocks, heads_q):
    """(index, batch * Hq + head, head, batch, block) of this program in a grid of row_blocks * Hq * B, from the last to
    the first: the main kernel, from the first to the last, finds in the L2 cache what was read last, and leaves its
    sums there.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = index // row_blocks
    return index, at, (at % heads_q).to(tl.int64), (at // heads_q).to(tl.int64), index % row_blocks


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "stride_ls", "heads_q", "seqlen_q", "row_blocks", "heads"])
def begin_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr, added_ptr, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, stride_ls, heads_q, seqlen_q, row_blocks, heads, natural,
    DV: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Line 4, and nothing of dQ is there yet. The deltas, what dP begins with, are dlse - rowsum(dO o O); the shifts,
    what S begins with, -lse in the units of S: -inf where a row sees no key or is none, so that its P is 0 by itself.
    """
    index, at, head, batch, block = place(row_blocks, heads_q)
    row = block * TILE_M + tl.arange(0, TILE_M)
    rows = row.to(tl.int64)
    here = row < seqlen_q
    dims = tl.arange(0, DIM_V)
    inside = here[:, None] & (dims < DV)[None, :]
    out = tl.load(out_ptr + ((batch * seqlen_q + rows) * heads_q + head)[:, None] * DV + dims[None, :], inside, 0.0)
    dout_ptr += batch * stride_ob + head * stride_oh
    dout = tl.load(dout_ptr + rows[:, None] * stride_os + dims[None, :], inside, 0.0)
    delta = -tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta += tl.load(dlse_ptr + batch * stride_lb + head * stride_lh + rows * stride_ls, here, 0.0)
    lse = tl.load(lse_ptr + at.to(tl.int64) * seqlen_q + rows, here, float("-inf"))
    shift = tl.where(lse == float("-inf"), float("-inf"), -lse / natural)
    of_rows = at.to(tl.int64) * row_blocks * TILE_M + rows
    tl.store(rows_ptr + of_rows, shift)
    tl.store(rows_ptr + heads.to(tl.int64) * row_blocks * TILE_M + of_rows, delta)
    tl.store(added_ptr + index, 0)


@triton.jit(do_not_specialize=["heads_q", "seqlen_q", "row_blocks"])
def finish_kernel(
    dq_ptr, sums_ptr, added_ptr, stride_qb, stride_qs, stride_qh, heads_q, seqlen_q, row_blocks, softmax_scale,
    D: tl.constexpr, TILE_M: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dQ in the dtype and layout of q, from its sums in the order in which `by_thread` leaves them; 0 where no tile has
    come by, as none of the queries sees a key."""
    index, _, head, batch, block = place(row_blocks, heads_q)
    sums_ptr += index.to(tl.int64) * (PARTS * TILE_M * WIDTH)
    row = block * TILE_M + tl.arange(0, TILE_M)
    there = tl.broadcast_to(tl.load(added_ptr + index), [TILE_M * WIDTH]) != 0
    dq_ptr += batch * stride_qb + head * stride_qh
    of_rows = dq_ptr + row.to(tl.int64)[:, None] * stride_qs
    for part in tl.static_range(PARTS):
        x = tl.load(sums_ptr + part * TILE_M * WIDTH + tl.arange(0, TILE_M * WIDTH), there, 0.0)
        # of the queries 64, eight, warp, lane // 4, lane % 4, half of 16 rows, parity
        x = x.reshape([TILE_M // 64, WIDTH // 8, 4, 8, 4, 2, 2])
        # to rows: (64, warp, half, lane // 4), columns: (eight, lane % 4, parity)
        x = x.permute((0, 2, 5, 3, 1, 4, 6))
        x = x.reshape([TILE_M, WIDTH]) * softmax_scale
        dims = part * WIDTH + tl.arange(0, WIDTH)
        inside = (row < seqlen_q)[:, None] & (dims < D)[None, :]
        tl.store(of_rows + dims[None, :], x.to(dq_ptr.dtype.element_ty), inside)
