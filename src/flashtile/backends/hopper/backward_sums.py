"""How dQ of the backward pass is added up in memory, up to 128 dims: line 15 of Algorithm 2.

Legend: sums: as in backward_rows.py · added: (B, Hq, row_blocks, 2) int32, of each half of a block of dQ, in order how
many tiles have added to it; in any order 0, 1 while the first that came writes it, WRITTEN once it is there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .backward_problem import BATCH, END, FIELDS, FIRST, HEAD_K, RANKS, TURN, WARPGROUPS, first_step
from .channel import make_ring, ring_of
from .compat import add_async, store_async
from .tile import halves

SUMS_WIDTH = gl.constexpr(256)  # of a row of the sums of dQ: as wide as a copy may be
WRITTEN = gl.constexpr(2)


@gluon.constexpr_function
def first_dq_part(warpgroup, DQ_PARTS):
    """The first part of dQ that a warpgroup computes; the first warpgroup has the greater half of them."""
    return warpgroup * ((DQ_PARTS + 1) // 2)


@gluon.jit
def make_dq_rings(sums_desc, DQ_PARTS: gl.constexpr):
    """For each warpgroup its parts of dQ of one step, on their way out by `add_loop`."""
    FIRST: gl.constexpr = first_dq_part(1, DQ_PARTS)
    return make_ring(sums_desc, 1, FIRST, 1), make_ring(sums_desc, 1, DQ_PARTS - FIRST, 1)


@gluon.jit
def make_signals(ring):
    """For each warpgroup a ring of steps of which warps tell one another. Its buffers, of `ring`, are not used."""
    return ring_of(ring.buffers, 2, 1, 1, 1), ring_of(ring.buffers, 2, 1, 1, 1)


@gluon.jit
def by_thread(dq):
    """(128, fours, 2, 2): a part of dQ as the threads of a warpgroup hold it, four numbers at a time."""
    D: gl.constexpr = dq.shape[1]
    # rows are (warp, half, lane // 4), columns (eight, lane % 4, parity)
    x = dq.reshape([4, 2, 8, D // 8, 4, 2]).permute((0, 2, 4, 3, 1, 5))
    return x.reshape([128, D // 8, 2, 2])


@gluon.jit
def put_dq(dq, ring, position):
    """Leaves this warpgroup's parts of dQ to `add_loop` in their buffers: four numbers of each thread, then the next
    four, which `finish_kernel` puts right.

    By way of shared memory: reductions from registers keep the loads of the next step waiting.
    """
    ring.await_empty(position)
    if len(dq) < ring.parts:
        dq = halves(dq[0])  # two parts, of one product
    for part in gl.static_range(ring.parts):
        buffer = ring.buffer(position, part)
        buffer.store(by_thread(dq[part]).permute((1, 0, 2, 3)).reshape(buffer.shape))
    ring.fill(position)


@gluon.jit
def add_parts(sums_desc, ring, position, row, writes):
    """Line 15: copies that add buffers to the sums, from a row on, or, of a block's first tile, write them there."""
    for part in gl.static_range(ring.parts):
        at = [row + part * sums_desc.block_shape[0], 0]
        if writes:
            store_async(sums_desc, at, ring.buffer(position, part))
        else:
            add_async(sums_desc, at, ring.buffer(position, part))


