"""Rings of shared-memory buffers between the warp that loads and the warpgroups that compute.

A position counts the buffers that went through a ring; it names both the buffer and the phase of its two barriers, so
that neither appears in a kernel's mathematics. Positions start at `Ring.first()`, so that the one before is valid.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import aggregate, load_async, seen_as


@gluon.constexpr_function
def of_matrix(layout, transposed):
    """The layout of a buffer that is seen as a matrix."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2, transposed)


@aggregate
class Ring:
    """`depth` slots of `parts` buffers each; a slot is full when its loads are done, empty when all readers say so.

    In pairs, of every three buffers of a slot the first two are one as well, twice as wide, for products: pairs come
    first in memory, then all third ones. Buffers that lie one after the other are one as columns past the width of the
    swizzle, which is a buffer's, lie behind all rows of those before.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr
    parts: gl.constexpr
    width: gl.constexpr  # columns of a buffer, or of a pair

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, depth, parts, width):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.depth = gl.constexpr(depth)
        self.parts = gl.constexpr(parts)
        self.width = gl.constexpr(width)

    @gluon.jit
    def slot(self, position):
        return (position % self.depth).to(gl.int32)

    @gluon.jit
    def await_empty(self, position):
        """Producer: waits until the slot may be written; returns the barrier that its loads must complete."""
        slot = self.slot(position)
        mbarrier.wait(self.empty.index(slot), ((position // self.depth) & 1) ^ 1)
        return self.full.index(slot)

    @gluon.jit
    def fill(self, position):
        """Producer: what this warpgroup writes to the slot is there."""
        mbarrier.arrive(self.full.index(self.slot(position)))

    @gluon.jit
    def await_full(self, position, pred=True):
        """Consumer: waits until the slot is loaded."""
        mbarrier.wait(self.full.index(self.slot(position)), (position // self.depth) & 1, pred=pred)

    @gluon.jit
    def release(self, position, pred=True):
        """Consumer: this warpgroup has read the slot."""
        mbarrier.arrive(self.empty.index(self.slot(position)), pred=pred)

    @gluon.jit
    def place(self, position, part: gl.constexpr):
        """Which of all buffers is buffer `part` of a slot."""
        if self.width == self.buffers.shape[-1]:
            at = self.slot(position) * self.parts + part
        elif part % 3 < 2:
            at = 2 * self.three(position, part) + part % 3
        else:
            at = self.buffers.shape[0] // 3 * 2 + self.three(position, part)
        return at

    @gluon.jit
    def buffer(self, position, part: gl.constexpr):
        """Buffer `part` of a slot, as it is loaded: (1, rows, 1, D)."""
        return self.buffers.index(self.place(position, part))

    @gluon.jit
    def matrices(self, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr = False):
        """All buffers as matrices (rows, WIDTH), of D columns or, the pairs, 2 D; or transposed. Seen so at once, and
        not one by one, as each view costs triton 3.9 time to compile."""
        x = self.buffers
        count: gl.constexpr = x.shape[0] * x.shape[4] // WIDTH
        rows: gl.constexpr = x.shape[2] * x.shape[3]
        layout: gl.constexpr = of_matrix(x.layout, TRANSPOSED)
        return seen_as(x, x.dtype, [count, WIDTH, rows] if TRANSPOSED else [count, rows, WIDTH], layout)

    @gluon.jit
    def matrix(self, position, part: gl.constexpr, TRANSPOSED: gl.constexpr = False):
        """Buffer `part` of a slot: (rows, D), or transposed."""
        return self.matrices(self.buffers.shape[4], TRANSPOSED).index(self.place(position, part))

    @gluon.jit
    def three(self, position, part: gl.constexpr):
        """In which three of all buffers buffer `part` of a slot is."""
        return self.slot(position) * (self.parts // 3) + part // 3

    @gluon.jit
    def pair(self, position, part: gl.constexpr, TRANSPOSED: gl.constexpr = False):
        """The pair that begins with buffer `part` of a slot: (rows, 2 D), or transposed."""
        return self.matrices(self.width, TRANSPOSED).index(self.three(position, part))

    @gluon.jit
    def first(self):
        return gl.to_tensor(2 * self.depth).to(gl.uint32)  # without a sign, slot and phase take fewer instructions


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
def make_ring(desc, depth: gl.constexpr, parts: gl.constexpr, readers: gl.constexpr, PAIRS: gl.constexpr = False):
    """A ring for blocks of the tensor of `desc`, read by `readers` warpgroups; in pairs, if so."""
    buffers = gl.allocate_shared_memory(desc.dtype, [depth * parts] + desc.block_shape, desc.layout)
    return ring_of(buffers, depth, parts, 1, readers, PAIRS)


@gluon.jit
def add_rings(rings, count: gl.constexpr, desc, depth: gl.constexpr, parts: gl.constexpr, PAIRS: gl.constexpr = False):
    """These rings and so many more, read by one warpgroup each."""
    for _ in gl.static_range(count):
        rings = rings + (make_ring(desc, depth, parts, 1, PAIRS),)
    return rings


@gluon.jit
def ring_of(
    buffers, depth: gl.constexpr, parts: gl.constexpr, writers: gl.constexpr, readers: gl.constexpr,
    PAIRS: gl.constexpr = False,
):  # fmt: skip
    """A ring of these buffers, full when `writers` and empty when `readers` warps or warpgroups have said so. Without
    readers nobody waits for it to be empty.

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
    return Ring(buffers, full, empty, depth, parts, 2 * buffers.shape[-1] if PAIRS else buffers.shape[-1])
