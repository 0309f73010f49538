"""Flash-Decoding in Triton (FlashAttention-2 section 3.2): the keys of a sequence split over programs, parts merged.

A task is one key head of one sequence; the queries of its group, all Sq of each head, are the rows of its one tile
(more than TILE_M rows: of several tasks). Row r is query r // group of head r % group.

How many keys there are is read on the device, so that a grid does not depend on it. With SHARED the blocks of every
`width`-th task lie in one line, task after task, and so many programs take equal shares of each line, whatever the
lengths are: the end of one task, whole ones, the beginning of another. Lines are alike, and so are their shares:
the key heads of a sequence, which lie side by side in memory, are read at the same time, at the same keys. A task that
lies in one share is written at once, the others as parts: share n of a line has at most one part that began before it,
kept in slot 2 n of the line, and one that goes on behind it, in slot 2 n + 1. `merge_kernel` finds them by the same
arithmetic (decode_shares.py). A part is the state of the online softmax: sums not yet divided by l, and m and l.
Without SHARED a program has one task, those of the longest sequences first if they are IN_ORDER; where there are no
slots, as programs have whole tasks, nothing is merged. What a program does with its blocks is in decode_blocks.py.

Legend: q (B, Sq, Hq, D) · caches (rows, capacity, Hk, D | Dv) or (pages, page_size, Hk, D | Dv) · parts: acc
(2 programs, TILE_M, Dv), m and l (TILE_M, 2 programs), float32 · out (B, Sq, Hq, Dv) · lse (B, Hq, Sq).
"""

import triton
import triton.language as tl

from .decode_blocks import Problem, attend_blocks, head_of_task, normalized
from .decode_shares import (
    Batch,
    at_a_time,
    begin_of_share,
    key_blocks,
    longest_first,
    most_of_a_piece,
    pieces_of,
    pieces_of_task,
    places_of_line,
    shares_of_line,
    shares_of_task,
    span_of,
    spread,
    start_of_share,
)


