"""Tile sizes per architecture: which tiles, warps and pipeline stages a kernel runs with, and why."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import warnings
from dataclasses import astuple, dataclass
from typing import Literal

from ... import env
from ...spec import AttentionSpec
from ...version import __version__

Role = Literal["forward", "dq", "dkdv", "gradients"]


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
            if not isinstance(value, int) or value <= 0 or value & (value - 1):
                raise ValueError(f"{name}: got {value!r}; want a power of two")
        if min(self.tile_m, self.tile_n) < 16:
            raise ValueError(f"tile_m, tile_n: got {self.tile_m}, {self.tile_n}; the matrix units want 16 at least")
        if self.tile_m > 128:
            raise ValueError(f"tile_m: got {self.tile_m}; want at most 128, to which rows of lse are padded")
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ValueError(f"num_stages: got {self.num_stages!r}; want 1 or more")

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's launch options; multiply-add fusion is named because its default differs between releases."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, {self.num_warps} warps, {self.num_stages} stages"


def padded_dim(spec: AttentionSpec) -> int:
    """64, 128 or 256: the power of two that holds D and Dv."""
    return max(64, 1 << (max(spec.head_dim, spec.head_dim_v) - 1).bit_length())


@dataclass(frozen=True)
class Key:
    """What the best tiles depend on: the kernel, bytes per element, the head dim's tile, and a window's loops."""

    role: Role
    itemsize: int
    dim: int  # see padded_dim
    windowed: bool

    @staticmethod
    def of(role: Role, spec: AttentionSpec) -> Key:
        return Key(role, spec.dtype.itemsize, padded_dim(spec), spec.window_left >= 0 or spec.window_right >= 0)

    def __str__(self) -> str:
        return f"{self.role}/{8 * self.itemsize}-bit/D{self.dim}/{'windowed' if self.windowed else 'full'}"


Table = dict[Key, Tiles]


def _table(rows: dict[tuple[Role, int, int], Tiles | tuple[Tiles, Tiles]]) -> Table:
    """A table from (role, itemsize, dim): tiles, or (tiles without a window, tiles with one)."""
    table = {}
    for (role, itemsize, dim), tiles in rows.items():
        full, windowed = tiles if isinstance(tiles, tuple) else (tiles, tiles)
        table[Key(role, itemsize, dim, False)] = full
        table[Key(role, itemsize, dim, True)] = windowed
    return table


# 16-bit: of several tilings, the one that does not spill and is fastest over S = 512 ... 16k on one H200
# (benchmarks/results/tiles-h200.json). Small tiles on 4 warps win: two or three programs share a multiprocessor, and
# one's softmax runs under another's products. float32: the largest tiles that do not spill. Gradients in one launch:
# tiles of which two programs fit; no others were timed.
SM_90 = _table({
    ("forward", 2, 64): Tiles(64, 64, 4, 3),
    ("forward", 2, 128): Tiles(64, 64, 4, 3),
    ("forward", 2, 256): Tiles(64, 32, 4, 2),
    ("dq", 2, 64): (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3)),
    ("dq", 2, 128): (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    ("dq", 2, 256): Tiles(128, 32, 8, 2),
    ("dkdv", 2, 64): Tiles(64, 64, 4, 3),
    ("dkdv", 2, 128): (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3)),
    ("dkdv", 2, 256): (Tiles(16, 64, 8, 3), Tiles(32, 32, 8, 2)),
    ("gradients", 2, 64): Tiles(64, 32, 4, 3),
    ("gradients", 2, 128): (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 3)),
    ("forward", 4, 64): Tiles(64, 32, 8, 2),
    ("forward", 4, 128): Tiles(32, 32, 8, 1),
    ("forward", 4, 256): Tiles(32, 32, 8, 2),
    ("dq", 4, 64): Tiles(64, 32, 8, 2),
    ("dq", 4, 128): Tiles(32, 32, 8, 2),
    ("dq", 4, 256): Tiles(32, 32, 8, 2),
    ("dkdv", 4, 64): Tiles(32, 32, 8, 1),
    ("dkdv", 4, 128): Tiles(32, 16, 8, 1),
    ("dkdv", 4, 256): Tiles(16, 16, 8, 1),
})  # fmt: skip

# Not measured yet: the first of a list of tilings, large ones first, that neither spills nor exceeds the
# shared memory (163 KiB, 99 KiB, 64 KiB, 64 KiB) when compiled ahead of time. `flashtile tune` measures.
SM_80 = _table({
    ("forward", 2, 64): Tiles(64, 64, 4, 3),
    ("forward", 2, 128): Tiles(64, 64, 4, 3),
    ("forward", 2, 256): Tiles(64, 64, 8, 2),
    ("dq", 2, 64): Tiles(64, 64, 4, 3),
    ("dq", 2, 128): Tiles(64, 64, 4, 2),
    ("dq", 2, 256): Tiles(64, 64, 8, 1),
    ("dkdv", 2, 64): Tiles(32, 64, 4, 3),
    ("dkdv", 2, 128): Tiles(32, 64, 8, 2),
    ("dkdv", 2, 256): Tiles(16, 64, 8, 1),
    ("forward", 4, 64): Tiles(64, 32, 8, 2),
    ("forward", 4, 128): Tiles(64, 32, 8, 2),
    ("forward", 4, 256): Tiles(32, 32, 8, 2),
    ("dq", 4, 64): Tiles(64, 32, 8, 2),
    ("dq", 4, 128): Tiles(64, 32, 8, 2),
    ("dq", 4, 256): Tiles(32, 32, 8, 2),
    ("dkdv", 4, 64): Tiles(32, 32, 8, 2),
    ("dkdv", 4, 128): Tiles(32, 16, 8, 1),
    ("dkdv", 4, 256): Tiles(32, 16, 8, 1),
})  # fmt: skip

SM_120 = _table({
    ("forward", 2, 64): Tiles(64, 64, 4, 3),
    ("forward", 2, 128): Tiles(64, 64, 4, 3),
    ("forward", 2, 256): Tiles(64, 32, 8, 2),
    ("dq", 2, 64): Tiles(64, 64, 4, 3),
    ("dq", 2, 128): Tiles(64, 32, 4, 3),
    ("dq", 2, 256): Tiles(64, 32, 8, 1),
    ("dkdv", 2, 64): Tiles(32, 64, 4, 3),
    ("dkdv", 2, 128): Tiles(32, 64, 8, 2),
    ("dkdv", 2, 256): Tiles(16, 64, 8, 1),
    ("forward", 4, 64): Tiles(64, 32, 8, 2),
    ("forward", 4, 128): Tiles(32, 32, 8, 1),
    ("forward", 4, 256): Tiles(32, 32, 8, 1),
    ("dq", 4, 64): Tiles(64, 32, 8, 2),
    ("dq", 4, 128): Tiles(32, 32, 8, 2),
    ("dq", 4, 256): Tiles(16, 16, 8, 1),
    ("dkdv", 4, 64): Tiles(32, 32, 8, 1),
    ("dkdv", 4, 128): Tiles(32, 16, 8, 1),
    ("dkdv", 4, 256): Tiles(16, 16, 8, 1),
})  # fmt: skip

GFX1201 = SM_120
GFX942 = {**SM_120, **_table({("forward", 2, 128): Tiles(128, 64, 8, 2)})}

# Small, so that small problems have edges, masked and full blocks.
INTERPRETER = _table({
    (role, itemsize, dim): Tiles(32, 16, 1, 1)
    for role in ("forward", "dq", "dkdv", "gradients") for itemsize in (2, 4) for dim in (64, 128, 256)
})  # fmt: skip

TABLES = {
    "sm_80": SM_80, "sm_90": SM_90, "sm_120": SM_120, "gfx942": GFX942, "gfx1201": GFX1201, "interpreter": INTERPRETER,
}  # fmt: skip


def choose(role: Role, spec: AttentionSpec, arch: str) -> Tiles:
    """The tiles of one kernel for `spec` on `arch`: the tuned ones, or the table's."""
    key = Key.of(role, spec)
    return tuned().get(arch, {}).get(str(key)) or TABLES[table_of(arch)][key]


