"""Measuring tiles on the GPU at hand: what `flashtile tune` runs, and the only user of triton.autotune."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from ...spec import AttentionSpec
from ...testing import make_inputs
from .backward import DKDV, DQ, row_numbers
from .config import Key, Tiles
from .forward import FORWARD
from .launch import Kernel

CANDIDATES = [
    Tiles(tile_m, tile_n, num_warps, num_stages)
    for tile_m in (16, 32, 64, 128)
    for tile_n in (16, 32, 64, 128)
    for num_warps in (4, 8)
    for num_stages in (1, 2, 3)
    if 1024 <= tile_m * tile_n <= 128 * 128 and (num_warps == 4 or tile_m * tile_n >= 2048)
]


def tune(spec: AttentionSpec, device: torch.device) -> Iterator[tuple[Key, Tiles]]:
    """Yields the fastest of `CANDIDATES` for each kernel of `spec`, as each is found."""
    q, k, v, dout, _ = make_inputs(spec, device)
    out = torch.empty_like(dout)
    lse = torch.zeros(spec.batch, spec.heads_q, spec.seqlen_q, device=device)
    shift, delta = (x.zero_() for x in row_numbers(spec)(lse))
    for kernel, tensors in (
        (FORWARD, (q, k, v, out, lse)),
        (DQ, (q, k, v, out, dout, lse, None, shift, delta, torch.empty_like(q))),
        (DKDV, (q, k, v, None, dout, None, None, shift, delta, torch.empty_like(k), torch.empty_like(v))),
    ):
        yield Key.of(kernel.role, spec), _fastest(kernel, spec, tensors)


def _fastest(kernel: Kernel, spec: AttentionSpec, tensors: tuple) -> Tiles:
    configs = {
        triton.Config({"TILE_M": t.tile_m, "TILE_N": t.tile_n}, num_warps=t.num_warps, num_stages=t.num_stages): t
        for t in CANDIDATES
    }
    tuned = triton.autotune(configs=list(configs), key=[])(kernel.fn)
    launch = kernel.describe(spec, CANDIDATES[0], *tensors)
    constants = {name: value for name, value in launch.constants.items() if name not in ("TILE_M", "TILE_N")}

    def grid(meta: dict) -> tuple[int]:
        return (kernel.describe(spec, Tiles(meta["TILE_M"], meta["TILE_N"], 4, 1), *tensors).grid,)

    tuned[grid](*tensors, *launch.scalars, **constants, enable_fp_fusion=True)
    return configs[tuned.best_config]
