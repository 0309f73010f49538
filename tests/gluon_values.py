"""What Gluon kernels hold, for gluon_on_cpu.py: registers, scalars, pointers and shared memory, over tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch


class Registers(torch.Tensor):
    """A tensor in registers, whose `type` says nothing."""

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def permute(self, *order: Any) -> Registers:
        return super().permute(*order)

    def reshape(self, *shape: Any) -> Registers:
        return super().reshape(*shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Registers:
        return self.view(dtype) if bitcast else super().to(dtype)


def registers(x: torch.Tensor) -> Registers:
    return x.as_subclass(Registers)


class Number(int):
    """A scalar with a type, which does not matter."""

    def to(self, _dtype: Any) -> Number:
        return self

    def __add__(self, other: Any) -> Any:
        return Number(int(self) + other) if isinstance(other, int) else int(self) + other

    def __sub__(self, other: int) -> Number:
        return Number(int(self) - int(other))

    def __mul__(self, other: int) -> Number:
        return Number(int(self) * int(other))

    __rmul__ = __mul__

    def __mod__(self, other: int) -> Number:
        return Number(int(self) % int(other))

    def __floordiv__(self, other: int) -> Number:
        return Number(int(self) // int(other))


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.tensor, self.at + steps)

    def __getitem__(self, axes: tuple) -> Pointer:
        return Pointer(self.tensor, self.at[axes])

    def to(self, _dtype: Any, **_: Any) -> Pointer:
        return self


class Shared:
    """Shared memory, seen through a view."""

    layout = SimpleNamespace(swizzle_byte_width=None, element_bitwidth=None, transposed=False)

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    @property
    def shape(self) -> list[int]:
        return list(self.view.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    def index(self, i: int) -> Shared:
        return Shared(self.view[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.view.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.view.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.view.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Pairs:
        if getattr(layout, "transposed", False):
            count, width, rows = shape
            return self._reinterpret(dtype, [count, rows, width], self.layout).permute((0, 2, 1))
        if dtype == self.dtype and shape[-1] == 2 * self.shape[-1]:
            buffers = 2 * shape[0]
            return Pairs(self.slice(0, buffers).reshape([buffers, *shape[1:-1], self.shape[-1]]))
        return Shared(self.view.view(dtype).flatten()[: math.prod(shape)].view(shape))

    def load(self, _layout: Any) -> Registers:
        return registers(self.view.clone())

    def store(self, x: torch.Tensor) -> None:
        self.view.copy_(x)


class Pairs:
    """An array of buffers, two and two of which are one, twice as wide."""

    def __init__(self, buffers: Shared, order: tuple[int, ...] = (0, 1)) -> None:
        self.buffers, self.order = buffers, order

    def permute(self, order: tuple[int, ...]) -> Pairs:
        return Pairs(self.buffers, tuple(axis - 1 for axis in order[1:]))

    def index(self, i: int) -> Pair:
        return Pair(self.buffers.index(2 * i), self.buffers.index(2 * i + 1), self.order)


class Pair:
    """Two buffers that are read as the columns of the one, then of the other."""

    def __init__(self, low: Shared, high: Shared, order: tuple[int, ...] = (0, 1)) -> None:
        self.low, self.high, self.order = low, high, order

    @property
    def view(self) -> torch.Tensor:
        return torch.cat((self.low.view, self.high.view), -1).permute(self.order)

    @property
    def shape(self) -> list[int]:
        return list(self.view.shape)

    def slice(self, start: int, length: int, dim: int = 0) -> Pair:
        if dim == 1:
            assert (start, length) == (0, self.shape[1]), "a part of a pair"
            return self
        return Pair(self.low.slice(start, length), self.high.slice(start, length))

    def load(self, _layout: Any) -> Registers:
        return registers(self.view)
