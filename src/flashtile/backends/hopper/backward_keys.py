"""dK and dV of the backward pass (Algorithm 2) where dQ has a kernel of its own: backward_queries.py, which runs before
this one and leaves it shifts and deltas.

A tile is 64 keys, whose dK and dV fill the registers of a warpgroup each. The first computes P and dV, the second dS
and dK; P goes from the first to the second through shared memory. P is computed under dP, dS under dV.

D and Dv lie in shared memory, and the sums in registers, in parts, so that 192 dims are not padded to 256.

Legend: as in backward.py; S^T, P^T, dP^T, dS^T: (KEYS, TILE_M) · parts of dK, dV: (KEYS, WIDTH).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

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
    PIECE,
    TURN,
    Problem,
    begin_scores,
    first_step,
    keep,
    load_loop,
    over_parts,
    probabilities,
    row_numbers,
    store_piece,
    store_slot,
)
from .channel import anew, make_ring, ring_of, width_of_slot
from .tile import add_product, meet, product_wait, zeros


@gluon.jit
def store_keys(p, desc, own_ring, other_ring, tile, sums, scale, entry, pieces_ptr, first: gl.constexpr):
    """Line 18: dV or dK of a tile, by way of the slot of K or V that this warpgroup alone has read, or, if that is not
    as wide, of the other one; or a piece of it."""
    if own_ring.parts == other_ring.parts and own_ring.width == other_ring.width:
        ring = own_ring
    else:
        ring = other_ring
        meet(0, 256)
    batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
    piece = gl.load(entry + PIECE) if p.PIECES else 0
    if p.PIECES and piece > 0:
        WIDTH: gl.constexpr = width_of_slot(own_ring) + width_of_slot(other_ring)
        store_piece(pieces_ptr, piece - 1, sums, 0, first, KEYS, WIDTH)
    else:
        store_slot(desc, ring, tile, sums, scale, batch, key, head_k)
    ring.release(tile)


@gluon.jit
def value_loop(K_KEPT: gl.constexpr, p, dv_desc, pieces_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, shifts):
    """The first warpgroup: P and dV."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    dv = zeros(KEYS, dv_desc.block_shape[3], v_ring.parts)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end, full_first = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + FULL_FIRST)
        turn = gl.load(entry + TURN)
        k_ring.await_full(tile)
        k = keep((), k_ring, tile, 0, width_of_slot(k_ring), K_KEPT, s_layout)
        has = False
        for _ in range(p.group):
            for j in range(first, end):
                block = p.turned(j, first, end, turn)
                # lines 10 and 11
                s = begin_scores(p, 0, 0, position, k, anew(tile), q_ring, k_ring, shifts, s_layout)
                s = warpgroup_mma_wait(0, deps=(s,))
                to_mask = block < full_first
                if p.HAS_LEFT:
                    to_mask |= block >= gl.load(entry + FULL_END)
                probs, capped = probabilities(
                    p, s, 0, shifts, q_ring, position, to_mask, entry, 0, block * p.TILE_M, None, s_layout
                )  # fmt: skip
                q_ring.release(position)
                given = probs
                if p.SOFTCAP:
                    given = probs * (1 - capped * capped)  # all that dS needs of the scores
                probs_ring.await_empty(position)
                probs_ring.buffer(position, 0).store(given.to(dv_desc.dtype))
                probs_ring.fill(position)
                # line 12
                dout_ring.await_full(position)
                dv = add_product(dv, gl.convert_layout(probs.to(dv_desc.dtype), p_layout), dout_ring, position, has)
                dv = product_wait(dv)
                dout_ring.release(position)
                has = True
                position += 1
        store_keys(p, dv_desc, k_ring, v_ring, tile, dv, 1.0, entry, pieces_ptr, 0)
        tile += 1
        entry += FIELDS


@gluon.jit
def key_loop(V_KEPT: gl.constexpr, p, dk_desc, pieces_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, deltas):
    """The second warpgroup: dS and dK."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_M, 16])
    dk = zeros(KEYS, dk_desc.block_shape[3], k_ring.parts)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        first, end = gl.load(entry + FIRST), gl.load(entry + END)
        v_ring.await_full(tile)
        v = keep((), v_ring, tile, 0, width_of_slot(v_ring), V_KEPT, s_layout)
        has = False
        for _ in range(p.group):
            for _ in range(first, end):
                # lines 13 and 14
                dout_ring.await_full(position)
                start = row_numbers(deltas, dout_ring, position, 0, s_layout)
                dp = over_parts(0, 0, v, anew(tile), position, v_ring, dout_ring, start, True)
                probs_ring.await_full(position)
                probs = probs_ring.buffer(position, 0).load(s_layout).to(gl.float32)
                probs_ring.release(position)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dout_ring.release(position)
                ds = (probs * dp).to(dk_desc.dtype)
                # line 16
                q_ring.await_full(position)
                dk = add_product(dk, gl.convert_layout(ds, p_layout), q_ring, position, has)
                dk = product_wait(dk)
                q_ring.release(position)
                has = True
                position += 1
        store_keys(p, dk_desc, v_ring, k_ring, tile, dk, p.softmax_scale, entry, pieces_ptr, width_of_slot(v_ring))
        tile += 1
        entry += FIELDS


@gluon.jit(do_not_specialize=["heads_q", "group", "row_blocks", "heads", "rounds"])
def keys_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, pieces_ptr, schedule_ptr,
    heads_q, group, row_blocks, heads, rounds, unit, cap_in, softmax_scale,
    TILE_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PARTS: gl.constexpr, PARTS_V: gl.constexpr,
    K_KEPT: gl.constexpr, V_KEPT: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: a warpgroup in `value_loop`, one in `key_loop`, a warp in `load_loop`."""
    p = Problem(heads_q, group, row_blocks, heads, unit, cap_in, softmax_scale, schedule_ptr, rounds,
                TILE_M, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, False, False)  # fmt: skip
    q_ring = make_ring(q_desc, STAGES, PARTS, 2)
    dout_ring = make_ring(dout_desc, STAGES, PARTS_V, 2)
    k_ring = make_ring(k_desc, KEY_STAGES, PARTS, 1)
    v_ring = make_ring(v_desc, VALUE_STAGES, PARTS_V, 1)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    probs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE_M], q_desc.dtype)
    probs_ring = ring_of(gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, TILE_M], probs_layout), 2, 1, 1, 1)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (value_loop, (K_KEPT, p, dv_desc, pieces_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, shifts)),
        (key_loop, (V_KEPT, p, dk_desc, pieces_ptr, q_ring, dout_ring, k_ring, v_ring, probs_ring, deltas)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, rows_desc,
                     q_ring, dout_ring, k_ring, v_ring, shifts, deltas)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
