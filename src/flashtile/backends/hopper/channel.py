"""Rings of shared-memory buffers between the warp that loads and the warpgroups that compute.

A position counts the buffers that went through a ring; it names both the buffer and the phase of its two barriers, so
that neither appears in a kernel's mathematics. Positions start at `Ring.first()`, so that the one before is valid.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import aggregate, arrive, load_async, seen_as

WARPS = gl.constexpr(4)  # of a warpgroup


@gluon.jit
def section(x, first: gl.constexpr, length: gl.constexpr, dim: gl.constexpr):
    """So many rows or columns of a matrix in shared memory; of all no view of its own, of which each costs triton 3.9
    time to compile."""
    return x if length == x.shape[dim] else x.slice(first, length, dim=dim)


@gluon.constexpr_function
def of_matrix(layout, transposed):
    """The layout of a buffer that is seen as a matrix."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2, transposed)


@gluon.constexpr_function
def pair_of(box, parts):
    """Columns of a pair of boxes, where they come in three parts; of other boxes, which make no pairs, 0."""
    return 2 * box[-1] if parts == 3 else 0


@gluon.constexpr_function
def shape_of(count, box, width, transposed):
    """Of the memory of so many boxes, in matrices of so many columns each, or transposed."""
    rows = math.prod(box[:-1])
    count = count * box[-1] // width
    return [count, width, rows] if transposed else [count, rows, width]


