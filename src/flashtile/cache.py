"""One checked call over a cache of keys and values: where they lie, and what else goes into the softmax.

Legend: B sequences, Sq queries and Sn new keys each; a cache is (rows, capacity, Hk, D) or, paged,
(pages, page_size, Hk, D). Sequence b has the keys first ... end of its row or of its pages; the last Sn are the new.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rotary import apply_rotary
from .spec import AttentionSpec

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Keys for each query of a call without a cache, from which on it may be one over a cache (`over_a_cache`): a mask by
# which queries see few keys leaves out none of them there.
MANY_KEYS = 4


class Arguments(NamedTuple):
    """The tensors that flash_attn_with_kvcache is given, and cache_seqlens; see there."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None

    def tidied(self, spec: AttentionSpec) -> Arguments:
        """Every last stride 1 but the caches', scales (B, Hk) and slopes (B, Hq); what is so stays as it is."""
        dense = Arguments._make(
            x if x is None or isinstance(x, int) or x is self.k_cache or x is self.v_cache or x.stride(-1) == 1
            else x.contiguous()
            for x in self
        )  # fmt: skip
        return dense._replace(
            alibi_slopes=_of_each_sequence(dense.alibi_slopes, spec.batch),
            k_descale=_of_each_sequence(dense.k_descale, spec.batch),
            v_descale=_of_each_sequence(dense.v_descale, spec.batch),
        )


LENGTHS = Arguments._fields.index("cache_seqlens")


def _of_each_sequence(x: Tensor | None, batch: int) -> Tensor | None:
    """(B, heads), of which x may be one for all."""
    return x if x is None or x.dim() == 2 else x.expand(batch, *x.shape)


