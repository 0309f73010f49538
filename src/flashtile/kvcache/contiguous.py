"""The contiguous cache: one row of fixed capacity for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import storage


class ContiguousCache:
    """Keys and values of `batch` sequences, with room for `capacity` tokens each.

    Attributes:
        k: (batch, capacity, Hk, D), the k_cache of flash_attn_with_kvcache.
        v: (batch, capacity, Hk, Dv), its v_cache.
        seqlens: (batch,) int32 on the cache's device, its cache_seqlens: the tokens each row holds. There is no
            other record of the lengths: after a call that writes k and v itself, `cache.seqlens += S`.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        heads_k: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """An empty cache.

        Args:
            batch, capacity, heads_k (Hk), head_dim (D): at least 1.
            head_dim_v: Dv; None means D.
            dtype: any floating-point dtype, float8 included.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        storage.check_count("batch", batch, 1)
        storage.check_count("capacity", capacity, 1)
        self.k, self.v = storage.allocate(batch, capacity, heads_k, head_dim, head_dim_v, dtype, device)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, cache_batch_idx: Sequence[int] | Tensor | None = None) -> None:
        """Writes S tokens behind those of each row, and advances seqlens.

        Reads seqlens back to check the capacity, so it waits for the device; inside a CUDA graph let
        flash_attn_with_kvcache write.

        Args:
            k: (B, S, Hk, D), dtype and device of the cache.
            v: (B, S, Hk, Dv).
            cache_batch_idx: the B rows to write, each once; None means all, in order.

        Raises:
            TypeError, ValueError: an argument is wrong, or a row has no room for S tokens; the message names it
                and the cache is as it was.
        """
        storage.check_tokens(k, v, self.k, self.v, ("batch", "seqlen"))
        rows = self._rows(cache_batch_idx)
        if k.shape[0] != len(rows):
            raise ValueError(f"k: got batch {k.shape[0]}; want {len(rows)}, one for each row written")
        tokens, capacity, lengths = k.shape[1], self.k.shape[1], self.seqlens.tolist()
        for row in rows:
            if lengths[row] + tokens > capacity:
                raise ValueError(
                    f"k: got {tokens} tokens for row {row}, which holds {lengths[row]} of {capacity}; "
                    f"want at most {max(0, capacity - lengths[row])}"
                )
        index = torch.tensor(rows, dtype=torch.int64, device=self.k.device)
        positions = self.seqlens[index].unsqueeze(1) + torch.arange(tokens, device=self.k.device)  # (B, S)
        self.k[index.unsqueeze(1), positions] = k
        self.v[index.unsqueeze(1), positions] = v
        self.seqlens[index] += tokens

    def reset(self, cache_batch_idx: Sequence[int] | Tensor | None = None) -> None:
        """Empties the rows named by `cache_batch_idx`, or all of them.

        Raises:
            ValueError: cache_batch_idx has an entry that is no row of the cache, or one twice.
        """
        self.seqlens[torch.tensor(self._rows(cache_batch_idx), dtype=torch.int64, device=self.k.device)] = 0

    def _rows(self, cache_batch_idx: Sequence[int] | Tensor | None) -> list[int]:
        """The rows that cache_batch_idx names."""
        batch = self.k.shape[0]
        if cache_batch_idx is None:
            return list(range(batch))
        if isinstance(cache_batch_idx, Tensor) and cache_batch_idx.dim() != 1:
            raise ValueError(f"cache_batch_idx: got shape {tuple(cache_batch_idx.shape)}; want 1 dimension (batch,)")
        rows = cache_batch_idx.tolist() if isinstance(cache_batch_idx, Tensor) else list(cache_batch_idx)
        for row in rows:
            if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < batch:
                raise ValueError(f"cache_batch_idx: got {row!r}; want rows 0 to {batch - 1}")
        if len(set(rows)) < len(rows):
            raise ValueError(f"cache_batch_idx: got {rows}; want each row once")
        return rows