def has_tiles(role: Role, spec: AttentionSpec, arch: str) -> bool:
    """Whether there is such a kernel for `spec` on `arch`."""
    return Key.of(role, spec) in TABLES[table_of(arch)]


def table_of(arch: str) -> str:
    """The table an architecture uses: its own, or that of its nearest relative in shared memory and matrix units."""
    if arch in TABLES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942" if arch.startswith("gfx9") else "gfx1201"
    if arch.startswith("sm_10"):
        return "sm_90"  # data-centre Blackwell has Hopper's shared memory
    return "sm_80" if arch == "sm_87" else "sm_120"  # sm_86, sm_89, sm_121: 99 KiB of shared memory


@functools.cache
def tuned() -> dict[str, dict[str, Tiles]]:
    """What `flashtile tune` measured on this machine: {arch: {key: tiles}}; read once."""
    path = env.tuned_configs()
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        if document["measured_with"] != _versions():
            warnings.warn(
                f"{path} was measured with {document['measured_with']}, this is {_versions()}: ignored; "
                "run `flashtile tune` again",
                stacklevel=2,
            )
            return {}
        return {arch: {key: Tiles(*values) for key, values in rows.items()} for arch, rows in document["tiles"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path} is damaged ({error}): ignored; run `flashtile tune` again", stacklevel=2)
        return {}


def save_tuned(arch: str, rows: dict[Key, Tiles]) -> None:
    """Adds one architecture's measured tiles to the file that `tuned` reads; the file is replaced in one step."""
    path = env.tuned_configs()
    everything = {**tuned(), arch: {**tuned().get(arch, {}), **{str(key): tiles for key, tiles in rows.items()}}}
    document = {
        "measured_with": _versions(),
        "tiles": {name: {key: astuple(tiles) for key, tiles in table.items()} for name, table in everything.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1))
    unfinished.replace(path)
    tuned.cache_clear()


def _versions() -> str:
    """What makes measured tiles stale when it changes."""
    return f"flashtile {__version__}, triton {importlib.metadata.version('triton')}"
