"""Flash-Decoding's loop, over the key blocks of a share, whatever their tasks, or of one task. Legend: decode.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..append import page_of_keys
from .decode_shares import key_blocks, span_of
from .tile import LN2, LOG2E, softmax_step, tanh

EXPONENT = tl.constexpr(0x7F800000)  # the bits of a float32's
FLOAT32_TINY = tl.constexpr(2.0**-126)


class Problem(NamedTuple):
    """What `decode_kernel` is told of a call, but for its lengths, which are the `Batch`'s, and parts."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    places_ptr: Any
    slopes_ptr: Any
    sinks_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    stride_qb: Any
    stride_qs: Any
    stride_qh: Any
    stride_kb: Any
    stride_ks: Any
    stride_kh: Any
    stride_vb: Any
    stride_vs: Any
    stride_vh: Any
    stride_pb: Any
    stride_slopes: Any
    stride_k_descale: Any
    stride_v_descale: Any
    heads_k: Any
    group: Any
    m_blocks: Any  # of a key head's rows
    tasks: Any  # of a sequence
    width: Any  # lines of blocks
    softmax_scale: Any
    unit: Any  # scores in base 2 are q.k times it
    cap_in: Any


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
def rows_of_task(p, batch, head_k, m_block, TILE_M: tl.constexpr):
    """(query, head of q, whether there is one) of each row of a task."""
    row = m_block * TILE_M + tl.arange(0, TILE_M)
    query = row // p.group
    return query, head_k.to(tl.int64) * p.group + row % p.group, query < batch.seqlen_q


