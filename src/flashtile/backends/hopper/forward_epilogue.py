"""How a tile of the forward pass leaves, or a piece of one: lines 12 to 15 of the paper's Algorithm 1.

Legend: as in forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import barrier
from .tile import halves, log2, scaled, store_matrix, store_rows

LN2 = gl.constexpr(0.6931471805599453)
LEAST = gl.constexpr(2.0**-100)  # Row sums between these can do without a running maximum: they, and the products
MOST = gl.constexpr(2.0**100)  # they are sums of, are far from what float32 cannot hold.


@gluon.jit
def store_tile(p, o, lse, batch, head, row, out_desc, lse_ptr, out_buffer, row_layout: gl.constexpr):
    """Line 15: a warpgroup's rows of O, one part after the other through a buffer for one, and of L."""
    WIDTH: gl.constexpr = out_desc.block_shape[3]
    if o[0].shape[1] > WIDTH:
        o = halves(o[0]) + o[1:]
    for part in gl.static_range(len(o)):
        store_rows(out_desc, out_buffer, o[part], batch, row, head, part * WIDTH)
    i = gl.arange(0, p.TILE_M, row_layout)
    rows = row + i // p.PACK
    at = (batch * p.heads_q + head + i % p.PACK).to(gl.int64) * p.seqlen_q
    gl.store(lse_ptr + at + rows, lse, mask=rows < p.seqlen_q)


@gluon.jit
def store_piece(p, warpgroup, o, lse, inverse, piece, pieces_ptr, row_layout: gl.constexpr):
    """The same of a piece of a tile, for `merge_kernel`, in float32: O (rows, Dv), L (rows,) and what O is to be
    multiplied by (rows,); multiplied for both ways out at once, it would be spilled."""
    ROWS: gl.constexpr = p.WARPGROUPS * p.TILE_M
    DIM_V: gl.constexpr = (len(o) - 1) * o[0].shape[1] + o[len(o) - 1].shape[1]
    pieces_ptr += piece * (ROWS * (DIM_V + 2))
    for part in gl.static_range(len(o)):
        store_matrix(pieces_ptr, o[part], warpgroup * p.TILE_M, part * o[0].shape[1], DIM_V)
    of_rows = pieces_ptr + (ROWS * DIM_V + warpgroup * p.TILE_M + gl.arange(0, p.TILE_M, row_layout))
    gl.store(of_rows, lse)
    gl.store(of_rows + ROWS, inverse)


@gluon.jit
def finish(
    p, warpgroup, o, m, l, batch, head, row, piece, out_desc, lse_ptr, pieces_ptr, out_buffer, failures,
    row_layout: gl.constexpr,
):  # fmt: skip
    """Lines 12 to 15: O / l and L = m + log l of a tile, or of a piece of it, stored; rows that see no key give 0 and
    -inf."""
    l_row = gl.convert_layout(gl.sum(l, axis=1), row_layout)
    if p.STEADY:
        total = gl.convert_layout(gl.sum(o[0], axis=1), row_layout)  # not finite, where a number of O is not
        for part in gl.static_range(1, len(o)):
            total += gl.convert_layout(gl.sum(o[part], axis=1), row_layout)
        fine = (l_row >= LEAST) & (l_row <= MOST) & (gl.abs(total) < float("inf"))
        failed = (fine | (m == float("-inf"))) ^ True
        before = failures.load(row_layout)
        barrier()
        failures.store(before | failed.to(gl.int32))
    empty = l_row == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, l_row)
    shift = m * p.unit
    left = gl.fma(m, p.unit, -shift)  # its rounding, which the scores kept when shift was taken off
    exponent, rest = log2(l_row)
    log_l = gl.fma(exponent, LN2, (rest - left) * LN2)
    lse = gl.where(empty, float("-inf"), gl.fma(m, p.natural, log_l))
    if p.PIECES and piece > 0:
        if row < p.seqlen_q:
            store_piece(p, warpgroup, o, lse, inverse, piece - 1, pieces_ptr, row_layout)
        row = p.seqlen_q  # of the tile nothing
    store_tile(p, scaled(o, inverse), lse, batch, head, row, out_desc, lse_ptr, out_buffer, row_layout)
