"""FlashAttention-2's backward pass (Algorithm 2) in Gluon, for Hopper (sm_90a).

A persistent program per multiprocessor walks the tiles of its schedule; a tile is a block of keys and one key head. One
warp loads by TMA, two warpgroups compute: each has half of the block's keys as the rows of S^T and dP^T, so that P^T
and dS^T are in registers the left operands of dV and dK. Only dS goes through shared memory, for dQ, which all tiles of
a head add up in float32 in global memory: two warps by turns do that, if need be in a fixed order (order.py).

Legend: q, dout (B, Sq, Hq, D | Dv), k, v (B, Sk, Hk, D | Dv). A step is one block of TILE_M queries of one query head,
in one part or two. A warpgroup's S^T, P^T, dP^T, dS^T of a part: (KEYS, QUERIES) · dK, dV: (KEYS, D), of 96 dims two
sums, of 64 and 32 · its share of dQ: (QUERIES, columns), one part of two, or half of the columns of the only one, of 96
dims 64 or 32.
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
    PIECE,
    QUERIES,
    RIGHT_EDGE,
    TURN,
    WARPGROUPS,
    Problem,
    begin_scores,
    first_step,
    keep,
    load_loop,
    over_parts,
    past_the_end,
    probabilities,
    row_numbers,
    store_piece,
)
from .backward_sums import add_loop, first_dq_part, make_dq_rings, put_dq
from .channel import anew, make_ring, pair_of, ring_of, width_of_slot
from .compat import SINCE_3_9, seen_as
from .tile import add_product, no_sums, pass_turn, store_rows, take_turn, wait_for, zeros


@gluon.jit
def ds_part(ring, position, warpgroup: gl.constexpr, part: gl.constexpr):
    """(KEYS, QUERIES): dS^T of the keys of a warpgroup and one part of a step."""
    return ring.buffer(position, warpgroup).slice(part * QUERIES, QUERIES, dim=1)


@gluon.jit
def dq_product(p, warpgroup: gl.constexpr, ds_ring, position, k_ring, tile, zero, first: gl.constexpr):
    """Line 15: issues this warpgroup's share of dQ = dS K, over all keys of a tile: its columns, from the first on."""
    WIDTH: gl.constexpr = zero.shape[1]
    DIM: gl.constexpr = width_of_slot(k_ring) // WARPGROUPS
    PART: gl.constexpr = warpgroup % p.PARTS
    dq = zero
    for of in gl.static_range(WARPGROUPS):
        ds = ds_part(ds_ring, position, of, PART).permute((1, 0))
        k = k_ring.columns(tile, of * DIM + first, WIDTH)
        dq = warpgroup_mma(ds, k, dq, use_acc=of > 0, is_async=True)
    return dq


@gluon.constexpr_function
def dv_early(dout_ring):
    """Whether dV is issued as soon as there is P, before dS: if it is one product. For the two of D 96 that is slower:
    S = 4k full -6 %, causal -4 %."""
    return dout_ring.parts == 1


@gluon.constexpr_function
def from_deltas(p, dout_ring):
    """Whether dP begins with the deltas: if dV is early, which leaves registers for them, and a step has one part."""
    return p.PARTS == 1 and dv_early(dout_ring)


@gluon.constexpr_function
def dout_readers(parts):
    """Who gives dO's slots back: with those of Q nobody, a barrier a step less, but at D 96 by triton 3.6 both
    warpgroups: S = 4k and 8k full +2 %, causal 0 on an H200, by 3.9 -1 to -1.5 %, 0."""
    return WARPGROUPS if parts > 1 and not SINCE_3_9 else 0


@gluon.jit
def begin_dp(
    p, warpgroup: gl.constexpr, part: gl.constexpr, position, v, tile, dout_ring, v_ring, deltas, layout: gl.constexpr
):  # fmt: skip
    """Line 13: issues dP^T = V dO^T, perhaps + deltas."""
    FROM_DELTAS: gl.constexpr = from_deltas(p, dout_ring)
    if part == 0:
        dout_ring.await_full(position)
    start = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    if FROM_DELTAS:
        start = row_numbers(deltas, dout_ring, position, part, layout)
    return over_parts(warpgroup, part, v, tile, position, v_ring, dout_ring, start, FROM_DELTAS)


