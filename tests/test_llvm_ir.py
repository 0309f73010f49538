"""What is changed in the LLVM IR of a Hopper kernel, as text."""

from __future__ import annotations

import pytest

from flashtile.backends.hopper.llvm_ir import arriving_by_warp, called_once, for_roles, items

KERNEL = """define ptx_kernel void @kernel(ptr addrspace(1) %0, i32 %1) #0 {
  br i1 undef, label %10, label %20

10:                                               ; preds = %2
  call fastcc void @"role<2>"(i32 0, ptr addrspace(1) %0, { ptr, i32 } { ptr null, i32 4 }, i32 %1) #3
  %11 = add i32 %1, 1
  br label %30

20:                                               ; preds = %2
  tail call fastcc void @"role<2>"(i32 1, ptr addrspace(1) nonnull %0, { ptr, i32 } { ptr null, i32 8 }, i32 noundef %1)
  br label %30

30:                                               ; preds = %20, %10
  %31 = phi i32 [ %11, %10 ], [ 7, %20 ]
  ret void
}"""
ONCE = """define ptx_kernel void @kernel(ptr addrspace(1) %0, i32 %1) #0 {
  br i1 undef, label %10, label %20

10:                                               ; preds = %2
  br label %calling

behind0:
  %11 = add i32 %1, 1
  br label %30

20:                                               ; preds = %2
  br label %calling

behind1:
  br label %30

30:                                               ; preds = %20, %10
  %31 = phi i32 [ %11, %behind0 ], [ 7, %behind1 ]
  ret void

calling:
  %argument0 = phi i32 [ 0, %10 ], [ 1, %20 ]
  %argument2 = phi { ptr, i32 } [ { ptr null, i32 4 }, %10 ], [ { ptr null, i32 8 }, %20 ]
  %role = phi i32 [ 0, %10 ], [ 1, %20 ]
  call fastcc void @"role<2>"(i32 %argument0, ptr addrspace(1) %0, { ptr, i32 } %argument2, i32 %1)
  switch i32 %role, label %behind0 [
    i32 1, label %behind1
  ]
}"""
PARAMETERS = "i32 range(i32 0, 2) %0, ptr addrspace(1) readonly captures(none) %1, { ptr, i32 } %2, i32 %3"
FUNCTION = """
define internal fastcc void @"role<2>"(PARAMETERS) unnamed_addr #1 {
  %5 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  tail call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  ret void
}

attributes #1 = { noinline nounwind }
""".replace("PARAMETERS", PARAMETERS)


def test_what_roles_call_is_called_in_one_place():
    assert called_once(KERNEL, {'@"role<2>"': items(PARAMETERS)}) == ONCE


def test_a_function_is_inlined_and_has_the_threads_and_barriers_of_a_warpgroup():
    changed = for_roles(KERNEL + FUNCTION)
    assert ONCE in changed
    assert "  %thread5 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n  %5 = and i32 %thread5, 127\n" in changed
    assert "barrier.cta.sync.aligned.count(i32 %barrier, i32 128)" in changed
    assert (
        "%later = icmp ne i32 %0, 0\n  %skipped = zext i1 %later to i32\n  %barrier = add i32 %0, %skipped\n" in changed
    )
    assert "attributes #1 = { alwaysinline nounwind }" in changed


ARRIVALS = """  %4 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %5 = and i32 %4, 127
  %7 = icmp eq i32 %5, 0
  WAIT
  %8 = and i1 %7, %1
  tail call void asm sideeffect "@$0 mbarrier.arrive.shared::cta.b64 _, [$1], 4;", "b,r"(i1 %8, ptr addrspace(3) %2) #9
  WAIT
  WAIT
  call void asm sideeffect "@$0 mbarrier.arrive.shared.b64 _, [$1], 4;", "b,r"(i1 %7, ptr addrspace(3) %2)
  WAIT
  call void asm sideeffect "@$0 mbarrier.arrive.shared.b64 _, [$1];", "b,r"(i1 %7, ptr addrspace(3) %2)
""".replace("WAIT", "tail call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")


def test_each_warp_arrives_where_a_thread_arrived_for_four():
    lines, changed = ARRIVALS.splitlines(), arriving_by_warp(ARRIVALS).splitlines()
    assert changed[:3] == lines[:3]
    assert changed[3:5] == ["  %lane = and i32 %5, 31", "  %first = icmp eq i32 %lane, 0"]
    assert changed[5] == "  %8 = and i1 %first, %1"
    assert '"bar.warp.sync -1; @$0 mbarrier.arrive.shared::cta.b64 _, [$1];", "b,r"(i1 %8, ' in changed[6]
    assert changed[7] == lines[6]  # a barrier of the kernel's own
    assert '"bar.warp.sync -1; @$0 mbarrier.arrive.shared.b64 _, [$1];", "b,r"(i1 %first, ' in changed[8]
    assert changed[9:] == lines[-2:]  # a thread that arrives once


def test_arrivals_of_threads_that_are_not_known_to_be_first_stay_as_they_are():
    for known, other in [("%5, 0", "%5, 1"), ("%4, 127", "%4, 255"), ("tid.x", "tid.y"), ("i1 %7, ptr", "i1 %1, ptr")]:
        unknown = ARRIVALS.replace(known, other)
        assert arriving_by_warp(unknown) == unknown


@pytest.mark.parametrize("calls", ["", '  call fastcc void @"role<2>"(i32 0)\n'], ids=["none", "one"])
def test_a_kernel_without_several_such_calls_stays_as_it_is(calls):
    kernel = f"define ptx_kernel void @kernel() {{\n{calls}  ret void\n}}"
    assert for_roles(kernel) == kernel


def test_items_are_separated_by_commas_outside_brackets():
    assert items("i32 0, { ptr, i32 } { ptr f(i8, i32 1), i32 2 }, <2 x i8> <i8 1, i8 2>") == [
        "i32 0", "{ ptr, i32 } { ptr f(i8, i32 1), i32 2 }", "<2 x i8> <i8 1, i8 2>",
    ]  # fmt: skip
