"""Threads that run tiles, each on one core: the scratch of a tile then stays in the cache of that core.

Splitting every operation of a tile over all cores instead costs a barrier per operation, and moves the
tile between caches. torch releases the interpreter lock inside each operation, so Python threads suffice.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_STARTING = threading.Lock()


def run(start: Callable[[], Callable[..., None]], tasks: Iterable[tuple]) -> None:
    """Calls `start` on as many threads as torch has here, and what it returns for every task exactly once.

    `start` is where a thread allocates its scratch. Returns when all tasks are done, or raises the first
    exception.
    """
    queue = deque(tasks)
    jobs = [_pool().submit(_drain, start, queue) for _ in range(min(count(), len(queue)))]
    try:
        wait(jobs)
    finally:
        queue.clear()  # an interrupted caller leaves no work behind
    for job in jobs:
        job.result()


def count() -> int:
    """How many threads `run` uses for a call from this thread, given enough tasks."""
    return min(torch.get_num_threads(), _cores())


# The thread-local modes of the caller (autograd, autocast) do not reach these threads. Inference mode
# records nothing, and may write both to ordinary tensors and to those of a caller in inference mode.
@torch.inference_mode()
def _drain(start: Callable[[], Callable[..., None]], queue: deque[tuple]) -> None:
    process = start()
    while True:
        try:
            task = queue.popleft()
        except IndexError:  # the other threads drew the rest
            return
        process(*task)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(), "flashtile", initializer=_use_one_core)


def _cores() -> int:
    return os.cpu_count() or 1


def _use_one_core() -> None:
    """Lets the operations of this thread run on this thread alone, and leaves all other threads as they were.

    `set_num_threads` sets the count of the calling thread and the one that threads yet to come start with;
    a thread that ends at once puts the latter back.
    """
    with _STARTING:
        for_new_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(for_new_threads,))
        restore.start()
        restore.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
