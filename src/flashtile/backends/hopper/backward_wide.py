"""The backward pass (Algorithm 2) for head dims above 128: a tile is 64 keys, whose dK and dV fill the registers of a
warpgroup each. The first computes P and dV, the second dS and dK, and each some parts of dQ.

P goes from the first to the second, dS from the second to the first, through shared memory. The first adds up dQ a step
late, so that it computes P of a step while the second has the matrix units for dK of the step before.

D and Dv lie in shared memory, and the sums in registers, in parts, so that 192 dims are not padded to 256.

Legend: as in backward.py; S^T, P^T, dP^T, dS^T: (KEYS, TILE_M) · parts of dK, dV: (KEYS, WIDTH), of dQ:
(TILE_M, WIDTH).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_problem import (
    BATCH,
    END,
    FIELDS,
    FIRST,
    FULL_END,
    FULL_FIRST,
    HEAD_K,
    KEY,
    KEYS,
    SUMS_WIDTH,
    TURN,
    WARPGROUPS,
    Problem,
    add_loop,
    begin_scores,
    by_thread,
    count_loop,
    first_dq_part,
    first_step,
    load_loop,
    make_dq_rings,
    make_signals,
    mask,
    over_parts,
    probabilities,
    put_dq,
    row_numbers,
    wait_for,
)
from .channel import anew, make_ring, ring_of
from .compat import store_async
from .tile import add_product, columns, matrix, meet, pass_turn, take_turn, zeros


@gluon.jit
def add_from_registers(dq, dq_ptr):
    """Adds a part of dQ to the sums where there is no shared memory for a buffer."""
    x = by_thread(dq)
    even, odd = gl.split(x)
    even_low, even_high = gl.split(even)
    odd_low, odd_high = gl.split(odd)
    layout: gl.constexpr = even_low.type.layout
    thread = gl.arange(0, 128, gl.SliceLayout(1, layout))
    four = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    pointers = (dq_ptr + (thread[:, None] * 4 + four[None, :] * 512)).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "red.global.relaxed.gpu.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,l,f,f,f,f",
        [pointers, even_low, odd_low, even_high, odd_high], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_dq(p, warpgroup: gl.constexpr, dq, sums, ring, turns, arrivals, position, row):
    """Line 15: leaves parts of dQ of a step to `add_loop`; or adds them to the sums, from a row on, in order when it is
    this warpgroup's turn."""
    if ring is not None:
        put_dq(dq, ring, position)
    else:
        if p.ORDERED:
            turns.await_full(position)
            turns.release(position)
        SIZE: gl.constexpr = dq[0].shape[0] * dq[0].shape[1]
        for part in gl.static_range(len(dq)):
            add_from_registers(dq[part], sums + (row.to(gl.int64) * SUMS_WIDTH + part * SIZE))
        if p.ORDERED:
            arrivals.await_empty(position)
            meet(WARPGROUPS + warpgroup, 128)
            arrivals.fill(position)


@gluon.jit
def dq_product(first: gl.constexpr, dq, ds_ring, position, k_ring, tile):
    """Line 15: issues dQ = dS K of a step, of as many parts of the dims as there are, from the first on."""
    WIDTH: gl.constexpr = dq[0].shape[1]
    ds = ds_ring.buffer(position, 0).permute((1, 0))
    for part in gl.static_range(len(dq)):
        k = columns(k_ring, tile, (first + part) * WIDTH, WIDTH)
        dq = dq[1:] + (warpgroup_mma(ds, k, dq[0], use_acc=False, is_async=True),)
    return dq


@gluon.jit
def store_keys(desc, ring, tile, sums, scale, batch, key, head):
    """Line 18: dK or dV of a tile, by way of the slot where its K or V was."""
    WIDTH: gl.constexpr = desc.block_shape[3]
    for part in gl.static_range(len(sums)):
        matrix(ring.buffer(tile, part)).store((sums[part] * scale).to(desc.dtype))
    fence_async_shared()
    for part in gl.static_range(len(sums)):
        store_async(desc, [batch, key, head, part * WIDTH], ring.buffer(tile, part))
    tma.store_wait(0)


