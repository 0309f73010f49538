"""Tile operations that the attention kernels share: block bounds, loads and stores, masks, the online softmax.

Shapes in kernels: rows are queries and columns are keys, S and P are (TILE_M, TILE_N); a tile of Q is
(TILE_M, TILE_D), of K (TILE_N, TILE_D), of V (TILE_N, TILE_DV). TILE_D and TILE_DV are D and Dv rounded up to a
power of two; what lies past an edge is loaded as zero and never stored. Row and column sums, maxima and lse
are float32. Exponentials are base 2: exp(x) = exp2(x * LOG2E), the factor folded into the softmax scale.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Rows of numbers per query are padded to a multiple of this, so that tiles read them unmasked (tile_m is at most this).
ROW_PAD = tl.constexpr(128)


@triton.jit
def place(program, n_blocks, n_heads):
    """(block, head, batch) of a program in a grid of n_blocks * n_heads * B, blocks of one head in a row.

    Programs that run at the same time so share one head's tensors, and the L2 cache holds them.
    """
    block = program % n_blocks
    head = program // n_blocks % n_heads
    batch = program // n_blocks // n_heads
    return block, head.to(tl.int64), batch.to(tl.int64)


@triton.jit
def visible_blocks(
    row_block, n_rows, n_cols, left, right,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Which column blocks a row block sees: (first, full_first, full_end, end).

    Blocks first ... end hold every visible pair; of these, full_first ... full_end need no mask. Row i sees
    columns i + n_cols - n_rows - left ... i + n_cols - n_rows + right. With EDGE a last block that the columns do
    not fill needs one too. Called with keys as rows, and left and right exchanged, it gives the query blocks that
    a key block sees.
    """
    offset = n_cols - n_rows
    first_row = row_block * TILE_ROWS + offset
    last_row = tl.minimum((row_block + 1) * TILE_ROWS, n_rows) - 1 + offset
    seen_end = n_cols
    full_end = n_cols // TILE_COLS if EDGE else tl.cdiv(n_cols, TILE_COLS)
    first = 0
    full_first = 0
    if HAS_RIGHT:
        seen_end = tl.minimum(n_cols, tl.maximum(last_row + right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(first_row + right + 1, 0) // TILE_COLS)
    if HAS_LEFT:
        first = tl.maximum(first_row - left, 0) // TILE_COLS
        full_first = tl.cdiv(tl.maximum(last_row - left, 0), TILE_COLS)
    end = tl.maximum(tl.cdiv(seen_end, TILE_COLS), first)
    full_first = tl.minimum(full_first, end)
    full_end = tl.maximum(full_end, full_first)
    return first, full_first, full_end, end


@triton.jit
def part_of(part: tl.constexpr, first, full_first, full_end, end):
    """The block range of part 0 (masked, before the full blocks), 1 (masked, after them) or 2 (full).

    Masked blocks come first, so that the long loop is the last: behind the prologue alone, ptxas serialises the
    products that Triton leaves in flight from one step of it to the next (C7515).
    """
    if part == 0:
        return first, full_first
    if part == 1:
        return full_end, end
    return full_first, full_end


@triton.jit
def visible(rows, cols, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the pairs rows x cols are visible; `rows` and `cols` broadcast against each other.

    Rows past the last query are not looked at: nothing of them is stored, and their P is 0 or multiplies zeros.
    """
    diagonal = rows + (seqlen_k - seqlen_q)
    seen = cols < seqlen_k
    if HAS_LEFT:
        seen &= cols >= diagonal - window_left
    if HAS_RIGHT:
        seen &= cols <= diagonal + window_right
    return seen


@triton.jit
def tile_pointers(ptr, stride, first_row, ROWS: tl.constexpr, TILE_D: tl.constexpr, KEEP: tl.constexpr):
    """(ROWS, TILE_D) pointers to rows first_row ... of a matrix, in 64 bits, so that no tensor is too large.

    With KEEP as the tile's corner plus offsets inside it, which stay in registers from step to step of a loop;
    else computed anew in every step, for loops that have no registers to spare.
    """
    if not KEEP:
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        return ptr + (rows[:, None] * stride + tl.arange(0, TILE_D)[None, :])
    inside_tile = tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, TILE_D)[None, :]
    return ptr + first_row.to(tl.int64) * stride + inside_tile


@triton.jit
def inside(first_row, n_rows, D: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr):
    """(ROWS, TILE_D), or (ROWS, 1) where D fills the tile: which elements lie inside an (n_rows, D) matrix."""
    mask = (first_row + tl.arange(0, ROWS) < n_rows)[:, None]
    if D < TILE_D:
        mask &= (tl.arange(0, TILE_D) < D)[None, :]
    return mask


@triton.jit
def load_tile(
    ptr, stride, first_row, n_rows, D: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr, EDGE: tl.constexpr,
    KEEP: tl.constexpr = True,
):  # fmt: skip
    """(ROWS, TILE_D) tile of an (n_rows, D) matrix, zero outside; without EDGE the rows are known to be inside."""
    pointers = tile_pointers(ptr, stride, first_row, ROWS, TILE_D, KEEP)
    if EDGE:
        return tl.load(pointers, mask=inside(first_row, n_rows, D, ROWS, TILE_D), other=0.0)
    if D < TILE_D:
        return tl.load(pointers, mask=(tl.arange(0, TILE_D) < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(ptr, stride, first_row, n_rows, tile, D: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr):
    """Stores a (ROWS, TILE_D) tile into an (n_rows, D) matrix, in the matrix's dtype."""
    pointers = tile_pointers(ptr, stride, first_row, ROWS, TILE_D, True)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=inside(first_row, n_rows, D, ROWS, TILE_D))


@triton.jit
def tanh(x):
    """tanh in float32: from exp2 away from zero, by its series (x^7 is below one rounding) near zero."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    x2 = x * x
    near = x * (1 + x2 * (x2 * (2.0 / 15) - 1.0 / 3))
    return tl.where(tl.abs(x) < 0.1, near, far)


@triton.jit
def exp_of_scores(s, shift, unit, EXACT: tl.constexpr):
    """exp(scores - shift) for scores s * unit in base 2, where `shift` is in base 2 too: one multiply-add each.

    EXACT takes `shift` in the unit of s and subtracts first: for the largest score of a row the difference is then
    an exact zero however large the scores are, as float32 results need it (16-bit ones round P more than that).
    """
    if EXACT:
        return tl.exp2((s - shift) * unit)
    return tl.exp2(s * unit - shift)


@triton.jit
def softmax_step(s, unit, m, l, EXACT: tl.constexpr):
    """One step of the online softmax (Algorithm 1, line 9), for scores s * unit in base 2, unit > 0.

    Takes and returns the running maximum m of s, (ROWS,), and the running sums l, (ROWS, SUMS), each of every SUMS-th P
    of a row: where those are what a thread has, threads add theirs up once, at the end, not at each block. Returns P
    and the factor for what was summed so far, too.
    """
    SUMS: tl.constexpr = l.shape[1]
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    p = exp_of_scores(s, (shift if EXACT else shift * unit)[:, None], unit, EXACT)
    alpha = tl.exp2((m - shift) * unit)
    return p, alpha, m_new, l * alpha[:, None] + tl.sum(p.reshape(p.shape[0], p.shape[1] // SUMS, SUMS), 1)


@triton.jit
def row_dot(a, b, EXACT: tl.constexpr):
    """(ROWS,) dot products of the rows of two (ROWS, TILE_D) tiles, in float32.

    EXACT sums in the order in which a product of tiles does, as its diagonal: where a row sees a single key, so that
    O is that V, D and dP are then the same number and cancel.
    """
    if EXACT:
        products = tl.dot(a, tl.trans(b), input_precision="ieee")
        rows = tl.arange(0, a.shape[0])
        return tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 1)
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
