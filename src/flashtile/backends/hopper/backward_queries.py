"""dQ of the backward pass (Algorithm 2) in a kernel of its own, for head dims above 128, and 128 where queries see few
keys: a tile is 128 queries, whose dQ stays in registers.

Added up over tiles of keys, as in backward.py, dQ of 256 dims would take as many bytes of the L2 cache as all that is
loaded. Here S and P are computed a second time instead: seven products, not five, but nothing is added up in memory,
set to zero or converted, and sums have the same order in every run.

A persistent program per multiprocessor walks the tiles of its schedule. One warp loads by TMA; two warpgroups compute
64 rows each, and take turns on the matrix units: dQ of a block of keys is issued with S and dP of the next, and P and
dS are computed under the other's products.

Legend: q, dout (B, Sq, Hq, D | Dv), k, v (B, Sk, Hk, D | Dv) · S, P, dP, dS: (TILE_M, TILE_N) · dQ: (TILE_M, D), in
parts · shift, delta: (TILE_M,), as in backward_rows.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .backward_problem import WARPGROUPS, store_piece, store_slot
from .channel import add_rings, anew, load_slot, make_ring, width_of_slot
from .forward import load_q, sit_out
from .forward_cache import no_cache
from .forward_problem import Problem, in_order, mask, masked_blocks, middle_blocks, scores_product, tile_to_load
from .tile import (
    add_product,
    exp2_of_fma,
    no_sums,
    pack,
    parts_of,
    pass_turn,
    product_wait,
    take_turn,
    tanh,
    unpack,
)


@gluon.jit
def load_loop(p, q_desc, dout_desc, k_desc, v_desc, q_rings, dout_rings, k_ring, v_ring):
    """The producer warp: Q and dO of every tile, and its blocks of K and V, `in_order`."""
    q_position = q_rings[0].first()
    position = first_block(k_ring, v_ring)
    entries, n_tiles = p.tiles()
    m_block_before = -1
    from_first = False
    for t in range(n_tiles):
        entry = gl.load(entries + t)
        batch, head, m_block = p.place(entry)
        first, last, middle, end, _, from_first = tile_to_load(
            p, entries, t, entry, m_block, m_block_before, from_first
        )
        m_block_before = m_block
        head_k = head // p.group
        for i in range(end - first):
            col = in_order(p, end - 1 - i, from_first, first, last, middle) * p.TILE_N
            load_slot(k_desc, k_ring, position, batch, col, head_k, k_ring.parts)
            if i == 0:
                load_q(p, q_desc, q_rings, q_position, batch, head, m_block)
                load_q(p, dout_desc, dout_rings, q_position, batch, head, m_block)
            load_slot(v_desc, v_ring, position, batch, col, head_k, v_ring.parts)
            position += 1
        q_position += 1


@gluon.jit
def first_block(k_ring, v_ring):
    """The position at which both rings of keys start."""
    return k_ring.first() * v_ring.depth


@gluon.jit
def shift_and_delta(
    p, out_ptr, dout_ptr, lse_ptr, dlse_ptr, strides, batch, head, row, natural, DV: gl.constexpr,
    row_layout: gl.constexpr,
):  # fmt: skip
    """Line 4, of a warpgroup's rows: see `begin_kernel`."""
    WIDTH: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_ls = strides
    lines = row + gl.arange(0, p.TILE_M, gl.SliceLayout(1, layout))
    here = lines < p.seqlen_q
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    out_ptr += (batch.to(gl.int64) * p.seqlen_q * p.heads_q + head) * DV
    dout_ptr += batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    of_out = lines.to(gl.int64)[:, None] * p.heads_q * DV + dims[None, :]
    of_dout = lines.to(gl.int64)[:, None] * stride_os + dims[None, :]
    products = gl.zeros([p.TILE_M, WIDTH], gl.float32, layout)
    for part in gl.static_range(parts_of(WIDTH, DV)):
        inside = here[:, None] & (dims + part * WIDTH < DV)[None, :]
        out = gl.load(out_ptr + of_out + part * WIDTH, mask=inside, other=0.0)
        dout = gl.load(dout_ptr + of_dout + part * WIDTH, mask=inside, other=0.0)
        products += out.to(gl.float32) * dout.to(gl.float32)
    delta = -gl.convert_layout(gl.sum(products, axis=1), row_layout)
    rows = row + gl.arange(0, p.TILE_M, row_layout)
    if dlse_ptr is not None:
        dlse_ptr += batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh
        delta += gl.load(dlse_ptr + rows.to(gl.int64) * stride_ls, mask=rows < p.seqlen_q, other=0.0)
    of_head = (batch * p.heads_q + head).to(gl.int64) * p.seqlen_q
    lse = gl.load(lse_ptr + of_head + rows, mask=rows < p.seqlen_q, other=float("-inf"))
    return gl.where(lse == float("-inf"), float("-inf"), -lse / natural), delta