@gluon.jit
def value_loop(
    DQ_PARTS: gl.constexpr, p, dv_desc, sums, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring,
    turns, arrivals, shifts,
):  # fmt: skip
    """The first warpgroup: P, dV, and the first parts of dQ, the greater half."""
    DIM: gl.constexpr = k_ring.buffers.shape[4] * k_ring.parts
    SUMS_ROWS: gl.constexpr = p.TILE_M * DIM // SUMS_WIDTH  # of a step
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    dq_zero = zeros(p.TILE_M, DIM // DQ_PARTS, first_dq_part(1, DQ_PARTS))
    dv = zeros(KEYS, dv_desc.block_shape[3], v_ring.parts)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end, full_first = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + FULL_FIRST)
        turn = gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        k_ring.await_full(tile)
        has = False
        sums_row = -1  # of the step before
        for i in range(p.group):
            for j in range(first, end):
                block = p.turned(j, first, end, turn)
                # lines 10 and 11
                s = begin_scores(p, 0, 0, position, anew(tile), q_ring, k_ring, shifts, s_layout)
                s = warpgroup_mma_wait(0, deps=(s,))
                probs, capped = probabilities(p, s, 0, shifts, q_ring, position, s_layout)
                q_ring.release(position)
                to_mask = block < full_first
                if p.HAS_LEFT:
                    to_mask |= block >= gl.load(entry + FULL_END)
                if to_mask:
                    probs = mask(p, probs, entry, 0, block * p.TILE_M)
                given = probs
                if p.SOFTCAP:
                    given = probs * (1 - capped * capped)  # all that dS needs of the scores
                full = probs_ring.await_empty(position)
                probs_ring.buffer(position, 0).store(given.to(dv_desc.dtype))
                mbarrier.arrive(full)
                # line 12, and line 15 of the step before
                dout_ring.await_full(position)
                left = gl.convert_layout(probs.to(dv_desc.dtype), p_layout)
                dv = add_product(dv, left, dout_ring, position, has)
                ds_ring.await_full(position - 1, pred=has)
                dq = dq_product(0, dq_zero, ds_ring, position - 1, k_ring, anew(tile))
                dv, dq = wait_for(dv, dq)
                dout_ring.release(position)
                ds_ring.release(position - 1, pred=has)
                if has:
                    add_dq(p, 0, dq, sums, dq_ring, turns, arrivals, position - 1, sums_row)
                sums_row = ((head + i) * p.row_blocks + block) * SUMS_ROWS
                has = True
                position += 1
        ds_ring.await_full(position - 1)
        dq = dq_product(0, dq_zero, ds_ring, position - 1, k_ring, tile)
        dv, dq = wait_for(dv, dq)
        ds_ring.release(position - 1)
        add_dq(p, 0, dq, sums, dq_ring, turns, arrivals, position - 1, sums_row)
        pass_turn(0, 2)  # the second may write over K, as this one over V, with whose last dP it is done
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        store_keys(dv_desc, v_ring, tile, dv, 1.0, batch, key, head_k)
        k_ring.release(tile)
        v_ring.release(tile)
        tile += 1
        entry += FIELDS


@gluon.jit
def key_loop(
    DQ_PARTS: gl.constexpr, p, dk_desc, sums, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring,
    turns, arrivals, deltas,
):  # fmt: skip
    """The second warpgroup: dS, dK, and the other parts of dQ."""
    DIM: gl.constexpr = k_ring.buffers.shape[4] * k_ring.parts
    SUMS_ROWS: gl.constexpr = p.TILE_M * DIM // SUMS_WIDTH  # of a step
    FIRST_PART: gl.constexpr = first_dq_part(1, DQ_PARTS)
    FIRST_ROW: gl.constexpr = SUMS_ROWS * FIRST_PART // DQ_PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    dq_zero = zeros(p.TILE_M, DIM // DQ_PARTS, DQ_PARTS - FIRST_PART)
    dk = zeros(KEYS, dk_desc.block_shape[3], k_ring.parts)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        k_ring.await_full(tile)
        v_ring.await_full(tile)
        has = False
        for i in range(p.group):
            for j in range(first, end):
                block = (head + i) * p.row_blocks + p.turned(j, first, end, turn)
                # lines 13 and 14
                dout_ring.await_full(position)
                start = row_numbers(deltas, dout_ring, position, 0, s_layout)
                dp = over_parts(0, 0, anew(tile), position, v_ring, dout_ring, start, True)
                probs_ring.await_full(position)
                probs = probs_ring.buffer(position, 0).load(s_layout).to(gl.float32)
                probs_ring.release(position)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dout_ring.release(position)
                ds = (probs * dp).to(dk_desc.dtype)
                full = ds_ring.await_empty(position)
                ds_ring.buffer(position, 0).store(ds)
                fence_async_shared()
                mbarrier.arrive(full)
                # lines 15 and 16
                q_ring.await_full(position)
                dk = add_product(dk, gl.convert_layout(ds, p_layout), q_ring, position, has)
                ds_ring.await_full(position)
                dq = dq_product(FIRST_PART, dq_zero, ds_ring, position, k_ring, anew(tile))
                dk, dq = wait_for(dk, dq)
                q_ring.release(position)
                ds_ring.release(position)
                row = block * SUMS_ROWS + FIRST_ROW
                add_dq(p, 1, dq, sums, dq_ring, turns, arrivals, position, row)
                has = True
                position += 1
        take_turn(1)
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        store_keys(dk_desc, k_ring, tile, dk, p.softmax_scale, batch, key, head_k)
        k_ring.release(tile)
        v_ring.release(tile)
        tile += 1
        entry += FIELDS


