"""What Algorithms 1 and 2 share: which tiles to compute, how to mask them, products of tiles.

A tile is computed for several heads at once, so that each core of the machine works on heads of its own.

Legend: Z heads at once (over batches, too) · a query block has M queries of the G = Hq / Hk query heads that share
a key head, its R = M * G rows ordered query first · a key block has N keys. S, P: (Z, R, N) · Q, O, dO, dQ:
(Z, R, D or Dv) · K, V: (Z, N, D or Dv).
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec

# exp(x) = exp2(x LOG2_E). torch's exp2 takes 0.3 ns per element, its exp 0.8 ns, and 10 ns where the result is 0.
# The number that torch multiplies by: rounded to the dtype of scores.
LOG2_E = {dtype: torch.tensor(math.log2(math.e), dtype=dtype).item() for dtype in (torch.float32, torch.float64)}

# Rows and keys of a block. A tile takes some 30 calls into torch whatever its size, so half as large costs a tenth.
BLOCK = 512
# Tiles of this many heads at once for each thread: 2 MB of float32 scores, which still fit a core's share of the caches.
HEADS_PER_THREAD = 2
# A tile across an edge of the mask is cut into strips of this many queries: the finest that bfloat16's products bear.
STRIP = 256


class Block(NamedTuple):
    """Queries or keys start..end-1."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Tile(NamedTuple):
    """Queries against keys; `masked` if some of these pairs are hidden.

    `rows` and `cols` say where they lie in tensors of the two blocks.
    """

    queries: Block
    keys: Block
    masked: bool
    rows: slice = slice(None)
    cols: slice = slice(None)


class Heads(NamedTuple):
    """Batches and key heads whose tiles are computed together."""

    batches: slice
    heads: slice

    def of_queries(self, spec: AttentionSpec, x: Tensor) -> Tensor:
        """(B', H', Sq, G, ...) of x (B, Sq, Hq, ...), a view."""
        return x.unflatten(2, (spec.heads_k, spec.group))[self.batches, :, self.heads].transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """(B', H', Sk, D) of x (B, Sk, Hk, D), a view."""
        return x[self.batches, :, self.heads].transpose(1, 2)


def heads_at_once(spec: AttentionSpec) -> list[Heads]:
    """All heads of all batches, as many at once as make a tile for every thread: more where tiles are small."""
    rows, keys = min(BLOCK, spec.seqlen_q * spec.group), min(BLOCK, spec.seqlen_k)
    count = HEADS_PER_THREAD * torch.get_num_threads() * BLOCK**2 // max(1, rows * keys)
    if count >= spec.heads_k:
        batches = count // spec.heads_k
        return [Heads(slice(b, b + batches), slice(None)) for b in range(0, spec.batch, batches)]
    return [
        Heads(slice(b, b + 1), slice(h, h + count)) for b in range(spec.batch) for h in range(0, spec.heads_k, count)
    ]


