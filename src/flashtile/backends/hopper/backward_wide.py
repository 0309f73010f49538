"""The backward pass (Algorithm 2) for head dims above 128: a tile is 64 keys, whose dK and dV fill the registers of a
warpgroup each. The first computes P and dV, the second dS and dK, and each a half of dQ.

P goes from the first to the second, dS from the second to the first, through shared memory. The first adds up dQ a step
late, so that it computes P of a step while the second has the matrix units for dK of the step before.

Legend: as in backward.py; S^T, P^T, dP^T, dS^T: (KEYS, TILE_M) · dK, dV: (KEYS, DIM) · a half of dQ: (TILE_M, DIM / 2).
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
    TURN,
    Problem,
    begin_scores,
    by_thread,
    first_step,
    load_loop,
    mask,
    over_dims,
    probabilities,
    row_numbers,
)
from .channel import anew, make_ring, ring_of
from .tile import matrix, pass_turn, store_rows, take_turn


@gluon.jit
def add_from_registers(dq, dq_ptr):
    """Adds a half of dQ to the sums, as backward.py does by way of a buffer, for which there is no shared memory."""
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
def dq_half(half: gl.constexpr, ds_ring, position, k_ring, tile, zero):
    """Line 15: issues dQ = dS K of a step, for one half of the columns."""
    WIDTH: gl.constexpr = zero.shape[1]
    ds = ds_ring.buffer(position, 0).permute((1, 0))
    k = matrix(k_ring.buffer(tile, 0)).slice(half * WIDTH, WIDTH, dim=1)
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)


@gluon.jit
def value_loop(p, dv_desc, sums_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, shifts):
    """The first warpgroup: P, dV, and the first half of dQ."""
    DIM: gl.constexpr = dv_desc.block_shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    dq_zero = gl.zeros([p.TILE_M, DIM // 2], gl.float32, dq_layout)
    dv = gl.zeros([KEYS, DIM], gl.float32, d_layout)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end, full_first = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + FULL_FIRST)
        turn = gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        k_ring.await_full(tile)
        has = False
        dq_before = sums_ptr
        for i in range(p.group):
            of_head = sums_ptr + (head + i).to(gl.int64) * p.row_blocks * (p.TILE_M * DIM)
            for j in range(first, end):
                block = p.turned(j, first, end, turn)
                dq_at = of_head + block.to(gl.int64) * (p.TILE_M * DIM)
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
                dout = matrix(dout_ring.buffer(position, 0))
                left = gl.convert_layout(probs.to(dv_desc.dtype), p_layout)
                dv = warpgroup_mma(left, dout, dv, use_acc=has, is_async=True)
                ds_ring.await_full(position - 1, pred=has)
                dq = dq_half(0, ds_ring, position - 1, k_ring, anew(tile), dq_zero)
                dv, dq = warpgroup_mma_wait(0, deps=(dv, dq))
                dout_ring.release(position)
                ds_ring.release(position - 1, pred=has)
                if has:
                    add_from_registers(dq, dq_before)
                dq_before = dq_at
                has = True
                position += 1
        ds_ring.await_full(position - 1)
        dq = dq_half(0, ds_ring, position - 1, k_ring, tile, dq_zero)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        ds_ring.release(position - 1)
        add_from_registers(dq, dq_before)
        pass_turn(0, 2)  # the second may write over K, as this one over V, with whose last dP it is done
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        store_rows(dv_desc, v_ring.buffer(tile, 0), dv, batch, key, head_k, 0)
        tma.store_wait(0)
        k_ring.release(tile)
        v_ring.release(tile)
        tile += 1
        entry += FIELDS


@gluon.jit
def key_loop(p, dk_desc, sums_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, deltas):
    """The second warpgroup: dS, dK, and the second half of dQ."""
    DIM: gl.constexpr = dk_desc.block_shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    dq_zero = gl.zeros([p.TILE_M, DIM // 2], gl.float32, dq_layout)
    dk = gl.zeros([KEYS, DIM], gl.float32, d_layout)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    sums_ptr += p.TILE_M * (DIM // 2)
    for _ in range(n_tiles):
        first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        k_ring.await_full(tile)
        v_ring.await_full(tile)
        has = False
        for i in range(p.group):
            of_head = sums_ptr + (head + i).to(gl.int64) * p.row_blocks * (p.TILE_M * DIM)
            for j in range(first, end):
                block = p.turned(j, first, end, turn)
                dq_at = of_head + block.to(gl.int64) * (p.TILE_M * DIM)
                # lines 13 and 14
                dout_ring.await_full(position)
                start = row_numbers(deltas, dout_ring, position, 0, s_layout)
                dout = matrix(dout_ring.buffer(position, 0))
                v = matrix(v_ring.buffer(anew(tile), 0))
                dp = over_dims(p, v, dout, start, True)
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
                q = matrix(q_ring.buffer(position, 0))
                dk = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, use_acc=has, is_async=True)
                ds_ring.await_full(position)
                dq = dq_half(1, ds_ring, position, k_ring, anew(tile), dq_zero)
                dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
                q_ring.release(position)
                ds_ring.release(position)
                add_from_registers(dq, dq_at)
                has = True
                position += 1
        take_turn(1)
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        store_rows(dk_desc, k_ring.buffer(tile, 0), dk * p.softmax_scale, batch, key, head_k, 0)
        tma.store_wait(0)
        k_ring.release(tile)
        v_ring.release(tile)
        tile += 1
        entry += FIELDS


@gluon.jit(do_not_specialize=["heads_q", "group", "row_blocks", "heads", "rounds"])
def wide_backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, sums_ptr, schedule_ptr,
    heads_q, group, row_blocks, heads, rounds, unit, cap_in, softmax_scale,
    TILE_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: one warpgroup in `value_loop`, one in `key_loop`, one warp in `load_loop`."""
    p = Problem(heads_q, group, row_blocks, heads, unit, cap_in, softmax_scale, schedule_ptr, rounds,
                TILE_M, HAS_LEFT, HAS_RIGHT, SOFTCAP, False, PADDED)  # fmt: skip
    q_ring = make_ring(q_desc, STAGES, 1, 2)
    dout_ring = make_ring(dout_desc, STAGES, 1, 2)
    k_ring = make_ring(k_desc, KEY_STAGES, 1, 2)
    v_ring = make_ring(v_desc, VALUE_STAGES, 1, 2)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE_M], q_desc.dtype)
    probs_ring = ring_of(gl.allocate_shared_memory(q_desc.dtype, [1, KEYS, TILE_M], ds_layout), 1, 1, 1, 1)
    ds_ring = ring_of(gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, TILE_M], ds_layout), 2, 1, 1, 2)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (value_loop, (p, dv_desc, sums_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, shifts)),
        (key_loop, (p, dk_desc, sums_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, deltas)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, rows_desc,
                     q_ring, dout_ring, k_ring, v_ring, shifts, deltas)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
