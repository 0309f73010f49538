"""Runs tasks on the OpenMP threads that torch computes with, each task on one of them.

The operations of a task then run on one core (inside a parallel region torch does not split them again), which
keeps a tile in that core's cache and saves a barrier per operation. Threads of our own would have to share the
cores with torch's, which spin for some milliseconds after each of its operations.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(start: Callable[[], Callable[..., None]], tasks: Iterable[tuple]) -> None:
    """Calls `start` on as many threads as torch has here, and what it returns for every task exactly once.

    Returns when all tasks are done, or raises the first exception. Where torch's OpenMP has no
    GOMP_parallel (Windows, macOS), tasks run one after another and torch splits each operation.
    """
    queue = deque(tasks)
    failures: list[BaseException] = []

    # Inference mode records nothing, and may write both to ordinary tensors and to those of a caller in that mode.
    @torch.inference_mode()
    def drain() -> None:
        try:
            process = start()
            while (task := _next(queue)) is not None:
                process(*task)
        except BaseException as failure:  # one that left a callback would be lost
            failures.append(failure)
            queue.clear()

    def drain_on_one_core(_: object) -> None:
        with _products_on_one_core():
            drain()

    threads = min(torch.get_num_threads(), len(queue))
    if threads > 1 and _GOMP_PARALLEL is not None:
        _GOMP_PARALLEL(_BODY(drain_on_one_core), None, threads, 0)
    else:
        drain()
    if failures:
        raise failures[0]


def _next(queue: deque[tuple]) -> tuple | None:
    try:
        return queue.popleft()
    except IndexError:  # another thread drew the last
        return None


@contextlib.contextmanager
def _products_on_one_core() -> Iterator[None]:
    """Of this thread. Where torch.set_num_threads was called, MKL would divide products for as many threads, though it
    has one here: float32 passes took 2 to 8 % longer on two cores (cpu-runs.json).
    """
    if _MKL_THREADS is None:
        yield
        return
    before = _MKL_THREADS(1)
    try:
        yield
    finally:
        _MKL_THREADS(before)


def _mkl_threads() -> Callable[[int], int] | None:
    """MKL_Set_Num_Threads_Local(number) of the MKL in torch, if it has one: returns the number before; 0 is none of the
    thread's own."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function


def _gomp_parallel() -> Callable[..., None] | None:
    """GOMP_parallel(function, data, number of threads, flags) of the OpenMP runtime that torch has loaded."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (OSError, TypeError, AttributeError):
        return None
    function.argtypes = [_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


_MKL_THREADS, _GOMP_PARALLEL = _mkl_threads(), _gomp_parallel()
