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
    add_loop,
    begin_scores,
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
)
from .channel import anew, make_ring, ring_of
from .compat import store_async
from .tile import add_product, columns, matrix, pass_turn, product_wait, take_turn, zeros


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
    DQ_PARTS: gl.constexpr, DQ_PIECES: gl.constexpr, p, dv_desc,
    q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring, shifts,
):  # fmt: skip
    """The first warpgroup: P, dV, and the first parts of dQ, the greater half."""
    DIM: gl.constexpr = k_ring.buffers.shape[4] * k_ring.parts
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
        k_ring.await_full(tile)
        has = False
        for _ in range(p.group):
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
                probs_ring.await_empty(position)
                probs_ring.buffer(position, 0).store(given.to(dv_desc.dtype))
                probs_ring.fill(position)
                # line 15 of the step before, whose dQ leaves while dV is computed, and line 12
                dout_ring.await_full(position)
                left = gl.convert_layout(probs.to(dv_desc.dtype), p_layout)
                ds_ring.await_full(position - 1, pred=has)
                dq = dq_product(0, dq_zero, ds_ring, position - 1, k_ring, anew(tile))
                dv = add_product(dv, left, dout_ring, position, has)
                dq = product_wait(dq, len(dv))
                probs_ring.release(position - 1, pred=has)
                if has:
                    put_dq(dq, dq_ring, position - 1, DQ_PIECES)
                dv = product_wait(dv)
                dout_ring.release(position)
                has = True
                position += 1
        ds_ring.await_full(position - 1)
        dq = dq_product(0, dq_zero, ds_ring, position - 1, k_ring, tile)
        dq = product_wait(dq)
        probs_ring.release(position - 1)
        put_dq(dq, dq_ring, position - 1, DQ_PIECES)
        pass_turn(0, 2)  # the second may write over K, as this one over V, with whose last dP it is done
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        store_keys(dv_desc, v_ring, tile, dv, 1.0, batch, key, head_k)
        k_ring.release(tile)
        v_ring.release(tile)
        tile += 1
        entry += FIELDS


@gluon.jit
def key_loop(
    DQ_PARTS: gl.constexpr, DQ_PIECES: gl.constexpr, p, dk_desc,
    q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring, deltas,
):  # fmt: skip
    """The second warpgroup: dS, dK, and the other parts of dQ."""
    DIM: gl.constexpr = k_ring.buffers.shape[4] * k_ring.parts
    FIRST_PART: gl.constexpr = first_dq_part(1, DQ_PARTS)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    dq_zero = zeros(p.TILE_M, DIM // DQ_PARTS, DQ_PARTS - FIRST_PART)
    dk = zeros(KEYS, dk_desc.block_shape[3], k_ring.parts)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end = gl.load(entry + FIRST), gl.load(entry + END)
        k_ring.await_full(tile)
        v_ring.await_full(tile)
        has = False
        for _ in range(p.group):
            for _ in range(first, end):
                # lines 13 and 14
                dout_ring.await_full(position)
                start = row_numbers(deltas, dout_ring, position, 0, s_layout)
                dp = over_parts(0, 0, anew(tile), position, v_ring, dout_ring, start, True)
                probs_ring.await_full(position)
                probs = probs_ring.buffer(position, 0).load(s_layout).to(gl.float32)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dout_ring.release(position)
                ds = (probs * dp).to(dk_desc.dtype)
                ds_ring.buffer(position, 0).store(ds)  # where P was, which these threads have read
                fence_async_shared()
                ds_ring.fill(position)
                # lines 15 and 16: dQ leaves while dK is computed
                q_ring.await_full(position)
                ds_ring.await_full(position)
                dq = dq_product(FIRST_PART, dq_zero, ds_ring, position, k_ring, anew(tile))
                dk = add_product(dk, gl.convert_layout(ds, p_layout), q_ring, position, has)
                dq = product_wait(dq, len(dk))
                probs_ring.release(position)
                put_dq(dq, dq_ring, position, DQ_PIECES)
                dk = product_wait(dk)
                q_ring.release(position)
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
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, sums_desc, added_ptr, ranks_ptr, schedule_ptr,
    heads_q, group, row_blocks, heads, rounds, unit, cap_in, softmax_scale,
    TILE_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PARTS: gl.constexpr, PARTS_V: gl.constexpr,
    DQ_PARTS: gl.constexpr, DQ_PIECES: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: a warpgroup in `value_loop`, one in `key_loop`, a warp in `load_loop`, two in
    `add_loop`, one in `count_loop`, which has nothing to do unless in order.

    added, ranks: as in `backward_kernel`.
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
    scores = gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, TILE_M], ds_layout)  # P, and then dS in its place
    probs_ring = ring_of(scores, 2, 1, 1, 2)
    ds_ring = ring_of(scores, 2, 1, 1, 0)
    dq_ring_0, dq_ring_1 = make_dq_rings(sums_desc, DQ_PARTS)
    if not p.ORDERED:
        arrivals_0: gl.constexpr = None
        arrivals_1: gl.constexpr = None
    else:
        arrivals_0, arrivals_1 = make_signals(q_ring)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (value_loop, (DQ_PARTS, DQ_PIECES, p, dv_desc,
                      q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring_0, shifts)),
        (key_loop, (DQ_PARTS, DQ_PIECES, p, dk_desc,
                    q_ring, dout_ring, k_ring, v_ring, probs_ring, ds_ring, dq_ring_1, deltas)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, rows_desc,
                     q_ring, dout_ring, k_ring, v_ring, shifts, deltas)),
        (add_loop, (0, DQ_PARTS, DQ_PIECES, p, sums_desc, q_ring, dq_ring_0, arrivals_0, added_ptr, ranks_ptr)),
        (add_loop, (1, DQ_PARTS, DQ_PIECES, p, sums_desc, q_ring, dq_ring_1, arrivals_1, added_ptr, ranks_ptr)),
        (count_loop, (1, p, q_ring, arrivals_0, arrivals_1, added_ptr)),
    ], [4, 1, 1, 1, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip
