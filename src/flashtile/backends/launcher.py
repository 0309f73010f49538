"""Launches of compiled kernels straight through the CUDA driver, for less host time than Triton's own launcher.

Triton reads every argument of every launch, and encodes a tensor map for each descriptor. Here the parameters of
launches are laid out once, as the driver reads them; a call writes the tensors' addresses into them, once for all
kernels that it launches. What was prepared for a problem is remembered.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arch import arch_of
from ..spec import AttentionSpec
from . import Backward, Forward
from .compiler import compiled_for, lies_near
from .driver import through_driver

Run = Callable[..., None]
"""run(*inputs, *outputs): launches on the current stream of the tensors' device."""

Inputs = tuple[Tensor | int | None, ...]
"""What a kernel reads, as tensors or addresses, and numbers that are others in each call."""

MAX_REMEMBERED = 4096  # problems per kernel; each costs a few kilobytes


class Launcher(ABC):
    """A kernel, with a launch prepared for each problem: a spec (any key), and what the tensors are that it reads."""

    def __init__(self) -> None:
        self._runs: dict[tuple, Run] = {}

    @abstractmethod
    def prepare(self, spec: Any, tensors: tuple) -> Run:
        """The launch for tensors that lie like these (some may be None), on their device, which is current."""

    def run_for(self, spec: Any, inputs: Inputs, outputs: tuple[Tensor, ...]) -> Run:
        """run(*inputs, *outputs) for tensors that lie like these, and other numbers.

        `outputs` are fresh, their layouts a function of the spec and the inputs' layouts.
        """
        device = outputs[0].device
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        key = (spec, device, *[x if x is None else (x.dtype, x.stride(), x.data_ptr() & 15) for x in tensors])
        if torch.version.hip:  # where kernels are compiled for that, too
            key += tuple(x is None or lies_near(x) for x in tensors)
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= MAX_REMEMBERED:
                self._runs.clear()
            with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
                run = self._runs[key] = self.prepare(spec, (*inputs, *outputs))
        return run

    def __call__(self, spec: Any, inputs: Inputs, outputs: tuple[Tensor, ...]) -> None:
        """Runs on the current stream of the tensors' device."""
        self.run_for(spec, inputs, outputs)(*inputs, *outputs)


def forward_pass(launcher: Launcher, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), contiguous, of a kernel that writes them from q, k and v."""
    out, lse = results_of(spec, q.device)
    launcher(spec, (q, k, v), (out, lse))
    return out, lse


def forward_pass_like(launcher: Launcher, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """`forward_pass` for tensors that lie like these: with nothing left to look up, for the sake of small calls."""
    out_like, lse_like = results = results_of(spec, q.device)
    run = launcher.run_for(spec, (q, k, v), results)
    empty_out(*results)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(out_like), torch.empty_like(lse_like)
        run(q, k, v, out, lse)
        return out, lse

    return forward


def backward_pass(
    launcher: Launcher, spec: AttentionSpec, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, laid out as torch.empty_like(q), (k) and (v), of kernels that write them from all the others."""
    gradients = _gradients(q, k, v)
    launcher(spec, (dout, dlse, q, k, v, out, lse), gradients)
    return gradients


