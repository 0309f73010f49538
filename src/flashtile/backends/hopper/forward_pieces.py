"""What programs leave of tiles that they share in the forward pass, merged.

Legend: pieces: float32, of each what `store_piece` in forward_epilogue.py leaves: O (ROWS, DIM_V), lse (ROWS,), and
what O is to be multiplied by (ROWS,) · shared: (tiles, 5), see `shared_tiles` in launch.py · out (B, Sq, Hq, Dv), lse
(B, Hq, Sq).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .forward_cache import CachedKeys
from .forward_schedule import are_whole


@gluon.jit(do_not_specialize=["seqlen_q", "heads_q", "row_blocks"])
def merge_kernel(
    pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlen_q, heads_q, row_blocks,
    DV: gl.constexpr, DIM_V: gl.constexpr, DIMS: gl.constexpr, ROWS: gl.constexpr, PACK: gl.constexpr,
    AT_A_TIME: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """AT_A_TIME rows of a tile: grid (tiles * row_blocks,)."""
    merge_rows(pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlen_q, heads_q, row_blocks,
               DV, DIM_V, DIMS, ROWS, PACK, AT_A_TIME, AT_ONCE, False)  # fmt: skip


@gluon.jit(do_not_specialize=[
    "seqlen_k", "seqlen_q", "heads_q", "row_blocks", "seqlen_new", "batches", "shares", "pieces_cost",
])  # fmt: skip
def merge_shares_kernel(
    pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlens_ptr, leftpad_ptr, seqlen_k, seqlen_q, heads_q, row_blocks,
    seqlen_new, batches, shares, pieces_cost,
    DV: gl.constexpr, DIM_V: gl.constexpr, DIMS: gl.constexpr, ROWS: gl.constexpr, PACK: gl.constexpr,
    AT_A_TIME: gl.constexpr, AT_ONCE: gl.constexpr, TILE_N: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """The same of tiles that `share_out` may have cut; MOST: of sequences, where all tiles may be whole, else 0.

    It starts while the kernel before runs, which lets it start when what came before that one has ended: the lengths
    are there. Where these say that all are whole, programs end at once; but the first waits, as what comes behind waits
    for this kernel alone, which must not end before the one before."""
    gdc_launch_dependents()
    if MOST > 0:
        keys = CachedKeys(seqlens_ptr, leftpad_ptr, None, None, seqlen_new, True, 0)
        if are_whole(keys, seqlen_k, batches, shares, pieces_cost, TILE_N, MOST):
            if gl.program_id(0) == 0:
                gdc_wait()
            return
    gdc_wait()
    merge_rows(pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlen_q, heads_q, row_blocks,
               DV, DIM_V, DIMS, ROWS, PACK, AT_A_TIME, AT_ONCE, True)  # fmt: skip


@gluon.jit
def merge_rows(
    pieces_ptr, out_ptr, lse_ptr, shared_ptr, seqlen_q, heads_q, row_blocks,
    DV: gl.constexpr, DIM_V: gl.constexpr, DIMS: gl.constexpr, ROWS: gl.constexpr, PACK: gl.constexpr,
    AT_A_TIME: gl.constexpr, AT_ONCE: gl.constexpr, IN_SHARES: gl.constexpr,
):  # fmt: skip
    """Out and lse of these rows, of the pieces of their tile (section 6 of docs/algorithm.md), AT_ONCE of these on
    their way together, in the same order in every run. IN_SHARES: pieces of `share_out`, where a tile may have
    one, which is all of it."""
    STRIDE: gl.constexpr = ROWS * (DIM_V + 2)
    LANES: gl.constexpr = DIMS // 4 if DIMS < 128 else 32
    # a thread has the same numbers of all pieces or, where rows are fewer than warps, of some
    ROWS_OF_WARP: gl.constexpr = 32 // LANES
    WARPS: gl.constexpr = AT_A_TIME // ROWS_OF_WARP  # that have rows of their own
    APART: gl.constexpr = gl.num_warps() // WARPS
    layout: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE // APART, 1, 4], [1, ROWS_OF_WARP, LANES], [APART, WARPS, 1], [2, 1, 0]
    )
    sums: gl.constexpr = gl.SliceLayout(2, layout)  # (pieces, rows)
    matrix: gl.constexpr = gl.SliceLayout(0, layout)  # (rows, dims)
    shared_ptr += gl.program_id(0) // row_blocks * 5
    batch, head, query = gl.load(shared_ptr), gl.load(shared_ptr + 1), gl.load(shared_ptr + 2)
    first_piece, count = gl.load(shared_ptr + 3), gl.load(shared_ptr + 4)
    if count > 1 or not IN_SHARES:
        pieces_ptr += first_piece.to(gl.int64) * STRIDE
        first_row = gl.program_id(0) % row_blocks * AT_A_TIME
        row = first_row + gl.arange(0, AT_A_TIME, gl.SliceLayout(1, matrix))
        dims = gl.arange(0, DIMS, gl.SliceLayout(0, matrix))
        in_piece = row[:, None] * DIM_V + dims[None, :]
        in_sums = ROWS * DIM_V + first_row + gl.arange(0, AT_A_TIME, gl.SliceLayout(0, sums))
        most = gl.full([AT_A_TIME], float("-inf"), gl.float32, gl.SliceLayout(0, sums))
        total = gl.zeros_like(most)
        out = gl.zeros([AT_A_TIME, DIMS], gl.float32, matrix)
        for i in range(0, count, AT_ONCE):
            piece = i + gl.arange(0, AT_ONCE, gl.SliceLayout(1, sums))
            here = (piece < count)[:, None]
            if IN_SHARES:  # of shares n, n + 1 ...: of the first its second slot
                piece = 2 * piece + (piece == 0).to(gl.int32)
            at = (piece * STRIDE)[:, None]
            lse = gl.load(pieces_ptr + (at + in_sums[None, :]), here, float("-inf"))
            inverse = gl.load(pieces_ptr + (at + in_sums[None, :] + ROWS), here, 0.0)
            inside = here[:, :, None] & (dims < DIM_V)[None, :][None, :, :]
            o = gl.load(pieces_ptr + (at[:, :, None] + in_piece[None, :, :]), inside, 0.0)
            most_before = most
            most = gl.maximum(most, gl.max(lse, axis=0))
            shift = gl.where(most == float("-inf"), 0.0, most)
            kept = gl.exp(most_before - shift)
            weight = gl.exp(lse - shift[None, :])
            total = total * kept + gl.sum(weight, axis=0)
            o = gl.sum(o * (weight * inverse)[:, :, None], axis=0)
            out = out * gl.convert_layout(kept, gl.SliceLayout(1, matrix))[:, None] + o
        inverse = gl.convert_layout(1 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, matrix))
        lse = gl.convert_layout(most + gl.log(total), gl.SliceLayout(1, matrix))
        queries = query + row // PACK
        heads = head * PACK + row % PACK
        there = queries < seqlen_q
        gl.store(lse_ptr + (batch * heads_q + heads).to(gl.int64) * seqlen_q + queries, lse, there)
        of_out = ((batch.to(gl.int64) * seqlen_q + queries) * heads_q + heads)[:, None] * DV + dims[None, :]
        out = (out * inverse[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + of_out, out, there[:, None] & (dims < DV)[None, :])