@gluon.jit
def begin_product(p, rows_ring, q_position, keys_ring, position, s_layout: gl.constexpr):
    """Line 10 or 13: issues S = Q K^T or dP = dO V^T of a block."""
    zero = gl.zeros([p.TILE_M, p.TILE_N], gl.float32, s_layout)
    only = anew(gl.to_tensor(0)).to(gl.int32)  # the slot; of a known one addresses are kept over the loop, and spilled
    rows = rows_ring.memory.index(only)
    return scores_product(p, rows, rows_ring, q_position, keys_ring, position, zero)


@gluon.jit
def begin_block(
    p, warpgroup: gl.constexpr, TURNS: gl.constexpr, q_ring, dout_ring, q_position, dq, ds, position, k_ring, v_ring,
    s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Issues dQ += dS K of the block before (line 15), if there is one, and S and dP of this, dP when that dQ is
    computed: then there are registers. The second warpgroup has S and dP the other way round, so that slots of V and of
    K are read for as long."""
    k_ring.await_full(position)
    if TURNS:
        take_turn(warpgroup)
    if ds is not None:
        dq = add_product(dq, unpack(ds, k_ring.memory.dtype, p_layout), k_ring, position - 1, True)
    if warpgroup == 0:
        s = begin_product(p, q_ring, q_position, k_ring, position, s_layout)
    else:
        v_ring.await_full(position)
        dp = begin_product(p, dout_ring, q_position, v_ring, position, s_layout)
    if ds is not None:
        dq = product_wait(dq, k_ring.parts if warpgroup == 0 else v_ring.parts)
        k_ring.release(position - 1)
    if warpgroup == 0:
        v_ring.await_full(position)
        dp = begin_product(p, dout_ring, q_position, v_ring, position, s_layout)
    else:
        s = begin_product(p, q_ring, q_position, k_ring, position, s_layout)
    if TURNS:
        pass_turn(warpgroup, p.WARPGROUPS)
    return s, dp, dq


@gluon.jit
def end_block(
    p, warpgroup: gl.constexpr, s, dp, shift, delta, row, col, to_mask, position, k_ring, v_ring,
    MASKED: gl.constexpr, row_layout: gl.constexpr,
):  # fmt: skip
    """Lines 11 and 14: dS, when S and dP are computed, as pairs of 16-bit numbers."""
    if warpgroup == 0:
        s = warpgroup_mma_wait(v_ring.parts, deps=(s,))
    else:
        dp = warpgroup_mma_wait(k_ring.parts, deps=(dp,))
        v_ring.release(position)
        s = warpgroup_mma_wait(0, deps=(s,))
    capped = s
    if p.SOFTCAP:
        capped = tanh(s, p.cap_in)
    s = capped
    if MASKED:
        if to_mask:
            s = mask(p, s, row, col, row_layout, False)  # by edge: D 256 -2 to -3 % by triton 3.6, -0.5 to 0 by 3.9
    probs = exp2_of_fma(s, p.unit, shift[:, None])
    if warpgroup == 0:
        dp = warpgroup_mma_wait(0, deps=(dp,))
        v_ring.release(position)
    ds = probs * (dp + delta[:, None])
    if p.SOFTCAP:
        ds *= 1 - capped * capped
    return pack(ds, k_ring.memory.dtype)


@gluon.jit
def step(
    p, warpgroup: gl.constexpr, TURNS: gl.constexpr, q_ring, dout_ring, q_position, dq, ds, shift, delta, position,
    row, col, k_ring, v_ring, MASKED: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
    row_layout: gl.constexpr,
):  # fmt: skip
    """dQ of the block before, S and dP of this one, and its dS."""
    s, dp, dq = begin_block(p, warpgroup, TURNS, q_ring, dout_ring, q_position, dq, ds, position, k_ring, v_ring,
                            s_layout, p_layout)  # fmt: skip
    ds = end_block(p, warpgroup, s, dp, shift, delta, row, col, True, position, k_ring, v_ring, MASKED, row_layout)
    return dq, ds


@gluon.jit
def compute_loop(
    warpgroup: gl.constexpr, TURNS: gl.constexpr, p, dq_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr,
    pieces_ptr, strides,
    q_ring, dout_ring, k_ring, v_ring, softmax_scale, padded, n_rows, DV: gl.constexpr,
):  # fmt: skip
    """One warpgroup: TILE_M rows of every tile."""
    DTYPE: gl.constexpr = dq_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.TILE_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    DIM: gl.constexpr = width_of_slot(k_ring)
    dq = no_sums(p.TILE_M, k_ring.width, DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)
    # dQ leaves by way of dO's slot, if that is as wide, as Q of the next tile is needed first
    if dout_ring.parts == q_ring.parts and dout_ring.width == q_ring.width:
        free_ring, out_ring = q_ring, dout_ring
    else:
        free_ring, out_ring = dout_ring, q_ring
    q_position = q_ring.first()
    position = first_block(k_ring, v_ring)
    entries, n_tiles = p.tiles()
    if TURNS:
        if warpgroup == p.WARPGROUPS - 1:
            pass_turn(warpgroup, p.WARPGROUPS)
    for t in range(n_tiles):
        entry = gl.load(entries + t)
        batch, head, m_block = p.place(entry)
        piece, first, full_first, full_end, end, _ = p.blocks_here(entries, t, entry, m_block)
        unseen = 0  # or 1: the block at the end, which only the other warpgroup sees
        if p.OWN_BLOCKS:
            full_end, unseen = p.own_blocks(m_block, warpgroup, first, full_first, full_end, end)
            end -= unseen
            if unseen > 0:
                if TURNS:
                    take_turn(warpgroup)
                    pass_turn(warpgroup, p.WARPGROUPS)
                sit_out(position, k_ring)
                sit_out(position, v_ring)
            position += unseen
        row = p.first_query(m_block, warpgroup)
        rows = row + gl.arange(0, p.TILE_M, row_layout)
        of_rows = rows_ptr + ((batch * p.heads_q + head).to(gl.int64) * padded + rows)
        shift, delta = shift_and_delta(p, out_ptr, dout_ptr, lse_ptr, dlse_ptr, strides, batch, head, row, p.natural,
                                       DV, row_layout)  # fmt: skip
        gl.store(of_rows, shift, mask=rows < padded)
        gl.store(of_rows + n_rows, delta, mask=rows < padded)
        shift *= p.unit
        q_ring.await_full(q_position)
        dout_ring.await_full(q_position)
        dq = no_sums(p.TILE_M, k_ring.width, DIM)
        s, dp, dq = begin_block(p, warpgroup, TURNS, q_ring, dout_ring, q_position, dq, None, position, k_ring, v_ring,
                                s_layout, p_layout)  # fmt: skip
        to_mask = (full_end < end) | (full_first == end)
        ds = end_block(p, warpgroup, s, dp, shift, delta, row, (end - 1) * p.TILE_N, to_mask, position, k_ring, v_ring,
                       True, row_layout)  # fmt: skip
        position += 1
        # the other blocks, `in_order`
        last, middle = middle_blocks(first, full_first, full_end, end)
        if p.HAS_LEFT or p.HAS_RIGHT:
            for i in range(masked_blocks(first, last, middle, end)):
                col = in_order(p, end - 2 - i, False, first, last, middle) * p.TILE_N
                dq, ds = step(p, warpgroup, TURNS, q_ring, dout_ring, q_position, dq, ds, shift, delta, position, row,
                              col, k_ring, v_ring, True, s_layout, p_layout, row_layout)  # fmt: skip
                position += 1
        for _ in range(middle - last):
            dq, ds = step(p, warpgroup, TURNS, q_ring, dout_ring, q_position, dq, ds, shift, delta, position, row,
                          0, k_ring, v_ring, False, s_layout, p_layout, row_layout)  # fmt: skip
            position += 1
        free_ring.release(q_position)
        dq = add_product(dq, unpack(ds, DTYPE, p_layout), k_ring, position - 1, True)
        dq = product_wait(dq)
        k_ring.release(position - 1)
        if p.PIECES and piece > 0:
            store_piece(pieces_ptr, piece - 1, dq, warpgroup * p.TILE_M, 0, p.WARPGROUPS * p.TILE_M, DIM)
        else:
            store_slot(dq_desc, out_ring, q_position, dq, softmax_scale, batch, row, head)
        out_ring.release(q_position)
        q_position += 1
    if TURNS:
        if warpgroup == 0:
            take_turn(warpgroup)


@gluon.jit(
    do_not_specialize=[
        "stride_lb", "stride_lh", "stride_ls", "seqlen_q", "seqlen_k", "heads_q", "group", "window_left",
        "window_right", "rounds",
    ]
)  # fmt: skip
def queries_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr, pieces_ptr,
    schedule_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_ls,
    seqlen_q, seqlen_k, heads_q, group, window_left, window_right, rounds, padded, n_rows,
    unit, natural, cap_in, softmax_scale,
    DV: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    PARTS: gl.constexpr, PARTS_V: gl.constexpr, TURNS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: two warpgroups in `compute_loop`, one warp in `load_loop`."""
    p = Problem(seqlen_q, seqlen_k, heads_q, group, window_left, window_right, unit, natural, cap_in,
                schedule_ptr, rounds, no_cache(), WARPGROUPS, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, SOFTCAP,
                False, False, False, False, 0, True, 1)  # fmt: skip
    q_rings = add_rings((), WARPGROUPS, q_desc, 1, PARTS)
    dout_rings = add_rings((), WARPGROUPS, dout_desc, 1, PARTS_V)
    k_ring = make_ring(k_desc, KEY_STAGES, PARTS, WARPGROUPS)
    v_ring = make_ring(v_desc, VALUE_STAGES, PARTS_V, WARPGROUPS)
    # tuples inline: bound to a name they lose their constexprs
    gl.warp_specialize([
        (compute_loop, (0, TURNS, p, dq_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr, pieces_ptr,
                        (stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_ls),
                        q_rings[0], dout_rings[0], k_ring, v_ring, softmax_scale, padded, n_rows, DV)),
        (compute_loop, (1, TURNS, p, dq_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr, pieces_ptr,
                        (stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_ls),
                        q_rings[1], dout_rings[1], k_ring, v_ring, softmax_scale, padded, n_rows, DV)),
        (load_loop, (p, q_desc, dout_desc, k_desc, v_desc, q_rings, dout_rings, k_ring, v_ring)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
