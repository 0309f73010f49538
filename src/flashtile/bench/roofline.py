"""What a device can do at best: matrix FLOP/s and memory bytes per second, from datasheets or measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .timing import copy_bytes, gemm_flops


@dataclass(frozen=True)
class Ceiling:
    """The limits of one device for one dtype: FLOP/s, bytes/s, and where the numbers come from."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    source: str

    def milliseconds(self, flops: float, moved_bytes: float) -> float:
        """The least time of work that needs `flops` operations and moves `moved_bytes`."""
        return 1e3 * max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class _Datasheet:
    half: float  # TFLOP/s of float16 and bfloat16 matrix products, dense, accumulated in float32
    single: float  # TFLOP/s of float32
    memory: float  # GB/s


_DATASHEETS = {
    "B200": _Datasheet(2250, 75, 7700),
    "GH200": _Datasheet(989, 67, 4000),
    "H200": _Datasheet(989, 67, 4800),
    "H100 PCIe": _Datasheet(756, 51, 2000),
    "H100 NVL": _Datasheet(835, 60, 3900),
    "H100": _Datasheet(989, 67, 3350),
    "A100-SXM4-40GB": _Datasheet(312, 19.5, 1555),
    "A100-PCIE-40GB": _Datasheet(312, 19.5, 1555),
    "A100 80GB PCIe": _Datasheet(312, 19.5, 1935),
    "A100": _Datasheet(312, 19.5, 2039),
    "L40S": _Datasheet(362, 91.6, 864),
    "RTX 5090": _Datasheet(209.5, 104.8, 1792),
    "RTX 4090": _Datasheet(165.2, 82.6, 1008),
    "RTX 3090": _Datasheet(71, 35.6, 936),
    "MI300X": _Datasheet(1307, 163.4, 5300),
}
"""By a part of the device's name, the more special names first."""

_ASSUMED = "NVIDIA H100 80GB HBM3"


def is_here(device: torch.device) -> bool:
    """Whether this machine has `device`."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """The limits of `device`: its datasheet, else measured now; a GPU that is not here is taken for an H100 SXM."""
    name = "this CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device) if is_here(device) else _ASSUMED
        sheet = next((sheet for part, sheet in _DATASHEETS.items() if part in name), None)
        if sheet is not None and dtype != torch.float64:
            tflops = sheet.single if dtype == torch.float32 else sheet.half
            source = "datasheet" if is_here(device) else "datasheet; assumed, this machine has no such device"
            return Ceiling(name, tflops * 1e12, sheet.memory * 1e9, source)
        if not is_here(device):
            return Ceiling(name, float("nan"), float("nan"), f"no number for {dtype}")
    return Ceiling(name, gemm_flops(device, dtype), copy_bytes(device), "measured now: matrix product and copy")
