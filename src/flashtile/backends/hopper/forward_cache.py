"""The keys of a cache, as the forward pass reads them: how many each sequence has, and where they lie.

Lengths are read on the device. Past a sequence's last key its row, or its last page, may hold anything: K is masked
there, and V set to zero, as a P of zero does not make zero of what is no number.

Legend: as in forward.py; a cache is (rows, capacity, Hk, D | Dv) or, paged, (pages, PAGE_SIZE, Hk, D | Dv).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .channel import load_slot, section, width_of_slot
from .compat import aggregate, barrier, load_async
from .tile import parts_of, width_of

CLEARED = gl.constexpr(16)  # rows of V at a time: 16 registers of each thread at 128 dims


@aggregate
class CachedKeys:
    """Where the keys of each sequence lie. Each of what may be None is where it is not needed: lengths, where all have
    as many keys; first keys, where those are at 0; places, where sequence b has row b; all, where there is no cache."""

    seqlens: object  # pointer to (B,): where keys end, without the new ones
    leftpad: object  # pointer to (B,): where they begin
    places: object  # pointer to the pages (B, pages of a sequence), or rows (B,)
    stride_places: object
    seqlen_new: object
    CACHED: gl.constexpr
    PAGE_SIZE: gl.constexpr  # 0: not in pages

    @gluon.constexpr_function
    def __init__(self, seqlens, leftpad, places, stride_places, seqlen_new, CACHED, PAGE_SIZE):
        self.seqlens = gl.constexpr(None) if seqlens is None else seqlens
        self.leftpad = gl.constexpr(None) if leftpad is None else leftpad
        self.places = gl.constexpr(None) if places is None else places
        self.stride_places = gl.constexpr(None) if stride_places is None else stride_places
        self.seqlen_new = gl.constexpr(None) if seqlen_new is None else seqlen_new
        self.CACHED = gl.constexpr(CACHED)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)

    @gluon.jit
    def first_key(self, sequence):
        """Where the keys of a sequence begin in its row."""
        first = 0
        if self.leftpad is not None:
            first = gl.load(self.leftpad + sequence).to(gl.int32)
        return first

    @gluon.jit
    def count(self, sequence, capacity):
        """How many keys a sequence has; never more than `capacity`, where they end at most."""
        end = capacity
        if self.seqlens is not None:
            end = gl.minimum(gl.load(self.seqlens + sequence).to(gl.int32) + self.seqlen_new, capacity)
        return gl.maximum(end - self.first_key(sequence), 0)

    @gluon.jit
    def page(self, sequence, block, capacity):
        """The block-th page of a sequence. Behind its last key the table may say anything: TMA reads zeros where no
        page is."""
        last = (capacity - 1) // self.PAGE_SIZE
        return gl.load(self.places + (sequence.to(gl.int64) * self.stride_places + gl.minimum(block, last)))

    @gluon.jit
    def place(self, sequence, key, capacity):
        """(row, token in it) of a key, or (page, token in it)."""
        if self.PAGE_SIZE > 0:
            row = self.page(sequence, key // self.PAGE_SIZE, capacity)
            token = key % self.PAGE_SIZE
        else:
            row = sequence
            if self.places is not None:
                row = gl.load(self.places + sequence)
            token = self.first_key(sequence) + key
        return row.to(gl.int32), token


@gluon.jit
def no_cache():
    """Keys that lie in a tensor (B, Sk, Hk, D)."""
    return CachedKeys(None, None, None, None, None, False, 0)


@gluon.jit
def await_kernel_before():
    """Waits until the kernel before has ended, while which this one starts; and lets the next one start, which finds
    place where programs end. What was written before this one is there for that; for the rest it waits by itself."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def load_keys(p, desc, ring, position, sequence, key, head):
    """Producer: a block of K or V of a sequence, from a key on; p: the problem of all sequences."""
    if not p.keys.CACHED:
        load_slot(desc, ring, position, sequence, key, head, ring.parts)
    elif desc.block_shape[1] == ring.box[1]:
        row, token = p.keys.place(sequence, key, p.seqlen_k)
        load_slot(desc, ring, position, row, token, head, ring.parts)
    else:
        load_pages(p, desc, ring, position, sequence, key, head)


@gluon.jit
def load_pages(p, desc, ring, position, sequence, key, head):
    """Producer: the same from several pages: of each as many copies as the slot has columns that lie apart."""
    PAGES: gl.constexpr = ring.box[1] // p.keys.PAGE_SIZE
    WIDTH: gl.constexpr = desc.block_shape[3]
    STRIPS: gl.constexpr = ring.box[3] // WIDTH
    full = ring.await_empty(position)
    mbarrier.expect(full, desc.block_type.nbytes * (PAGES * STRIPS * ring.parts))
    for page in gl.static_range(PAGES):
        row = p.keys.page(sequence, key // p.keys.PAGE_SIZE + page, p.seqlen_k).to(gl.int32)
        for part in gl.static_range(ring.parts):
            for strip in gl.static_range(STRIPS):
                at = ring.piece(position, part, strip, page, p.keys.PAGE_SIZE, WIDTH)
                load_async(desc, [row, 0, head, (part * STRIPS + strip) * WIDTH], full, at)


@gluon.jit
def clear_rows(x, kept):
    """Zeros in the rows of a matrix in shared memory past the first `kept`."""
    ROWS: gl.constexpr = x.shape[0]
    THREADS: gl.constexpr = x.shape[1] // 8  # of a row
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, CLEARED, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, ROWS, CLEARED):
        if kept < first + CLEARED:
            some = section(x, first, CLEARED, 0)
            some.store(gl.where((rows < kept - first)[:, None], some.load(layout), 0.0))


@gluon.jit
def clear_past(ring, position, kept):
    """Consumer: the same of a slot, before its products, if it is not kept whole. All warpgroups that read it write the
    same."""
    DIM: gl.constexpr = width_of_slot(ring)
    if kept < ring.box[1]:
        ring.await_full(position)
        for part in gl.static_range(parts_of(ring.width, DIM)):
            clear_rows(ring.columns(position, part * ring.width, width_of(part, ring.width, DIM)), kept)
        fence_async_shared()
        barrier()
