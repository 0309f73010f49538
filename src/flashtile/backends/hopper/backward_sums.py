"""How dQ of the backward pass is added up in memory, up to 128 dims: line 15 of Algorithm 2.

Legend: sums: as in backward_rows.py · added: (B, Hq, row_blocks) int32, of each block of dQ, in order how many
tiles have added to it; in any order 0, 1 while the first that came writes it, WRITTEN once it is there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .backward_problem import BATCH, END, FIELDS, FIRST, HEAD_K, RANKS, TURN, WRITTEN, first_step
from .channel import make_ring
from .compat import add_async, store_async
from .tile import halves

SUMS_WIDTH = gl.constexpr(256)  # of a row of the sums of dQ: as wide as a copy may be
ADDERS = gl.constexpr(2)  # warps that add, each of them every so many steps; no more, as `await_turn` tells two apart


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
def add_half(sums_desc, ring, position, row, first: gl.constexpr, writes):
    """Line 15: copies that add a warpgroup's buffers, parts `first` ... of a block of dQ, to the sums, of which the
    block's begin in `row`; or, of a block's first tile, write them there. Then gives the buffers back."""
    fence_async_shared()  # here: a fence right after the writes would wait for them
    for part in gl.static_range(ring.parts):
        at = [row + (first + part) * sums_desc.block_shape[0], 0]
        if writes:
            store_async(sums_desc, at, ring.buffer(position, part))
        else:
            add_async(sums_desc, at, ring.buffer(position, part))
    tma.store_wait(0)  # until they are read
    ring.release(position)


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

    A look takes half a step, and what is there stays: so not one look for each step.
    """
    lanes = gl.inline_asm_elementwise(  # 0 ... 31; by `gl.arange` the number of the thread would be spilled for it
        "mov.u32 $0, %laneid;", "=r,r", [gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    blocks = head * p.row_blocks + p.turned(gl.minimum(step + lanes, end - 1), first, end, turn)
    state = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l", [added_ptr + blocks], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    written = gl.min(gl.where(state == WRITTEN, 32, lanes), 0)
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r", [written], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return written


@gluon.jit
def is_first(added_ptr):
    """Whether this warp is the first that has something for a block of dQ, and is to write it. If not, waits until that
    is there: only for a copy under way, so that programs may run in any order."""
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
    """Says that a block of dQ is there, by the warp that knows of it."""
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
    """Says that what this warp knows of has been added to a block of dQ. The fence waits for all that the
    multiprocessor has under way in memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        bar.warp.sync 0xffffffff;
        elect.sync _|one, 0xffffffff;
        @one fence.acq_rel.gpu;
        @one red.relaxed.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [added_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_loop(
    adder: gl.constexpr, DQ_PARTS: gl.constexpr, p, sums_desc, q_ring, dq_ring_0, dq_ring_1, added_ptr, ranks_ptr
):  # fmt: skip
    """A warp that adds dQ of every other step to the sums, perhaps in the order of the ranks: line 15. The first to
    come to a block writes it, so that sums need not be zero before.

    What it waits for from one copy to the next takes longer than a step, so that two take turns.
    """
    entry, n_tiles = p.tiles()
    position = first_step(q_ring)
    for _ in range(n_tiles):
        first, end, turn = gl.load(entry + FIRST), gl.load(entry + END), gl.load(entry + TURN)
        head = gl.load(entry + BATCH) * p.heads_q + gl.load(entry + HEAD_K) * p.group
        steps = end - first
        for i in range(p.group):
            written = 0  # so many of the next blocks are there; -1: the last was not, the next likely is not either
            before = ((position + adder) % ADDERS).to(gl.int32)  # steps of the other warp, before one of this
            for j in range(first + before, end, ADDERS):
                at = position + (j - first)
                block = (head + i) * p.row_blocks + p.turned(j, first, end, turn)
                if p.ORDERED:  # while dQ is computed: a look takes half a step
                    rank = gl.load(ranks_ptr + (gl.load(entry + RANKS) + i * steps + (j - first)))
                    await_added(added_ptr + block, rank.to(gl.int32))
                    writes = rank == 0
                else:
                    if written == 0:
                        written = written_from(p, added_ptr, head + i, j, first, end, turn)
                    writes = written <= 0
                row = block * (DQ_PARTS * sums_desc.block_shape[0])
                await_turn(dq_ring_0, at)
                if not p.ORDERED:
                    if writes:  # perhaps: asked for only now, as the first must wait for its own program alone
                        writes = is_first(added_ptr + block)
                    written = gl.where(writes, -1, gl.maximum(written - ADDERS, 0))
                add_half(sums_desc, dq_ring_0, at, row, 0, writes)
                await_turn(dq_ring_1, at)
                add_half(sums_desc, dq_ring_1, at, row, first_dq_part(1, DQ_PARTS), writes)
                if p.ORDERED:
                    arrived()
                    count_added(added_ptr + block)
                elif writes:
                    arrived()
                    say_written(added_ptr + block)
            position += steps
        entry += FIELDS


@gluon.jit
def await_turn(dq_ring, position):
    """Waits until a buffer is full of a step's dQ, once the other warp has read that of the step before: a barrier
    knows whether the last phase is over, not which it is."""
    dq_ring.await_empty(position)
    dq_ring.await_full(position)
