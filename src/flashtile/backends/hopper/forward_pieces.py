"""What programs leave of tiles that they share in the forward pass, merged, in plain Triton.

Legend: pieces: float32, of each what `store_piece` in forward_epilogue.py leaves: O (ROWS, DIM_V), lse (ROWS,), and
what O is to be multiplied by (ROWS,) · shared: (tiles, 5), see `shared_tiles` in launch.py · out (B, Sq, Hq, Dv), lse
(B, Hq, Sq).
"""

import triton
import triton.language as tl


@triton.jit
def lse_of_pieces(of_rows, i, count, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """(AT_ONCE, rows): lse of pieces i ..., -inf past the last."""
    piece = i + tl.arange(0, AT_ONCE)
    return tl.load(of_rows[None, :] + piece[:, None] * STRIDE, (piece < count)[:, None], float("-inf"))


@triton.jit(do_not_specialize=["seqlen_q", "heads_q"])
def merge_kernel(
    pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlen_q, heads_q,
    DV: tl.constexpr, DIM_V: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
    AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """AT_A_TIME rows of a tile: out and lse of its pieces (section 6 of docs/algorithm.md), in the same order in every
    run."""
    STRIDE: tl.constexpr = ROWS * (DIM_V + 2)
    AT_ONCE: tl.constexpr = 8
    shared_ptr += tl.program_id(0) // (ROWS // AT_A_TIME) * 5
    batch, head, query = tl.load(shared_ptr), tl.load(shared_ptr + 1), tl.load(shared_ptr + 2)
    first, count = tl.load(shared_ptr + 3), tl.load(shared_ptr + 4)
    pieces_ptr += first.to(tl.int64) * STRIDE
    row = tl.program_id(0) % (ROWS // AT_A_TIME) * AT_A_TIME + tl.arange(0, AT_A_TIME)
    of_rows = pieces_ptr + ROWS * DIM_V + row
    most = tl.full([AT_A_TIME], float("-inf"), tl.float32)
    for i in range(0, count, AT_ONCE):
        most = tl.maximum(most, tl.max(lse_of_pieces(of_rows, i, count, STRIDE, AT_ONCE), 0))
    shift = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros_like(most)
    for i in range(0, count, AT_ONCE):
        total += tl.sum(tl.exp(lse_of_pieces(of_rows, i, count, STRIDE, AT_ONCE) - shift[None, :]), 0)
    inverse = 1 / tl.where(total == 0, 1.0, total)
    dims = tl.arange(0, DIMS)
    inside = (dims < DIM_V)[None, :]
    out = tl.zeros([AT_A_TIME, DIMS], tl.float32)
    for i in range(count):
        weight = tl.exp(tl.load(of_rows + i * STRIDE) - shift) * inverse * tl.load(of_rows + i * STRIDE + ROWS)
        of_piece = pieces_ptr + i * STRIDE + (row[:, None] * DIM_V + dims[None, :])
        out += weight[:, None] * tl.load(of_piece, inside, 0.0)
    queries = query + row // PACK
    heads = head * PACK + row % PACK
    here = queries < seqlen_q
    of_lse = lse_ptr + (batch * heads_q + heads).to(tl.int64) * seqlen_q + queries
    tl.store(of_lse, shift + tl.log(total), here)
    of_out = out_ptr + ((batch.to(tl.int64) * seqlen_q + queries) * heads_q + heads)[:, None] * DV + dims[None, :]
    tl.store(of_out, out.to(out_ptr.dtype.element_ty), here[:, None] & (dims < DV)[None, :])
