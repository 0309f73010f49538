"""What each design choice of the Hopper forward kernel brings: the kernel is timed with the choice switched off.

    python benchmarks/hopper_ablation.py benchmarks/results/hopper-ablation-h200.json

A choice is switched off in the kernel's own source, or in what the host gives it. Each variant is checked against the
kernel before it is timed, in random order, on a GPU that does not rest. bfloat16, 16k tokens, hidden size 2048.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import typer

from flashtile.backends.hopper import config, launch
from flashtile.backends.hopper.forward_problem import MANY_KEYS
from flashtile.bench.report import atomically, describe_machine
from flashtile.bench.timing import gemm_flops, median_ms
from flashtile.spec import AttentionSpec

Lists = list[list[tuple[int, int]]]

NO_TURNS = """
@gluon.jit
def take_turn(warpgroup: gl.constexpr):
    pass


@gluon.jit
def pass_turn(warpgroup: gl.constexpr, WARPGROUPS: gl.constexpr):
    pass


@gluon.jit
def load_q("""
PING_PONG = [("\n@gluon.jit\ndef load_q(", NO_TURNS)]
ONE_END = [  # for all warpgroups of a tile, that of its last rows
    ("        if p.OWN_BLOCKS:\n            full_end, unseen", "        if False:\n            full_end, unseen"),
]
ONE_WAY = [("in_order(here, end - 1 - i, from_first,", "in_order(here, end - 1 - i, False,")]


def in_turn(spec: AttentionSpec, rows: int, warpgroups: int, tile_n: int, programs: int) -> Lists:
    """Tiles as a grid would have them: of one head after the other, dealt out to the programs in turn."""
    m_blocks = range(-(-spec.seqlen_q // rows))
    tiles = [(head, m_block) for head in range(spec.batch * spec.heads_q) for m_block in m_blocks]
    return [tiles[i::programs] for i in range(min(programs, len(tiles)))]


@dataclass(frozen=True)
class Choice:
    """How to switch a choice off: what to replace in forward.py, what the host does; tiles of None: not possible.
    concerns: the problems for which it makes a difference."""

    source: list[tuple[str, str]] = field(default_factory=list)
    schedule: Callable[..., Lists] = launch.schedule
    tiles: Callable[[config.Tiles], config.Tiles | None] = lambda tiles: tiles
    steady: bool = True
    concerns: Callable[[AttentionSpec], bool] = lambda spec: True


CHOICES = {
    "all": Choice(),
    "no ping-pong": Choice(PING_PONG),
    "no overlap of softmax and P V": Choice(
        tiles=lambda t: replace(t, o_awaited="before") if t.o_awaited != "before" else None
    ),
    "O awaited behind the softmax": Choice(
        tiles=lambda t: replace(t, o_awaited="behind") if t.o_awaited == "before" else None
    ),
    "no flat loop": Choice(tiles=lambda t: replace(t, flat=False) if t.flat else None),
    "a flat loop": Choice(tiles=lambda t: replace(t, flat=True) if not t.flat else None),
    "tiles dealt out in turn": Choice(schedule=in_turn),
    "a running maximum": Choice(steady=False),
    "Q in one slot": Choice(tiles=lambda t: replace(t, q_stages=1) if t.q_stages > 1 else None),
    "two warpgroups": Choice(
        tiles=lambda t: replace(t, warpgroups=2, compute_registers=240) if t.warpgroups == 3 else None
    ),
    "no end of its own for each warpgroup": Choice(
        ONE_END,
        tiles=lambda t: t if t.rows - t.tile_m >= t.tile_n else None,
        concerns=lambda spec: spec.window_right >= 0,
    ),
    "keys from the last to the first": Choice(
        ONE_WAY, concerns=lambda spec: spec.window_right >= 0 and spec.seqlen_k >= MANY_KEYS.value
    ),
    "Q in shared memory": Choice(tiles=lambda t: replace(t, q_kept=0) if t.q_kept else None),
}


def module_without(choice: Choice) -> ModuleType:
    """forward.py with a choice's replacements, each of which must apply once."""
    source = Path(launch.__file__).with_name("forward.py").read_text()
    for old, new in choice.source:
        if source.count(old) != 1:
            raise ValueError(f"forward.py: found {source.count(old)} times, want once:\n{old}")
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / "forward.py"  # stays: triton reads the source again when it compiles
    path.write_text(source)
    name = f"flashtile.backends.hopper.without_{zlib.crc32(source.encode()):x}"  # triton caches by name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Variant(launch.ForwardKernel):
    """The forward kernel with a choice switched off."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.kernel = module_without(choice).forward_kernel

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Callable[..., None]:
        tiles = self.choice.tiles(config.choose(spec))
        changes = {"forward_kernel": self.kernel, "schedule": self.choice.schedule}
        if not self.choice.steady:
            changes["steady"] = mock.Mock(return_value=False)
        with mock.patch.multiple(launch, **changes), mock.patch.object(launch.config, "choose", return_value=tiles):
            return super().prepare(spec, tensors)


def measure(spec: AttentionSpec, variants: dict[str, Variant], rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant that there is for a spec."""
    device = torch.device("cuda")
    q, k, v = (torch.randn(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim, device=device).to(spec.dtype)
               for _ in range(3))  # fmt: skip
    calls: dict[str, Callable[[], object]] = {}
    right: torch.Tensor | None = None
    for name, variant in variants.items():
        if variant.choice.tiles(config.choose(spec)) is None or not variant.choice.concerns(spec):
            continue
        out, lse = torch.full_like(q, torch.nan), torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, device=device)
        run = variant.run_for(spec, (q, k, v), (out, lse))
        run(q, k, v, out, lse)
        right = out.clone() if right is None else right
        if not torch.allclose(out, right, atol=0.02, rtol=0.02):
            raise ValueError(f"{name}: wrong by {(out.float() - right.float()).abs().max()}")
        calls[name] = lambda run=run, out=out, lse=lse: run(q, k, v, out, lse)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(median_ms(calls[name], device, 40))
    return {name: statistics.median(found) for name, found in times.items()}


def main(output: Path, rounds: int = 5) -> None:
    """Times every choice switched off, prints TFLOP/s and writes JSON."""
    device = torch.device("cuda")
    variants = {name: Variant(choice) for name, choice in CHOICES.items()}
    rows = []
    for dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in (512, 2048, 8192):
                heads, batch = 2048 // dim, 16384 // seqlen
                spec = AttentionSpec(
                    batch, seqlen, seqlen, heads, heads, dim, dim, torch.bfloat16, dim**-0.5,
                    window_right=0 if causal else -1,
                )  # fmt: skip
                flops = 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
                tflops = {name: flops / ms / 1e9 for name, ms in measure(spec, variants, rounds).items()}
                rows.append({"head_dim": dim, "causal": causal, "seqlen": seqlen, "tflops": tflops})
                effects = ", ".join(f"{name} {x / tflops['all'] - 1:+.0%}" for name, x in tflops.items())
                typer.echo(f"{'causal' if causal else 'full'} D {dim} S {seqlen}: {tflops['all']:.0f}, {effects}")
    document = {**describe_machine(device), "gemm_flops": gemm_flops(device, torch.bfloat16), "rows": rows}
    atomically(output, lambda temporary: temporary.write_text(json.dumps(document, indent=1)))


if __name__ == "__main__":
    typer.run(main)