@aggregate
class Ring:
    """`depth` slots of `parts` buffers each; a slot is full when its loads are done, empty when all readers say so. A
    ring without readers goes with another: its slots are filled behind those of that, and read before they are empty.

    Products take a buffer as a matrix, or as several, or in pairs, of every three buffers of a slot the first two as
    one: columns past the width of the swizzle lie behind all rows of those before. Pairs come first in memory, then
    all third ones. The memory has the shape in which most products take buffers, as each other view of it costs
    triton 3.9 time to compile.
    """

    memory: gl.shared_memory_descriptor  # matrices (rows, so many columns of a buffer), or transposed
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr
    parts: gl.constexpr
    readers: gl.constexpr  # warps or warpgroups that say so
    each: gl.constexpr  # by so many arrivals, one or one of each warp
    width: gl.constexpr  # columns that products take: some of a buffer, all, or a pair
    transposed: gl.constexpr
    box: gl.constexpr  # shape of a buffer as it is loaded: (1, S, heads, D), or (rows, D)
    layout: gl.constexpr  # of such a buffer

    @gluon.constexpr_function
    def __init__(self, memory, full, empty, depth, parts, readers, each, width, transposed, box, layout):
        self.memory = memory
        self.full = full
        self.empty = empty
        self.depth = gl.constexpr(depth)
        self.parts = gl.constexpr(parts)
        self.readers = gl.constexpr(readers)
        self.each = gl.constexpr(each)
        self.width = gl.constexpr(width)
        self.transposed = gl.constexpr(transposed)
        self.box = gl.constexpr(box)
        self.layout = gl.constexpr(layout)

    @gluon.jit
    def slot(self, position):
        return (position % self.depth).to(gl.int32)

    @gluon.jit
    def await_empty(self, position):
        """Producer: waits until the slot may be written; returns the barrier that its loads must complete."""
        slot = self.slot(position)
        if self.readers > 0:
            mbarrier.wait(self.empty.index(slot), ((position // self.depth) & 1) ^ 1)
        return self.full.index(slot)

    @gluon.jit
    def fill(self, position):
        """Producer: what this warpgroup writes to the slot is there."""
        arrive(self.full.index(self.slot(position)), 1)

    @gluon.jit
    def await_full(self, position, pred=True):
        """Consumer: waits until the slot is loaded."""
        mbarrier.wait(self.full.index(self.slot(position)), (position // self.depth) & 1, pred=pred)

    @gluon.jit
    def release(self, position, pred=True):
        """Consumer: this warpgroup has read the slot. Where it arrives for each of its warps, they do so themselves
        and need not meet: see arriving_by_warp in llvm_ir.py."""
        if self.readers > 0:
            arrive(self.empty.index(self.slot(position)), self.each, pred=pred)

    @gluon.jit
    def three(self, position, part: gl.constexpr):
        """In which three of all buffers buffer `part` of a slot is."""
        return self.slot(position) * (self.parts // 3) + part // 3

    @gluon.jit
    def place(self, position, part: gl.constexpr):
        """Which of all buffers is buffer `part` of a slot."""
        if self.width <= self.box[-1]:
            at = self.slot(position) * self.parts + part
        elif part % 3 < 2:
            at = 2 * self.three(position, part) + part % 3
        else:
            at = self.depth * self.parts // 3 * 2 + self.three(position, part)
        return at

    @gluon.jit
    def buffer(self, position, part: gl.constexpr):
        """Buffer `part` of a slot, as it is loaded."""
        x = self.memory
        if len(self.box) > 2:
            x = seen_as(x, x.dtype, [self.depth * self.parts] + self.box, self.layout)
        return x.index(self.place(position, part))

    @gluon.jit
    def piece(
        self, position, part: gl.constexpr, strip: gl.constexpr, number: gl.constexpr,
        ROWS: gl.constexpr, WIDTH: gl.constexpr,
    ):  # fmt: skip
        """Of buffer `part` the number-th ROWS, of the strip-th WIDTH columns, those of the swizzle: a box (1, ROWS, 1,
        WIDTH) that is loaded by itself."""
        STRIPS: gl.constexpr = self.box[-1] // WIDTH
        PIECES: gl.constexpr = self.box[1] // ROWS
        shape: gl.constexpr = [self.depth * self.parts * STRIPS * PIECES, 1, ROWS, 1, WIDTH]
        x = seen_as(self.memory, self.memory.dtype, shape, self.layout)
        return x.index((self.place(position, part) * STRIPS + strip) * PIECES + number)

    @gluon.jit
    def columns(self, position, first: gl.constexpr, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr = False):
        """(rows, WIDTH), or transposed: columns of a slot, from the first on: of one buffer, or a pair."""
        D: gl.constexpr = self.box[-1]
        EACH: gl.constexpr = self.width if WIDTH > D else min(self.width, D)
        if WIDTH > D:
            at = self.three(position, first // D)
        else:
            at = self.place(position, first // D) * (D // EACH) + first % D // EACH
        x = self.memory
        if WIDTH > D or self.transposed != TRANSPOSED:
            shape: gl.constexpr = shape_of(self.depth * self.parts, self.box, EACH, TRANSPOSED)
            x = seen_as(x, x.dtype, shape, of_matrix(self.layout, TRANSPOSED))
        return section(x.index(at), first % EACH, WIDTH, 0 if TRANSPOSED else 1)

    @gluon.jit
    def first(self):
        return gl.to_tensor(2 * self.depth).to(gl.uint32)  # without a sign, slot and phase take fewer instructions


@gluon.constexpr_function
def width_of_slot(ring):
    """D or Dv, of all parts."""
    return ring.box[-1] * ring.parts


@gluon.jit
def anew(position):
    """The same position, of which the compiler knows nothing: it works out addresses when they are needed, instead of
    keeping those of every slice of an operand over the loop, for which it has no registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [position], dtype=gl.uint32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def load_parts(desc, batch, row, head, full, ring, position, block: gl.constexpr, PARTS: gl.constexpr):
    """All dims of some rows, in PARTS buffers: the `block`-th so many of a slot."""
    WIDTH: gl.constexpr = desc.block_shape[3]
    for part in gl.static_range(PARTS):
        load_async(desc, [batch, row, head, part * WIDTH], full, ring.buffer(position, block * PARTS + part))


@gluon.jit
def load_slot(desc, ring, position, batch, row, head, PARTS: gl.constexpr):
    """Producer: fills a slot with rows of a head, in PARTS parts of their dims and as many blocks as fit."""
    full = ring.await_empty(position)
    mbarrier.expect(full, desc.block_type.nbytes * ring.parts)
    for block in gl.static_range(ring.parts // PARTS):
        load_parts(desc, batch, row + block * desc.block_shape[1], head, full, ring, position, block, PARTS)


@gluon.jit
def make_ring(
    desc, depth: gl.constexpr, parts: gl.constexpr, readers: gl.constexpr,
    WIDTH: gl.constexpr = 0, TRANSPOSED: gl.constexpr = False, EACH: gl.constexpr = 1, BOX: gl.constexpr = None,
):  # fmt: skip
    """A ring for blocks of the tensor of `desc`, read by `readers` warpgroups, most of the time WIDTH columns at once,
    a buffer's if that is 0, in pairs if it is twice that; or transposed. EACH: arrivals of a reader. BOX: the shape of
    a buffer, where it is loaded in pieces."""
    box: gl.constexpr = desc.block_shape if BOX is None else BOX
    width: gl.constexpr = WIDTH if WIDTH > 0 else box[-1]
    shape: gl.constexpr = shape_of(depth * parts, box, min(width, box[-1]), TRANSPOSED)
    memory = gl.allocate_shared_memory(desc.dtype, shape, of_matrix(desc.layout, TRANSPOSED))
    full, empty = make_barriers(depth, 1, readers * EACH)
    return Ring(memory, full, empty, depth, parts, readers, EACH, width, TRANSPOSED, box, desc.layout)


@gluon.jit
def add_rings(
    rings, count: gl.constexpr, desc, depth: gl.constexpr, parts: gl.constexpr,
    WIDTH: gl.constexpr = 0, EACH: gl.constexpr = 1,
):  # fmt: skip
    """These rings and so many more, read by one warpgroup each."""
    for _ in gl.static_range(count):
        rings = rings + (make_ring(desc, depth, parts, 1, WIDTH, False, EACH),)
    return rings


@gluon.jit
def ring_of(matrices, depth: gl.constexpr, parts: gl.constexpr, writers: gl.constexpr, readers: gl.constexpr):
    """A ring of these matrices, written and read by so many warpgroups."""
    full, empty = make_barriers(depth, writers, readers)
    box: gl.constexpr = [matrices.shape[1], matrices.shape[2]]
    return Ring(matrices, full, empty, depth, parts, readers, 1, box[-1], False, box, matrices.layout)


@gluon.jit
def make_barriers(depth: gl.constexpr, writers: gl.constexpr, readers: gl.constexpr):
    """Those of slots that are full after so many arrivals of writers, and empty after so many of readers.

    A barrier that nobody uses must not be made. Triton gives its memory to other buffers, and where several processes
    share a GPU it has been seen to put the barrier back there later, over what a warpgroup had written.
    """
    full = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    empty = full
    if readers > 0:
        empty = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(depth):
        mbarrier.init(full.index(slot), count=writers)
        if readers > 0:
            mbarrier.init(empty.index(slot), count=readers)
    return full, empty
