"""Tiles of the Hopper kernels, by head dim: frozen, checked, with the measured reason beside each number."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import AttentionSpec

SHARED_BYTES = 227 * 1024  # of one multiprocessor, all of it for one program


@dataclass(frozen=True)
class Tiles:
    """Warpgroups of tile_m rows each, key blocks of tile_n keys, and how many Q and K, V blocks are in flight."""

    head_dim: int  # D and Dv as they lie in shared memory: a power of two
    warpgroups: int
    tile_n: int
    q_stages: int
    stages: int
    compute_registers: int
    q_in_registers: bool = False  # rather than read from shared memory for every key block
    out_parts: int = 1  # O leaves in this many parts, through shared memory for one
    load_registers: int = 24
    tile_m: int = 64  # rows of one wgmma

    def __post_init__(self) -> None:
        if self.warpgroups not in (2, 3):
            raise ValueError(f"warpgroups: got {self.warpgroups}; want 2 or 3")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"shared memory: got {self.shared_bytes} bytes; want at most {SHARED_BYTES}: {self}")

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * self.tile_m

    @property
    def shared_bytes(self) -> int:
        rows = self.q_stages * self.rows + self.rows // self.out_parts  # Q, and O on its way out
        barriers = 16 * (self.q_stages + 2 * self.stages)
        failures = 4 * 4 * self.tile_m
        return 2 * self.head_dim * (rows + 2 * self.stages * self.tile_n) + barriers + failures


D64 = Tiles(64, warpgroups=3, tile_n=128, q_stages=2, stages=4, compute_registers=160)
"""Three warpgroups hide more of the exponentials than two: 16k tokens on an H200, S = 2k and 16k full, 457 -> 508 and
484 -> 590 TFLOP/s."""
D64_SHORT = Tiles(64, warpgroups=2, tile_n=128, q_stages=3, stages=4, compute_registers=240, q_in_registers=True)
"""Tiles of 192 rows waste more of a short problem: S = 512 causal 175 -> 249 TFLOP/s. Q in three
stages: 253 -> 264. Q in registers: S = 512 and 1k full 385 -> 409 and 442 -> 482."""
D128 = Tiles(128, warpgroups=2, tile_n=128, q_stages=2, stages=2, compute_registers=240)
"""tile_n 128 rather than 64: 573 -> 640 TFLOP/s in an earlier kernel of this shape. Q in two stages, for the flat loop:
+9 % at S = 512, 0 at 16k."""
D256 = Tiles(256, warpgroups=2, tile_n=64, q_stages=1, stages=2, compute_registers=240, out_parts=2)
"""What fits: O takes half of the registers, and shared memory has room for one Q and half of O."""


def choose(spec: AttentionSpec) -> Tiles:
    """The tiles for a spec."""
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return D256
    if max(spec.head_dim, spec.head_dim_v) > 64:
        return D128
    short = spec.seqlen_q <= (2048 if spec.window_right >= 0 else 1024)
    return D64_SHORT if short else D64
