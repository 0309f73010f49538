"""How Flash-Decoding's key blocks are shared out: whose blocks a program has, and which programs have a task's.

A line is the blocks of some tasks, task after task, and its shares go to as many programs, in order. Both kernels of
decode.py do this arithmetic, and what launches them some of it.
"""

import triton
import triton.language as tl


@triton.jit
def span_of(sequence, here, seqlens_ptr, leftpad_ptr, seqlen_new, capacity):
    """(first, n_keys) of a sequence, or of a vector of them; never past the cache."""
    end = capacity
    if seqlens_ptr is not None:
        end = tl.minimum(tl.load(seqlens_ptr + sequence, here, 0).to(tl.int32) + seqlen_new, capacity)
    first = 0
    if leftpad_ptr is not None:
        first = tl.load(leftpad_ptr + sequence, here, 0).to(tl.int32)
    return first, tl.maximum(end - first, 0)


@triton.jit
def key_blocks(
    n_keys, seqlen_q, window_left, window_right, TILE_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """(first, how many): the key blocks that any query of a sequence sees; one at least: its rows must be written."""
    offset = n_keys - seqlen_q
    first = n_keys * 0
    end = n_keys
    if HAS_LEFT:
        first = tl.maximum(offset - window_left, 0) // TILE_N
    if HAS_RIGHT:
        end = tl.minimum(n_keys, tl.maximum(offset + seqlen_q + window_right, 0))
    return first, tl.maximum(tl.cdiv(end, TILE_N) - first, 1)


@triton.jit
def blocks_of_sequences(
    batches, tasks, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q, window_left, window_right,
    TILE_B: tl.constexpr, TILE_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(TILE_B,) blocks of a line that belong to each sequence, which has so many `tasks` in it."""
    sequence = tl.arange(0, TILE_B)
    here = sequence < batches
    _, n_keys = span_of(sequence, here, seqlens_ptr, leftpad_ptr, seqlen_new, capacity)
    _, blocks = key_blocks(n_keys, seqlen_q, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT)
    return tl.where(here, blocks * tasks, 0)


@triton.jit
def shares_of_line(n_blocks, n_shares, least):
    """(share, longer): blocks of each share of a line, and how many shares, the first, have one more.

    `least` blocks at least, so that short lines go to fewer programs. Else as many for each, rounded up, where whole
    tasks then stay whole, unless more than a sixteenth of the programs would have none.
    """
    share = (n_blocks + n_shares - 1) // n_shares
    longer = n_blocks * 0
    if share < least:
        share = least
    elif (share > least) & (16 * (share * n_shares - n_blocks) > share * n_shares):
        share -= 1
        longer = n_blocks - share * n_shares
    return share, longer


@triton.jit
def begin_of_share(rank, share, longer):
    """The first block of a share of a line."""
    return rank * share + min(rank, longer)


@triton.jit
def share_of_block(block, share, longer):
    """Which share of a line has a block."""
    of_longer = longer * (share + 1)
    return block // (share + 1) if block < of_longer else longer + (block - of_longer) // share
