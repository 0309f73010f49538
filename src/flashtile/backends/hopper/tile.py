"""What the Hopper kernels do with tiles and with warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .channel import anew, section, width_of_slot
from .compat import barrier, store_async

FIRST_BARRIER = gl.constexpr(8)  # named barriers below are Triton's own


@gluon.jit
def meet(barrier, threads):
    """Waits at a named barrier until so many threads have come or passed by."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, $1;", "=r,r,r", [FIRST_BARRIER + barrier, threads], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take_turn(warpgroup):
    """Ping-pong: waits for this warpgroup's turn on the matrix units."""
    meet(warpgroup, 256)


@gluon.jit
def pass_turn(warpgroup, WARPGROUPS: gl.constexpr):
    """Ping-pong: lets the next warpgroup issue its products."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, $1;", "=r,r,r", [FIRST_BARRIER + (warpgroup + 1) % WARPGROUPS, 256],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def matrix(buffer):
    """A buffer (1, S, heads, D) as a matrix (rows, D)."""
    return buffer.reshape([buffer.shape[1] * buffer.shape[2], buffer.shape[3]])


@gluon.jit
def zeros(rows: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr):
    """Sums in registers: PARTS of (rows, WIDTH)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    return (gl.zeros([rows, WIDTH], gl.float32, layout),) * PARTS


@gluon.jit
def no_sums(rows: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """Sums in registers before the first product: (rows, DIM), in parts of WIDTH columns, the last of what is left."""
    sums = zeros(rows, WIDTH, DIM // WIDTH)
    if DIM % WIDTH > 0:
        sums += zeros(rows, DIM % WIDTH, 1)
    return sums


@gluon.jit
def halves(x):
    """The first and the second half of the columns."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def whole(low, high):
    """The matrix of these halves of its columns, in a layout of its own."""
    x = gl.join(low, high).permute((0, 2, 1))
    return x.reshape([x.shape[0], 2 * x.shape[2]])


@gluon.constexpr_function
def parts_of(WIDTH, DIM):
    """In how many parts of WIDTH columns, the last of what is left, DIM comes."""
    return -(-DIM // WIDTH)


@gluon.constexpr_function
def width_of(part, WIDTH, DIM):
    """Columns of a part of DIM: WIDTH, but of the last what is left."""
    return min(WIDTH, DIM - part * WIDTH)


@gluon.jit
def add_product(sums, left, ring, position, has, row: gl.constexpr = 0):
    """Issues sums + left x, x a slot's rows from `row` on, for each part of its columns; left x where the sums have
    nothing."""
    DIM: gl.constexpr = width_of_slot(ring)
    for part in gl.static_range(len(sums)):
        if len(sums) > 1:
            position = anew(position)
        x = ring.columns(position, part * ring.width, width_of(part, ring.width, DIM))
        x = section(x, row, left.shape[1], 0)
        sums = sums[1:] + (warpgroup_mma(left, x, sums[0], use_acc=has, is_async=True),)
    return sums


@gluon.jit
def product_wait(sums, behind: gl.constexpr = 0):
    """The sums, computed; so many products issued after them may still run."""
    done = warpgroup_mma_wait(behind, deps=sums)
    return done if len(sums) > 1 else (done,)


@gluon.jit
def wait_for(sums, others):
    """(sums, others), computed."""
    SUMS: gl.constexpr = len(sums)
    done = warpgroup_mma_wait(0, deps=sums + others)
    return done[:SUMS], done[SUMS:]


@gluon.jit
def await_stores():
    """Until the copies to global memory that one thread of the warpgroup issued have read their buffers."""
    tma.store_wait(0)
    barrier()


@gluon.jit
def store_rows(desc, buffer, x, batch, row, head, col):
    """Rows of O, dK or dV, from column col on, by way of a buffer."""
    await_stores()
    section(matrix(buffer), 0, x.shape[1], 1).store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    store_async(desc, [batch, row, head, col], buffer)


@gluon.jit
def scaled(o, factors):
    """O with each row times its factor."""
    for _ in gl.static_range(len(o)):
        by_row = gl.convert_layout(factors, gl.SliceLayout(1, o[0].type.layout))[:, None]
        o = o[1:] + (o[0] * by_row,)
    return o


@gluon.jit
def store_matrix(ptr, x, row, column, stride):
    """x, from a row and a column of a matrix on."""
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    in_row = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    gl.store((ptr + (rows * stride + column))[:, None] + in_row[None, :], x)


@gluon.jit
def exp2_of_fma(x, factor, summand):
    """2^(x * factor + summand), in float32. Each exponential comes right behind its own multiply-add: given all of
    these first, triton 3.9 makes a slower kernel at 64 dims."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }", "=f,f,f,f", [x, factor, summand],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def tanh(x, factor):
    """tanh(y) where 2 y is x * factor in base 2: 1 - 2 / (1 + 2^(x * factor)) in float32. Within 2.5e-7, near zero too,
    where a formula of its own would be half of a step of the forward pass: see LARGEST_SOFTCAP."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 e;
        mul.rn.f32 e, $1, $2;
        ex2.approx.ftz.f32 e, e;
        add.rn.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 e, e;
        fma.rn.f32 $0, e, 0fC0000000, 0f3F800000; }""",
        "=f,f,f", [x, factor], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def log2(x):
    """log2 of normal positive numbers as an exponent and the rest, 0 ... 1. In one number they would lose a part of the
    rest: 5e-7 at 1,000. The instruction is wrong by 2.4e-7 of the rest, by 1e-6 of all of x."""
    bits = x.to(gl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)  # 1 ... 2
    rest = gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [fraction], dtype=gl.float32, is_pure=True, pack=1
    )
    return ((bits >> 23) - 127).to(gl.float32), rest


@gluon.jit
def row_sums_by_lane(x):
    """Sums of the numbers of a row that lie in one thread: (TILE_M, 4), reduced once per tile and not per block."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def row_sums_in_order(x):
    """`row_sums_by_lane`, one number after the other. As triton 3.9 adds up, by pairs of pairs, no exponential is
    wanted early, and ptxas puts most multiply-adds of a step ahead of the first."""
    ROWS: gl.constexpr = x.shape[0]
    BLOCKS: gl.constexpr = x.shape[1] // 8
    blocks = (gl.sum(x.reshape([ROWS, BLOCKS, 4, 2]), axis=3).permute((0, 2, 1)),)
    for _ in gl.static_range(BLOCKS - 1):  # in halves, until each is alone
        first = blocks[0]
        blocks = blocks[1:] + gl.split(first.reshape([ROWS, 4, 2, first.shape[2] // 2]).permute((0, 1, 3, 2)))
    sums = blocks[0]
    for block in gl.static_range(1, BLOCKS):
        sums += blocks[block]
    return sums.reshape([ROWS, 4])


@gluon.jit
def pack(probs, dtype: gl.constexpr):
    """P as it goes round the loop: pairs of 16-bit numbers in an int32, half the registers of float32.

    As a tensor of 16-bit numbers it would be taken apart and put together again on the way round.
    """
    low, high = gl.split(probs.reshape([probs.shape[0], probs.shape[1] // 2, 2]))
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        CONVERT + " $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(probs, dtype: gl.constexpr, layout: gl.constexpr):
    """P as the left operand of a product."""
    low = (probs & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (probs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([probs.shape[0], 2 * probs.shape[1]]), layout)
