"""What one attention problem costs: visible pairs, tiles, FLOPs and HBM bytes, counted and not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..spec import AttentionSpec

Mode = Literal["fwd", "bwd"]


def visible_pairs(spec: AttentionSpec) -> int:
    """Pairs (query, key) of one batch and head where the query sees the key."""
    return sum(end - first for first, end in map(spec.visible_keys, range(spec.seqlen_q)))


def paper_pairs(spec: AttentionSpec) -> float:
    """Pairs as the papers count them: Sq * Sk, halved for a square causal mask; any other mask exactly."""
    square = spec.seqlen_q == spec.seqlen_k and spec.window_left < 0
    if square and spec.window_right == 0:
        return spec.seqlen_q * spec.seqlen_k / 2
    return visible_pairs(spec)


def flops(spec: AttentionSpec, mode: Mode, pairs: float) -> float:
    """Floating point operations of the matrix products over `pairs` pairs per batch and head.

    Forward: Q K^T and P V. Backward: Q K^T again, dS^T Q and dS K (D wide), dO V^T and P^T dO (Dv wide), which is
    2.5 x the forward where D = Dv (FlashAttention-2, section 4.1).
    """
    D, Dv = spec.head_dim, spec.head_dim_v
    width = D + Dv if mode == "fwd" else 3 * D + 2 * Dv
    return 2 * spec.batch * spec.heads_q * pairs * width


@dataclass(frozen=True)
class Tiles:
    """The tiles of one batch and head: `full` ones need no mask, `masked` ones do, `skipped` ones are not visited."""

    full: int
    masked: int
    skipped: int

    @property
    def total(self) -> int:
        return self.full + self.masked + self.skipped


def count_tiles(spec: AttentionSpec, tile_m: int, tile_n: int) -> Tiles:
    """Tiles of `tile_m` queries x `tile_n` keys by what is visible in them.

    A tile that sticks out past the last key is masked there, so it is never full; rows past the last query
    are not counted against it.
    """
    blocks_n = -(-spec.seqlen_k // tile_n)
    full = visited = blocks_m = 0
    for start in range(0, spec.seqlen_q, tile_m):
        blocks_m += 1
        ranges = [spec.visible_keys(row) for row in range(start, min(start + tile_m, spec.seqlen_q))]
        # consecutive rows see ranges that move one key at a time, so what a row block sees is one range too
        seen = [(first, end) for first, end in ranges if first < end]
        if not seen:
            continue
        visited += -(-max(end for _, end in seen) // tile_n) - min(first for first, _ in seen) // tile_n
        seen_by_all = max(first for first, _ in ranges), min(end for _, end in ranges)
        full += max(0, seen_by_all[1] // tile_n - -(-seen_by_all[0] // tile_n))
    return Tiles(full, visited - full, blocks_m * blocks_n - visited)


def least_bytes(spec: AttentionSpec, mode: Mode) -> int:
    """HBM bytes when every tensor of this algorithm crosses once: what its roofline needs.

    Forward reads Q, K, V and writes O and L. Backward reads Q, K, V, O, dO and L, and writes dQ, dK and dV. (K and
    V tiles that several row blocks read again are expected to come from the L2 cache.)
    """
    q, k, v, out, lse = _tensor_bytes(spec)
    if mode == "fwd":
        return q + k + v + out + lse
    return (q + k + v + out) + out + lse + (q + k + v)


def tile_bytes(spec: AttentionSpec, tiles: Tiles, tile_n: int) -> int:
    """HBM bytes of the forward pass if no cache held K and V: each visited tile loads its keys and values again.

    The IO complexity of FlashAttention section 3.2, with this tile size: an upper bound beside `least_bytes`.
    """
    q, _, _, out, lse = _tensor_bytes(spec)
    keys = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize * tile_n
    return q + out + lse + spec.batch * spec.heads_q * (tiles.full + tiles.masked) * keys


def standard_bytes(spec: AttentionSpec, mode: Mode) -> int:
    """HBM bytes of standard attention as FlashAttention counts them (Algorithm 0; Algorithm 3 backward).

    Forward: S is written and read, P is written and read (4 Sq Sk), Q, K, V are read, O is written. Backward: P
    is read twice, dP written and read, dS written and read twice (7 Sq Sk); dO is read twice, Q, K and V once,
    dQ, dK and dV are written. Masked elements cross like the others.
    """
    q, k, v, out, _ = _tensor_bytes(spec)
    square = spec.batch * spec.heads_q * spec.seqlen_q * spec.seqlen_k * spec.dtype.itemsize
    if mode == "fwd":
        return q + k + v + out + 4 * square
    return 2 * out + 2 * (q + k + v) + 7 * square


def _tensor_bytes(spec: AttentionSpec) -> tuple[int, int, int, int, int]:
    """Bytes of q, k, v, out and lse."""
    item = spec.dtype.itemsize
    rows, keys = spec.batch * spec.seqlen_q * spec.heads_q, spec.batch * spec.seqlen_k * spec.heads_k
    return (
        rows * spec.head_dim * item,
        keys * spec.head_dim * item,
        keys * spec.head_dim_v * item,
        rows * spec.head_dim_v * item,
        rows * spec.lse_dtype.itemsize,
    )
