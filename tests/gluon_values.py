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
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.tensor, self.at + steps)

    def __sub__(self, steps: Any) -> Pointer:
        return self + -steps

    def __getitem__(self, axes: tuple) -> Pointer:
        return Pointer(self.tensor, self.at[axes])

    def to(self, _dtype: Any, **_: Any) -> Pointer:
        return self


class Shared:
    """Shared memory, seen through a view."""

    layout = None

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

    @staticmethod
    def _reinterpret(memory: Matrices | Matrix, dtype: torch.dtype, shape: list[int], layout: Any) -> Matrices | Shared:
        return memory.seen_as(dtype, shape, layout)

    def load(self, _layout: Any) -> Registers:
        return registers(self.view.clone())

    def store(self, x: torch.Tensor) -> None:
        self.view.copy_(x)


class Matrices:
    """Shared memory as matrices, or as boxes that hold one each. Behind all rows of the first so many columns, which is
    the width of the swizzle, lie those of the next: `strips` is (strips, rows, columns)."""

    def __init__(self, strips: torch.Tensor, shape: list[int], transposed: bool) -> None:
        self.strips, self.shape, self.transposed, self.dtype = strips, shape, transposed, strips.dtype
        self.each = strips.shape[0] // shape[0]  # strips of a matrix

    def index(self, i: int) -> Matrix:
        return Matrix(self.strips[int(i) * self.each :][: self.each], self.shape[1:], self.transposed)

    def seen_as(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Matrices:
        assert dtype == self.dtype
        strips = self.strips
        if math.prod(shape[1:]) < strips[0].numel():  # some rows of a strip
            strips = strips.view(shape[0], -1, strips.shape[2])
        return Matrices(strips[: math.prod(shape) // strips[0].numel()], shape, layout.transposed)


class Matrix:
    """One of them."""

    def __init__(self, strips: torch.Tensor, shape: list[int], transposed: bool) -> None:
        self.strips, self.shape, self.transposed, self.dtype = strips, list(shape), transposed, strips.dtype

    @property
    def view(self) -> torch.Tensor:
        x = torch.cat(tuple(self.strips), -1)
        return x.T if self.transposed else x.view(self.shape)

    def slice(self, start: int, length: int, dim: int = 0) -> Matrix:
        shape = [length if axis == dim else n for axis, n in enumerate(self.shape)]
        if dim == (1 if self.transposed else 0):
            strips = self.strips[:, start : start + length]
        elif len(self.strips) == 1:
            strips = self.strips[:, :, start : start + length]
        else:
            columns = self.strips.shape[-1]
            assert start % columns == length % columns == 0, "a part of a strip"
            strips = self.strips[start // columns :][: length // columns]
        return Matrix(strips, shape, self.transposed)

    def seen_as(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        return Shared(self.strips.view(dtype).flatten()[: math.prod(shape)].view(shape))

    def load(self, _layout: Any) -> Registers:
        return registers(self.view)

    def store(self, x: torch.Tensor) -> None:
        strips, rows, columns = self.strips.shape
        assert not self.transposed
        self.strips.copy_(x.reshape(rows, strips, columns).movedim(1, 0))
