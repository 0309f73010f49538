"""How the programs of a persistent kernel stay close together where each goes through more than the L2 cache holds, so
that what one has read is there for the others. They count who begins a round, and wait a while for the last."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# By so many steps a program may be ahead of the last to begin a round. Backward, D 128, S = 64k full, where programs
# were up to a tile of 1024 steps apart in the end: +1.4 and +2.4 % on an H200, hot +0.5 and +0.8 %, 32k +0.6 %; by 16
# steps +0.6 and +1.3 %, by 128 +0.4 %, by none 0.
STEPS_AHEAD = gl.constexpr(48)
# So often it looks before it goes on, for 0.1 ms: others may not run yet, and need not for this one to go on.
LOOKS = gl.constexpr(128)


@gluon.jit
def say_begun(count_ptr):
    """Counts this program, which begins a round."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one red.relaxed.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [count_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_begun(count_ptr, count):
    """Waits until so many have been counted, or until it has looked often enough."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred missing, waits;
        .reg .b32 counted, looks;
        mov.b32 looks, $3;
        again: ld.relaxed.gpu.global.b32 counted, [$1];
        sub.u32 looks, looks, 1;
        setp.lt.u32 missing, counted, $2;
        setp.ne.and.u32 waits, looks, 0, missing;
        @waits bra again;
        mov.b32 $0, counted;
        }""",
        "=r,l,r,r", [count_ptr, count, LOOKS], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