@gluon.jit(do_not_specialize=["heads_q", "group", "row_blocks", "heads", "rounds"])
def wide_backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, sums, added_ptr, ranks_ptr, schedule_ptr,
    heads_q, group, row_blocks, heads, rounds, unit, cap_in, softmax_scale,
    TILE_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PARTS: gl.constexpr, PARTS_V: gl.constexpr,
    DQ_PARTS: gl.constexpr, DQ_BUFFER: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: a warpgroup in `value_loop`, one in `key_loop`, a warp in `load_loop`, two in
    `add_loop`, unless dQ has no buffer and no order, one in `count_loop`, in order.

    sums: a descriptor where dQ has a buffer, else a pointer. added, ranks: as in `backward_kernel`.
    """
    p = Problem(heads_q, group, row_blocks, heads, unit, cap_in, softmax_scale, schedule_ptr, rounds,
                TILE_M, HAS_LEFT, HAS_RIGHT, SOFTCAP, ranks_ptr is not None)  # fmt: skip
    q_ring = make_ring(q_desc, STAGES, PARTS, 2)
    dout_ring = make_ring(dout_desc, STAGES, PARTS_V, 2)
    k_ring = make_ring(k_desc, KEY_STAGES, PARTS, 2)
    v_ring = make_ring(v_desc, VALUE_STAGES, PARTS_V, 2)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE_M], q_desc.dtype)
    probs_ring = ring_of(gl.allocate_shared_memory(q_desc.dtype, [1, KEYS, TILE_M], ds_layout), 1, 1, 1, 1)
    ds_ring = ring_of(gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, TILE_M], ds_layout), 2, 1, 1, 2)
    if not DQ_BUFFER:
        dq_ring_0: gl.constexpr = None
        dq_ring_1: gl.constexpr = None
    else:
        dq_ring_0, dq_ring_1 = make_dq_rings(sums, DQ_PARTS)
    if DQ_BUFFER or not p.ORDERED:
        turns_0: gl.constexpr = None
        turns_1: gl.constexpr = None
    else:
        turns_0, turns_1 = make_signals(q_ring)
    if not p.ORDERED:
        arrivals_0: gl.constexpr = None
        arrivals_1: gl.constexpr = None
    else:
        arrivals_0, arrivals_1 = make_signals(q_ring)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (value_loop, (DQ_PARTS, p, dv_desc, sums, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring,
                      dq_ring_0, turns_0, arrivals_0, shifts)),
        (key_loop, (DQ_PARTS, p, dk_desc, sums, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring,
                    dq_ring_1, turns_1, arrivals_1, deltas)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, rows_desc,
                     q_ring, dout_ring, k_ring, v_ring, shifts, deltas)),
        (add_loop, (0, DQ_PARTS, p, sums, q_ring, dq_ring_0, turns_0, arrivals_0, added_ptr, ranks_ptr)),
        (add_loop, (1, DQ_PARTS, p, sums, q_ring, dq_ring_1, turns_1, arrivals_1, added_ptr, ranks_ptr)),
        (count_loop, (1, p, q_ring, arrivals_0, arrivals_1, added_ptr)),
    ], [4, 1, 1, 1, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip
