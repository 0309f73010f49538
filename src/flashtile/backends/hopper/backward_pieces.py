"""What programs leave of tiles that they share in the backward pass, added up, in plain Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seqlen"])
def add_kernel(
    pieces_ptr, dx_ptr, dv_ptr, shared_ptr, stride_xb, stride_xs, stride_xh, stride_vb, stride_vs, stride_vh, seqlen,
    softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """dK, called dx, and dV of tiles in pieces, which are added up from the first to the last in every run: NUMBERS of
    a tile. Or dQ, without a dv.

    pieces: (pieces, ROWS, DIM_V + DIM) float32, dV beside dK; shared: see `shared_tiles`.
    """
    WIDTH: tl.constexpr = DIM_V + DIM
    BLOCKS: tl.constexpr = ROWS * WIDTH // NUMBERS
    AT_ONCE: tl.constexpr = 8
    shared_ptr += tl.program_id(0) // BLOCKS * 5
    batch, head, start = tl.load(shared_ptr), tl.load(shared_ptr + 1), tl.load(shared_ptr + 2)
    first, count = tl.load(shared_ptr + 3), tl.load(shared_ptr + 4)
    at = tl.program_id(0) % BLOCKS * NUMBERS + tl.arange(0, NUMBERS)
    numbers = pieces_ptr.to(tl.pointer_type(tl.float32)) + first * (ROWS * WIDTH) + at
    total = tl.zeros([NUMBERS], tl.float32)
    for i in range(0, count, AT_ONCE):
        piece = i + tl.arange(0, AT_ONCE)
        x = tl.load(numbers[None, :] + piece[:, None] * (ROWS * WIDTH), (piece < count)[:, None], 0.0)
        total += tl.sum(x, 0)
    batch, head, row, column = batch.to(tl.int64), head.to(tl.int64), start.to(tl.int64) + at // WIDTH, at % WIDTH
    here = row < seqlen
    of_dx = dx_ptr + batch * stride_xb + row * stride_xs + head * stride_xh + (column - DIM_V)
    tl.store(
        of_dx, (total * softmax_scale).to(dx_ptr.dtype.element_ty), here & (column >= DIM_V) & (column < DIM_V + D)
    )
    if dv_ptr is not None:
        of_dv = dv_ptr + batch * stride_vb + row * stride_vs + head * stride_vh + column
        tl.store(of_dv, total.to(dv_ptr.dtype.element_ty), here & (column < DV))