@gluon.jit
def store_sums(desc, buffer, sums, scale, batch, key, head):
    """Line 18: dK or dV of a warpgroup's keys, by way of a buffer."""
    for part in gl.static_range(len(sums)):
        store_rows(desc, buffer, sums[part] * scale, batch, key, head, part * desc.block_shape[3])


@gluon.jit
def store_keys(p, warpgroup: gl.constexpr, dk_desc, dv_desc, dk, dv, entry, dq_ring, position):
    """Line 18: dV and dK of a warpgroup's keys, by way of the buffer of dQ, which has left."""
    dq_ring.await_empty(position)
    buffer = keys_buffer(dq_ring, dk_desc)
    batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY) + warpgroup * KEYS
    store_sums(dv_desc, buffer, dv, 1.0, batch, key, head_k)
    store_sums(dk_desc, buffer, dk, p.softmax_scale, batch, key, head_k)


@gluon.jit
def keys_buffer(dq_ring, desc):
    """The buffer of dQ as one of keys."""
    return seen_as(dq_ring.memory.index(0), desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def probabilities_and_ds(
    p, warpgroup: gl.constexpr, part: gl.constexpr, BEHIND: gl.constexpr, s, dp, dv, has, position, to_mask, entry, row,
    past_end, q_ring, dout_ring, ds_ring, shifts, deltas, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Lines 11 and 14: P^T and dS^T of one part of a step, in the dtype of q, dS^T also in its ring. If dV is early
    also line 12. BEHIND: products issued after dP, S of the last part, or dK of the first."""
    EARLY: gl.constexpr = dv_early(dout_ring)
    FROM_DELTAS: gl.constexpr = from_deltas(p, dout_ring)
    s = warpgroup_mma_wait(len(dv) + BEHIND, deps=(s,))  # dP is as many products as dV
    probs, capped = probabilities(
        p, s, part, shifts, q_ring, position, to_mask, entry, warpgroup * KEYS, row, past_end, s_layout
    )  # fmt: skip
    DTYPE: gl.constexpr = dout_ring.memory.dtype
    if EARLY:
        left = gl.convert_layout(probs.to(DTYPE), p_layout)
        dv = add_product(dv, left, dout_ring, position, has, part * QUERIES)
    if not FROM_DELTAS:
        delta = row_numbers(deltas, dout_ring, position, part, s_layout)
    # behind dP: as above, and this part's dV; P too, or dS would be begun before all of P is there
    dp, probs = warpgroup_mma_wait(BEHIND + (len(dv) if EARLY else 0), deps=(dp, probs))
    if not FROM_DELTAS:
        dp += delta
    ds = probs * dp
    if p.SOFTCAP:
        ds *= 1 - capped * capped
    probs, ds = probs.to(DTYPE), ds.to(DTYPE)
    if part == 0:
        ds_ring.await_empty(position)
    ds_part(ds_ring, position, warpgroup, part).store(ds)
    return probs, ds, dv


@gluon.jit
def last_dq(
    p, warpgroup: gl.constexpr, ds_ring, position, k_ring, tile, dq_ring, zero, FIRST_COLUMN: gl.constexpr
):  # fmt: skip
    """Line 15 of a step with none under way behind it."""
    ds_ring.await_full(position)
    dq = dq_product(p, warpgroup, ds_ring, position, k_ring, tile, zero, FIRST_COLUMN)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    tma.store_wait(0)  # dK of the tile before, by the same buffer
    put_dq((dq,), dq_ring, position)


@gluon.jit
def step_of_diagonal(
    p, warpgroup: gl.constexpr, k, v, dk, dv, has, position, tile, tile_before, before, entry, row,
    q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring, shifts, deltas, dq_zero,
    FIRST_COLUMN: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """A step whose first part sees no key of this warpgroup: dS of that is 0, and there is nothing to add of it."""
    LAST: gl.constexpr = p.PARTS - 1
    q_ring.await_full(position)
    dout_ring.await_full(position)
    ds_ring.await_empty(position)
    ds_part(ds_ring, position, warpgroup, 0).store(gl.zeros([KEYS, QUERIES], q_ring.memory.dtype, s_layout))
    if LAST > 0:
        s = begin_scores(p, warpgroup, LAST, position, k, anew(tile), q_ring, k_ring, shifts, s_layout)
        dp = begin_dp(p, warpgroup, LAST, position, v, anew(tile), dout_ring, v_ring, deltas, s_layout)
        _, ds, dv = probabilities_and_ds(
            p, warpgroup, LAST, 0, s, dp, dv, has, position, True, entry, row, None,
            q_ring, dout_ring, ds_ring, shifts, deltas, s_layout, p_layout,
        )  # fmt: skip
        dk = add_product(dk, gl.convert_layout(ds, p_layout), q_ring, position, has, LAST * QUERIES)
    fence_async_shared()
    ds_ring.fill(position)
    if before:
        last_dq(p, warpgroup, ds_ring, position - 1, k_ring, tile_before, dq_ring, dq_zero, FIRST_COLUMN)
        ds_ring.release(position - 1)
        if tile_before != tile:
            k_ring.release(tile_before)
    if LAST > 0:
        dk, dv = wait_for(dk, dv)
    q_ring.release(position)
    dout_ring.release(position)
    return dk, dv


@gluon.jit
def compute_loop(
    warpgroup: gl.constexpr, DQ_PARTS: gl.constexpr, K_KEPT: gl.constexpr, V_KEPT: gl.constexpr,
    p, dk_desc, dv_desc, pieces_ptr,
    q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring, shifts, deltas,
):  # fmt: skip
    """One warpgroup: KEYS keys of every tile.

    dQ of a step is computed in the next, also across tiles: by then the other warpgroup, which is about half a step
    apart, has its dS.
    """
    DIM: gl.constexpr = width_of_slot(q_ring)
    WIDTH: gl.constexpr = dk_desc.block_shape[3]
    DQ_WIDTH: gl.constexpr = DIM // DQ_PARTS  # of a part
    FIRST_PART: gl.constexpr = first_dq_part(warpgroup, DQ_PARTS)
    FIRST_COLUMN: gl.constexpr = FIRST_PART // p.PARTS * DQ_WIDTH  # of a step in two parts it has all columns of one
    LAST: gl.constexpr = p.PARTS - 1
    EARLY: gl.constexpr = dv_early(dout_ring)
    # there may be a `step_of_diagonal`: at D 128, S = 8k and 16k causal it cost 0.3 to 0.8 % on an H200
    ON_DIAGONAL: gl.constexpr = p.HAS_RIGHT and warpgroup > 0 and DIM < 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    (dq_zero,) = zeros(QUERIES, dq_ring.parts * DQ_WIDTH * p.PARTS, 1)
    dk = no_sums(KEYS, WIDTH, DIM)
    dv = no_sums(KEYS, WIDTH, DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    tile_before = tile - 1  # a value of its own: bound to that of `tile`, the loops would not carry it
    before = False  # whether there is a step before
    # from here on one warpgroup computes P and dS while the matrix units work for the other
    if warpgroup == 1:
        take_turn(1)
    for _ in range(n_tiles):
        first, end, full_first = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + FULL_FIRST)
        turn = gl.load(entry + TURN)
        past_end = past_the_end(entry, warpgroup * KEYS, s_layout)
        k_ring.await_full(tile)
        k = keep((), k_ring, tile, warpgroup, DIM, K_KEPT, s_layout)
        v_ring.await_full(tile)
        v = keep((), v_ring, tile, warpgroup, DIM, V_KEPT, s_layout)
        has = False
        for _ in range(p.group):
            start = first
            if ON_DIAGONAL:
                unseen = first * p.TILE_M + QUERIES <= gl.load(entry + RIGHT_EDGE) + warpgroup * KEYS
                if unseen & (turn == 0) & (end - first > 1):
                    dk, dv = step_of_diagonal(
                        p, warpgroup, k, v, dk, dv, has, position, tile, tile_before, before, entry, first * p.TILE_M,
                        q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring, shifts, deltas, dq_zero,
                        FIRST_COLUMN, s_layout, p_layout,
                    )  # fmt: skip
                    tile_before = tile
                    before = True
                    if p.PARTS == 2:
                        has = True
                    start = first + 1
                    position += 1
            for j in range(start, end):
                block = p.turned(j, first, end, turn)
                to_mask = block < full_first
                if p.HAS_LEFT:
                    to_mask |= block >= gl.load(entry + FULL_END)
                s = begin_scores(p, warpgroup, 0, position, k, anew(tile), q_ring, k_ring, shifts, s_layout)
                dp = begin_dp(p, warpgroup, 0, position, v, anew(tile), dout_ring, v_ring, deltas, s_layout)
                has_last = has
                if p.PARTS == 2:
                    # the first part's products go on while P and dS of the last are computed
                    s_last = begin_scores(
                        p, warpgroup, LAST, position, k, anew(tile), q_ring, k_ring, shifts, s_layout
                    )  # fmt: skip
                    probs, ds, dv = probabilities_and_ds(
                        p, warpgroup, 0, LAST, s, dp, dv, has, position, to_mask, entry, block * p.TILE_M,
                        past_end, q_ring, dout_ring, ds_ring, shifts, deltas, s_layout, p_layout,
                    )  # fmt: skip
                    s = s_last
                    dp = begin_dp(p, warpgroup, LAST, position, v, anew(tile), dout_ring, v_ring, deltas, s_layout)
                    dk = add_product(dk, gl.convert_layout(ds, p_layout), q_ring, position, has)
                    has_last = True
                probs, ds, dv = probabilities_and_ds(
                    p, warpgroup, LAST, LAST, s, dp, dv, has_last, position, to_mask, entry, block * p.TILE_M,
                    past_end, q_ring, dout_ring, ds_ring, shifts, deltas, s_layout, p_layout,
                )  # fmt: skip
                # line 15 of the step before, whose dQ leaves while the last products run, line 12, unless early, and 16
                ds_ring.await_full(position - 1, pred=before)
                dq = dq_product(p, warpgroup, ds_ring, position - 1, k_ring, anew(tile_before), dq_zero, FIRST_COLUMN)
                if not EARLY:
                    dv = add_product(dv, gl.convert_layout(probs, p_layout), dout_ring, position, has)
                left = gl.convert_layout(ds, p_layout)
                dk = add_product(dk, left, q_ring, position, has_last, LAST * QUERIES)
                fence_async_shared()
                ds_ring.fill(position)
                if warpgroup == 0:
                    if not before:
                        pass_turn(0, WARPGROUPS)
                dq = warpgroup_mma_wait(len(dk) if EARLY else len(dv) + len(dk), deps=(dq,))
                if before:
                    ds_ring.release(position - 1)
                    tma.store_wait(0)  # dK of the tile before, by the same buffer
                    put_dq((dq,), dq_ring, position - 1)
                    if tile_before != tile:
                        k_ring.release(tile_before)
                dk, dv = wait_for(dk, dv)
                q_ring.release(position)
                dout_ring.release(position)
                tile_before = tile
                before = True
                has = True
                position += 1
        v_ring.release(tile)
        # line 18
        piece = gl.load(entry + PIECE) if p.PIECES else 0
        if p.PIECES and piece > 0:
            store_piece(pieces_ptr, piece - 1, dv, warpgroup * KEYS, 0, WARPGROUPS * KEYS, 2 * DIM)
            store_piece(pieces_ptr, piece - 1, dk, warpgroup * KEYS, DIM, WARPGROUPS * KEYS, 2 * DIM)
        else:
            store_keys(p, warpgroup, dk_desc, dv_desc, dk, dv, entry, dq_ring, position - 1)
        tile += 1
        entry += FIELDS
    last_dq(p, warpgroup, ds_ring, position - 1, k_ring, tile_before, dq_ring, dq_zero, FIRST_COLUMN)


@gluon.constexpr_function
def by_edge(dim):
    """Whether in a window a block is compared only with an edge that cuts it: up to 96 dims by triton 3.9. 8k with 1024
    keys to both sides or to the left D 64 +0.5 and +0.8 % on an H200, D 96 +1.3 and +0.5 %, 128 -0.2 and -0.1 %; by 3.6
    D 64 and 96 -0.3 to -0.7 %."""
    return SINCE_3_9 and dim < 128


@gluon.jit(do_not_specialize=["heads_q", "group", "row_blocks", "heads", "rounds"])
def backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, sums_desc, pieces_ptr, added_ptr, ranks_ptr,
    schedule_ptr,
    heads_q, group, row_blocks, heads, rounds, unit, cap_in, softmax_scale,
    TILE_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, PARTS: gl.constexpr, PARTS_V: gl.constexpr,
    K_KEPT: gl.constexpr, V_KEPT: gl.constexpr, DQ_PARTS: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: two warpgroups in `compute_loop`, a warp in `load_loop`, two in `add_loop`.

    added: (B, Hq, row_blocks) int32, 0, or WRITTEN where sums are zero, as are the counts of rounds behind them then;
    ranks: those of `order` in order.py, or None: tiles add in any order.
    """
    p = Problem(heads_q, group, row_blocks, heads, unit, cap_in, softmax_scale, schedule_ptr, rounds,
                TILE_M, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, ranks_ptr is not None,
                HAS_LEFT and by_edge(PARTS * q_desc.block_shape[3]))  # fmt: skip
    PAIR: gl.constexpr = pair_of(q_desc.block_shape, PARTS)
    PAIR_V: gl.constexpr = pair_of(v_desc.block_shape, PARTS_V)
    q_ring = make_ring(q_desc, STAGES, PARTS, WARPGROUPS, PAIR)
    dout_ring = make_ring(dout_desc, STAGES, PARTS_V, dout_readers(PARTS_V), PAIR_V)
    k_ring = make_ring(k_desc, KEY_STAGES, WARPGROUPS * PARTS, WARPGROUPS, PAIR)
    v_ring = make_ring(v_desc, VALUE_STAGES, WARPGROUPS * PARTS_V, WARPGROUPS, PAIR_V)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], rows_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE_M], q_desc.dtype)
    ds_buffers = gl.allocate_shared_memory(q_desc.dtype, [2 * WARPGROUPS, KEYS, TILE_M], ds_layout)
    ds_ring = ring_of(ds_buffers, 2, WARPGROUPS, WARPGROUPS, WARPGROUPS)
    dq_ring_0, dq_ring_1 = make_dq_rings(sums_desc, DQ_PARTS)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (compute_loop, (0, DQ_PARTS, K_KEPT, V_KEPT, p, dk_desc, dv_desc, pieces_ptr,
                        q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring_0, shifts, deltas)),
        (compute_loop, (1, DQ_PARTS, K_KEPT, V_KEPT, p, dk_desc, dv_desc, pieces_ptr,
                        q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring_1, shifts, deltas)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, rows_desc,
                     q_ring, dout_ring, k_ring, v_ring, shifts, deltas, added_ptr if TOGETHER else None)),
        (add_loop, (0, DQ_PARTS, p, sums_desc, q_ring, dq_ring_0, dq_ring_1, added_ptr, ranks_ptr)),
        (add_loop, (1, DQ_PARTS, p, sums_desc, q_ring, dq_ring_0, dq_ring_1, added_ptr, ranks_ptr)),
    ], [4, 1, 1, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip
