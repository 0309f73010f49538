"""Runs tasks on the OpenMP threads that torch computes with, each task on one of them.

The operations of a task then run on one core (inside a parallel region torch does not split them again), which
keeps a tile in that core's cache and saves a barrier per operation. Threads of our own would have to share the
cores with torch's, which spin for some milliseconds after each of its operations.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable

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
    def drain(_: object = None) -> None:
        try:
            process = start()
            while (task := _next(queue)) is not None:
                process(*task)
        except BaseException as failure:  # one that left a callback would be lost
            failures.append(failure)
            queue.clear()

    threads = min(torch.get_num_threads(), len(queue))
    if threads > 1 and _GOMP_PARALLEL is not None:
        _GOMP_PARALLEL(_BODY(drain), None, threads, 0)
    else:
        drain()
    if failures:
        raise failures[0]


def _next(queue: deque[tuple]) -> tuple | None:
    try:
        return queue.popleft()
    except IndexError:  # another thread drew the last
        return None


def _gomp_parallel() -> Callable[..., None] | None:
    """GOMP_parallel(function, data, number of threads, flags) of the OpenMP runtime that torch has loaded."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (OSError, TypeError, AttributeError):
        return None
    function.argtypes = [_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


_GOMP_PARALLEL = _gomp_parallel()
