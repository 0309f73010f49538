"""Attention over a cache of keys and values: what one call is, checked once, and the cache's update.

Legend: B sequences, Sq queries and Sn new keys each; a cache is (rows, capacity, Hk, D) or, paged,
(pages, page_size, Hk, D). Sequence b has the keys first[b] ... end[b] of its row, or of its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import spec as checks
from .dispatch import choose, decoder
from .rotary import apply_rotary
from .spec import AttentionSpec


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of each sequence lie.

    k, v: (rows, capacity, Hk, D) and (rows, capacity, Hk, Dv); with a block_table (pages, page_size, ...).
    rows: (B,) the row of each sequence; None: sequence b has row b.
    block_table: (B, pages of a sequence), or None.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    block_table: Tensor | None

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def places(self, sequence: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the first two dims of k and v."""
        if self.block_table is None:
            return (sequence if self.rows is None else self.rows[sequence].long()), token
        page_size = self.k.shape[1]
        return self.block_table[sequence, token // page_size].long(), token % page_size

    def write(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """New keys and values (B, Sn, Hk, D) as tokens start ... start + Sn of each sequence."""
        batch, seqlen = k.shape[:2]
        token = start[:, None] + torch.arange(seqlen, device=k.device)
        places = self.places(torch.arange(batch, device=k.device)[:, None].expand(batch, seqlen), token)
        self.k[places], self.v[places] = k, v

    def read(self, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, end - first, Hk, D) of a sequence."""
        if self.block_table is None:
            row = sequence if self.rows is None else int(self.rows[sequence])
            return self.k[row : row + 1, first:end], self.v[row : row + 1, first:end]
        token = torch.arange(first, end, device=self.k.device)
        places = self.places(torch.full_like(token, sequence), token)
        return self.k[places][None], self.v[places][None]


@dataclass(frozen=True)
class CachedCall:
    """One checked call. spec: of one sequence, its seqlen_k the cache's capacity."""

    spec: AttentionSpec
    cache: Cache
    first: Tensor  # (B,) int64
    end: Tensor  # (B,) int64, the new keys included


def checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
    block_table: Tensor | None, settings: tuple,
) -> CachedCall:  # fmt: skip
    """The call, or the error that names what is wrong; nothing is written before this returns."""
    checks.check_like("k_cache", k_cache, q)
    checks.check_like("v_cache", v_cache, q)
    if (k is None) != (v is None):
        raise ValueError(f"k, v: got {'only v' if k is None else 'only k'}; want both or neither")
    batch, device = q.shape[0], q.device
    if block_table is not None:
        checks.check_index("block_table", block_table, (batch, None), k_cache.shape[0], device)
        if k_cache.shape[1] & (k_cache.shape[1] - 1):
            raise ValueError(f"k_cache: got pages of {k_cache.shape[1]} keys; want a power of two")
        for name, given in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if given is not None:
                raise ValueError(f"{name}: got a tensor together with block_table; want one of them")
    elif cache_batch_idx is not None:
        checks.check_index("cache_batch_idx", cache_batch_idx, (batch,), k_cache.shape[0], device)
    elif k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got batch {k_cache.shape[0]}; want the batch of q, {batch}")
    cache = Cache(k_cache, v_cache, cache_batch_idx, block_table)
    one_row = (1, cache.capacity)
    spread = (x[:1, :1].expand(*one_row, *x.shape[2:]) if x.shape[0] and x.shape[1] else x for x in (k_cache, v_cache))
    checks.check_tensors(q[:1], *spread)
    seqlen_new = 0
    if k is not None and v is not None:
        checks.check_tensors(q, k, v)
        for name, new, kept in (("k", k, k_cache), ("v", v, v_cache)):
            if new.shape[2:] != kept.shape[2:]:
                raise ValueError(
                    f"{name}: got {tuple(new.shape[2:])} heads and dims; want the cache's, {tuple(kept.shape[2:])}"
                )
        seqlen_new = k.shape[1]
    length = cache.capacity - seqlen_new if cache_seqlens is None else cache_seqlens
    if isinstance(length, int):
        length = torch.full((batch,), length, device=device)
    checks.check_index("cache_seqlens", length, (batch,), cache.capacity - seqlen_new + 1, device)
    first = torch.zeros_like(length) if cache_leftpad is None else cache_leftpad
    checks.check_index("cache_leftpad", first, (batch,), cache.capacity + 1, device)
    if device.type == "cpu" and bool((first > length).any()):
        raise ValueError("cache_leftpad: got more than cache_seqlens in a sequence; want at most that")
    spec = AttentionSpec(
        1, q.shape[1], cache.capacity, q.shape[2], k_cache.shape[2], q.shape[3], v_cache.shape[3], q.dtype, *settings
    )
    return CachedCall(spec, cache, first.long().contiguous(), length.long() + seqlen_new)


@dataclass(frozen=True)
class Rotary:
    """cos, sin: (positions, R). interleaved: pairs are neighbours."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def checked_rotary(
    call: CachedCall, q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Rotary | None:
    """The rotary tables, None where there are none, or the error that names what is wrong."""
    checks.check_flag("rotary_interleaved", interleaved)
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        raise ValueError(
            f"rotary_cos, rotary_sin: got {'no rotary_sin' if sin is None else 'no rotary_cos'}; want both"
        )
    if k is None:
        raise ValueError("rotary_cos: got tables without k and v; want new keys to turn")
    checks.check_rotary(cos, sin, call.spec.head_dim, call.cache.capacity, q)
    return Rotary(cos, sin, interleaved)


def update(call: CachedCall, q: Tensor, k: Tensor | None, v: Tensor | None, rotary: Rotary | None) -> Tensor:
    """Writes the new keys, turned, into the cache; returns the queries, turned."""
    if k is None or v is None:
        return q
    start = call.end - k.shape[1]
    if rotary is not None:
        masked = call.spec.window_left >= 0 or call.spec.window_right >= 0
        position = (start - call.first)[:, None]
        k = apply_rotary(
            k, rotary.cos, rotary.sin, position + torch.arange(k.shape[1], device=k.device), rotary.interleaved
        )
        steps = torch.arange(q.shape[1], device=q.device) * masked
        q = apply_rotary(q, rotary.cos, rotary.sin, position + steps, rotary.interleaved)
    call.cache.write(k, v, start)
    return q


def attend(call: CachedCall, q: Tensor, num_splits: int, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of each sequence's queries over its keys."""
    cache, of_all = call.cache, replace(call.spec, batch=q.shape[0])
    decoding = decoder(of_all, q.device, backend)
    if decoding is None or cache.k.stride(-1) != 1 or cache.v.stride(-1) != 1:
        return _one_after_the_other(call, q, backend)
    places, paged = cache.block_table, cache.block_table is not None
    if places is None:
        places = torch.arange(q.shape[0], device=q.device) if cache.rows is None else cache.rows
    return decoding.decode(of_all, q, cache.k, cache.v, call.first, call.end, places.contiguous(), paged, num_splits)


def _one_after_the_other(call: CachedCall, q: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for sequence, (first, end) in enumerate(zip(call.first.tolist(), call.end.tolist(), strict=True)):
        of_one = replace(call.spec, seqlen_k=end - first)
        query = q[sequence : sequence + 1]
        out, lse = choose(of_one, q.device, backend).forward(of_one, query, *call.cache.read(sequence, first, end))
        outs.append(out)
        lses.append(lse)
    if not outs:
        lse = q.new_empty(0, q.shape[2], q.shape[1], dtype=call.spec.lse_dtype)
        return q.new_empty(0, *q.shape[1:3], call.spec.head_dim_v), lse
    return torch.cat(outs), torch.cat(lses)