def backward_pass_like(
    launcher: Launcher, spec: AttentionSpec, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> Backward:  # fmt: skip
    """`backward_pass` for tensors that lie like these: with nothing left to look up, for the sake of small calls."""
    run = launcher.run_for(spec, (dout, dlse, q, k, v, out, lse), _gradients(q, k, v))

    def backward(
        dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _gradients(q, k, v)
        run(dout, dlse, q, k, v, out, lse, *gradients)
        return gradients

    return backward


def results_of(spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), not yet written."""
    out = torch.empty((spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v), dtype=spec.dtype, device=device)
    lse = torch.empty((spec.batch, spec.heads_q, spec.seqlen_q), dtype=torch.float32, device=device)
    return out, lse


def behind(x: Tensor, numbers: int) -> Tensor | int:
    """The memory so many numbers behind the beginning of a tensor that lies in one piece, as a launch takes it."""
    return x.data_ptr() + numbers * x.element_size() if x.is_cuda else x[numbers:]


def empty_out(*tensors: Tensor | None) -> None:
    """Frees the memory of tensors: what stays is how they lie, which the host asks for faster than by numbers."""
    for x in tensors:
        if x is not None:
            x.untyped_storage().resize_(0)


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class KernelCall(NamedTuple):
    """A launch of a Triton kernel: how many programs, all arguments, Triton's options.

    moves: of each of the first arguments, which one of those that a run is called with takes its place. most_at_once,
    shared: each program has so much shared memory that no more than so many fit on a multiprocessor (0: as many as
    there is place for), or so many bytes at least, up to the 48 KiB that every kernel may ask for; if the launch goes
    straight through the driver.
    """

    fn: Any
    grid: int
    arguments: tuple
    moves: Sequence[int]
    options: dict[str, Any]
    most_at_once: int = 0
    shared: int = 0


def call_of(
    fn: Any, grid: int, moving: dict[str, Any], names: tuple[str, ...], others: tuple, options: dict[str, Any]
) -> KernelCall:
    """The launch of a kernel whose first arguments are these of all that move in a run, by their names."""
    order, arguments = list(moving), (*(moving[name] for name in names), *others)
    return KernelCall(fn, grid, arguments, [order.index(name) for name in names], options)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, sequence and head."""
    return x.stride(0), x.stride(1), x.stride(2)


def rows_apart(x: Tensor | None) -> int:
    """The first stride; of nothing 0."""
    return 0 if x is None else x.stride(0)


def multiprocessors_of(device: torch.device) -> int:
    """Those of a GPU; where kernels are interpreted, 1."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def prepared(device: torch.device, *calls: KernelCall) -> Run:
    """The launches of Triton kernels, in order, as `run_of` describes them; of an empty grid, nothing."""
    calls = tuple(call for call in calls if call.grid)
    if device.type == "cpu":  # the interpreter compiles nothing
        return _in_order([partial(call.fn[(call.grid,)], **call.options) for call in calls], calls)
    arch = arch_of(device)
    assert arch is not None, "a tensor on a GPU, and no GPU"
    return run_of([compiled_for(call.fn, call.arguments, call.options, arch) for call in calls], calls, device)


def run_of(kernels: list[Any], calls: tuple[KernelCall, ...], device: torch.device) -> Run:
    """The launches of kernels that Triton compiled for these calls, on `device`.

    A run takes tensors, or their addresses, in the place of the arguments that move, which are tensors or their
    descriptors; each must lie in memory as the one before. A number among them, of which the kernels make no variants,
    is another in each run. None among them, and the other arguments, stay.
    """
    return through_driver(kernels, calls, device.index) or _through_triton(kernels, calls, device.index)


def _through_triton(kernels: list[Any], calls: tuple[KernelCall, ...], device_index: int) -> Run:
    launch = _in_order([kernel[(call.grid, 1, 1)] for kernel, call in zip(kernels, calls, strict=True)], calls)
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def run(*tensors: Tensor | int | None) -> None:
        with contextlib.nullcontext() if current_device() == device_index else torch.cuda.device(device_index):
            launch(*tensors, stream=stream_of(device_index))

    return run


def _in_order(launches: list[Callable[..., Any]], calls: tuple[KernelCall, ...]) -> Run:
    """A run of functions that launch these calls, each with all of its arguments."""
    moving = [
        (launch, _moves(call), call.arguments[len(call.moves) :]) for launch, call in zip(launches, calls, strict=True)
    ]

    def run(*tensors: Tensor | int | None, **where: Any) -> None:
        for launch, moves, others in moving:
            moved = ((None if i is None else tensors[i], like) for i, like in moves)
            launch(*(x if like is None else _of(like, x) for x, like in moved), *others, **where)

    return run


def _moves(call: KernelCall) -> list[tuple[int | None, Any]]:
    """Of each argument that moves: which one of a run's it is, if it is not None, and its descriptor, if it has one."""
    return [
        (None if x is None else i, None if x is None or isinstance(x, Tensor | int) else _of(x, None))
        for x, i in zip(call.arguments[: len(call.moves)], call.moves, strict=True)
    ]


def _of(descriptor: Any, tensor: Tensor | int | None) -> Any:
    """The descriptor of another tensor that lies alike, without the checks of a new one."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__, base=tensor)
    return other
