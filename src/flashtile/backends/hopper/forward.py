"""FlashAttention-3 forward pass in Gluon, for Hopper (sm_90a).

A persistent program per multiprocessor walks the tiles of its schedule. One warp loads by TMA; two or three
warpgroups compute 64 rows each by WGMMA, above 64 dims with O += P V of a block under the softmax of the next (section
3.2), and take turns on the matrix units (ping-pong, section 3.1). With two, up to 128 dims, the walk is one flat loop:
the first product of a tile runs under the last of the tile before, and its epilogue under the next softmax.

Blocks that need no mask keep the maximum that the blocks before them found (STEADY). Any number will do for it, as it
cancels in O / l and in L, as long as nothing overflows; a program that finds it did walks its tiles again, with the
running maximum of the paper.

Legend: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq) float32. A
warpgroup has TILE_M = 64 rows of a tile; S, P: (TILE_M, TILE_N) · O: (TILE_M, D_V), in parts · m, l: (TILE_M,).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .channel import WARPS, add_rings, anew, load_slot, make_ring, pair_of, width_of_slot
from .compat import call_as_worker
from .forward_cache import CachedKeys, await_kernel_before, clear_past, load_keys
from .forward_epilogue import finish
from .forward_problem import TAIL, Problem, in_order, mask, masked_blocks, middle_blocks, scores_product, tile_to_load
from .forward_schedule import longest_first, share_out
from .tile import (
    add_product,
    await_stores,
    exp2_of_fma,
    halves,
    meet,
    no_sums,
    pack,
    pass_turn,
    product_wait,
    row_sums_by_lane,
    row_sums_in_order,
    scaled,
    take_turn,
    tanh,
    unpack,
    wait_for,
    whole,
)


@gluon.jit
def any_failed(p, failures):
    """Whether a row of this program's tiles could not do without a running maximum. All warps of the program meet."""
    meet(p.WARPGROUPS, 128 * p.WARPGROUPS + 32)
    layout: gl.constexpr = gl.BlockedLayout([failures.shape[0] // 32], [32], [gl.num_warps()], [0])
    return gl.max(failures.load(layout), axis=0) != 0


@gluon.jit
def load_q(p, q_desc, q_rings, position, batch, head, m_block):
    """The rows of a tile, to the ring of each warpgroup."""
    for warpgroup in gl.static_range(p.WARPGROUPS):
        q_ring = q_rings[warpgroup]
        load_slot(q_desc, q_ring, position, batch, p.first_query(m_block, warpgroup), head, q_ring.parts)


@gluon.jit
def load_loop(p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, failures):
    """The producer warp: what `compute_loop` reads."""
    q_position = q_rings[0].first()
    position = k_ring.first()
    if p.STEADY:
        careful = False
        again = True
        while again:
            q_position, position = load_walk(p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, q_position, position)
            again = any_failed(p, failures) & (careful ^ True)
            careful = True
    else:
        load_walk(p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, q_position, position)


@gluon.jit
def load_walk(p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, q_position, position):
    """Q of every tile, and its blocks of K and V, `in_order`; returns the positions after them.

    In the order in which slots become free, and are needed: V after the next block's K; Q, where it has one slot,
    after its tile's first K.
    """
    LATE_Q: gl.constexpr = q_rings[0].depth == 1
    entries, n_tiles = p.tiles()
    batch_before = 0
    head_before = 0
    col_before = -1
    m_block_before = -1
    from_first = False
    for t in range(n_tiles):
        entry = gl.load(entries + t)
        batch, head, m_block = p.place(entry)
        here = p.of_sequence(batch)
        first, last, middle, end, tail, from_first = tile_to_load(
            here, entries, t, entry, m_block, m_block_before, from_first
        )
        m_block_before = m_block
        end += tail
        if not LATE_Q:
            load_q(p, q_desc, q_rings, q_position, batch, head, m_block)
        head_k = head // p.group
        for i in range(end - first):
            col = in_order(here, end - 1 - i, from_first, first, last, middle) * p.TILE_N
            load_keys(p, k_desc, k_ring, position, batch, col, head_k)
            if col_before >= 0:
                load_keys(p, v_desc, v_ring, position - 1, batch_before, col_before, head_before)
            if LATE_Q:
                if i == 0:
                    load_q(p, q_desc, q_rings, q_position, batch, head, m_block)
            batch_before = batch
            head_before = head_k
            col_before = col
            position += 1
        q_position += 1
    if not p.SHARED or n_tiles > 0:
        load_keys(p, v_desc, v_ring, position - 1, batch_before, col_before, head_before)
    return q_position, position


@gluon.jit
def scores(p, s):
    """S, in units that p.unit takes to base 2."""
    return tanh(s, p.cap_in) if p.SOFTCAP else s


@gluon.jit
def probabilities(p, s, shift):
    """P, not normalised: 2^(scores in base 2 - shift)."""
    return exp2_of_fma(s, p.unit, -shift[:, None])


@gluon.jit
def softmax(p, s, m, row, col, to_mask, MASKED: gl.constexpr, row_layout: gl.constexpr):
    """P, the new maximum and the factor for what was summed so far (Algorithm 1 of FlashAttention-2, line 9)."""
    s = scores(p, s)
    if MASKED:
        if to_mask:
            s = mask(p, s, row, col, row_layout, True)
    m_new = gl.maximum(m, gl.max(s, axis=1))
    top = m_new
    if MASKED:
        top = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    alpha = gl.exp2((m - top) * p.unit)  # 1 where the maximum stays, and not what m * p.unit loses to rounding
    return probabilities(p, s, top * p.unit), m_new, alpha


@gluon.jit
def add_values(o, probs, v_ring, position, has):
    """O += P V of a slot's first keys is begun. Its addresses are worked out only then: by triton 3.9, D 64, 5 to 20
    instructions of a step fewer; by 3.6, D 256, S = 512 and 1k full +2 and +1 %."""
    return add_product(o, probs, v_ring, anew(position), has)


@gluon.jit
def begin_values(o, probs, v_ring, position, has, p_layout: gl.constexpr, there=True):
    """O += P V of a block is begun, P as it goes round the loop; there: False of none, whose V nobody loads."""
    v_ring.await_full(position, pred=there)
    return add_values(o, unpack(probs, v_ring.memory.dtype, p_layout), v_ring, position, has)


@gluon.jit
def release_early(q_ring, q_position, done):
    """Gives Q back with its last product where it has one slot: the next tile's comes under the softmax."""
    if q_ring.depth == 1:
        if done:
            q_ring.release(q_position)


@gluon.jit
def step(
    p, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, final, row, col, k_ring, v_ring,
    MASKED: gl.constexpr, STEADY: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """S of this block and O += P V of the block before, then the softmax of this one while the latter runs. O_FIRST: O
    is issued first, and the softmax waits for both, as it has the other warpgroups' products to run under.

    STEADY: with m as it is. Finding the maximum and rescaling O are a third of the instructions otherwise. final: the
    position of the tile's last block.
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([p.TILE_M, p.TILE_N], gl.float32, s_layout)
    O_FIRST: gl.constexpr = p.O_AWAITED == "before"
    take_turn(warpgroup)
    if O_FIRST:
        o = begin_values(o, probs, v_ring, position - 1, has_o, p_layout)
    k_ring.await_full(position)
    s = scores_product(p, q, q_ring, q_position, k_ring, position, zero)
    if not O_FIRST:
        o = begin_values(o, probs, v_ring, position - 1, has_o, p_layout)
    pass_turn(warpgroup, p.WARPGROUPS)
    if O_FIRST:
        both, o = wait_for((s,), o)
        s = both[0]
        v_ring.release(position - 1)
    else:
        s = warpgroup_mma_wait(len(o), deps=(s,))
    k_ring.release(position)
    release_early(q_ring, q_position, position == final)
    HALF_WAY: gl.constexpr = STEADY and p.O_AWAITED == "half way"
    if HALF_WAY:
        low, high = halves(s)
        shift = gl.convert_layout(m * p.unit, gl.SliceLayout(1, low.type.layout))
        low = probabilities(p, scores(p, low), shift)
        v_ring.await_full(position - 1)  # again: it keeps the wait for O here, which ptxas would move
    elif STEADY:
        p_new = probabilities(p, scores(p, s), m * p.unit)
        l += gl.convert_layout(row_sums_in_order(p_new), l.type.layout)
    else:
        p_new, m, alpha = softmax(p, s, m, row, col, True, MASKED, row_layout)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + row_sums_by_lane(p_new)
    if not O_FIRST:
        o = product_wait(o)
        v_ring.release(position - 1)
    if HALF_WAY:
        p_new = gl.convert_layout(whole(low, probabilities(p, scores(p, high), shift)), s_layout)
        l += gl.convert_layout(row_sums_in_order(p_new), l.type.layout)
    elif not STEADY:
        o = scaled(o, alpha)
    return o, pack(p_new, k_ring.memory.dtype), m, l


@gluon.jit
def tail_scores(p, q, q_ring, q_position, row, col, k_ring, position, s):
    """S of the tail's keys, masked. It goes into the softmax of the block after it, and so has no turn of its own."""
    k_ring.await_full(position)
    s = scores_product(p, q, q_ring, q_position, k_ring, position, s)
    s = warpgroup_mma_wait(0, deps=(s,))
    k_ring.release(position)
    return mask(p, scores(p, s), row, col, gl.SliceLayout(1, s.type.layout), True)


@gluon.jit
def add_tail(p, s, o, m, l, v_ring, position, p_layout: gl.constexpr):
    """O = P V of the tail's keys, and their P to the sums of rows."""
    shift = gl.where(m == float("-inf"), 0.0, m * p.unit)  # a row that has seen no key yet
    probs = probabilities(p, s, gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout)))
    v_ring.await_full(position)
    o = add_values(o, gl.convert_layout(probs.to(v_ring.memory.dtype), p_layout), v_ring, position, False)
    l += gl.convert_layout(row_sums_by_lane(probs), l.type.layout)
    o = product_wait(o)
    v_ring.release(position)
    return o, l


@gluon.jit
def sit_out_scores(warpgroup, p, position, k_ring):
    """S of a block of which no row of this warpgroup is to see anything: it lets the others go on."""
    k_ring.await_full(position)
    take_turn(warpgroup)
    pass_turn(warpgroup, p.WARPGROUPS)
    k_ring.release(position)


@gluon.jit
def sit_out(position, ring):
    """A slot of such a block of which this warpgroup needs nothing."""
    ring.await_full(position)
    ring.release(position)


@gluon.jit
def other_blocks(
    p, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, row, first, full_first, full_end, end,
    careful, k_ring, v_ring, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """The blocks of a tile but for that at its end, `in_order`."""
    blocks_here = gl.where(row < p.seqlen_q, end - first, 1)
    for _ in range(end - first - blocks_here):
        sit_out_scores(warpgroup, p, position, k_ring)
        sit_out(position - 1, v_ring)
        position += 1
    end = first + blocks_here
    final = position + (blocks_here - 2)
    last, middle = middle_blocks(first, full_first, full_end, end)
    steady = 0
    if p.STEADY:
        steady = gl.where(careful, 0, middle - last)
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT
    if MASKED:
        # and those without one that a second walk computes with a running maximum: a loop less to compile
        unmasked = middle - last - steady if p.STEADY else 0
        for i in range(masked_blocks(first, last, middle, end) + unmasked):
            col = in_order(p, end - 2 - i, False, first, last, middle) * p.TILE_N
            o, probs, m, l = step(p, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, final, row,
                                  col, k_ring, v_ring, True, False, s_layout, p_layout)  # fmt: skip
            has_o = True
            position += 1
    if not (MASKED and p.STEADY):
        for _ in range(middle - last - steady):
            o, probs, m, l = step(p, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, final, row,
                                  0, k_ring, v_ring, False, False, s_layout, p_layout)  # fmt: skip
            has_o = True
            position += 1
    if p.STEADY:
        m = gl.where((steady > 0) & (m == float("-inf")), 0.0, m)  # a row that has seen no key yet
        for _ in range(steady):
            o, probs, m, l = step(p, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, final, row,
                                  0, k_ring, v_ring, False, True, s_layout, p_layout)  # fmt: skip
            has_o = True
            position += 1
    return o, probs, m, l, has_o, position


@gluon.jit
def end_tile(
    p, warpgroup, o, probs, m, l, has_o, v_ring, position, batch, head, row, piece, out_desc, lse_ptr, pieces_ptr,
    out_buffer, failures, p_layout: gl.constexpr, row_layout: gl.constexpr,
):  # fmt: skip
    """The last O += P V of a tile, and its epilogue; returns O, whose registers the next tile's takes."""
    o = begin_values(o, probs, v_ring, position, has_o, p_layout)
    o = product_wait(o)
    v_ring.release(position)
    finish(p, warpgroup, o, m, l, batch, head, row, piece, out_desc, lse_ptr, pieces_ptr, out_buffer, failures,
           row_layout)  # fmt: skip
    return o


@gluon.jit
def compute_role(
    warpgroup: gl.constexpr, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring, out_buffers, failures
):  # fmt: skip
    """A warpgroup's `compute_loop`, which is one function for all, made once: its number is an argument, and `anew`, as
    triton 3.6 takes that of the first call for a constant."""
    number = anew(gl.to_tensor(warpgroup)).to(gl.int32)
    mine = failures.slice(warpgroup * p.TILE_M, p.TILE_M)
    call_as_worker(compute_loop, (number, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring,
                                  out_buffers.index(warpgroup), failures, mine))  # fmt: skip


@gluon.jit(noinline=True)  # until PTX is written: see compiling.py
def compute_loop(warpgroup, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring, out_buffer, failures, mine):
    """One warpgroup: TILE_M rows of every tile; twice, where it takes a running maximum."""
    q_position = q_ring.first()
    position = k_ring.first()
    if p.STEADY:
        careful = False
        again = True
        while again:
            q_position, position = compute_walk(warpgroup, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring,
                                                out_buffer, mine, q_position, position, careful)  # fmt: skip
            again = any_failed(p, failures) & (careful ^ True)
            careful = True
    else:
        compute_walk(warpgroup, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring, out_buffer, mine, q_position,
                     position, True)  # fmt: skip


@gluon.jit
def compute_walk(
    warpgroup, p, out_desc, lse_ptr, pieces_ptr, q_ring, k_ring, v_ring, out_buffer, failures,
    q_position, position, careful,
):  # fmt: skip
    """All tiles of this program once, no block of them STEADY if `careful`; returns the positions after them."""
    WARPS: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.TILE_N, 16])
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TAIL, 16])
    o = no_sums(p.TILE_M, v_ring.width, width_of_slot(v_ring))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    entries, n_tiles = p.tiles()
    zero = gl.zeros([p.TILE_M, p.TILE_N], gl.float32, s_layout)
    probs = pack(zero, out_desc.dtype)
    m = gl.full([p.TILE_M], float("-inf"), gl.float32, row_layout)
    l = row_sums_by_lane(zero)
    has_o = False
    batch = 0
    head = 0
    row = 0
    piece = 0
    if warpgroup == p.WARPGROUPS - 1:
        pass_turn(warpgroup, p.WARPGROUPS)
    entry = gl.load(entries)
    for t in range(n_tiles):
        batch_new, head_new, m_block = p.place(entry)
        here = p.of_sequence(batch_new)
        piece_new, first, full_first, full_end, end, tail = here.blocks_here(entries, t, entry, m_block)
        entry = gl.load(entries + t + 1)  # of the next tile: it takes as long as a product
        unseen = 0  # or 1: the block at the end, which only other warpgroups see
        if p.OWN_BLOCKS:
            full_end, unseen = here.own_blocks(m_block, warpgroup, first, full_first, full_end, end)
            end -= unseen
            if unseen > 0:
                sit_out_scores(warpgroup, p, position, k_ring)
            position += unseen
        row_new = p.first_query(m_block, warpgroup)
        q_ring.await_full(q_position)
        q = q_ring.columns(q_position, 0, q_ring.box[-1])
        if p.Q_KEPT > 0:
            q = q_ring.columns(q_position, 0, p.Q_KEPT).load(gl.DotOperandLayout(0, s_layout, 2))
        m_new = gl.full([p.TILE_M], float("-inf"), gl.float32, row_layout)
        if p.TAILS:
            s_tail = gl.zeros([p.TILE_M, TAIL], gl.float32, tail_layout)
            if tail > 0:
                s_tail = tail_scores(here, q, q_ring, q_position, row_new, end * p.TILE_N, k_ring, position, s_tail)
                m_new = gl.convert_layout(gl.max(s_tail, axis=1), row_layout)
                position += 1
        # S of the first block but for the tail; flat: under the last O += P V of the tile before
        k_ring.await_full(position)
        take_turn(warpgroup)
        s = scores_product(p, q, q_ring, q_position, k_ring, position, zero)
        if p.FLAT:
            o = begin_values(o, probs, v_ring, position - 1 - tail - unseen, has_o, p_layout, t > 0)
        pass_turn(warpgroup, p.WARPGROUPS)
        s = warpgroup_mma_wait(len(o) if p.FLAT else 0, deps=(s,))
        k_ring.release(position)
        blocks_here = gl.where(row_new < p.seqlen_q, end - first, 1)
        release_early(q_ring, q_position, blocks_here == 1)
        to_mask = (full_end < end) | (full_first == end)
        probs_new, m_new, _ = softmax(here, s, m_new, row_new, (end - 1) * p.TILE_N, to_mask, True, row_layout)
        l_new = row_sums_by_lane(probs_new)
        if p.FLAT:
            o = product_wait(o)
            v_ring.release(position - 1 - tail - unseen, pred=t > 0)
            if t > 0:
                finish(p, warpgroup, o, m, l, batch, head, row, piece, out_desc, lse_ptr, pieces_ptr,
                       out_buffer, failures, row_layout)  # fmt: skip
        if p.OWN_BLOCKS:
            if unseen > 0:
                sit_out(position - 1, v_ring)
        if p.TAILS:
            if tail > 0:
                o, l_new = add_tail(p, s_tail, o, m_new, l_new, v_ring, position - 1, p_layout)
        if p.keys.CACHED:
            clear_past(v_ring, position, here.seqlen_k - (end - 1) * p.TILE_N)
        probs = pack(probs_new, out_desc.dtype)
        m = m_new
        l = l_new
        batch = batch_new
        head = head_new
        row = row_new
        piece = piece_new
        has_o = tail > 0
        position += 1
        o, probs, m, l, has_o, position = other_blocks(
            here, warpgroup, q, q_ring, q_position, o, probs, m, l, has_o, position, row, first, full_first, full_end,
            end, careful, k_ring, v_ring, s_layout, p_layout,
        )  # fmt: skip
        if q_ring.depth > 1:
            q_ring.release(q_position)
        q_position += 1
        if not p.FLAT:
            o = end_tile(p, warpgroup, o, probs, m, l, has_o, v_ring, position - 1, batch, head, row, piece, out_desc,
                         lse_ptr, pieces_ptr, out_buffer, failures, p_layout, row_layout)  # fmt: skip
    if warpgroup == 0:
        take_turn(warpgroup)
    if p.FLAT and (not p.SHARED or n_tiles > 0):
        end_tile(p, warpgroup, o, probs, m, l, has_o, v_ring, position - 1, batch, head, row, piece, out_desc, lse_ptr,
                 pieces_ptr, out_buffer, failures, p_layout, row_layout)  # fmt: skip
    await_stores()
    return q_position, position


