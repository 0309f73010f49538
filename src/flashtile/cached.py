"""Attention over a cache of keys and values: what one call is, checked once, and the cache's update.

Legend: B sequences, Sq new queries each, Sn new keys each; a cache is (rows, capacity, Hk, D) or, paged,
(pages, page_size, Hk, D). Sequence b has the keys first ... end of its row or pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dispatch import choose
from .spec import AttentionSpec


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of each sequence lie.

    k, v: (rows, capacity, Hk, D) and Dv, or (pages, page_size, Hk, D) with a block_table.
    rows: (B,) the row of each sequence, without a block_table.
    block_table: (B, pages of a sequence) int32, or None.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    block_table: Tensor | None

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k.shape[1]

    def at(self, sequence: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the first two dims of k and v."""
        if self.block_table is None:
            return (sequence if self.rows is None else self.rows[sequence]), token
        page_size = self.k.shape[1]
        return self.block_table[sequence, token // page_size].long(), token % page_size

    def write(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """New keys and values (B, Sn, Hk, D) as tokens start ... start + Sn of each sequence."""
        batch, seqlen = k.shape[:2]
        token = start[:, None] + torch.arange(seqlen, device=k.device)
        sequence = torch.arange(batch, device=k.device)[:, None].expand(batch, seqlen)
        place = self.at(sequence, token)
        self.k[place], self.v[place] = k, v

    def read(self, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, end - first, Hk, D) of a sequence."""
        token = torch.arange(first, end, device=self.k.device)
        place = self.at(torch.full_like(token, sequence), token)
        return self.k[place][None], self.v[place][None]


def attend(
    spec: AttentionSpec, q: Tensor, cache: Cache, first: Tensor, end: Tensor, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of each sequence's queries over its keys first ... end, one sequence after the other.

    spec: of one sequence, its seqlen_k the cache's capacity.
    """
    results = []
    for sequence, (start, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        of_one = replace(spec, seqlen_k=stop - start)
        k, v = cache.read(sequence, start, stop)
        query = q[sequence : sequence + 1]
        results.append(choose(of_one, q.device, backend).forward(of_one, query, k, v))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)
