"""Host time of small forward calls: one after the other, and replayed from a CUDA graph."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..interface import flash_attn_func
from ..testing import make_inputs
from .cases import Case
from .timing import Call

CASES = tuple(Case.square(1, seqlen, 8, 64, False, "bfloat16") for seqlen in (128, 256, 512))
_GRAPH_CALLS = 20


class HostTime(NamedTuple):
    """Medians in microseconds a call: of the host, and of a CUDA graph of such calls."""

    case: str
    provider: str
    host_us: float
    graph_us: float


def measure(device: torch.device, rounds: int) -> list[HostTime]:
    """The times of `CASES`: flashtile as it picks its backend by itself, and PyTorch as it does."""
    return [time for case in CASES for time in _measure(case, device, rounds)]


def _measure(case: Case, device: torch.device, rounds: int) -> list[HostTime]:
    q, k, v, *_ = make_inputs(case.spec, device)
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    calls: dict[str, Call] = {
        "flashtile": lambda: flash_attn_func(q, k, v),
        "sdpa": lambda: scaled_dot_product_attention(q_, k_, v_),
    }
    graphs = {name: _graph(call) for name, call in calls.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            replayed = _us(graphs[name].replay, device, calls=50) / _GRAPH_CALLS
            found[name].append((_us(calls[name], device), replayed))
    return [HostTime(case.label, name, *map(statistics.median, zip(*found[name], strict=True))) for name in calls]


def _graph(call: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles and allocates what a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            call()
    return graph


def _us(call: Callable[[], object], device: torch.device, calls: int = 300) -> float:
    """Microseconds per call, when many calls follow each other and the GPU is never waited for."""
    for _ in range(10):
        call()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls * 1e6