class Cache(NamedTuple):
    """Where the keys and values of each sequence lie. The last stride of every tensor but k and v is 1.

    k, v: (rows, capacity, Hk, D) and (rows, capacity, Hk, Dv); with a block_table (pages, page_size, ...).
    rows: (B,) the row of each sequence; None: sequence b has row b.
    block_table: (B, pages of a sequence), or None.
    seqlens: (B,) where the keys end without the new ones, or one number for all; None: where those just fit.
    leftpad: (B,) where the keys begin; None: at 0.
    seqlen_new: Sn.
    k_descale, v_descale: (B, Hk) float32: what is stored, times this, is meant; None: 1.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    block_table: Tensor | None
    seqlens: Tensor | int | None
    leftpad: Tensor | None
    seqlen_new: int
    k_descale: Tensor | None
    v_descale: Tensor | None

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def places(self) -> Tensor | None:
        """The pages (B, pages of a sequence), or the rows (B,), of the sequences; None: sequence b has row b."""
        return self.rows if self.block_table is None else self.block_table

    @property
    def page_size(self) -> int:
        """Keys of a page; 0: not in pages."""
        return 0 if self.block_table is None else self.k.shape[1]

    @property
    def lengths(self) -> Tensor | None:
        """`seqlens`, where only the device knows them."""
        return None if isinstance(self.seqlens, int) else self.seqlens

    @property
    def end(self) -> int:
        """Where the keys of each sequence end, the new ones too; with `lengths`, where they end at most."""
        return self.seqlens + self.seqlen_new if isinstance(self.seqlens, int) else self.capacity

    @property
    def alike(self) -> bool:
        """Whether all sequences are known to have as many keys, without a look at the device."""
        return self.lengths is None and self.leftpad is None

    def spans(self, batch: int) -> tuple[Tensor, Tensor]:
        """first and end of the keys of each sequence, (B,) int64 each."""
        device = self.k.device
        first = torch.zeros(batch, dtype=torch.int64, device=device) if self.leftpad is None else self.leftpad.long()
        if self.lengths is None:
            return first, torch.full((batch,), self.end, device=device)
        return first, self.lengths.long() + self.seqlen_new

    def write(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """New keys and values (B, Sn, Hk, D) as tokens start ... start + Sn of each sequence."""
        batch, seqlen = k.shape[:2]
        token = start[:, None] + torch.arange(seqlen, device=k.device)
        indices = self._indices(torch.arange(batch, device=k.device)[:, None].expand(batch, seqlen), token)
        self.k[indices], self.v[indices] = _stored(k, self.k, self.k_descale), _stored(v, self.v, self.v_descale)

    def read(self, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, end - first, Hk, D) of a sequence, float32 where they are stored as float8."""
        if self.block_table is None:
            row = sequence if self.rows is None else int(self.rows[sequence])
            k, v = self.k[row : row + 1, first:end], self.v[row : row + 1, first:end]
        else:
            token = torch.arange(first, end, device=self.k.device)
            indices = self._indices(torch.full_like(token, sequence), token)
            k, v = _gathered(self.k, *indices)[None], _gathered(self.v, *indices)[None]
        return _meant(k, self.k_descale, sequence), _meant(v, self.v_descale, sequence)

    def block(self, sequences: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (n, N, Hk, D) as stored, of sequences (n,) at tokens (n, N); anything past the capacity."""
        n, width = token.shape
        if self.places is None and self.leftpad is None and n == len(self.k):  # all of them, the same tokens of each
            begin = int(token[0, 0])
            return self.k[:, begin : begin + width], self.v[:, begin : begin + width]
        token = token.clamp(max=self.capacity - 1)
        rows, places = self._indices(sequences[:, None].expand(n, width), token)
        return _gathered(self.k, rows, places), _gathered(self.v, rows, places)

    def _indices(self, sequence: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the first two dims of k and v."""
        if self.block_table is None:
            return (sequence if self.rows is None else self.rows[sequence].long()), token
        page_size = self.k.shape[1]
        return self.block_table[sequence, token // page_size].long(), token % page_size


def _gathered(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """x[rows, places]: whole tokens at a time where they lie in one line; 4k of 1,024 numbers in 1 ms, not 4."""
    if x.stride(0) != x.stride(1) * x.shape[1]:
        return x[rows, places]
    return x.flatten(0, 1).index_select(0, (rows * x.shape[1] + places).flatten()).unflatten(0, rows.shape)


def _stored(new: Tensor, cache: Tensor, descale: Tensor | None) -> Tensor:
    """New keys or values (B, Sn, Hk, D) in the cache's dtype: float8 has no infinity, so that they stop at its end."""
    if cache.dtype != FP8:
        return new
    new = new.float() if descale is None else new.float() / descale[:, None, :, None]
    return new.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _meant(stored: Tensor, descale: Tensor | None, sequence: int) -> Tensor:
    """The keys or values (1, S, Hk, D) of one sequence that are stored so."""
    if stored.dtype != FP8:
        return stored
    return stored.float() if descale is None else stored.float() * descale[sequence, :, None]


class CachedCall(NamedTuple):
    """One checked call.

    spec: of all sequences, its seqlen_k the cache's capacity.
    given: what it was given, tidied.
    interleaved: whether rotary turns dims (2 i, 2 i + 1) together, or (i, R + i).
    """

    spec: AttentionSpec
    given: Arguments
    interleaved: bool

    @property
    def cache(self) -> Cache:
        """Where its keys and values lie."""
        given = self.given
        return Cache(
            given.k_cache, given.v_cache, given.cache_batch_idx, given.block_table, given.cache_seqlens,
            given.cache_leftpad, self.seqlen_new, given.k_descale, given.v_descale,
        )  # fmt: skip

    @property
    def seqlen_new(self) -> int:
        """Sn."""
        return 0 if self.given.k is None else self.given.k.shape[1]

    @property
    def alibi_slopes(self) -> Tensor | None:
        """(B, Hq) float32: -slope |i + Sk - Sq - j| is added to the score of query i and key j."""
        return self.given.alibi_slopes

    @property
    def sinks(self) -> Tensor | None:
        """(Hq,): a score that has no value, in the softmax of each query of a head."""
        return self.given.sinks

    @property
    def rotary_dims(self) -> int:
        """R, of which 2 R dims of each head are turned."""
        return 0 if self.given.rotary_cos is None else self.given.rotary_cos.shape[1]

    def append(self) -> Tensor:
        """Writes the new keys, if there are any, turned, into the cache; returns the queries, turned."""
        q, k, v, cache = self.given.q, self.given.k, self.given.v, self.cache
        cos, sin = self.given.rotary_cos, self.given.rotary_sin
        if k is None or v is None:
            return q
        first, end = cache.spans(len(q))
        start = end - k.shape[1]
        if cos is not None and sin is not None:
            position = (start - first)[:, None]
            k = apply_rotary(k, cos, sin, position + torch.arange(k.shape[1], device=k.device), self.interleaved)
            steps = torch.arange(q.shape[1], device=q.device) * self.spec.masked
            q = apply_rotary(q, cos, sin, position + steps, self.interleaved)
        cache.write(k, v, start)
        return q


def over_a_cache(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> CachedCall:
    """A call without a cache, q (B, Sq, Hq, D), k and v (B, Sk, Hk, D | Dv), as one over k and v as they are."""
    nothing = (None,) * (len(Arguments._fields) - 3)
    return CachedCall(spec, Arguments(q, k, v, *nothing), interleaved=False)
