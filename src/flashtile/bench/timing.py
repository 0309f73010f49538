"""Clocks: medians of interleaved rounds, peak memory, and the rates of the machine beside them."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache; the size that triton.testing.do_bench uses
_MAX_CALLS = 200


def interleaved(
    prepare: Mapping[Key, Callable[[], Call]], device: torch.device, *, rounds: int, round_ms: float, seed: int = 0
) -> tuple[dict[Key, list[float]], dict[Key, Exception]]:
    """Median milliseconds per call in each of `rounds` rounds, for every contender, in a new random order each round.

    `prepare[key]()` gives the call to time and is not timed itself; what it holds is freed before the next
    contender's turn. Drifts of clock and temperature so fall on all contenders alike. A contender that raises
    is out, and is returned with its exception instead of times.
    """
    shuffle = random.Random(seed)
    times: dict[Key, list[float]] = {key: [] for key in prepare}
    failures: dict[Key, Exception] = {}
    for _ in range(rounds):
        order = list(times)
        shuffle.shuffle(order)
        for key in order:
            try:
                times[key].append(median_ms(prepare[key](), device, round_ms))
            except Exception as error:
                failures[key] = error.with_traceback(None)  # the traceback would keep the tensors alive
                del times[key]
    return times, failures


def median_ms(call: Call, device: torch.device, round_ms: float) -> float:
    """Median milliseconds of one call, called for about `round_ms` milliseconds in all, at least once."""
    return _gpu_median(call, device, round_ms) if device.type == "cuda" else _cpu_median(call, round_ms)


def _cpu_median(call: Call, round_ms: float) -> float:
    times: list[float] = []
    while len(times) < _MAX_CALLS and sum(times) < round_ms:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _gpu_median(call: Call, device: torch.device, round_ms: float) -> float:
    """CUDA events around each call, the L2 cache flushed before it, as triton.testing.do_bench does."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def events(count: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in marks:
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in marks]

    with torch.cuda.device(device):
        call()
        estimate = statistics.median(events(3))
        count = min(_MAX_CALLS, max(5, int(round_ms / max(estimate, 1e-3))))
        return statistics.median(events(count))


def with_peak_bytes(call: Callable[[], Result], device: torch.device) -> tuple[Result, int | None]:
    """What `call` returns, and the bytes it held at its peak beyond what was held before, its result included.

    On a GPU what PyTorch's allocator counts. On Linux the growth of the process's resident memory, which the
    kernel tracks (VmHWM): it sees every thread and library scratch, to about a MiB. None elsewhere. A first call
    brings in code pages, caches and workspaces too.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return call(), None
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # hand freed pages back, or their reuse would not show
    try:
        reset.write_text("5")  # set the peak to what is resident now
    except OSError:
        return call(), None
    before = _resident_peak()
    result = call()
    return result, max(0, _resident_peak() - before)


def _resident_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product, the ceiling of anything built of matrix products."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (_median_of_rounds(lambda: a @ b, device) * 1e-3)


def copy_bytes(device: torch.device) -> float:
    """Bytes per second of a device-to-device copy, read and written bytes counted."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median_of_rounds(lambda: target.copy_(source), device) * 1e-3)


def _median_of_rounds(call: Call, device: torch.device) -> float:
    call()
    return statistics.median(median_ms(call, device, 60) for _ in range(3))
