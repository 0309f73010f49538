"""The paged cache: a pool of pages, handed out to sequences as they grow and shared between those with one prefix.

Which page belongs to whom is kept on the host, in plain Python; the device holds only keys and values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import storage


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than were wanted. The cache is as it was before the call."""


@dataclass
class _Sequence:
    """One sequence: its page table, its tokens, and how far it may write.

    It holds ceil(end / page_size) pages. Those that begin before `length` may be shared. Where end > length, no
    other sequence has the right to write to its pages behind position `length`.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    end: int = 0

    def table(self) -> Tensor:
        """The page table, int32, on the host."""
        if not self.pages:
            return torch.zeros(0, dtype=torch.int32)
        return torch.frombuffer(self.pages, dtype=torch.int32).clone()  # a view would forbid the array to grow


class PagedCache:
    """Keys and values of any number of sequences, in pages of `page_size` tokens from one pool.

    A sequence is an int handle from `new` or `fork`. Its tokens are written by `append`; or, in a decode step, by
    flash_attn_with_kvcache, between `reserve` and `advance`:

        for sequence in batch:
            cache.reserve(sequence, S)
        out = flash_attn_with_kvcache(
            q, cache.k, cache.v, k, v,
            cache_seqlens=cache.cache_seqlens(batch), block_table=cache.block_table(batch), causal=True,
        )
        for sequence in batch:
            cache.advance(sequence, S)

    Layers that share one page table share one cache: with heads_k = layers * Hk,
    `cache.k.unflatten(2, (layers, Hk))[:, :, layer]` is the k_cache of one layer, a view.

    Attributes:
        k: (num_pages, page_size, Hk, D), the k_cache of flash_attn_with_kvcache.
        v: (num_pages, page_size, Hk, Dv), its v_cache.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        heads_k: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """A cache without sequences.

        Args:
            num_pages, heads_k (Hk), head_dim (D): at least 1.
            page_size: tokens in a page, a power of two.
            head_dim_v: Dv; None means D.
            dtype: any floating-point dtype, float8 included.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        storage.check_count("num_pages", num_pages, 1)
        storage.check_count("page_size", page_size, 1)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size: got {page_size}; want a power of two")
        self.k, self.v = storage.allocate(num_pages, page_size, heads_k, head_dim, head_dim_v, dtype, device)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the next to go
        self._references = [0] * num_pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0  # handles are never given out twice, so a freed one stays wrong

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def new(self) -> int:
        """The handle of a new sequence without tokens; it takes no page yet."""
        return self._add(_Sequence())

    def fork(self, sequence: int) -> int:
        """The handle of a new sequence with the same tokens.

        Nothing is copied and no page taken: both read the same pages. Whichever of them is next to write to the
        last page, where that is partly full, gets a copy of its own first (see `reserve`).

        Raises:
            ValueError: there is no such sequence.
        """
        entry = self._entry(sequence)
        shared = entry.pages[: self._pages_for(entry.length)]
        for page in shared:
            self._references[page] += 1
        return self._add(_Sequence(shared, entry.length, entry.length))

    def free(self, sequence: int) -> None:
        """Ends a sequence. Pages that no other sequence shares go back to the pool.

        Raises:
            ValueError: there is no such sequence.
        """
        for page in self._entry(sequence).pages:
            self._drop(page)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """Tokens of a sequence.

        Raises:
            ValueError: there is no such sequence.
        """
        return self._entry(sequence).length

    @torch.no_grad()
    def append(self, sequence: int, k: Tensor, v: Tensor) -> None:
        """Writes S tokens behind those of a sequence.

        Args:
            k: (S, Hk, D), dtype and device of the cache.
            v: (S, Hk, Dv).

        Raises:
            OutOfPagesError: the pool has too few free pages; the cache is as it was.
            TypeError, ValueError: an argument is wrong; the message names it and the cache is as it was.
        """
        entry = self._entry(sequence)
        storage.check_tokens(k, v, self.k, self.v, ("seqlen",))
        end = entry.length + k.shape[0]
        self._make_room(entry, end)
        positions = torch.arange(entry.length, end)
        pages = entry.table().long()[positions // self._page_size].to(self.k.device, non_blocking=True)
        offsets = (positions % self._page_size).to(self.k.device, non_blocking=True)
        self.k[pages, offsets] = k
        self.v[pages, offsets] = v
        entry.length = end

    def reserve(self, sequence: int, n: int) -> None:
        """Makes room for n tokens behind those of a sequence, without writing them: its page table then covers them.

        The room lasts until `advance` or `append` uses it or the sequence is freed, whoever is forked meanwhile;
        reserving less than is there already changes nothing. If others share a partly full last page, the
        sequence gets a copy of it.

        Raises:
            OutOfPagesError: the pool has too few free pages; the cache is as it was.
            TypeError, ValueError: there is no such sequence, or n is not an int >= 0.
        """
        entry = self._entry(sequence)
        storage.check_count("n", n, 0)
        self._make_room(entry, entry.length + n)

    def advance(self, sequence: int, n: int) -> None:
        """Counts n tokens, written to reserved room by flash_attn_with_kvcache, as tokens of the sequence.

        Raises:
            TypeError, ValueError: there is no such sequence, or n is not an int from 0 to the tokens reserved.
        """
        entry = self._entry(sequence)
        storage.check_count("n", n, 0)
        if entry.length + n > entry.end:
            raise ValueError(
                f"n: got {n}; want at most {entry.end - entry.length}, the tokens reserved for sequence {sequence}"
            )
        entry.length += n

    def block_table(self, sequences: Sequence[int]) -> Tensor:
        """The page tables of B sequences as flash_attn_with_kvcache reads them, reserved pages included.

        Returns:
            (B, max_pages) int32 on the cache's device, max_pages that of the longest and at least 1: token j of
            row b is in page block_table[b, j // page_size], at j % page_size. Unused entries are 0; page 0 is some
            sequence's, so a call that writes k and v must find the room reserved, and no sequence twice.

        Raises:
            ValueError: there is no such sequence.
        """
        tables = [self._entry(sequence).table() for sequence in sequences]
        block_table = torch.zeros(len(tables), max([1, *map(len, tables)]), dtype=torch.int32)
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table)] = table
        return block_table.to(self.k.device, non_blocking=True)

    def cache_seqlens(self, sequences: Sequence[int]) -> Tensor:
        """Tokens of B sequences, (B,) int32 on the cache's device, without those reserved and not yet advanced over.

        Raises:
            ValueError: there is no such sequence.
        """
        lengths = torch.tensor([self._entry(sequence).length for sequence in sequences], dtype=torch.int32)
        return lengths.to(self.k.device, non_blocking=True)

    @property
    def _page_size(self) -> int:
        return self.k.shape[1]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _entry(self, sequence: int) -> _Sequence:
        entry = self._sequences.get(sequence)
        if entry is None:
            freed = isinstance(sequence, int) and 0 <= sequence < self._next
            raise ValueError(
                f"sequence: got {sequence!r}{', which was freed' if freed else ''}; want a handle from new() or fork()"
            )
        return entry

    def _add(self, entry: _Sequence) -> int:
        handle = self._next
        self._sequences[handle] = entry
        self._next += 1
        return handle

    def _make_room(self, entry: _Sequence, end: int) -> None:
        """Lets `entry` write up to position `end`: takes the pages missing, and makes a shared last page its own."""
        if end <= entry.end:
            return
        partly_full = entry.length % self._page_size != 0
        copies = partly_full and self._references[entry.pages[-1]] > 1
        wanted = self._pages_for(end) - len(entry.pages) + copies
        if wanted > self.free_pages:
            raise OutOfPagesError(
                f"out of pages: {wanted} wanted, {self.free_pages} free, {self.k.shape[0]} in the pool"
            )
        taken = [self._free.pop() for _ in range(wanted)]
        for page in taken:
            self._references[page] = 1
        if copies:
            shared, own = entry.pages.pop(), taken[0]
            self.k[own].copy_(self.k[shared])
            self.v[own].copy_(self.v[shared])
            self._drop(shared)
        entry.pages.extend(taken)
        entry.end = end

    def _drop(self, page: int) -> None:
        """One reference less to `page`; without any it is free."""
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)
