"""What Algorithms 1 and 2 share: which tiles to compute, how to mask them, products of tiles.

Legend: a tile has h key heads, M queries of the G = Hq / Hk query heads that share each of them, R = M * G rows
ordered query first, and N keys. S, P: (h, R, N) · Q, O, dO, dQ: (h, R, D or Dv) · K, V: (h, N, D or Dv).
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec

# exp(x) = exp2(x LOG2_E). torch's exp2 takes 0.3 ns per element, its exp 0.8 ns, and 10 ns where the result is 0.
# The number that torch multiplies by: rounded to the dtype of scores.
LOG2_E = {dtype: torch.tensor(math.log2(math.e), dtype=dtype).item() for dtype in (torch.float32, torch.float64)}

# Rows of a block of queries, and keys of a block. A tile takes some 20 calls into torch whatever its size: half as
# large, everything runs a tenth slower. Twice as large gains nothing more, and its 2 MB of float32 scores still fit a
# core's share of the caches. Fewer rows in each of several heads would read K and V from memory more often: 9 % slower.
ROWS = 1024
KEYS = 512
# A tile across an edge of the mask is cut into strips of this many queries: the finest that bfloat16's products bear.
STRIP = 256
# Key heads of a group at least: as many strips as make a tile; loading Q, K and V for all of them in one call is
# worth it where tiles are whole, too.
HEADS = ROWS // STRIP


class Block(NamedTuple):
    """Queries or keys start..end-1."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Heads(NamedTuple):
    """Key heads start..end-1 of one element of the batch."""

    batch: int
    start: int
    end: int

    def of(self, x: Tensor, inside: Block) -> Tensor:
        """(h, M, G, ...) of x (B, Hk, Sq, G, ...), or (h, N, ...) of x (B, Hk, Sk, ...)."""
        return x[self.batch, self.start : self.end, inside.start : inside.end]