@triton.jit
def await_kernel_before(known, SHARED: tl.constexpr):
    """Waits until the kernel before has ended, while which this one starts; `known`, 1 or more, is worked out first.

    In a branch, which is always taken: the assembler would put all arithmetic that stands before the wait behind it.
    Programs of shares then let the next kernel start, once all of them run: the merge takes no place from them.
    """
    if known > 0:
        tl.extra.cuda.gdc_wait()
    if SHARED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=[
    "stride_pb", "stride_slopes", "stride_k_descale", "stride_v_descale", "batches", "seqlen_q", "heads_k", "group",
    "seqlen_new", "capacity", "width", "least", "window_left", "window_right",
])  # fmt: skip
def decode_kernel(
    q_ptr, k_ptr, v_ptr, seqlens_ptr, leftpad_ptr, places_ptr, slopes_ptr, sinks_ptr, k_descale_ptr, v_descale_ptr,
    acc_parts_ptr, sums_parts_ptr, capacity, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_pb,
    stride_slopes, stride_k_descale, stride_v_descale,
    batches, seqlen_q, heads_k, group, seqlen_new, width, least, softmax_scale, unit, cap_in,
    window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr, BY_HALVES: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, SHARED: tl.constexpr, LINE_EACH: tl.constexpr, WHOLE_IF_ALIKE: tl.constexpr,
    IN_ORDER: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """An equal share of a line of key blocks, of those of `width` lines: grid (programs,); without SHARED one task:
    grid (B * Hk * blocks of rows,). IN_ORDER: those of the longest sequences come first. SPLIT: in that order, a piece
    of one, if it is longer than an equal share for each program that runs at once: grid (tasks + these,).
    WHOLE_IF_ALIKE: a task, or none, where all sequences turn out to have as many key blocks, by a loop of its own, as
    each step of one that goes on to other tasks takes longer. LINE_EACH: there are as many lines as a sequence has
    tasks. SUMS: of a row, as `softmax_step` keeps them.

    `places` are pages, or rows of the cache, or None: sequence b has row b. stride_vs is None where it is stride_ks:
    the offsets of a tile's keys then take registers once. Of parts, acc is (2 * programs, TILE_M, DV), and sums, m and
    l, (TILE_M, 2 * programs, 2).
    """
    m_blocks = tl.cdiv(seqlen_q * group, TILE_M)
    tasks = heads_k * m_blocks
    program = tl.program_id(0)
    n_shares = tl.num_programs(0) // width  # of a line
    line, rank = program % width, program // width
    of_line = 1 if LINE_EACH else tasks // width  # of a sequence's tasks, those in a line
    alike: tl.constexpr = seqlens_ptr is None and leftpad_ptr is None  # nothing need be read to find a share
    batch = Batch(batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q, window_left, window_right)
    p = Problem(
        q_ptr, k_ptr, v_ptr, places_ptr, slopes_ptr, sinks_ptr, k_descale_ptr, v_descale_ptr, out_ptr, lse_ptr,
        stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_pb,
        stride_slopes, stride_k_descale, stride_v_descale, heads_k, group, m_blocks, tasks, width, softmax_scale, unit,
        cap_in,
    )  # fmt: skip
    if EARLY and not alike:
        await_kernel_before(n_shares, SHARED or SPLIT)
    if SHARED:
        if alike:
            n_first, blocks = key_blocks(capacity, batch, TILE_N)
            of_sequence = blocks * of_line
            n_blocks = of_sequence * batches
            cost = 0
        else:
            # in pages, each warp by itself takes 20 registers more, and 3 % longer (decode_search_by_warp)
            LANES: tl.constexpr = at_a_time(TILE_B) if PAGE_SIZE == 0 else TILE_B
            n_blocks, cost, begin = places_of_line(0, of_line, batch, TILE_B, LANES, TILE_N)
            if WHOLE_IF_ALIKE and cost == 0:  # all have as many blocks
                task, here = spread(program, tl.num_programs(0), batches * tasks)
                if here:
                    sequence = task // tasks
                    first, n_keys = span_of(sequence, True, batch)
                    n_block, steps = key_blocks(n_keys, batch, TILE_N)
                    head_k, m_block = head_of_task(task % tasks, m_blocks)
                    attend_blocks(
                        p, batch, None, None, sequence, 0, head_k, m_block, first, n_keys, 0, n_block, n_block + steps,
                        steps, line, rank, n_shares, D, DV, TILE_D, TILE_DV, TILE_M, TILE_N, PAGE_SIZE, SOFTCAP, EXACT,
                        NEGATIVE, BY_HALVES, PAIRS, SUMS, False, LINE_EACH, False,
                    )  # fmt: skip
                return
        share, longer = shares_of_line(n_blocks, n_shares, least)
        position = begin_of_share(rank, share, longer)
        stop = tl.minimum(begin_of_share(rank + 1, share, longer), n_blocks)
        place = tl.minimum(position, n_blocks - 1)  # an empty share has no steps, but q and a page, and must find them
        if alike:
            sequence = place // of_sequence
            inside_sequence = place % of_sequence
            steps = stop - position
        else:
            sequence, inside_sequence, steps = start_of_share(
                place, stop, of_line, cost, batch, TILE_B, LANES, TILE_N, LINE_EACH
            )
            # so written, the loop at D 64 is 2 to 4 % faster than with tl.where (decode_steps_of_an_empty_share)
            steps = tl.minimum(steps, tl.maximum(stop - position, 0))
    else:
        sequence, inside_sequence = program // tasks, program % tasks
        most = None
        if SPLIT:
            most = most_of_a_piece(tasks, n_shares - batches * tasks, batch, TILE_B, TILE_N)
        if IN_ORDER:
            sequence, inside_sequence = longest_first(program, tasks, most, batch, TILE_B, TILE_N)
        if SPLIT:
            has_piece = sequence < batches
            sequence = tl.minimum(sequence, batches - 1)
    first, n_keys = span_of(sequence, True, batch)
    n_first, blocks = key_blocks(n_keys, batch, TILE_N)
    if SHARED:
        task = line
        begin = inside_sequence
        if not LINE_EACH:
            task += inside_sequence // (blocks + cost) * width
            begin = inside_sequence % (blocks + cost)
        begin = tl.maximum(begin - cost, 0)
    else:
        task, begin, steps = inside_sequence, 0, blocks
        if SPLIT:
            n_pieces = pieces_of(blocks, most)
            task, piece = inside_sequence // n_pieces, inside_sequence % n_pieces
            begin = blocks * piece // n_pieces
            steps = tl.where(has_piece, blocks * (piece + 1) // n_pieces - begin, 0)
    head_k, m_block = head_of_task(task, m_blocks)
    n_block = n_first + begin
    n_end = n_first + blocks
    if EARLY and alike:
        await_kernel_before(n_end, SHARED)
    attend_blocks(
        p, batch, acc_parts_ptr, sums_parts_ptr, sequence, task, head_k, m_block, first, n_keys, begin, n_block, n_end,
        steps, line, rank, n_shares, D, DV, TILE_D, TILE_DV, TILE_M, TILE_N, PAGE_SIZE, SOFTCAP, EXACT, NEGATIVE,
        BY_HALVES, PAIRS, SUMS, SHARED, LINE_EACH, EARLY and not (SHARED or SPLIT),
    )  # fmt: skip


@triton.jit(do_not_specialize=[
    "n_shares", "batches", "seqlen_q", "heads_k", "group", "seqlen_new", "capacity", "width", "least", "window_left",
    "window_right",
])  # fmt: skip
def merge_kernel(
    acc_parts_ptr, sums_parts_ptr, seqlens_ptr, leftpad_ptr, capacity, out_ptr, lse_ptr,
    n_shares, batches, seqlen_q, heads_k, group, seqlen_new, width, least, window_left, window_right,
    DV: tl.constexpr, PARTS: tl.constexpr, DIMS: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    LINE_EACH: tl.constexpr, WHOLE_IF_ALIKE: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """DIMS of out, and lse, of one row, where its task was split, from PARTS of its parts at a time: grid
    (B * Hq * Sq * blocks of DIMS,).

    With EARLY it starts while parts are still computed. What it reads before it waits, the lengths, was there
    before `decode_kernel` began, which is launched behind all that came before. Programs that have nothing to merge end
    while parts are computed, and leave their place to others. The first waits even so: this kernel must not end before
    `decode_kernel`, as the next one in the stream waits for this one alone.
    Before it waits it goes round once, for no parts: where they lie is known then, and the instructions are at hand.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel, if it waits for this one by itself
    dim_blocks = tl.cdiv(DV, DIMS)
    dim = tl.program_id(0) % dim_blocks * DIMS + tl.arange(0, DIMS)
    place = tl.program_id(0) // dim_blocks  # in lse
    query = place % seqlen_q
    head = place // seqlen_q % (heads_k * group)
    sequence = place // seqlen_q // (heads_k * group)
    row = query * group + head % group
    m_blocks = tl.cdiv(seqlen_q * group, TILE_M)
    tasks = heads_k * m_blocks
    of_line = 1 if LINE_EACH else tasks // width  # of a sequence's tasks, those in a line
    task = head // group * m_blocks + row // TILE_M
    line = task if LINE_EACH else task % width
    batch = Batch(batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q, window_left, window_right)
    _, n_keys = span_of(sequence, True, batch)
    _, blocks = key_blocks(n_keys, batch, TILE_N)
    if SPLIT:
        first_share, n_parts = pieces_of_task(
            sequence, task, blocks, tasks, n_shares - batches * tasks, batch, TILE_B, TILE_N
        )
    else:
        first_share, n_parts = shares_of_task(
            sequence, task, blocks, of_line, width, n_shares, least, batch, TILE_B, TILE_N, LINE_EACH, WHOLE_IF_ALIKE
        )
    if n_parts == 1:
        if EARLY and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    row %= TILE_M
    first_slot = 2 * (line * n_shares + first_share)
    acc_ptr = acc_parts_ptr + (first_slot.to(tl.int64) * TILE_M + row) * DV
    sums_ptr = sums_parts_ptr + 2 * (row.to(tl.int64) * (2 * n_shares * width) + first_slot)
    out_at = ((sequence.to(tl.int64) * seqlen_q + query) * heads_k * group + head) * DV
    acc = tl.zeros([DIMS], tl.float32)
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    # Lest the compiler puts what waits for m before it loads acc. From the L2 cache is faster, where that keeps it so.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    for first in range(-PARTS if EARLY else 0, n_parts, PARTS):
        if EARLY and first == 0:
            tl.extra.cuda.gdc_wait()
        part = first + tl.arange(0, PARTS)
        here = (part >= 0) & (part < n_parts)
        slot = 2 * part + (part == 0)
        at = slot[:, None].to(tl.int64) * (TILE_M * DV) + dim[None, :]
        inside = here[:, None] & (dim < DV)[None, :]
        accs = tl.load(acc_ptr + at, inside, 0.0, cache_modifier=CACHE, volatile=not EARLY)  # (PARTS, DIMS)
        ms = tl.load(sums_ptr + 2 * slot, here, float("-inf"), cache_modifier=CACHE, volatile=not EARLY)
        ls = tl.load(sums_ptr + 2 * slot + 1, here, 0.0, cache_modifier=CACHE, volatile=not EARLY)
        m_new = tl.maximum(m, tl.max(ms, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        weights = tl.exp(ms - shift)
        alpha = tl.exp(m - shift)
        acc = acc * alpha + tl.sum(accs * weights[:, None], 0)
        l = l * alpha + tl.sum(ls * weights, 0)
        m = m_new
    out, lse = normalized(acc, m, l)
    tl.store(out_ptr + out_at + dim, out.to(out_ptr.dtype.element_ty), dim < DV)
    tl.store(lse_ptr + place, lse)
