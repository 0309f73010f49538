"""What Algorithms 1 and 2 share: which tiles to compute, how to mask them, products of tiles.

Legend: a row block has M queries of the G = Hq / Hk query heads that share one key head, its R = M * G rows
ordered query first; a key block has N keys. S, P: (R, N) · Q, O, dO, dQ: (R, D or Dv) · K, V: (N, D or Dv).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec

# A tile of scores.
TILE_ROWS = 512
TILE_KEYS = 512
# A tile across the edge of the mask is cut into strips of this many queries.
STRIP = 128


class Block(NamedTuple):
    """Queries or keys start..end-1."""

    start: int
    end: int

    def within(self, outer: Block, repeat: int = 1) -> slice:
        """Where this block lies in a tensor that holds `outer`, `repeat` rows for each element."""
        return slice((self.start - outer.start) * repeat, (self.end - outer.start) * repeat)

    def __len__(self) -> int:
        return self.end - self.start


class Tile(NamedTuple):
    """Queries against keys; `masked` if some of these pairs are hidden."""

    queries: Block
    keys: Block
    masked: bool


def query_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_r blocks of queries (line 1 of both algorithms)."""
    return _blocks(spec.seqlen_q, max(1, TILE_ROWS // spec.group))


def key_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_c blocks of keys (line 1 of both algorithms); longer ones where there are few rows."""
    rows = max(1, min(TILE_ROWS, spec.seqlen_q * spec.group))
    return _blocks(spec.seqlen_k, min(4096, TILE_ROWS * TILE_KEYS // rows))


def _blocks(length: int, size: int) -> list[Block]:
    return [Block(start, min(start + size, length)) for start in range(0, length, size)]


def visible_tiles(spec: AttentionSpec, queries: Block, keys: Block) -> Iterator[Tile]:
    """Tiles that cover every visible pair of `queries` x `keys` once, and as few others as strips allow.

    The one place that knows block bounds: nothing where all is hidden, one tile where all is visible, and
    strips clipped to what they see in between.
    """
    if _all_visible(spec, queries, keys):
        yield Tile(queries, keys, masked=False)
        return
    for start in range(queries.start, queries.end, STRIP):
        strip = Block(start, min(start + STRIP, queries.end))
        first, end = spec.visible_keys(strip.start)[0], spec.visible_keys(strip.end - 1)[1]
        seen = Block(max(keys.start, first), min(keys.end, end))
        if seen.start < seen.end:
            yield Tile(strip, seen, masked=not _all_visible(spec, strip, seen))


def _all_visible(spec: AttentionSpec, queries: Block, keys: Block) -> bool:
    """Whether every query sees every key: the last query the first key, and the first query the last key."""
    return spec.visible_keys(queries.end - 1)[0] <= keys.start and keys.end <= spec.visible_keys(queries.start)[1]


def hide(spec: AttentionSpec, tile: Tile, x: Tensor, value: float) -> None:
    """Writes `value` over the hidden pairs of x (R, N).

    In a strip each edge of the mask is a diagonal, and what it hides a slice of one constant triangle.
    """
    if not tile.masked:
        return
    query, (key, key_end), length = tile.queries.start, tile.keys, len(tile.queries)
    pairs = x.unflatten(0, (length, spec.group))  # (M, G, N)
    triangle = _triangle()[:length, None]  # (M, 1, STRIP)
    if spec.window_right >= 0:
        end = query + spec.offset + spec.window_right + 1  # the first query sees keys before this one
        if (start := max(key, end)) < key_end:
            pairs[..., start - key :].masked_fill_(triangle[..., start - end : key_end - end], value)
    if spec.window_left >= 0:
        first = query + spec.offset - spec.window_left  # the first query sees keys from this one on
        if (stop := min(key_end, first + length - 1)) > key:
            pairs[..., : stop - key].masked_fill_(~triangle[..., key - first : stop - first], value)


@functools.cache
def _triangle() -> Tensor:
    """(STRIP, STRIP) bool: column >= row."""
    return torch.ones(STRIP, STRIP, dtype=torch.bool).triu()


def without_keys(spec: AttentionSpec) -> int:
    """How many queries see no key at all: the first ones, as the mask is aligned to the bottom right."""
    if spec.seqlen_k == 0:
        return spec.seqlen_q
    return min(spec.seqlen_q, max(0, -spec.offset - spec.window_right)) if spec.window_right >= 0 else 0


def queries_of(spec: AttentionSpec, x: Tensor, batch: int, head_k: int, queries: Block) -> Tensor:
    """(M, G, ...) of x (B, Sq, Hq, ...): the query heads that share a key head."""
    return x[batch, queries.start : queries.end, head_k * spec.group : (head_k + 1) * spec.group]


def keys_of(x: Tensor, batch: int, head_k: int, keys: Block) -> Tensor:
    """(N, D) of x (B, Sk, Hk, D)."""
    return x[batch, keys.start : keys.end, head_k]


def product_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of P and dS in products: bfloat16 stays, as its products run at twice the speed of float32.

    Products of float16 have no fast kernel on most CPUs (a twentieth of float32's speed where measured).
    """
    return torch.bfloat16 if spec.dtype == torch.bfloat16 else spec.lse_dtype


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. A bfloat16 product is rounded once per tile, and summed over tiles in float32."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total.add_(torch.mm(a, b))


def scores(spec: AttentionSpec, q: Tensor, k: Tensor, scratch: Scratch) -> Tensor:
    """S = Q K^T of a tile, soft-capped; q (R, D) is multiplied by `query_factor` already."""
    s = torch.mm(q, k.t(), out=scratch.tile(len(q), len(k)))
    return s.tanh_().mul_(spec.softcap) if spec.softcap > 0 else s


def query_factor(spec: AttentionSpec) -> float:
    """What Q is multiplied by once per block, so that no tile of scores has to be."""
    return spec.softmax_scale / spec.softcap if spec.softcap > 0 else spec.softmax_scale


def exp_(x: Tensor) -> Tensor:
    """exp(x) in place. exp2 takes 0.3 ns per element here; exp takes 0.8, and 10 where the result is 0."""
    return x.mul_(_LOG2_E).exp2_()


_LOG2_E = math.log2(math.e)


class Scratch:
    """One tile's worth of memory, used for tile after tile."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        rows = max(map(len, query_blocks(spec)), default=0) * spec.group
        self._memory = torch.empty(rows * max(map(len, key_blocks(spec)), default=0), dtype=dtype)

    def tile(self, rows: int, columns: int) -> Tensor:
        """A contiguous (rows, columns) tensor on this memory."""
        return self._memory[: rows * columns].view(rows, columns)

    def converted(self, x: Tensor) -> Tensor:
        """x in the dtype of this memory: x itself where it has that dtype."""
        return x if x.dtype == self._memory.dtype else self.tile(*x.shape).copy_(x)
