"""Host time of small calls: forward, one after the other and replayed from a CUDA graph, and forward and backward."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..interface import flash_attn_func
from ..testing import make_inputs
from .cases import Case
from .providers import PROVIDERS
from .timing import Call

CASES = tuple(
    Case.square(1, seqlen, 8, head_dim, causal, "bfloat16")
    for seqlen, head_dim, causal in (
        (128, 64, False), (256, 64, False), (512, 64, False), (512, 64, True), (512, 128, False), (512, 128, True),
    )
)  # fmt: skip
_GRAPH_CALLS = 20


class HostTime(NamedTuple):
    """Medians in microseconds a call: of the host, of a CUDA graph of such calls, and, by the clock, of a forward and a
    backward pass through autograd."""

    case: str
    provider: str
    host_us: float
    graph_us: float
    step_us: float


def measure(device: torch.device, rounds: int) -> list[HostTime]:
    """The times of `CASES`: flashtile as it picks its backend by itself; PyTorch as it does, on tensors laid out as it
    wants them, and on those that flashtile has ("sdpa, transposed")."""
    return [time for case in CASES for time in _measure(case, device, rounds)]


def _measure(case: Case, device: torch.device, rounds: int) -> list[HostTime]:
    q, k, v, dout, _ = make_inputs(case.spec, device)
    ours, theirs = (q, k, v), tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))
    sdpa = partial(scaled_dot_product_attention, is_causal=case.causal)
    timed = {
        "flashtile": _timed(partial(flash_attn_func, causal=case.causal), ours, dout, device),
        "sdpa": _timed(sdpa, theirs, dout.transpose(1, 2).contiguous(), device),
        "sdpa, transposed": _timed(PROVIDERS["sdpa"].build(case, device), ours, dout, device),
    }
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name in random.sample(list(timed), len(timed)):
            found[name].append(tuple(time() for time in timed[name]))
    return [HostTime(case.label, name, *map(statistics.median, zip(*found[name], strict=True))) for name in timed]


def _timed(
    attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor, device: torch.device
) -> tuple[Callable[[], float], ...]:
    """What measures each time of a `HostTime`."""
    leaves = tuple(x.clone().requires_grad_() for x in inputs)

    def forward() -> None:
        attend(*inputs)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    graph = _graph(forward)
    return (
        lambda: _us(forward, device), lambda: _us(graph.replay, device, calls=50) / _GRAPH_CALLS,
        lambda: _us(step, device),
    )  # fmt: skip


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
