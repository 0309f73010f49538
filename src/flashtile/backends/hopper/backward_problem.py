"""What the kernels with tiles of keys share, backward.py and backward_keys.py: the problem, its loads, scores and
probabilities; and how a gradient leaves.

Legend: as in backward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from .channel import load_parts, load_slot, section, width_of_slot
from .compat import aggregate, load_async, store_async
from .tile import exp2_of_fma, parts_of, store_matrix, tanh, width_of
from .together import STEPS_AHEAD, await_begun, say_begun

KEYS = gl.constexpr(64)  # of one warpgroup: the rows of one wgmma
QUERIES = gl.constexpr(64)  # of one part of a step
WARPGROUPS = gl.constexpr(2)


# What the host's schedule says of a tile: `tile_fields` in schedule.py fills it in.
BATCH = gl.constexpr(0)
HEAD_K = gl.constexpr(1)
KEY = gl.constexpr(2)  # its first key
FIRST = gl.constexpr(3)  # blocks first ... end hold every query that sees a key of the tile, at least one
END = gl.constexpr(4)
FULL_FIRST = gl.constexpr(5)  # of these, full_first ... full_end need no mask
FULL_END = gl.constexpr(6)
KEYS_HERE = gl.constexpr(7)  # keys from its first to the end of K
RIGHT_EDGE = gl.constexpr(8)  # the first and the last query that see its first key
LEFT_EDGE = gl.constexpr(9)
TURN = gl.constexpr(10)  # blocks past the first at which the tile begins; or -(first + end): it goes backwards
RANKS = gl.constexpr(11)  # where its ranks begin, if tiles add to dQ in order
PIECE = gl.constexpr(12)  # 0 or, of a piece of a tile, 1 + which of all pieces
ROUND = gl.constexpr(13)  # 0 or, if programs stay together, where in `added` those that begin this round are counted
FIELDS = gl.constexpr(16)

WRITTEN = gl.constexpr(2)  # a block of dQ is there: see backward_sums.py; a count of rounds begins there too


@aggregate
class Problem:
    """One backward problem and how it is tiled."""

    heads_q: gl.tensor
    group: gl.tensor
    row_blocks: gl.tensor  # blocks of TILE_M queries of one head
    heads: gl.tensor  # B * Hq
    unit: gl.tensor  # scores in base 2 are s * unit
    cap_in: gl.tensor  # with a soft cap, s = tanh(q.k, cap_in)
    softmax_scale: gl.tensor
    schedule: gl.tensor  # (programs, rounds, FIELDS) int32: how many tiles, the tiles, and one that is only begun
    rounds: gl.tensor
    TILE_M: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    SOFTCAP: gl.constexpr
    MASKED: gl.constexpr  # S or exponents: see BackwardTiles
    ORDERED: gl.constexpr  # tiles add to dQ in a fixed order
    BY_EDGE: gl.constexpr  # in a window a block is compared only with an edge that cuts it
    PIECES: gl.constexpr  # there may be pieces of tiles
    PARTS: gl.constexpr  # of a step

    @gluon.constexpr_function
    def __init__(
        self, heads_q, group, row_blocks, heads, unit, cap_in, softmax_scale, schedule, rounds,
        TILE_M, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, ORDERED, BY_EDGE,
    ):  # fmt: skip
        self.heads_q = heads_q
        self.group = group
        self.row_blocks = row_blocks
        self.heads = heads
        self.unit = unit
        self.cap_in = cap_in
        self.softmax_scale = softmax_scale
        self.schedule = schedule
        self.rounds = rounds
        self.TILE_M = gl.constexpr(TILE_M)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.MASKED = gl.constexpr(MASKED)
        self.ORDERED = gl.constexpr(ORDERED)
        self.BY_EDGE = gl.constexpr(BY_EDGE)
        self.PIECES = gl.constexpr(not HAS_LEFT and not HAS_RIGHT)
        self.PARTS = gl.constexpr(TILE_M // QUERIES)

    @gluon.jit
    def tiles(self):
        """(this program's first tile, how many it has)."""
        start = self.schedule + gl.program_id(0) * self.rounds * FIELDS
        return start + FIELDS, gl.load(start)

    @gluon.jit
    def turned(self, i, first, end, turn):
        """Blocks first ... end from `turn` past the first on, then those before it; or backwards, as ~(i + turn)."""
        if self.HAS_LEFT or self.HAS_RIGHT:  # tiles begin apart by themselves, and go backwards in order alone
            block = (i + turn) ^ (turn >> 31) if self.ORDERED else i
        else:
            block = gl.where(i + turn < end, i + turn, i + turn - (end - first))
        return block


@gluon.jit
def load_rows(p, desc, rows_desc, ring, numbers, position, batch, head, row, which: gl.constexpr):
    """Line 9: a block of Q and its shifts, or a block of dO and its deltas."""
    full = ring.await_empty(position)
    mbarrier.expect(full, desc.block_type.nbytes * ring.parts + rows_desc.block_type.nbytes)
    load_parts(desc, batch, row, head, full, ring, position, 0, ring.parts)
    at = ((which * p.heads + batch * p.heads_q + head) * p.row_blocks) * p.TILE_M + row
    load_async(rows_desc, [at], full, numbers.index(ring.slot(position)))


@gluon.jit
def first_step(ring):
    """The position at which both the rings of queries and that of dS, two deep, start."""
    return 2 * ring.first()


@gluon.jit
def load_loop(
    p, q_desc, dout_desc, k_desc, v_desc, rows_desc, q_ring, dout_ring, k_ring, v_ring, shifts, deltas, added_ptr=None
):  # fmt: skip
    """The producer warp: K and V of every tile, and for each query head of its group the blocks of Q and dO. added_ptr:
    what counts rounds of tiles, unless programs never stay together."""
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    tile = k_ring.first()
    for _ in range(n_tiles):
        batch, head_k, key = gl.load(entry + BATCH), gl.load(entry + HEAD_K), gl.load(entry + KEY)
        first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
        load_slot(k_desc, k_ring, tile, batch, key, head_k, q_ring.parts)  # line 6
        if added_ptr is not None:
            count = gl.load(entry + ROUND)
            if count > 0:
                say_begun(added_ptr + count)
            meets = gl.where(count > 0, first + STEPS_AHEAD, end)  # the block at which it waits; at no other
        for i in range(p.group):
            head = head_k * p.group + i
            for j in range(first, end):
                row = p.turned(j, first, end, turn) * p.TILE_M
                load_rows(p, q_desc, rows_desc, q_ring, shifts, position, batch, head, row, 0)
                if i == 0:
                    if j == first:
                        load_slot(v_desc, v_ring, tile, batch, key, head_k, dout_ring.parts)
                load_rows(p, dout_desc, rows_desc, dout_ring, deltas, position, batch, head, row, 1)
                if added_ptr is not None:
                    if j == meets:
                        await_begun(added_ptr + count, WRITTEN + gl.num_programs(0))
                position += 1
        tile += 1
        entry += FIELDS


@gluon.jit
def mask(p, x, unseen: gl.constexpr, entry, key, row):
    """S^T or P^T, `unseen` where query row + j does not see key + i of the tile: limits in a register per key, queries
    as constants.

    What the lane adds to a query, bits 1 and 2, is taken off the limits: see `mask` in forward_problem.py.
    """
    keys = key + gl.arange(0, KEYS, gl.SliceLayout(1, x.type.layout))
    queries = gl.arange(0, QUERIES, gl.SliceLayout(0, x.type.layout))
    of_lane = (queries & 6)[None, :]
    queries = (queries & ~6)[None, :]
    seen = keys < gl.load(entry + KEYS_HERE)
    cut = True  # by the edge at hand
    if p.BY_EDGE:
        cut = row < gl.load(entry + FULL_FIRST) * p.TILE_M
    if cut:
        if p.HAS_RIGHT:
            first = gl.maximum(gl.where(seen, 0, QUERIES), keys + (gl.load(entry + RIGHT_EDGE) - row))
            x = gl.where(queries >= first[:, None] - of_lane, x, unseen)
        else:
            x = gl.where(seen[:, None], x, unseen)
    if p.HAS_LEFT:
        if p.BY_EDGE:
            cut = row >= gl.load(entry + FULL_END) * p.TILE_M
        if cut:
            last = keys + (gl.load(entry + LEFT_EDGE) - row)
            x = gl.where(queries <= last[:, None] - of_lane, x, unseen)
    return x


@gluon.jit
def past_the_end(entry, key, layout: gl.constexpr):
    """(KEYS,): 0 or, of keys of the tile from `key` on that are past the end of K, -inf."""
    keys = key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    return gl.where(keys < gl.load(entry + KEYS_HERE), 0.0, float("-inf"))


@gluon.jit
def store_slot(desc, ring, position, sums, scale, batch, row, head):
    """dQ, dK or dV of a warpgroup, by way of a slot of its shape whose contents nobody reads any more."""
    WIDTH: gl.constexpr = desc.block_shape[3]
    for part in gl.static_range(len(sums)):
        ring.columns(position, part * WIDTH, WIDTH).store((sums[part] * scale).to(desc.dtype))
    fence_async_shared()
    for part in gl.static_range(len(sums)):
        store_async(desc, [batch, row, head, part * WIDTH], ring.buffer(position, part))
    tma.store_wait(0)


@gluon.jit
def store_piece(pieces_ptr, piece, sums, row, first: gl.constexpr, rows: gl.constexpr, WIDTH: gl.constexpr):
    """The sums of some rows of a tile by a piece of it, in columns `first` ... of (pieces, rows, WIDTH) float32:
    `add_kernel` adds up the pieces of a tile. Not scaled: that would be done ahead, for both ways out, and spill."""
    numbers = pieces_ptr.to(gl.pointer_type(gl.float32))
    for part in gl.static_range(len(sums)):
        store_matrix(numbers, sums[part], piece * rows + row, first + part * sums[0].shape[1], WIDTH)


@gluon.jit
def row_numbers(numbers, ring, position, part: gl.constexpr, layout: gl.constexpr):
    """(KEYS, QUERIES): the shifts or deltas of a part of a step, which is loaded."""
    row = numbers.index(ring.slot(position)).slice(part * QUERIES, QUERIES).load(gl.SliceLayout(0, layout))
    everywhere, _ = gl.broadcast(row[None, :], gl.zeros([KEYS, QUERIES], gl.float32, layout))
    return everywhere


@gluon.jit
def keep(kept, ring, tile, block: gl.constexpr, DIM: gl.constexpr, KEPT: gl.constexpr, layout: gl.constexpr):
    """These and the first KEPT of DIM dims of a block of keys in registers, as left operands of products, in parts as
    wide as the ring's: a step then reads less of shared memory."""
    WIDTH: gl.constexpr = min(KEPT, ring.width)
    for part in gl.static_range(parts_of(ring.width, KEPT)):
        keys = ring.columns(tile, block * DIM + part * WIDTH, WIDTH)
        kept = kept + (keys.load(gl.DotOperandLayout(0, layout, 2)),)
    return kept


@gluon.jit
def over_parts(
    block: gl.constexpr, part: gl.constexpr, kept, tile, position, keys_ring, queries_ring, start,
    use_acc: gl.constexpr,
):  # fmt: skip
    """Issues start + keys queries^T, of a block of the keys and a part of the queries, over all parts of the dims, the
    first of them from registers (`keep`)."""
    WIDTH: gl.constexpr = kept[0].shape[1] if len(kept) > 0 else queries_ring.width
    DIM: gl.constexpr = width_of_slot(queries_ring)
    for dims in gl.static_range(parts_of(WIDTH, DIM)):
        if dims < len(kept):
            keys = kept[dims]
        else:
            keys = keys_ring.columns(tile, block * DIM + dims * WIDTH, width_of(dims, WIDTH, DIM))
        queries = queries_ring.columns(position, dims * WIDTH, width_of(dims, WIDTH, DIM), True)
        queries = section(queries, part * QUERIES, QUERIES, 1)
        start = warpgroup_mma(keys, queries, start, use_acc=use_acc or dims > 0, is_async=True)
    return start


@gluon.jit
def begin_scores(
    p, warpgroup: gl.constexpr, part: gl.constexpr, position, k, tile, q_ring, k_ring, shifts, layout: gl.constexpr
):  # fmt: skip
    """Line 10: issues S^T = K Q^T, which starts from the shifts, as then they take no registers of their own. From 0
    with a soft cap, and in the second part: to load shifts into it, ptxas would wait for the first part's products."""
    FROM_SHIFTS: gl.constexpr = part == 0 and not p.SOFTCAP
    if part == 0:
        q_ring.await_full(position)
    start = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    if FROM_SHIFTS:
        start = row_numbers(shifts, q_ring, position, part, layout)
    return over_parts(warpgroup, part, k, tile, position, k_ring, q_ring, start, FROM_SHIFTS)


@gluon.jit
def probabilities(
    p, s, part: gl.constexpr, shifts, q_ring, position, to_mask, entry, key, row, past_end, layout: gl.constexpr,
):  # fmt: skip
    """Line 11: (P^T, the tanh of the scores if there is a soft cap), of scores from `begin_scores`.

    A mask is a branch. Ahead of the exponentials it lets ptxas put what follows under them, behind them what comes
    before; there is none where only keys past the end are unseen and the exponents' summand says so.
    """
    capped = s
    if p.SOFTCAP:
        capped = tanh(s, p.cap_in)
    s = capped
    if part == 1 or p.SOFTCAP:
        s = capped + row_numbers(shifts, q_ring, position, part, layout)
    row += part * QUERIES
    if p.MASKED == "exponents" and not p.HAS_LEFT and not p.HAS_RIGHT:
        probs = exp2_of_fma(s, p.unit, past_end[:, None])
    elif p.MASKED == "S":
        if to_mask:
            s = mask(p, s, float("-inf"), entry, key, row)
        probs = gl.exp2(s * p.unit)
    else:
        probs = gl.exp2(s * p.unit)
        if to_mask:
            probs = mask(p, probs, 0.0, entry, key, row)
    return probs, capped
