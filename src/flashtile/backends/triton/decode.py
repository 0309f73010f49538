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
slots, as programs have whole tasks, nothing is merged.

Legend: q (B, Sq, Hq, D) · caches (rows, capacity, Hk, D | Dv) or (pages, page_size, Hk, D | Dv) · parts: acc
(2 programs, TILE_M, Dv), m and l (TILE_M, 2 programs), float32 · out (B, Sq, Hq, Dv) · lse (B, Hq, Sq).
"""

import triton
import triton.language as tl

from ..append import page_of_keys
from .decode_shares import (
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
    start_of_share,
)
from .tile import LN2, LOG2E, softmax_step, tanh

EXPONENT = tl.constexpr(0x7F800000)  # the bits of a float32's
FLOAT32_TINY = tl.constexpr(2.0**-126)


@triton.jit
def load_keys(
    ptr, stride_b, stride_s, page, start, inside, PAGE_SIZE: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    """(TILE_N, TILE_D) tile of K or V of one head, from token `start` of a row or page on, zero outside."""
    token = tl.arange(0, inside.shape[0])
    if PAGE_SIZE > 0:
        token %= PAGE_SIZE
    dims = tl.arange(0, TILE_D)
    at = token[:, None] * stride_s + dims[None, :]  # the same in every block: worked out once, in 32 bits
    mask = inside[:, None]
    if D < TILE_D:
        mask &= (dims < D)[None, :]
    if page.type.is_block():
        ptr += page[:, None] * stride_b
    else:
        ptr += page * stride_b + start.to(tl.int64) * stride_s
    return tl.load(ptr + at, mask, 0.0)


@triton.jit
def as_float16(q):
    """(rows of q times a power of two that puts their largest in 1 ... 2, as float16; what to multiply by afterwards).

    For float8 keys: float16 holds those exactly, and one instruction makes two; bfloat16 takes more, and slower ones.
    """
    largest = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), FLOAT32_TINY)
    power = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) / power[:, None]).to(tl.float16), power


@triton.jit
def load_float8(
    ptr, stride_b, stride_s, page, start, inside, PAGE_SIZE: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    """(even, odd): the even dims and the odd dims of a float8 `load_keys`, (TILE_N, TILE_D // 2) each, as float16.

    A product wants two keys of one dim of V side by side. Pairs of dims are moved so like any 16-bit matrix, on their
    way from shared memory to registers, which matrices of bytes cannot be; two keys' pairs are then four bytes of a
    register, and one instruction sorts them. As float16 V would go back to shared memory first, at twice its size.
    """
    pairs_ptr = ptr.to(tl.pointer_type(tl.int16))
    pairs = load_keys(pairs_ptr, stride_b // 2, stride_s // 2, page, start, inside, PAGE_SIZE, D // 2, TILE_D // 2)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 sorted; .reg .b16 even, odd;"
        " prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {even, odd}, sorted;"
        " cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


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


@triton.jit
def with_sink(acc, m, l, sink):
    """A step of the online softmax by one more score of each row, which has no value."""
    m_new = tl.maximum(m, sink)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp(m - shift)
    return acc * alpha[:, None], m_new, l * alpha + tl.exp(sink - shift)


@triton.jit
def normalized(acc, m, l):
    """(out, lse) of one row, or of each: acc and l are sums of exp(score - m); rows that have seen no key are zero."""
    empty = l == 0
    return acc * (1.0 / tl.where(empty, 1.0, l)), tl.where(empty, float("-inf"), m + tl.log(l))


@triton.jit
def head_of_task(task, m_blocks):
    """(key head, block of rows): no division where a head has one block."""
    head_k = task
    m_block = task * 0
    if m_blocks > 1:
        head_k = task // m_blocks
        m_block = task % m_blocks
    return head_k, m_block


@triton.jit
def rows_of_task(head_k, m_block, group, seqlen_q, TILE_M: tl.constexpr):
    """(query, head of q, whether there is one) of each row of a task."""
    row = m_block * TILE_M + tl.arange(0, TILE_M)
    query = row // group
    return query, head_k.to(tl.int64) * group + row % group, query < seqlen_q


@triton.jit
def queries_of_task(
    q_ptr, slopes_ptr, k_descale_ptr, sequence, head_k, m_block, stride_qb, stride_qs, stride_qh, stride_slopes,
    stride_k_descale, seqlen_q, group, softmax_scale,
    D: tl.constexpr, TILE_D: tl.constexpr, TILE_M: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
    BY_HALVES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """q (TILE_M, TILE_D), with PAIRS its even and its odd dims; of each row, (TILE_M,), what its scores are to be
    multiplied by, its ALiBi slope in base 2 and its query; k's scale.
    """
    query, head, here = rows_of_task(head_k, m_block, group, seqlen_q, TILE_M)
    at = sequence.to(tl.int64) * stride_qb + query.to(tl.int64) * stride_qs + head * stride_qh
    dims = tl.arange(0, TILE_D)
    q = tl.load(q_ptr + (at[:, None] + dims[None, :]), here[:, None] & (dims < D)[None, :], 0.0)
    k_scale = 1.0
    if k_descale_ptr is not None:
        k_scale = tl.load(k_descale_ptr + sequence * stride_k_descale + head_k)
    if EXACT:
        q *= softmax_scale * k_scale
    if NEGATIVE:  # unit is positive: q carries the scale's sign
        q = -q
    power = tl.full([TILE_M], 1.0, tl.float32)
    if BY_HALVES:
        q, power = as_float16(q)
    odd = q
    if PAIRS:
        q, odd = tl.split(q.reshape(TILE_M, TILE_D // 2, 2))
    slope = tl.zeros([TILE_M], tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + sequence * stride_slopes + head, here, 0.0) * LOG2E
    return q, odd, power, slope, query, k_scale


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
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, BY_HALVES: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, SHARED: tl.constexpr, LINE_EACH: tl.constexpr, IN_ORDER: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """An equal share of a line of key blocks, of those of `width` lines: grid (programs,); without SHARED one task:
    grid (B * Hk * blocks of rows,). IN_ORDER: those of the longest sequences come first. SPLIT: in that order, a piece
    of one, if it is longer than an equal share for each program that runs at once: grid (tasks + these,). LINE_EACH:
    there are as many lines as a sequence has tasks. SUMS: of a row, as `softmax_step` keeps them.

    `places` are pages, or rows of the cache, or None: sequence b has row b. stride_vs is None where it is stride_ks:
    the offsets of a tile's keys then take registers once. Of parts, acc is (2 * programs, TILE_M, DV), and sums, m and
    l, (TILE_M, 2 * programs, 2).

    There is one loop, over the blocks of a share whatever their tasks: the first blocks of a task are in flight while
    the last of the task before are computed. That the compiler can pipeline it so rests on three things. All of where a
    block lies is carried from the step before (sequence, head_k, m_block, first, n_keys, n_block, ends, page) and moves
    on, but behind the last, in an `if` apart from those that store a task and load q, which are behind products. No
    value is carried for two steps: hence goes_on, not the `ends` of the step before. And the first q is loaded before
    the loop: were it zeros there, a task's q would lie in registers as a product takes it, and they are few. Without
    SHARED no task follows; what loads its q keeps the first one's from being awaited before the first blocks are asked
    for.
    """
    m_blocks = tl.cdiv(seqlen_q * group, TILE_M)
    tasks = heads_k * m_blocks
    program = tl.program_id(0)
    n_shares = tl.num_programs(0) // width  # of a line
    line, rank = program % width, program // width
    of_line = 1 if LINE_EACH else tasks // width  # of a sequence's tasks, those in a line
    alike: tl.constexpr = seqlens_ptr is None and leftpad_ptr is None  # nothing need be read to find a share
    if EARLY and not alike:
        await_kernel_before(n_shares, SHARED or SPLIT)
    if SHARED:
        if alike:
            n_first, blocks = key_blocks(capacity, seqlen_q, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT)
            of_sequence = blocks * of_line
            n_blocks = of_sequence * batches
            cost = 0
        else:
            # in pages, each warp by itself takes 20 registers more, and 3 % longer (decode_search_by_warp)
            LANES: tl.constexpr = at_a_time(TILE_B) if PAGE_SIZE == 0 else TILE_B
            n_blocks, cost, begin = places_of_line(
                0, of_line, batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q, window_left,
                window_right, TILE_B, LANES, TILE_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
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
                place, stop, of_line, cost, batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q,
                window_left, window_right, TILE_B, LANES, TILE_N, HAS_LEFT, HAS_RIGHT, LINE_EACH,
            )  # fmt: skip
            # so written, the loop at D 64 is 2 to 4 % faster than with tl.where (decode_steps_of_an_empty_share)
            steps = tl.minimum(steps, tl.maximum(stop - position, 0))
    else:
        sequence, inside_sequence = program // tasks, program % tasks
        most = None
        if SPLIT:
            most = most_of_a_piece(
                tasks, n_shares - batches * tasks, batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q,
                window_left, window_right, TILE_B, TILE_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        if IN_ORDER:
            sequence, inside_sequence = longest_first(
                program, tasks, most, batches, seqlens_ptr, leftpad_ptr, seqlen_new, capacity, seqlen_q, window_left,
                window_right, TILE_B, TILE_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        if SPLIT:
            has_piece = sequence < batches
            sequence = tl.minimum(sequence, batches - 1)
    first, n_keys = span_of(sequence, True, seqlens_ptr, leftpad_ptr, seqlen_new, capacity)
    n_first, blocks = key_blocks(n_keys, seqlen_q, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT)
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
    page = page_of_keys(places_ptr, n_block * TILE_N, n_keys, sequence, stride_pb, TILE_N, PAGE_SIZE)
    stride_vs = stride_ks if stride_vs is None else stride_vs
    q, q_odd, q_scale, slope, query, k_scale = queries_of_task(
        q_ptr, slopes_ptr, k_descale_ptr, sequence, head_k, m_block, stride_qb, stride_qs, stride_qh,
        stride_slopes, stride_k_descale, seqlen_q, group, softmax_scale,
        D, TILE_D, TILE_M, EXACT, NEGATIVE, BY_HALVES, PAIRS,
    )  # fmt: skip
    dims_v = tl.arange(0, TILE_DV)
    acc = tl.zeros([TILE_M, TILE_DV // 2 if PAIRS else TILE_DV], tl.float32)
    if PAIRS:  # even dims are in q, k, v, acc
        acc_odd = acc
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M, SUMS], tl.float32)
    goes_on = True  # the task of the block before; a task begins where it does not
    ends = n_block + 1 == n_end
    for step in range(steps):
        if not goes_on:
            q, q_odd, q_scale, slope, query, k_scale = queries_of_task(
                q_ptr, slopes_ptr, k_descale_ptr, sequence, head_k, m_block, stride_qb, stride_qs, stride_qh,
                stride_slopes, stride_k_descale, seqlen_q, group, softmax_scale,
                D, TILE_D, TILE_M, EXACT, NEGATIVE, BY_HALVES, PAIRS,
            )  # fmt: skip
            acc = tl.zeros_like(acc)
            if PAIRS:
                acc_odd = tl.zeros_like(acc)
            m = tl.full([TILE_M], float("-inf"), tl.float32)
            l = tl.zeros_like(l)
        base_2 = unit  # scores in base 2 are s * base_2
        if not EXACT and not SOFTCAP:
            base_2 = unit * k_scale
        s_unit = base_2 if slopes_ptr is None else 1.0
        keys = n_block * TILE_N + tl.arange(0, TILE_N)
        inside = keys < n_keys
        diagonal = (query + (n_keys - seqlen_q))[:, None]
        start = n_block * TILE_N % PAGE_SIZE if PAGE_SIZE > 0 else first + n_block * TILE_N
        k_head = k_ptr + head_k.to(tl.int64) * stride_kh
        if PAIRS:
            k, k_odd = load_float8(k_head, stride_kb, stride_ks, page, start, inside, PAGE_SIZE, D, TILE_D)
            s = tl.dot(q, tl.trans(k))
            s = tl.dot(q_odd, tl.trans(k_odd), s)
        else:
            k = load_keys(k_head, stride_kb, stride_ks, page, start, inside, PAGE_SIZE, D, TILE_D)
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # (TILE_M, TILE_N)
        if BY_HALVES:
            s *= q_scale[:, None]
        if SOFTCAP:
            s = tanh(s * (cap_in * k_scale))
        if slopes_ptr is not None:
            s = s * base_2 - slope[:, None] * tl.abs(diagonal - keys[None, :]).to(tl.float32)
        seen = inside[None, :]
        if HAS_LEFT:
            seen &= keys[None, :] >= diagonal - window_left
        if HAS_RIGHT:
            seen &= keys[None, :] <= diagonal + window_right
        p, alpha, m, l = softmax_step(tl.where(seen, s, float("-inf")), s_unit, m, l, EXACT)
        p = p.to(q.dtype)
        v_head = v_ptr + head_k.to(tl.int64) * stride_vh
        if PAIRS:
            v, v_odd = load_float8(v_head, stride_vb, stride_vs, page, start, inside, PAGE_SIZE, DV, TILE_DV)
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        else:
            v = load_keys(v_head, stride_vb, stride_vs, page, start, inside, PAGE_SIZE, DV, TILE_DV).to(q.dtype)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")

        if ends | (step + 1 == steps):
            if EARLY and not (SHARED or SPLIT):
                # not before: the next kernel's programs would crowd where the first of these end
                tl.extra.cuda.gdc_launch_dependents()
            acc_end = tl.interleave(acc, acc_odd) if PAIRS else acc
            m_end = m if EXACT and slopes_ptr is None else m * (s_unit * LN2)
            l_end = tl.sum(l, 1)
            if v_descale_ptr is not None:
                acc_end *= tl.load(v_descale_ptr + sequence * stride_v_descale + head_k)
            if sinks_ptr is not None:
                _, head, here = rows_of_task(head_k, m_block, group, seqlen_q, TILE_M)
                sink = tl.load(sinks_ptr + head, here, 0.0).to(tl.float32)
                sink = tl.where(begin == 0, sink, float("-inf"))  # in one part of a task
                acc_end, m_end, l_end = with_sink(acc_end, m_end, l_end, sink)
            if acc_parts_ptr is None or (ends & (begin == 0)):
                _, head, here = rows_of_task(head_k, m_block, group, seqlen_q, TILE_M)
                stored = here[:, None] & (dims_v < DV)[None, :]
                out, lse = normalized(acc_end, m_end[:, None], l_end[:, None])
                out_at = ((sequence.to(tl.int64) * seqlen_q + query) * heads_k * group + head) * DV
                tl.store(out_ptr + (out_at[:, None] + dims_v[None, :]), out.to(out_ptr.dtype.element_ty), stored)
                lse_at = (sequence.to(tl.int64) * heads_k * group + head) * seqlen_q + query
                tl.store(lse_ptr + lse_at[:, None], lse, here[:, None])
            else:
                row = tl.arange(0, TILE_M)
                here = row < seqlen_q * group - m_block * TILE_M
                stored = here[:, None] & (dims_v < DV)[None, :]
                slot = (2 * (line * n_shares + rank) + (begin == 0)).to(tl.int64)
                acc_at = slot * (TILE_M * DV)
                tl.store(acc_parts_ptr + acc_at + (row[:, None] * DV + dims_v[None, :]), acc_end, stored)
                sums_ptr = sums_parts_ptr + 2 * (row.to(tl.int64) * (2 * tl.num_programs(0)) + slot)
                tl.store(sums_ptr, m_end, here)
                tl.store(sums_ptr + 1, l_end, here)

        n_block += 1
        goes_on = not ends
        if SHARED and (ends & (step + 1 < steps)):
            begin = 0
            task += width
            if LINE_EACH or task >= tasks:
                task -= tasks
                sequence = tl.minimum(sequence + 1, batches - 1)  # there is one; so written, 32 rows do not spill
            head_k, m_block = head_of_task(task, m_blocks)
            first, n_keys = span_of(sequence, True, seqlens_ptr, leftpad_ptr, seqlen_new, capacity)
            n_block, blocks = key_blocks(
                n_keys, seqlen_q, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT
            )  # fmt: skip
            n_end = n_block + blocks
        ends = n_block + 1 == n_end
        # the next block's: read in its own step it would halve the blocks in flight
        page = page_of_keys(places_ptr, n_block * TILE_N, n_keys, sequence, stride_pb, TILE_N, PAGE_SIZE)


@triton.jit(do_not_specialize=[
    "n_shares", "batches", "seqlen_q", "heads_k", "group", "seqlen_new", "capacity", "width", "least", "window_left",
    "window_right",
])  # fmt: skip
def merge_kernel(
    acc_parts_ptr, sums_parts_ptr, seqlens_ptr, leftpad_ptr, capacity, out_ptr, lse_ptr,
    n_shares, batches, seqlen_q, heads_k, group, seqlen_new, width, least, window_left, window_right,
    DV: tl.constexpr, PARTS: tl.constexpr, DIMS: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, LINE_EACH: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
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
    batch = place // seqlen_q // (heads_k * group)
    row = query * group + head % group
    m_blocks = tl.cdiv(seqlen_q * group, TILE_M)
    tasks = heads_k * m_blocks
    of_line = 1 if LINE_EACH else tasks // width  # of a sequence's tasks, those in a line
    task = head // group * m_blocks + row // TILE_M
    line = task if LINE_EACH else task % width
    _, n_keys = span_of(batch, True, seqlens_ptr, leftpad_ptr, seqlen_new, capacity)
    _, blocks = key_blocks(n_keys, seqlen_q, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT)
    if SPLIT:
        first_share, n_parts = pieces_of_task(
            batch, task, blocks, tasks, n_shares - batches * tasks, batches, seqlens_ptr, leftpad_ptr, seqlen_new,
            capacity, seqlen_q, window_left, window_right, TILE_B, TILE_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    else:
        first_share, n_parts = shares_of_task(
            batch, task, blocks, of_line, width, n_shares, least, batches, seqlens_ptr, leftpad_ptr, seqlen_new,
            capacity, seqlen_q, window_left, window_right, TILE_B, TILE_N, HAS_LEFT, HAS_RIGHT, LINE_EACH,
        )  # fmt: skip
    if n_parts == 1:
        if EARLY and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    row %= TILE_M
    first_slot = 2 * (line * n_shares + first_share)
    acc_ptr = acc_parts_ptr + (first_slot.to(tl.int64) * TILE_M + row) * DV
    sums_ptr = sums_parts_ptr + 2 * (row.to(tl.int64) * (2 * n_shares * width) + first_slot)
    out_at = ((batch.to(tl.int64) * seqlen_q + query) * heads_k * group + head) * DV
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