@triton.jit
def queries_of_task(
    p, batch, sequence, head_k, m_block, D: tl.constexpr, TILE_D: tl.constexpr, TILE_M: tl.constexpr,
    EXACT: tl.constexpr, NEGATIVE: tl.constexpr, BY_HALVES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """q (TILE_M, TILE_D), with PAIRS its even and its odd dims; of each row, (TILE_M,), what its scores are to be
    multiplied by, its ALiBi slope in base 2 and its query; k's scale.
    """
    query, head, here = rows_of_task(p, batch, head_k, m_block, TILE_M)
    at = sequence.to(tl.int64) * p.stride_qb + query.to(tl.int64) * p.stride_qs + head * p.stride_qh
    dims = tl.arange(0, TILE_D)
    q = tl.load(p.q_ptr + (at[:, None] + dims[None, :]), here[:, None] & (dims < D)[None, :], 0.0)
    k_scale = 1.0
    if p.k_descale_ptr is not None:
        k_scale = tl.load(p.k_descale_ptr + sequence * p.stride_k_descale + head_k)
    if EXACT:
        q *= p.softmax_scale * k_scale
    if NEGATIVE:  # unit is positive: q carries the scale's sign
        q = -q
    power = tl.full([TILE_M], 1.0, tl.float32)
    if BY_HALVES:
        q, power = as_float16(q)
    odd = q
    if PAIRS:
        q, odd = tl.split(q.reshape(TILE_M, TILE_D // 2, 2))
    slope = tl.zeros([TILE_M], tl.float32)
    if p.slopes_ptr is not None:
        slope = tl.load(p.slopes_ptr + sequence * p.stride_slopes + head, here, 0.0) * LOG2E
    return q, odd, power, slope, query, k_scale


@triton.jit
def attend_blocks(
    p, batch, acc_parts_ptr, sums_parts_ptr, sequence, task, head_k, m_block, first, n_keys, begin, n_block, n_end,
    steps, line, rank, n_shares, D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, BY_HALVES: tl.constexpr, PAIRS: tl.constexpr, SUMS: tl.constexpr, SHARED: tl.constexpr,
    LINE_EACH: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """Blocks n_block, n_block + 1 ... of a task of `sequence`, whose last is the one before n_end, and whose keys begin
    at token `first`; with SHARED then those of the tasks that follow in the line: `steps` in all. Whole tasks go to out
    and lse, others to the parts of share `rank` of the line, of n_shares. begin: blocks of the task that are others'.
    STARTS_NEXT: behind its last block it lets the next kernel start.

    The first blocks of a task are in flight while the last of the task before are computed. That the compiler can
    pipeline it so rests on three things. All of where a block lies is carried from the step before (sequence, head_k,
    m_block, first, n_keys, n_block, ends, page) and moves on, but behind the last, in an `if` apart from those that
    store a task and load q, which are behind products. No value is carried for two steps: hence goes_on, not the
    `ends` of the step before. And the first q is loaded before the loop: were it zeros there, a task's q would lie in
    registers as a product takes it, and they are few. Without SHARED no task follows; what loads its q keeps the first
    one's from being awaited before the first blocks are asked for.
    """
    seqlen_q = batch.seqlen_q
    page = page_of_keys(p.places_ptr, n_block * TILE_N, n_keys, sequence, p.stride_pb, TILE_N, PAGE_SIZE)
    stride_vs = p.stride_ks if p.stride_vs is None else p.stride_vs
    q, q_odd, q_scale, slope, query, k_scale = queries_of_task(
        p, batch, sequence, head_k, m_block, D, TILE_D, TILE_M, EXACT, NEGATIVE, BY_HALVES, PAIRS
    )
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
                p, batch, sequence, head_k, m_block, D, TILE_D, TILE_M, EXACT, NEGATIVE, BY_HALVES, PAIRS
            )
            acc = tl.zeros_like(acc)
            if PAIRS:
                acc_odd = tl.zeros_like(acc)
            m = tl.full([TILE_M], float("-inf"), tl.float32)
            l = tl.zeros_like(l)
        base_2 = p.unit  # scores in base 2 are s * base_2
        if not EXACT and not SOFTCAP:
            base_2 = p.unit * k_scale
        s_unit = base_2 if p.slopes_ptr is None else 1.0
        keys = n_block * TILE_N + tl.arange(0, TILE_N)
        inside = keys < n_keys
        diagonal = (query + (n_keys - seqlen_q))[:, None]
        start = n_block * TILE_N % PAGE_SIZE if PAGE_SIZE > 0 else first + n_block * TILE_N
        k_head = p.k_ptr + head_k.to(tl.int64) * p.stride_kh
        if PAIRS:
            k, k_odd = load_float8(k_head, p.stride_kb, p.stride_ks, page, start, inside, PAGE_SIZE, D, TILE_D)
            s = tl.dot(q, tl.trans(k))
            s = tl.dot(q_odd, tl.trans(k_odd), s)
        else:
            k = load_keys(k_head, p.stride_kb, p.stride_ks, page, start, inside, PAGE_SIZE, D, TILE_D)
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # (TILE_M, TILE_N)
        if BY_HALVES:
            s *= q_scale[:, None]
        if SOFTCAP:
            s = tanh(s * (p.cap_in * k_scale))
        if p.slopes_ptr is not None:
            s = s * base_2 - slope[:, None] * tl.abs(diagonal - keys[None, :]).to(tl.float32)
        seen = inside[None, :]
        if batch.window_left is not None:
            seen &= keys[None, :] >= diagonal - batch.window_left
        if batch.window_right is not None:
            seen &= keys[None, :] <= diagonal + batch.window_right
        weights, alpha, m, l = softmax_step(tl.where(seen, s, float("-inf")), s_unit, m, l, EXACT)
        weights = weights.to(q.dtype)
        v_head = p.v_ptr + head_k.to(tl.int64) * p.stride_vh
        if PAIRS:
            v, v_odd = load_float8(v_head, p.stride_vb, stride_vs, page, start, inside, PAGE_SIZE, DV, TILE_DV)
            acc_odd = tl.dot(weights, v_odd, acc_odd * alpha[:, None])
        else:
            v = load_keys(v_head, p.stride_vb, stride_vs, page, start, inside, PAGE_SIZE, DV, TILE_DV)
            v = v.to(q.dtype)
        acc = tl.dot(weights, v, acc * alpha[:, None], input_precision="ieee")

        if ends | (step + 1 == steps):
            if STARTS_NEXT:
                # not before: the next kernel's programs would crowd where the first of these end
                tl.extra.cuda.gdc_launch_dependents()
            acc_end = tl.interleave(acc, acc_odd) if PAIRS else acc
            m_end = m if EXACT and p.slopes_ptr is None else m * (s_unit * LN2)
            l_end = tl.sum(l, 1)
            if p.v_descale_ptr is not None:
                acc_end *= tl.load(p.v_descale_ptr + sequence * p.stride_v_descale + head_k)
            if p.sinks_ptr is not None:
                _, head, here = rows_of_task(p, batch, head_k, m_block, TILE_M)
                sink = tl.load(p.sinks_ptr + head, here, 0.0).to(tl.float32)
                sink = tl.where(begin == 0, sink, float("-inf"))  # in one part of a task
                acc_end, m_end, l_end = with_sink(acc_end, m_end, l_end, sink)
            if acc_parts_ptr is None or (ends & (begin == 0)):
                _, head, here = rows_of_task(p, batch, head_k, m_block, TILE_M)
                stored = here[:, None] & (dims_v < DV)[None, :]
                out, lse = normalized(acc_end, m_end[:, None], l_end[:, None])
                out_at = ((sequence.to(tl.int64) * seqlen_q + query) * p.heads_k * p.group + head) * DV
                out_at = out_at[:, None] + dims_v[None, :]
                tl.store(p.out_ptr + out_at, out.to(p.out_ptr.dtype.element_ty), stored)
                lse_at = (sequence.to(tl.int64) * p.heads_k * p.group + head) * seqlen_q + query
                tl.store(p.lse_ptr + lse_at[:, None], lse, here[:, None])
            else:
                row = tl.arange(0, TILE_M)
                here = row < seqlen_q * p.group - m_block * TILE_M
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
            task += p.width
            if LINE_EACH or task >= p.tasks:
                task -= p.tasks
                # there is one; so written, 32 rows do not spill
                sequence = tl.minimum(sequence + 1, batch.sequences - 1)
            head_k, m_block = head_of_task(task, p.m_blocks)
            first, n_keys = span_of(sequence, True, batch)
            n_block, blocks = key_blocks(n_keys, batch, TILE_N)
            n_end = n_block + blocks
        ends = n_block + 1 == n_end
        # the next block's: read in its own step it would halve the blocks in flight
        page = page_of_keys(p.places_ptr, n_block * TILE_N, n_keys, sequence, p.stride_pb, TILE_N, PAGE_SIZE)
