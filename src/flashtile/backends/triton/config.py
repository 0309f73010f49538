"""Tile sizes per architecture: which tiles, warps and pipeline stages a kernel runs with, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from ... import env
from ...spec import AttentionSpec

Role = Literal["forward", "dkdv", "dq"]


@dataclass(frozen=True)
class Tiles:
    """tile_m query rows by tile_n keys, on num_warps warps, loads num_stages deep in flight."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "num_warps"):
            value = getattr(self, name)
            if value <= 0 or value & (value - 1):
                raise ValueError(f"{name}: got {value}; want a power of two")
        if min(self.tile_m, self.tile_n) < 16:
            raise ValueError(f"tile_m, tile_n: got {self.tile_m}, {self.tile_n}; the matrix units want 16 at least")
        if self.num_stages < 1:
            raise ValueError(f"num_stages: got {self.num_stages}; want 1 or more")

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's launch options; multiply-add fusion is named because its default differs between releases."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


SM_90 = {
    ("forward", 2, 64): Tiles(128, 128, 8, 3),
    ("forward", 2, 128): Tiles(128, 128, 8, 2),
    ("forward", 2, 256): Tiles(128, 64, 8, 2),
    ("dkdv", 2, 64): Tiles(64, 128, 8, 3),
    ("dkdv", 2, 128): Tiles(64, 128, 8, 2),
    ("dkdv", 2, 256): Tiles(64, 64, 8, 1),
    ("dq", 2, 64): Tiles(128, 64, 8, 3),
    ("dq", 2, 128): Tiles(128, 64, 8, 2),
    ("dq", 2, 256): Tiles(64, 64, 8, 1),
    ("forward", 4, 64): Tiles(64, 32, 4, 2),
    ("forward", 4, 128): Tiles(64, 32, 8, 2),
    ("forward", 4, 256): Tiles(32, 32, 8, 1),
    ("dkdv", 4, 64): Tiles(32, 32, 4, 2),
    ("dkdv", 4, 128): Tiles(32, 32, 8, 1),
    ("dkdv", 4, 256): Tiles(16, 16, 8, 1),
    ("dq", 4, 64): Tiles(32, 32, 4, 2),
    ("dq", 4, 128): Tiles(32, 32, 8, 1),
    ("dq", 4, 256): Tiles(16, 16, 8, 1),
}

INTERPRETER = {
    # small, so that small problems have edges, masked and full blocks
    (role, size, dim): Tiles(32, 16, 1, 1)
    for role in ("forward", "dkdv", "dq")
    for size in (2, 4)
    for dim in (64, 128, 256)
}

TABLES = {"sm_90": SM_90, "interpreter": INTERPRETER}


def choose(role: Role, spec: AttentionSpec, arch: str) -> Tiles:
    """The tiles of one kernel for `spec` on `arch`."""
    dim = max(64, 1 << (max(spec.head_dim, spec.head_dim_v) - 1).bit_length())
    return TABLES[arch][role, spec.dtype.itemsize, dim]


@functools.cache
def arch_of(device: torch.device) -> str:
    """"sm_90", "gfx942" ... of a GPU, or "interpreter"."""
    if env.triton_interpret():
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