@gluon.jit(do_not_specialize=[
    "seqlen_q", "seqlen_k", "heads_q", "group", "window_left", "window_right", "rounds", "stride_places", "seqlen_new",
    "batches", "m_blocks", "pieces_cost",
])  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, pieces_ptr, shared_ptr, seqlens_ptr, leftpad_ptr, places_ptr, seqlen_k,
    schedule_ptr, seqlen_q, heads_q, group, window_left, window_right, rounds, unit, natural, cap_in, stride_places,
    seqlen_new, dealt_ptr, batches, m_blocks, pieces_cost,
    WARPGROUPS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PARTS_V: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    STEADY: gl.constexpr, TAILS: gl.constexpr, FLAT: gl.constexpr, O_AWAITED: gl.constexpr, Q_KEPT: gl.constexpr,
    PACK: gl.constexpr, CACHED: gl.constexpr, PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). Roles: WARPGROUPS warpgroups in `compute_loop`, one warp in `load_loop`. CACHED: K and V are a
    cache, in pages if PAGE_SIZE is not 0, of which the descriptors may have less than a block; seqlen_k: what a
    sequence has there at most; dealt_ptr: what the schedule, which is not written yet, is made of; m_blocks: blocks of
    rows of a head, where programs share keys, and write of tiles, to shared_ptr, what the merge is to know."""
    keys = CachedKeys(seqlens_ptr, leftpad_ptr, places_ptr, stride_places, seqlen_new, CACHED, PAGE_SIZE)
    p = Problem(seqlen_q, seqlen_k, heads_q, group, window_left, window_right, unit, natural, cap_in,
                schedule_ptr, rounds, keys, WARPGROUPS, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, SOFTCAP, STEADY,
                TAILS, FLAT, O_AWAITED, Q_KEPT, pieces_ptr is not None, PACK)  # fmt: skip
    PAIR: gl.constexpr = pair_of(q_desc.block_shape, PARTS)
    q_rings = add_rings((), WARPGROUPS, q_desc, Q_STAGES, PARTS, PAIR, WARPS)
    k_ring = make_ring(k_desc, STAGES, PARTS, WARPGROUPS, Q_KEPT if Q_KEPT > 0 else PAIR, True, WARPS,
                       [1, TILE_N, 1, DIM // PARTS])  # fmt: skip
    v_ring = make_ring(v_desc, STAGES, PARTS_V, WARPGROUPS, pair_of(v_desc.block_shape, PARTS_V), False, WARPS,
                       [1, TILE_N, 1, DIM_V // PARTS_V])  # fmt: skip
    out_buffers = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS] + out_desc.block_shape, out_desc.layout)
    failures = gl.allocate_shared_memory(gl.int32, [4 * TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    failures.store(gl.zeros([4 * TILE_M], gl.int32, gl.BlockedLayout([2], [32], [gl.num_warps()], [0])))
    if CACHED:
        await_kernel_before()
    if dealt_ptr is not None:
        longest_first(p, dealt_ptr, batches)
    if m_blocks is not None:
        share_out(p, shared_ptr, batches, m_blocks, pieces_cost)
    # tuples inline: bound to a name they lose their constexprs
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (compute_role, (0, p, out_desc, lse_ptr, pieces_ptr, q_rings[0], k_ring, v_ring, out_buffers, failures)),
            (compute_role, (1, p, out_desc, lse_ptr, pieces_ptr, q_rings[1], k_ring, v_ring, out_buffers, failures)),
            (load_loop, (p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, failures)),
        ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_role, (0, p, out_desc, lse_ptr, pieces_ptr, q_rings[0], k_ring, v_ring, out_buffers, failures)),
            (compute_role, (1, p, out_desc, lse_ptr, pieces_ptr, q_rings[1], k_ring, v_ring, out_buffers, failures)),
            (compute_role, (2, p, out_desc, lse_ptr, pieces_ptr, q_rings[2], k_ring, v_ring, out_buffers, failures)),
            (load_loop, (p, q_desc, k_desc, v_desc, q_rings, k_ring, v_ring, failures)),
        ], [4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
