"""Host time of small calls: forward and decode steps, one after the other and replayed from a CUDA graph, and forward
and backward."""

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

from ..interface import flash_attn_func, flash_attn_with_kvcache
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
DECODING = (8, 1024, 32, 8, 128)  # B, keys, Hq, Hk, D
_GRAPH_CALLS = 20


class HostTime(NamedTuple):
    """Medians in microseconds a call: of the host, of a CUDA graph of such calls, and, by the clock, of a forward and a
    backward pass through autograd, if there is one."""

    case: str
    provider: str
    host_us: float
    graph_us: float
    step_us: float | None = None


def measure(device: torch.device, rounds: int) -> list[HostTime]:
    """The times of `CASES` and of steps of `DECODING`: flashtile as it picks its backend by itself; PyTorch as it does,
    on tensors laid out as it wants them, and on those that flashtile has ("sdpa, transposed")."""
    batch, keys, heads_q, heads_k, dim = DECODING
    decoding = f"decode B={batch} Sk={keys} H={heads_q}/{heads_k} D={dim} bfloat16"
    forward = [time for case in CASES for time in _medians(case.label, _passes(case, device), rounds)]
    steps = {name: _timed_forward(step, device) for name, step in _decode_steps(device).items()}
    return forward + _medians(decoding, steps, rounds)


_Times = tuple[Callable[[], float], ...]
"""What measures each time of a `HostTime`."""


def _medians(case: str, timed: dict[str, _Times], rounds: int) -> list[HostTime]:
    """By provider, measured in turns."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name in random.sample(list(timed), len(timed)):
            found[name].append(tuple(time() for time in timed[name]))
    return [HostTime(case, name, *map(statistics.median, zip(*found[name], strict=True))) for name in timed]


def _passes(case: Case, device: torch.device) -> dict[str, _Times]:
    q, k, v, dout, _ = make_inputs(case.spec, device)
    ours, theirs = (q, k, v), tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))
    sdpa = partial(scaled_dot_product_attention, is_causal=case.causal)
    return {
        "flashtile": _timed(partial(flash_attn_func, causal=case.causal), ours, dout, device),
        "sdpa": _timed(sdpa, theirs, dout.transpose(1, 2).contiguous(), device),
        "sdpa, transposed": _timed(PROVIDERS["sdpa"].build(case, device), ours, dout, device),
    }


def _decode_steps(device: torch.device) -> dict[str, Call]:
    """Steps over a full cache, and over lengths on the device, of which PyTorch's own knows none; and with a new key
    and value for each sequence, written to the last place, by PyTorch's indexing where its attention is asked."""
    batch, keys, heads_q, heads_k, dim = DECODING
    q, new, k, v = (
        torch.randn(batch, n, heads, dim, device=device, dtype=torch.bfloat16)
        for n, heads in ((1, heads_q), (1, heads_k), (keys, heads_k), (keys, heads_k))
    )
    lengths = torch.full((batch,), keys - 1, dtype=torch.int32, device=device)
    q_rows, new_rows, k_rows, v_rows = (x.transpose(1, 2).contiguous() for x in (q, new, k, v))
    sdpa = partial(scaled_dot_product_attention, q_rows, k_rows, v_rows, enable_gqa=True)

    def sdpa_with_new_keys() -> Tensor:
        for x in (k_rows, v_rows):
            x[:, :, keys - 1 :] = new_rows
        return sdpa()

    ours = partial(flash_attn_with_kvcache, q, k, v)
    return {
        "flashtile": ours, "flashtile, lengths": partial(ours, cache_seqlens=lengths), "sdpa": sdpa,
        "flashtile, new keys": partial(ours, new, new, cache_seqlens=lengths), "sdpa, new keys": sdpa_with_new_keys,
    }  # fmt: skip


def _timed(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor, device: torch.device) -> _Times:
    """Of a forward pass, and of that with a backward pass."""
    leaves = tuple(x.clone().requires_grad_() for x in inputs)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return *_timed_forward(partial(attend, *inputs), device), lambda: _us(step, device)


def _timed_forward(forward: Call, device: torch.device) -> _Times:
    graph = _graph(forward)
    return lambda: _us(forward, device), lambda: _us(graph.replay, device, calls=50) / _GRAPH_CALLS


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
