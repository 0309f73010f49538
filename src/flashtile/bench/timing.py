"""Clocks for a cool and for a hot GPU, interleaved rounds, peak memory, and the rates of the machine beside them."""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

Call = Callable[[], object]
Pace = Literal["cool", "hot"]
"""cool: calls one by one, the L2 cache empty, for so short a time after a rest that the GPU keeps its clock; hot: calls
on end, as in training, after so many that the GPU has come to its limit of power."""
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache; the size that triton.testing.do_bench uses
_MAX_CALLS = 200
# An 8192^3 bfloat16 matrix product makes 765 TFLOP/s on an H200 for 50 ms after such a rest, 660 to 680 from 150 ms on,
# but 550 for a tenth of a second 0.9 s after it: `limit_of_power` in benchmarks/results/hopper-runs-h200.json.
_REST_S = 0.1
_HEAT_MS = 200


def interleaved(
    prepare: Mapping[Key, Callable[[], Call]],
    device: torch.device,
    *,
    rounds: int,
    round_ms: float,
    paces: Sequence[Pace] = ("cool",),
    seed: int = 0,
) -> tuple[dict[Key, dict[Pace, list[float]]], dict[Key, Exception]]:
    """Milliseconds per call at each pace in each of `rounds` rounds, all contenders and paces in a new random order.

    `prepare[key]()` gives the call to time and is not timed itself; what it holds is freed before the next
    turn. Drifts of clock and temperature so fall on all contenders alike. A contender that raises
    is out, and is returned with its exception instead of times.
    """
    shuffle = random.Random(seed)
    times: dict[Key, dict[Pace, list[float]]] = {key: {pace: [] for pace in paces} for key in prepare}
    failures: dict[Key, Exception] = {}
    for _ in range(rounds):
        order = [(key, pace) for key in times for pace in paces]
        shuffle.shuffle(order)
        for key, pace in order:
            if key in failures:
                continue
            try:
                times[key][pace].append(PACES[pace](prepare[key](), device, round_ms))
            except Exception as error:
                failures[key] = error.with_traceback(None)  # the traceback would keep the tensors alive
                del times[key]
    return times, failures


def cool_ms(call: Call, device: torch.device, round_ms: float) -> float:
    """`median_ms`, on a GPU that has rested."""
    return median_ms(call, device, round_ms, rest_s=_REST_S)


def hot_ms(call: Call, device: torch.device, round_ms: float) -> float:
    """Milliseconds of one of the calls that follow each other for about `round_ms`, as others did for 200 ms before,
    and those after a rest: what a GPU does at its limit depends on how long it has been there."""
    if device.type != "cuda":
        raise ValueError(f"device: got {device}; want a GPU, as a CPU's limit of power is not looked at")
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        time.sleep(_REST_S)
        heat, count = 0.0, 1
        while heat < _HEAT_MS:
            estimate = max(_on_end_ms(call, count), 1e-3)
            heat += count * estimate
            count = math.ceil((_HEAT_MS - heat) / estimate)
        return _on_end_ms(call, math.ceil(round_ms / estimate))


PACES: dict[Pace, Callable[[Call, torch.device, float], float]] = {"cool": cool_ms, "hot": hot_ms}


def _on_end_ms(call: Call, count: int) -> float:
    """Milliseconds of one of `count` calls on the current GPU, nothing between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def median_ms(call: Call, device: torch.device, round_ms: float, rest_s: float = 0.0) -> float:
    """Median milliseconds of one call, called for about `round_ms` milliseconds in all, at least once; a GPU has been
    idle for `rest_s` seconds then."""
    return _gpu_median(call, device, round_ms, rest_s) if device.type == "cuda" else _cpu_median(call, round_ms)


def _cpu_median(call: Call, round_ms: float) -> float:
    times: list[float] = []
    while len(times) < _MAX_CALLS and sum(times) < round_ms:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _gpu_median(call: Call, device: torch.device, round_ms: float, rest_s: float) -> float:
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
        _, estimate = events(2)
        time.sleep(rest_s)
        return statistics.median(events(min(_MAX_CALLS, max(1, int(round_ms / max(estimate, 1e-3))))))


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


def gemm_size(device: torch.device) -> int:
    """Rows and columns of the square matrix product beside which attention is put."""
    return 8192 if device.type == "cuda" else 2048


def gemm_work(device: torch.device) -> float:
    """FLOPs of one such product."""
    return 2 * gemm_size(device) ** 3


def gemms(count: int, device: torch.device, dtype: torch.dtype) -> Call:
    """`count` such products on end, the ceiling of anything built of matrix products."""
    size = gemm_size(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def call() -> None:
        for _ in range(count):
            a @ b

    return call


def gemm_flops(device: torch.device, dtype: torch.dtype, pace: Pace = "cool") -> float:
    """FLOP/s of such a product by itself."""
    return gemm_work(device) / (_median_of_rounds(gemms(1, device, dtype), device, pace) * 1e-3)


def copy_bytes(device: torch.device) -> float:
    """Bytes per second of a device-to-device copy, read and written bytes counted."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median_of_rounds(lambda: target.copy_(source), device, "cool") * 1e-3)


def _median_of_rounds(call: Call, device: torch.device, pace: Pace) -> float:
    call()
    return statistics.median(PACES[pace](call, device, 60) for _ in range(3))
