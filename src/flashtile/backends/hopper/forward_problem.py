"""A problem in tiles of queries, of the forward pass or of dQ: which keys they see, the mask, and S.

Legend: as in forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .channel import anew, section, width_of_slot
from .compat import aggregate
from .forward_cache import CachedKeys
from .tile import parts_of, width_of

TAIL = gl.constexpr(16)  # keys that one wgmma of O += P V sums over, the fewest that it can be computed for
PIECE_BITS = gl.constexpr(21)  # of each of the three numbers of a piece of a tile
MANY_KEYS = gl.constexpr(8192)  # from which on `in_order` turns blocks: with fewer it costs 1 to 6 % on an H200


@aggregate
class Problem:
    """One attention problem and how it is tiled."""

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    unit: gl.tensor  # scores in base 2 are s * unit
    natural: gl.tensor  # in base e, s * natural
    cap_in: gl.tensor  # with a soft cap, s = tanh(q.k, cap_in)
    schedule: gl.tensor  # (programs, rounds): see `entries` in launch.py
    rounds: gl.tensor
    keys: CachedKeys  # where they lie in a cache; seqlen_k is then how many a sequence has at most
    WARPGROUPS: gl.constexpr
    TILE_M: gl.constexpr
    TILE_N: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    SOFTCAP: gl.constexpr
    STEADY: gl.constexpr
    TAILS: gl.constexpr  # up to TAIL keys past the last whole block do not cost a block
    FLAT: gl.constexpr  # a tile begins before the last has ended
    O_AWAITED: gl.constexpr  # when O += P V is: before, half way through (STEADY) or behind the next softmax
    Q_KEPT: gl.constexpr  # dims of Q that a warpgroup keeps in registers, from the first on
    OWN_BLOCKS: gl.constexpr  # key blocks end for some warpgroups before they end for others
    PIECES: gl.constexpr  # there may be pieces of tiles
    SHARED: gl.constexpr  # `share_out` wrote the schedule: a program may have no tile
    PACK: gl.constexpr  # query heads of a group that lie in the rows of a tile: row r is query r // PACK, head r % PACK

    @gluon.constexpr_function
    def __init__(
        self, seqlen_q, seqlen_k, heads_q, group, window_left, window_right, unit, natural, cap_in, schedule, rounds,
        keys, WARPGROUPS, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, SOFTCAP, STEADY, TAILS, FLAT, O_AWAITED,
        Q_KEPT, PIECES, PACK,
    ):  # fmt: skip
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.heads_q = heads_q
        self.group = group
        self.window_left = window_left
        self.window_right = window_right
        self.unit = unit
        self.natural = natural
        self.cap_in = cap_in
        self.schedule = schedule
        self.rounds = rounds
        self.keys = keys
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.TILE_M = gl.constexpr(TILE_M)
        self.TILE_N = gl.constexpr(TILE_N)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.STEADY = gl.constexpr(STEADY)
        self.TAILS = gl.constexpr(TAILS)
        self.FLAT = gl.constexpr(FLAT)
        self.O_AWAITED = gl.constexpr(O_AWAITED)
        self.Q_KEPT = gl.constexpr(Q_KEPT)
        self.OWN_BLOCKS = gl.constexpr(HAS_RIGHT and (WARPGROUPS - 1) * TILE_M >= TILE_N)
        self.PIECES = gl.constexpr(PIECES and not HAS_LEFT and (keys.CACHED or not HAS_RIGHT))
        self.SHARED = gl.constexpr(PIECES and keys.CACHED)
        self.PACK = gl.constexpr(PACK)

    @gluon.jit
    def of_sequence(self, batch):
        """The problem of one sequence, which may have keys of its own number."""
        if self.keys.CACHED:
            seqlen_k = self.keys.count(batch, self.seqlen_k)
            here = Problem(
                self.seqlen_q, seqlen_k, self.heads_q, self.group, self.window_left, self.window_right, self.unit,
                self.natural, self.cap_in, self.schedule, self.rounds, self.keys, self.WARPGROUPS, self.TILE_M,
                self.TILE_N, self.HAS_LEFT, self.HAS_RIGHT, self.SOFTCAP, self.STEADY, self.TAILS, self.FLAT,
                self.O_AWAITED, self.Q_KEPT, self.PIECES, self.PACK,
            )  # fmt: skip
        else:
            here = self
        return here

    @gluon.jit
    def tiles(self):
        """(where this program's list of tiles starts, how many it has)."""
        start = self.schedule + gl.program_id(0) * self.rounds
        return start + 1, gl.load(start).to(gl.int32)

    @gluon.jit
    def place(self, entry):
        """(batch, first query head, m_block) of an entry of the schedule."""
        heads = self.heads_q // self.PACK
        head = (entry >> 32).to(gl.int32) & 0x7FFFFFFF  # without the sign, which only a piece has
        return head // heads, head % heads * self.PACK, (entry & 0xFFFFFFFF).to(gl.int32)

    @gluon.jit
    def first_query(self, m_block, warpgroup):
        """The query of the first row of a warpgroup's part of a tile."""
        return (m_block * self.WARPGROUPS + warpgroup) * (self.TILE_M // self.PACK)

    @gluon.jit
    def ends_of_keys(self, query, query_end):
        """(full_end, seen_end): all of these queries see the keys before block full_end, as far as the right edge goes,
        and none those from key seen_end on."""
        all_see = self.seqlen_k
        seen_end = self.seqlen_k
        if self.HAS_RIGHT:
            offset = self.seqlen_k - self.seqlen_q + self.window_right + 1
            all_see = gl.minimum(gl.maximum(query + offset, 0), all_see)
            seen_end = gl.minimum(gl.maximum(gl.minimum(query_end, self.seqlen_q) - 1 + offset, 0), seen_end)
        return all_see // self.TILE_N, seen_end

    @gluon.jit
    def key_blocks(self, m_block):
        """(first, full_first, full_end, end, tail): blocks first ... end hold every key that a tile sees, at least one;
        of these, full_first ... full_end need no mask. With tail 1, not 0, one more comes after them, of which at most
        TAIL keys are there."""
        query, query_end = self.first_query(m_block, 0), self.first_query(m_block + 1, 0)
        full_end, seen_end = self.ends_of_keys(query, query_end)
        first = 0
        full_first = 0
        if self.HAS_LEFT:
            offset = self.seqlen_k - self.seqlen_q
            first_row = query + offset
            last_row = gl.minimum(query_end, self.seqlen_q) - 1 + offset
            first = gl.maximum(first_row - self.window_left, 0) // self.TILE_N
            full_first = (gl.maximum(last_row - self.window_left, 0) + self.TILE_N - 1) // self.TILE_N
        end = gl.maximum((seen_end + self.TILE_N - 1) // self.TILE_N, first + 1)
        tail = 0
        if self.TAILS:
            tail = ((end > first + 1) & ((self.seqlen_k - 1) % self.TILE_N < TAIL)).to(gl.int32)
            end -= tail
        full_first = gl.minimum(gl.maximum(full_first, first), end)
        full_end = gl.maximum(full_end, full_first)
        return first, full_first, full_end, end, tail

    @gluon.jit
    def blocks_here(self, entries, t, entry, m_block):
        """(0 or, of a piece of a tile, 1 + which of all pieces; the key blocks of the tile or the piece)."""
        first, full_first, full_end, end, tail = self.key_blocks(m_block)
        piece = 0
        if self.PIECES:
            if entry < 0:
                numbers = gl.load(entries + (self.rounds // 2 + t))
                MASK: gl.constexpr = (1 << PIECE_BITS) - 1
                piece = (numbers >> 2 * PIECE_BITS).to(gl.int32)
                first = (numbers >> PIECE_BITS & MASK).to(gl.int32)
                full_first = first
                end_here = (numbers & MASK).to(gl.int32)
                tail = gl.where(end_here == end, tail, 0)
                end = end_here
        return piece, first, full_first, full_end, end, tail

    @gluon.jit
    def own_blocks(self, m_block, warpgroup, first, full_first, full_end, end):
        """(full_end, unseen) of a warpgroup's rows; unseen: 1, if they see nothing of a tile's last block, which is not
        its only one with a mask."""
        own_full_end, seen_end = self.ends_of_keys(
            self.first_query(m_block, warpgroup), self.first_query(m_block, warpgroup + 1)
        )
        _, middle = middle_blocks(first, full_first, full_end, end)
        unseen = ((end - 1) * self.TILE_N >= seen_end) & (end - 1 > middle)
        if not self.HAS_LEFT:  # or blocks with a mask would not come first, in one order for all
            full_end = gl.maximum(own_full_end, full_first)
        return full_end, unseen.to(gl.int32)


@gluon.jit
def middle_blocks(first, full_first, full_end, end):
    """(last, middle): blocks last ... middle need no mask and are not the first that is computed, end - 1."""
    middle = gl.minimum(gl.maximum(full_end, first), end - 1)
    return gl.minimum(full_first, middle), middle


@gluon.jit
def tile_to_load(p, entries, t, entry, m_block, m_block_before, from_first):
    """What a producer needs of a tile, the one before and its direction given: its key blocks (first, last, middle,
    end, tail), and its own direction, see `in_order`."""
    from_first = (m_block > m_block_before) | (from_first ^ True)  # the longest tiles of heads begin together
    _, first, full_first, full_end, end, tail = p.blocks_here(entries, t, entry, m_block)
    last, middle = middle_blocks(first, full_first, full_end, end)
    return first, last, middle, end, tail, from_first


@gluon.jit
def masked_blocks(first, last, middle, end):
    """How many blocks have a mask, but for the first that is computed, end - 1."""
    return end - 1 - middle + (last - first)


@gluon.jit
def in_order(p, block, from_first, first, last, middle):
    """The block that comes in place of `block`, of blocks from the last to the first: those with a mask come first.

    Where tiles end at different keys, and these are many, blocks without a mask come from the first to the last for
    tiles that programs begin at the same time, and the other way for the next ones, which end at the same time: they
    then read the same blocks at the same time.
    """
    if p.HAS_LEFT:
        # those of the left edge, first ... last - 1, before those without a mask, last ... middle - 1
        apart = gl.where(block < middle - (last - first), last - first, last - middle)
        block = gl.where(block < middle, block + apart, block)
    if p.HAS_RIGHT:
        turned = from_first & (p.seqlen_k >= MANY_KEYS) & (block >= last) & (block < middle)
        block = gl.where(turned, last + middle - 1 - block, block)
    return block


@gluon.jit
def mask(p, s, row, col, row_layout: gl.constexpr, BY_EDGE: gl.constexpr):
    """S with -inf where query row + i // PACK does not see key col + j: a limit per row, columns as constants. BY_EDGE:
    in a window only what an edge cuts is compared with it, mostly one of the two.

    What the lane adds to a column, bits 1 and 2, is taken off the limits: added to the columns it would take a register
    for each, hoisted out of the loop and spilled.
    """
    offset = p.seqlen_k - p.seqlen_q
    rows = row + gl.arange(0, p.TILE_M, row_layout) // p.PACK + offset
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    of_lane = (cols & 6)[None, :]
    cols = (cols & ~6)[None, :]
    end = p.seqlen_k - 1 - col  # the last key that the first row sees
    last = gl.zeros_like(rows) + end
    if p.HAS_RIGHT:
        last = gl.minimum(last, rows + (p.window_right - col))
        end = gl.minimum(end, row + offset + (p.window_right - col))
    cut = True  # by the edge at hand
    if p.HAS_LEFT and BY_EDGE:
        cut = end < s.shape[1] - 1
    if cut:
        s = gl.where(cols <= last[:, None] - of_lane, s, float("-inf"))
    if p.HAS_LEFT:
        first = rows - (p.window_left + col)
        if BY_EDGE:
            cut = row + offset + (p.TILE_M - 1) // p.PACK > p.window_left + col
        if cut:
            s = gl.where(cols >= first[:, None] - of_lane, s, float("-inf"))
    return s


@gluon.jit
def scores_product(p, q, q_ring, q_position, k_ring, position, s):
    """S = Q K^T, or dP = dO V^T, of the first keys of a slot is begun, in parts of the dims: those in which Q and K
    lie, or the first as wide as Q_KEPT. q: the first part, where it is kept in registers or there is no other."""
    KEYS: gl.constexpr = s.shape[1]
    WIDTH: gl.constexpr = p.Q_KEPT if p.Q_KEPT > 0 else k_ring.width
    DIM: gl.constexpr = width_of_slot(k_ring)
    for part in gl.static_range(parts_of(WIDTH, DIM)):
        if DIM > WIDTH:
            q_position, position = anew(q_position), anew(position)
            if part * WIDTH >= p.Q_KEPT:
                q = q_ring.columns(q_position, part * WIDTH, width_of(part, WIDTH, DIM))
        k = section(k_ring.columns(position, part * WIDTH, width_of(part, WIDTH, DIM), True), 0, KEYS, 1)
        s = warpgroup_mma(q, k, s, use_acc=part > 0, is_async=True)
    return s
