"""What would run one problem on a device, and what it costs: counted, nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import dispatch
from ..plan import Plan
from ..spec import AttentionSpec
from .counting import Tiles, count_tiles, flops, least_bytes, standard_bytes, tile_bytes, visible_pairs
from .roofline import Ceiling, ceiling


@dataclass(frozen=True)
class Cost:
    """One direction: FLOPs over visible pairs, HBM bytes of this algorithm and of the standard one, least time."""

    flops: float
    least_bytes: int
    standard_bytes: int
    roofline_ms: float


@dataclass(frozen=True)
class Explanation:
    """The answer of `flashtile explain`; `plan`, `tiles` and `tile_bytes` are None where the backend offers no plan,
    `leaves_backward` where the backward pass is its own."""

    spec: AttentionSpec
    device: torch.device
    declined: dict[str, str | None]
    backend: str
    leaves_backward: str | None
    plan: Plan | None
    pairs: int
    tiles: Tiles | None
    tile_bytes: int | None
    forward: Cost
    backward: Cost
    ceiling: Ceiling


def explain(spec: AttentionSpec, device: torch.device) -> Explanation:
    """Which backend would take `spec` on `device`, how, and at what cost; `device` need not be here."""
    declined = dispatch.declined(spec, device)
    backend = next(name for name, reason in declined.items() if reason is None)
    leaves_backward = getattr(dispatch.BACKENDS[backend], "leaves_backward", None)
    offer = getattr(dispatch.BACKENDS[backend], "plan", None)
    plan = None if offer is None else offer(spec, device)
    tiles = None if plan is None else count_tiles(spec, plan.tile_m, plan.tile_n)
    limits = ceiling(device, spec.dtype)
    pairs = visible_pairs(spec)

    def cost(mode) -> Cost:
        operations, moved = flops(spec, mode, pairs), least_bytes(spec, mode)
        return Cost(operations, moved, standard_bytes(spec, mode), limits.milliseconds(operations, moved))

    return Explanation(
        spec,
        device,
        declined,
        backend,
        None if leaves_backward is None else leaves_backward(spec),
        plan,
        pairs,
        tiles,
        None if plan is None or tiles is None else tile_bytes(spec, tiles, plan.tile_n),
        cost("fwd"),
        cost("bwd"),
        limits,
    )


def lines(answer: Explanation) -> list[tuple[str, str]]:
    """`answer` as (what, text) pairs."""
    spec, plan, tiles = answer.spec, answer.plan, answer.tiles
    heads = spec.batch * spec.heads_q
    share = answer.pairs / max(1, spec.seqlen_q * spec.seqlen_k)
    told = [(f"backend {name}", reason or "can run this") for name, reason in answer.declined.items()]
    told += [
        ("would run", f"{answer.backend} on {answer.device}"),
        ("config", "–" if plan is None else plan.config),
        ("grid", "–" if plan is None else f"{plan.grid} programs"),
        (
            "visible pairs",
            f"{answer.pairs} of {spec.seqlen_q} × {spec.seqlen_k} ({share:.1%}), in each of {heads} heads",
        ),
        ("tiles", "–" if plan is None or tiles is None else _tiles(plan, tiles)),
    ]
    if answer.leaves_backward is not None:
        told.insert(len(answer.declined) + 1, ("backward", f"goes elsewhere: {answer.leaves_backward}"))
    for name, cost in (("forward", answer.forward), ("backward", answer.backward)):
        saved = cost.standard_bytes / cost.least_bytes if cost.least_bytes else 1.0
        told += [
            (f"{name} FLOPs", f"{cost.flops / 1e9:.3f} GFLOP over the visible pairs"),
            (f"{name} HBM, this", f"{_mib(cost.least_bytes)}: each tensor crosses once"),
            (f"{name} HBM, standard", f"{_mib(cost.standard_bytes)}: S and P too, {saved:.1f}× as much"),
            (f"{name} roofline", f"{cost.roofline_ms:.4g} ms"),
        ]
        if name == "forward" and answer.tile_bytes is not None:
            told.insert(-2, ("forward HBM, no cache", f"{_mib(answer.tile_bytes)}: K and V loaded again for each tile"))
    limits = answer.ceiling
    rates = f"{limits.flops_per_second / 1e12:.4g} TFLOP/s, {limits.bytes_per_second / 1e9:.4g} GB/s"
    return [*told, ("roofline of", f"{limits.name}: {rates} ({limits.source})")]


def _tiles(plan: Plan, tiles: Tiles) -> str:
    counts = f"{tiles.full} full, {tiles.masked} masked, {tiles.skipped} skipped"
    return f"{tiles.total} of {plan.tile_m} × {plan.tile_n} per head: {counts}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
