"""Which tiles each program has of a call over a cache, found from the lengths on the device before any is computed.

Legend: as in forward.py; a line: one head and one block of rows, of all sequences.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import barrier
from .forward_problem import PIECE_BITS

MOST_SEQUENCES = gl.constexpr(128)  # a thread of a warpgroup compares each with all others
COMPARED = gl.constexpr(16)  # at a time
LEAST_SHARE = gl.constexpr(2)  # blocks of keys
TILE_COST = gl.constexpr(1)  # blocks of keys that could be computed while a tile begins and ends; an estimate


@gluon.jit
def longest_first(p, dealt, batches):
    """Writes this program's tiles of the schedule: those that are dealt to it, each of the sequence that has its place
    when the longest come first (see cached_schedule.py). Of sequences with as many keys the first comes first."""
    layout: gl.constexpr = gl.BlockedLayout([1, COMPARED], [32, 1], [gl.num_warps(), 1], [1, 0])
    sequence = gl.arange(0, MOST_SEQUENCES, gl.SliceLayout(1, layout))
    number = gl.arange(0, COMPARED, gl.SliceLayout(0, layout))
    row = gl.program_id(0) * p.rounds
    end = p.rounds // 2  # behind it are pieces, of which there are none
    entry = gl.load(dealt + row + number, number < end, 0)
    last = batches - 1
    keys = p.keys.count(gl.minimum(sequence, last), p.seqlen_k)[:, None]
    place = gl.zeros_like(sequence)
    for first in range(0, batches, COMPARED):
        other = first + number
        of_other = gl.where(other <= last, p.keys.count(gl.minimum(other, last), p.seqlen_k), -1)[None, :]
        is_ahead = (of_other > keys) | ((of_other == keys) & (other[None, :] < sequence[:, None]))
        place += gl.sum(is_ahead.to(gl.int32), axis=1)
    place = gl.where(sequence <= last, place, -1)
    heads = p.heads_q // p.PACK
    for first in range(0, end, COMPARED):
        at = first + number
        head = (entry >> 32).to(gl.int32)
        has_place = (head // heads)[None, :] == place[:, None]
        found = gl.sum(gl.where(has_place, sequence[:, None], 0), axis=0)
        of_sequence = ((found * heads + head % heads).to(gl.int64) << 32) | (entry & 0xFFFFFFFF)
        gl.store(p.schedule + row + at, gl.where(at == 0, entry, of_sequence), at < end)
        entry = gl.load(dealt + row + COMPARED + at, at < end - COMPARED, 0)
        barrier()


@gluon.jit
def share_out(p, shared_ptr, batches, m_blocks, pieces_cost):
    """Writes this program's list of the schedule: its share of a line. The key blocks of all its tiles, one sequence
    after the other, are cut into as many equal shares as the line has programs: the end of one tile, whole ones, the
    beginning of another. Programs with the same share of other lines read the same keys of other heads at that time.
    Each has one tile, or none, where `are_whole` says so.

    Of share n slot 2 n of the line's pieces is for that of a tile that begins before it, slot 2 n + 1 for that of one
    that goes on behind it. Who begins a tile writes to (tiles, 5) what the merge is to know: batch, head, first query,
    slot 2 n, and in how many pieces it is, or 1. Where shares are fewer than sequences, that has a row for each share,
    and the tile that goes on behind it.
    """
    sequence = sequences(MOST_SEQUENCES)
    heads = p.heads_q // p.PACK
    lines = heads * m_blocks
    line = gl.program_id(0) % lines
    n = gl.program_id(0) // lines
    shares = gl.num_programs(0) // lines
    head = line // m_blocks
    m_block = line % m_blocks
    fewer_shares = batches > shares
    gl.store(shared_ptr + (gl.program_id(0) * 5 + 4), 1, fewer_shares)  # unless a tile goes on, which says so below

    # where tiles begin in the line and end, what a tile costs beside its blocks counted ahead of these
    first, blocks = blocks_of_tile(p, sequence, batches, m_block)
    end = gl.associative_scan(gl.where(sequence < batches, blocks + TILE_COST, 0), 0, plus)
    begin = end - blocks
    share = gl.maximum((gl.max(end, axis=0) + shares - 1) // shares, LEAST_SHARE)

    # this share's part of each tile
    from_block = gl.maximum(n * share - begin, 0)
    to_block = gl.minimum((n + 1) * share - begin, blocks)
    if are_whole(p.keys, p.seqlen_k, batches, shares, pieces_cost, p.TILE_N, MOST_SEQUENCES):
        from_block = gl.where(sequence == n, 0, blocks)
        to_block = blocks
    mine = from_block < to_block
    slot = line * (2 * shares) + 2 * n
    tile = ((sequence * heads + head).to(gl.int64) << 32) | m_block
    is_piece = (from_block > 0) | (to_block < blocks)
    piece = (slot + 1 + (from_block == 0).to(gl.int32)).to(gl.int64)
    numbers = (((piece << PIECE_BITS) | (first + from_block)) << PIECE_BITS) | (first + to_block)

    entries = p.schedule + gl.program_id(0) * p.rounds
    first_mine = gl.min(gl.where(mine, sequence, MOST_SEQUENCES), axis=0)
    barrier()
    at = entries + (1 + sequence - first_mine)
    gl.store(at, gl.where(is_piece, tile | -0x8000000000000000, tile), mine)
    gl.store(at + p.rounds // 2, numbers, mine)
    gl.store(entries, gl.sum(mine.to(gl.int32), axis=0))
    goes_on = mine & (from_block == 0) & (to_block < blocks)
    told = goes_on | (mine & (from_block == 0) & (fewer_shares ^ True))
    shared = shared_ptr + gl.where(fewer_shares, gl.program_id(0), sequence * lines + line) * 5
    gl.store(shared, sequence, told)
    gl.store(shared + 1, gl.zeros_like(sequence) + head, told)
    gl.store(shared + 2, gl.zeros_like(sequence) + p.first_query(m_block, 0), told)
    gl.store(shared + 3, gl.zeros_like(sequence) + slot, told)
    gl.store(shared + 4, gl.where(goes_on, (end - 1) // share - n + 1, 1), told)
    barrier()


@gluon.jit
def are_whole(keys, capacity, batches, shares, pieces_cost, TILE_N: gl.constexpr, MOST: gl.constexpr):
    """Whether tiles are not shared: where there are enough programs, and the longest takes less than a share and what
    pieces and their merging cost, in blocks; of all keys, seen or not, so that every line and the merge say the same.
    MOST: a power of two of sequences, 32 at least."""
    sequence = sequences(MOST)
    blocks = (keys.count(gl.minimum(sequence, batches - 1), capacity) + TILE_N - 1) // TILE_N
    blocks = gl.where(sequence < batches, blocks + TILE_COST, 0)
    longest = gl.max(blocks, axis=0) - TILE_COST
    return (batches <= shares) & ((longest - pieces_cost) * shares <= gl.sum(blocks, axis=0))


@gluon.jit
def sequences(MOST: gl.constexpr):
    """The numbers of so many: each warp has all, and waits for no other."""
    layout: gl.constexpr = gl.BlockedLayout([MOST // 32], [32], [gl.num_warps()], [0])
    return gl.arange(0, MOST, layout)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def blocks_of_tile(p, sequence, batches, m_block):
    """(first, blocks) of keys that a tile of each sequence sees; none where there is no such sequence."""
    here = p.of_sequence(gl.minimum(sequence, batches - 1))
    first, _, _, end, _ = here.key_blocks(m_block)
    return first, gl.where(sequence < batches, end - first, 0)