class Tile(NamedTuple):
    """Queries against keys; `masked` if some of these pairs are hidden. They lie at `rows` and `cols` of two blocks."""

    queries: Block
    keys: Block
    masked: bool
    rows: Block
    cols: Block

    def heads_at_once(self, heads: int) -> list[int] | list[Block]:
        """The heads of a block, in parts that fill a step: one by one for a whole tile, several for a strip.

        One by one they lose their dimension: single products are faster than a batch of one.
        """
        scores = len(self.rows) * len(self.cols)
        if 2 * scores > ROWS * KEYS or heads == 1:
            return list(range(heads))
        return blocks(heads, ROWS * KEYS // scores)


def blocks(length: int, size: int) -> list[Block]:
    """0..length-1 in blocks of `size`, the last as long as is left."""
    return [Block(start, min(start + size, length)) for start in range(0, length, size)]


def query_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_r blocks of queries (line 1 of both algorithms)."""
    return blocks(spec.seqlen_q, max(1, ROWS // spec.group))


def key_blocks(spec: AttentionSpec) -> list[Block]:
    """The T_c blocks of keys (line 1 of both algorithms); longer ones where there are few rows."""
    rows = max(1, spec.seqlen_q * spec.group)
    return blocks(spec.seqlen_k, max(KEYS, min(4096, ROWS * KEYS // rows)))


def head_groups(spec: AttentionSpec, each: int) -> list[Heads]:
    """All key heads, in groups for one task: as many as fill a step, but enough groups for all threads.

    A group makes `each` tasks.
    """
    scores = min(ROWS, spec.seqlen_q * spec.group) * min(KEYS, spec.seqlen_k)
    filling = max(HEADS, ROWS * KEYS // max(1, scores))
    enough = spec.batch * spec.heads_k * each // (2 * torch.get_num_threads())
    size = max(1, min(filling, enough, spec.heads_k))
    return [Heads(batch, *heads) for batch in range(spec.batch) for heads in blocks(spec.heads_k, size)]


def visible_tiles(spec: AttentionSpec, queries: Block, keys: Block) -> list[Tile]:
    """Tiles that cover every visible pair of `queries` x `keys` once, and as few others as strips allow.

    The one place that knows block bounds: nothing where all is hidden, one tile where all is visible, and
    strips clipped to what they see in between.
    """
    if _all_visible(spec, queries, keys):
        return [Tile(queries, keys, False, Block(0, len(queries) * spec.group), Block(0, len(keys)))]
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
        rows = Block((strip.start - queries.start) * spec.group, (strip.end - queries.start) * spec.group)
        tiles.append(Tile(strip, seen, masked, rows, Block(seen.start - keys.start, seen.end - keys.start)))
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
    """Writes `value`, 0 or -inf, over the hidden pairs of x (h, R, N) or (R, N), whatever they hold.

    In a strip each edge of the mask is a diagonal, and what it hides a triangle.
    """
    query, (key, key_end), length = tile.queries.start, tile.keys, len(tile.queries)
    pairs = x.unflatten(-2, (length, spec.group))  # (h, M, G, N)
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


def by_key_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """A view (B, Hk, Sq, G, ...) of x (B, Sq, Hq, ...)."""
    return x.unflatten(2, (spec.heads_k, spec.group)).transpose(1, 2)


class Parts:
    """Tensors of a block, a NamedTuple, and views of some of their heads and rows or columns, each made once.

    Python runs one thread at a time: views made anew in every step cost two threads 3 % of all time.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._parts: dict[tuple[int | Block, Block], Any] = {}

    def __call__(self, heads: int | Block, inside: Block) -> Any:
        part = self._parts.get((heads, inside))
        if part is None:
            where = heads if isinstance(heads, int) else slice(*heads), slice(*inside)
            part = type(self.whole)(*(None if x is None else x[where] for x in self.whole))
            self._parts[heads, inside] = part
        return part


def query_factor(spec: AttentionSpec) -> float:
    """What Q is multiplied by once per block, so that no tile of scores has to be."""
    return spec.softmax_scale / spec.softcap if spec.softcap > 0 else spec.softmax_scale


def product_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of P and dS in products: bfloat16 stays, as its products run at twice the speed of float32.

    Products of float16 have no fast kernel on most CPUs (a twentieth of float32's speed where measured).
    """
    return torch.bfloat16 if spec.dtype == torch.bfloat16 else spec.lse_dtype


def product_plus(x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = x + a @ b, in one head or several."""
    (torch.addmm if a.ndim == 2 else torch.baddbmm)(x, a, b, out=out)


class Scratch:
    """Uninitialised memory by name: `scratch(name, dtype, *shape)`; the same name gives the same memory.

    The first write to fresh pages can take longer than the operation that writes, so memory is kept from call to
    call: a few tiles for each thread, and nothing larger, as large problems have time for fresh pages.
    """

    _KEPT_BYTES = 4 << 20
    _spare: ClassVar[list[dict[tuple, Tensor]]] = []

    def __init__(self) -> None:
        try:
            self._memory = self._spare.pop()
        except IndexError:
            self._memory = {}
        self._views: dict[tuple, Tensor] = {}

    def __del__(self) -> None:
        self._spare.append({key: memory for key, memory in self._memory.items() if memory.nbytes <= self._KEPT_BYTES})

    def __call__(self, *key: Any) -> Tensor:
        view = self._views.get(key)
        if view is None:
            name, dtype, *shape = key
            elements = math.prod(shape)
            memory = self._memory.get((name, dtype))
            if memory is None or len(memory) < elements:
                memory = self._memory[name, dtype] = torch.empty(elements, dtype=dtype)
            view = self._views[key] = memory[:elements].view(shape)
        return view

    def converted(self, name: str, dtype: torch.dtype, x: Tensor) -> Tensor:
        """x itself where it has that dtype, else a copy."""
        return x if x.dtype == dtype else self(name, dtype, *x.shape).copy_(x)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b. A bfloat16 product is rounded once per tile, and summed over tiles in float32."""
        if total.dtype == a.dtype:
            product_plus(total, a, b, total)
        else:
            product = torch.matmul(a, b, out=self("product", a.dtype, *total.shape))
            total.add_(self.converted("sum", total.dtype, product))  # mixed dtypes would allocate
