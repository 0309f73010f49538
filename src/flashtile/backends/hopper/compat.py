"""What differs between the Gluon of Triton 3.6 and of later releases, under one name each, and what none of them has a
name for."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language import core

SINCE_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_Shared = gl.shared_memory_descriptor
seen_as = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret

_MEETS = gl.constexpr(not SINCE_3_9)


@gluon.jit
def arrive(at, count: gl.constexpr, pred=True):
    """One thread arrives so many times when all of its warpgroup have come. Before 3.9 Triton would see to the latter,
    but only where it knows of shared memory that they have read: not in a function."""
    if _MEETS:
        barrier()
    mbarrier.arrive(at, count=count, pred=pred)


if hasattr(tma, "async_atomic_add"):
    add_async = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def add_async(tensor_desc, coord, src, _semantic=None):
        """A copy from shared memory that adds to what is there; in 3.6 it has no Python function."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def call_as_worker(function, arguments, _semantic=None, _generator=None):
    """function(*arguments), as roles of a warpgroup call it that are not the first: for the first role, of as many
    warps, Triton would make the same function once more."""
    return _generator.call_JitFunction(function, arguments, kwargs={}, caller_context=GluonCallerContext(num_warps=4))