def query_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_r blocks of queries (line 1 of both algorithms)."""
    return _blocks(spec.seqlen_q, max(1, BLOCK // spec.group))


def key_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_c blocks of keys (line 1 of both algorithms); longer ones where there are few rows."""
    rows = max(1, min(BLOCK, spec.seqlen_q * spec.group))
    return _blocks(spec.seqlen_k, min(4096, BLOCK**2 // rows))


def _blocks(length: int, size: int) -> list[Block]:
    return [Block(start, min(start + size, length)) for start in range(0, length, size)]


def visible_tiles(spec: AttentionSpec, queries: Block, keys: Block) -> list[Tile]:
    """Tiles that cover every visible pair of `queries` x `keys` once, and as few others as strips allow.

    The one place that knows block bounds: nothing where all is hidden, one tile where all is visible, and
    strips clipped to what they see in between.
    """
    if _all_visible(spec, queries, keys):
        return [Tile(queries, keys, masked=False)]
    tiles: list[Tile] = []
    for start in range(queries.start, queries.end, STRIP):
        strip = Block(start, min(start + STRIP, queries.end))
        first, end = spec.visible_keys(strip.start)[0], spec.visible_keys(strip.end - 1)[1]
        seen = Block(max(keys.start, first), min(keys.end, end))
        if seen.start >= seen.end:
            continue
        masked = not _all_visible(spec, strip, seen)
        if seen == keys and not masked and tiles and tiles[-1].keys == keys and not tiles[-1].masked:
            strip = Block(tiles.pop().queries.start, strip.end)  # strips that see the whole block make one tile
        rows = slice((strip.start - queries.start) * spec.group, (strip.end - queries.start) * spec.group)
        tiles.append(Tile(strip, seen, masked, rows, slice(seen.start - keys.start, seen.end - keys.start)))
    return tiles


def _all_visible(spec: AttentionSpec, queries: Block, keys: Block) -> bool:
    """Whether every query sees every key: the last query the first key, and the first query the last key."""
    return spec.visible_keys(queries.end - 1)[0] <= keys.start and keys.end <= spec.visible_keys(queries.start)[1]


def tiles_of_queries(spec: AttentionSpec, queries: Block) -> list[tuple[Block, list[Tile]]]:
    """The key blocks that a block of queries sees, each with its tiles (lines 6 and 8 of Algorithm 1)."""
    pairs = ((keys, visible_tiles(spec, queries, keys)) for keys in key_blocks(spec))
    return [(keys, tiles) for keys, tiles in pairs if tiles]


def tiles_of_keys(spec: AttentionSpec, keys: Block) -> list[tuple[Block, list[Tile]]]:
    """The query blocks that see a block of keys, each with its tiles (lines 8 and 10 of Algorithm 2)."""
    pairs = ((queries, visible_tiles(spec, queries, keys)) for queries in query_blocks(spec))
    return [(queries, tiles) for queries, tiles in pairs if tiles]


def hide_(spec: AttentionSpec, tile: Tile, x: Tensor, value: float) -> None:
    """Writes `value`, 0 or -inf, over the hidden pairs of x (Z, R, N), whatever they hold.

    In a strip each edge of the mask is a diagonal, and what it hides a triangle.
    """
    query, (key, key_end), length = tile.queries.start, tile.keys, len(tile.queries)
    pairs = x.unflatten(1, (length, spec.group))  # (Z, M, G, N)
    if spec.window_right >= 0:
        end = query + spec.offset + spec.window_right + 1  # the first query sees keys before this one
        if (start := max(key, end)) < key_end:
            triangle = (slice(length), None, slice(start - end, key_end - end))
            _hide_triangle_(pairs[..., start - key :], triangle, value, right=True)
    if spec.window_left >= 0:
        first = query + spec.offset - spec.window_left  # the first query sees keys from this one on
        if (stop := min(key_end, first + length - 1)) > key:
            triangle = (slice(length), None, slice(key - first, stop - first))
            _hide_triangle_(pairs[..., : stop - key], triangle, value, right=False)


def _hide_triangle_(pairs: Tensor, triangle: tuple, value: float, *, right: bool) -> None:
    """Sets bits to zero and adds `value`: a third of masked_fill_'s time, and it hides NaN as well."""
    bits, bias = _triangles(pairs.dtype, right)
    pairs.view(bits.dtype).bitwise_and_(bits[triangle])
    if value:
        pairs.add_(bias[triangle])


@functools.cache
def _triangles(dtype: torch.dtype, right: bool) -> tuple[Tensor, Tensor]:
    """(STRIP, STRIP): all bits and 0 where a pair is visible, no bits and -inf where hidden.

    Hidden by the right edge is column >= row, by the left edge column < row.
    """
    hidden = torch.ones(STRIP, STRIP, dtype=torch.bool)
    hidden = hidden.triu() if right else hidden.tril(-1)
    zeros = torch.zeros(STRIP, STRIP, dtype=torch.int32 if dtype == torch.float32 else torch.int64)
    return zeros.masked_fill(~hidden, -1), zeros.to(dtype).masked_fill(hidden, -math.inf)


def without_keys(spec: AttentionSpec) -> int:
    """How many queries see no key at all: the first ones, as the mask is aligned to the bottom right."""
    if spec.seqlen_k == 0:
        return spec.seqlen_q
    return min(spec.seqlen_q, max(0, -spec.offset - spec.window_right)) if spec.window_right >= 0 else 0


def query_factor(spec: AttentionSpec) -> float:
    """What Q is multiplied by once per block, so that no tile of scores has to be."""
    return spec.softmax_scale / spec.softcap if spec.softcap > 0 else spec.softmax_scale


def scores(spec: AttentionSpec, q: Tensor, k: Tensor, scratch: Scratch) -> Tensor:
    """S = Q K^T of a tile, soft-capped; q is multiplied by `query_factor` already."""
    s = scratch.product("scores", q, k.mT)
    return s.tanh_().mul_(spec.softcap) if spec.softcap > 0 else s


def product_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of P and dS in products: bfloat16 stays, as its products run at twice the speed of float32.

    Products of float16 have no fast kernel on most CPUs (a twentieth of float32's speed where measured).
    """
    return torch.bfloat16 if spec.dtype == torch.bfloat16 else spec.lse_dtype


class Scratch:
    """Uninitialised memory for a few tiles, by name: `scratch(name, dtype, *shape)`.

    Each thread keeps its memory from call to call, because the first write to fresh pages takes as long as
    a whole operation on a tile.
    """

    _kept = threading.local()

    def __init__(self) -> None:
        if not hasattr(self._kept, "memory"):
            self._kept.memory = {}
        self._memory: dict[tuple[str, torch.dtype], Tensor] = self._kept.memory
        self._views: dict[tuple, Tensor] = {}

    def __call__(self, *key: Any) -> Tensor:
        view = self._views.get(key)
        if view is None:
            name, dtype, *shape = key
            elements = math.prod(shape)
            memory = self._memory.get((name, dtype))
            if memory is None or len(memory) < elements:
                with torch.inference_mode(False):  # else later calls outside that mode could not write to it
                    memory = self._memory[name, dtype] = torch.empty(elements, dtype=dtype)
            view = self._views[key] = memory[:elements].view(shape)
        return view

    def copy(self, name: str, dtype: torch.dtype, x: Tensor) -> Tensor:
        """A contiguous copy of x (B', H', ...) as (Z, ...)."""
        return self(name, dtype, *x.shape).copy_(x).flatten(0, 1)

    def converted(self, name: str, dtype: torch.dtype, x: Tensor) -> Tensor:
        """x itself where it has that dtype, else a copy."""
        return x if x.dtype == dtype else self(name, dtype, *x.shape).copy_(x)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b for each head. With `out`, autocast leaves it alone."""
        return torch.bmm(a, b, out=self(name, a.dtype, *a.shape[:2], b.shape[2]))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b. A bfloat16 product is rounded once per tile, and summed over tiles in float32."""
        total.add_(self.converted("sum", total.dtype, self.product("product", a, b)))  # mixed dtypes would allocate