@gluon.jit
def await_added(added_ptr, tiles):
    """Waits until so many tiles have added to a block of dQ; then this one may, by a copy."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred missing;
        again: ld.acquire.gpu.global.b32 $0, [$1];
        setp.ne.b32 missing, $0, $2;
        @missing bra again;
        fence.proxy.async.global;
        }""",
        "=&r,l,r", [added_ptr, tiles], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def written_from(p, added_ptr, head, step, first, end, turn):
    """How many blocks of dQ from a step on, one after another and up to 32, are there, for copies to add to.

    added_ptr: of a warpgroup. A look takes half a step, and what is there stays: so not one look for each step.
    """
    lanes = gl.inline_asm_elementwise(  # 0 ... 31; by `gl.arange` the number of the thread would be spilled for it
        "mov.u32 $0, %laneid;", "=r,r", [gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    blocks = head * p.row_blocks + p.turned(gl.minimum(step + lanes, end - 1), first, end, turn)
    state = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l", [added_ptr + blocks * WARPGROUPS], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    written = gl.min(gl.where(state == WRITTEN, 32, lanes), 0)
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r", [written], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return written


@gluon.jit
def is_first(added_ptr):
    """Whether this warp is the first that has something for a half of a block of dQ, and is to write it. If not, waits
    until that is there: only for a copy under way, so that programs may run in any order."""
    mine = gl.inline_asm_elementwise(
        """{
        .reg .pred one, mine, missing;
        .reg .b32 state, lane;
        mov.b32 state, 0;
        elect.sync lane|one, 0xffffffff;
        @one atom.relaxed.gpu.global.cas.b32 state, [$1], 0, 1;
        shfl.sync.idx.b32 state, state, lane, 31, 0xffffffff;
        setp.eq.b32 mine, state, 0;
        selp.b32 $0, 1, 0, mine;
        @mine bra done;
        again: ld.acquire.gpu.global.b32 state, [$1];
        setp.ne.b32 missing, state, $2;
        @missing bra again;
        fence.proxy.async.global;
        done:
        }""",
        "=&r,l,r", [added_ptr, WRITTEN], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return mine == 1


@gluon.jit
def say_written(added_ptr):
    """Says that a half of a block of dQ is there, by the warp that knows of it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        bar.warp.sync 0xffffffff;
        elect.sync _|one, 0xffffffff;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [added_ptr, WRITTEN], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrived():
    """Waits until what this warp wrote or added is there, not only read: for others once this is released to them."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_added(added_ptr):
    """Says that what this warp knows of has been added to a block of dQ, to both halves. One fence for both: it waits
    for all that the multiprocessor has under way in memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one fence.acq_rel.gpu;
        @one red.relaxed.gpu.global.add.u32 [$1], 1;
        @one red.relaxed.gpu.global.add.u32 [$1 + 4], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [added_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_loop(
    warpgroup: gl.constexpr, DQ_PARTS: gl.constexpr, p, sums_desc, q_ring, dq_ring, arrivals, added_ptr, ranks_ptr
):  # fmt: skip
    """The warp that adds a warpgroup's parts of dQ of every step to the sums, perhaps in the order of the ranks: line
    15. The first to come to a block writes it, so that sums need not be zero before.

    Each warpgroup has its own: one for both would wait for two copies in a step.
    """
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    for _ in range(n_tiles):
        first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        if p.ORDERED:
            of_step = ranks_ptr + gl.load(entry + RANKS)
            rank = gl.load(of_step)
        for i in range(p.group):
            written = 0  # so many of the next blocks are there; -1: the last was not, the next likely is not either
            for j in range(first, end):
                block = (head + i) * p.row_blocks + p.turned(j, first, end, turn)
                of_half = added_ptr + (block * WARPGROUPS + warpgroup)
                if p.ORDERED:  # while dQ is computed: a look takes half a step
                    await_added(of_half, rank.to(gl.int32))
                    writes = rank == 0
                else:
                    if written == 0:
                        written = written_from(p, added_ptr + warpgroup, head + i, j, first, end, turn)
                    writes = written <= 0
                row = (block * DQ_PARTS + first_dq_part(warpgroup, DQ_PARTS)) * sums_desc.block_shape[0]
                dq_ring.await_full(position)
                fence_async_shared()  # here: a fence right after the writes would wait for them
                if not p.ORDERED:
                    if writes:  # perhaps: asked for only now, as whoever is the first must not wait for anything
                        writes = is_first(of_half)
                    written = gl.where(writes, -1, gl.maximum(written - 1, 0))
                add_parts(sums_desc, dq_ring, position, row, writes)
                tma.store_wait(0)  # until the buffer is read
                dq_ring.release(position)
                if not p.ORDERED:
                    if writes:
                        arrived()
                        say_written(of_half)
                else:
                    of_step += 1
                    rank = gl.load(of_step)  # of the next step, before it is needed
                    arrivals.await_empty(position)
                    arrived()
                    arrivals.fill(position)
                position += 1
        entry += FIELDS


@gluon.jit
def count_loop(p, q_ring, arrivals_0, arrivals_1, added_ptr):
    """In order, the warp that counts what both warpgroups have added, so that those who add go on."""
    if p.ORDERED:
        entry, n_tiles = p.tiles()
        position = first_step(q_ring)
        for _ in range(n_tiles):
            first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
            head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
            for i in range(p.group):
                for j in range(first, end):
                    block = (head + i) * p.row_blocks + p.turned(j, first, end, turn)
                    arrivals_0.await_full(position)
                    arrivals_1.await_full(position)
                    count_added(added_ptr + block * WARPGROUPS)
                    arrivals_0.release(position)
                    arrivals_1.release(position)
                    position += 1
            entry += FIELDS
