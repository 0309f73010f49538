"""The problems that are measured: frozen cases, and the suites they come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..spec import AttentionSpec

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One attention problem as a benchmark names it, every field a JSON value."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str
    head_dim_v: int = 0  # 0: as head_dim

    @staticmethod
    def square(
        batch: int, seqlen: int, heads: int, head_dim: int, causal: bool, dtype: str, heads_k: int = 0,
        head_dim_v: int = 0,
    ) -> Case:  # fmt: skip
        """Self-attention: Sq = Sk; `heads_k` = 0 means as many as query heads."""
        return Case(batch, seqlen, seqlen, heads, heads_k or heads, head_dim, causal, dtype, head_dim_v)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.batch, self.seqlen_q, self.seqlen_k, self.heads_q, self.heads_k,
            self.head_dim, self.head_dim_v or self.head_dim, DTYPES[self.dtype], self.head_dim**-0.5,
            window_right=0 if self.causal else -1,
        )  # fmt: skip

    @property
    def parts(self) -> tuple[str, ...]:
        """B, S, H (query/key heads), D (D/Dv), mask and dtype as short words, for tables."""
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        heads = f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else f"{self.head_dim}"
        return f"B={self.batch}", f"S={seqlen}", f"H={heads}", f"D={dims}", self.mask, self.dtype

    @property
    def label(self) -> str:
        return " ".join(self.parts)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    """A family of cases: the sizes it covers unless others are asked for, and how a case is made of them."""

    about: str
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    make: Callable[[int, int, bool, str], Case]  # (S, D, causal, dtype)

    def cases(
        self, seqlens: Sequence[int] = (), head_dims: Sequence[int] = (), dtypes: Sequence[str] = ()
    ) -> list[Case]:
        """Every combination, causal and full; an empty choice means the suite's own."""
        return [
            self.make(seqlen, head_dim, causal, dtype)
            for dtype in dtypes or self.dtypes
            for head_dim in head_dims or self.head_dims
            for causal in (False, True)
            for seqlen in seqlens or self.seqlens
        ]


_TOKENS, _HIDDEN = 16384, 2048  # FlashAttention-2, section 4.1


def _paper(seqlen: int, head_dim: int, causal: bool, dtype: str) -> Case:
    return Case.square(max(1, _TOKENS // seqlen), seqlen, max(1, _HIDDEN // head_dim), head_dim, causal, dtype)


SUITES: dict[str, Suite] = {
    "paper": Suite(
        "FlashAttention-2 section 4.1: 16k tokens in all, hidden size 2048",
        (512, 1024, 2048, 4096, 8192, 16384), (64, 128), ("bfloat16",), _paper,
    ),
    "cpu": Suite(
        "one sequence, 8 heads, sizes for a CPU",
        (1024, 4096, 8192), (64, 128), ("float32", "bfloat16"),
        lambda s, d, causal, dtype: Case.square(1, s, 8, d, causal, dtype),
    ),
    "demo": Suite(
        "the paper's setting at a CPU's size: 8k tokens in all, hidden size 128; what `flashtile demo` runs on a CPU",
        (512, 1024, 2048, 4096, 8192), (64,), ("float32",),
        lambda s, d, causal, dtype: Case.square(max(1, 8192 // s), s, max(1, 128 // d), d, causal, dtype),
    ),
    "gqa": Suite(
        "grouped queries: 32 query heads over 8 key heads, 16k tokens in all",
        (2048, 8192), (128,), ("bfloat16",),
        lambda s, d, causal, dtype: Case.square(max(1, _TOKENS // s), s, 32, d, causal, dtype, heads_k=8),
    ),
    "mqa": Suite(
        "all queries share one key head: 16 query heads, 16k tokens in all",
        (2048, 8192), (128,), ("bfloat16",),
        lambda s, d, causal, dtype: Case.square(max(1, _TOKENS // s), s, 16, d, causal, dtype, heads_k=1),
    ),
    "unequal": Suite(
        "values narrower than keys: D 192, Dv 128, 16 heads, 16k tokens in all",
        (2048, 8192), (192,), ("bfloat16",),
        lambda s, d, causal, dtype: Case.square(max(1, _TOKENS // s), s, 16, d, causal, dtype, head_dim_v=128),
    ),
    "wide": Suite(
        "head dims past 128, hidden size 2048, 16k tokens in all",
        (2048, 8192), (192, 256), ("bfloat16",), _paper,
    ),
    "odd": Suite(
        "a head dim that is no power of two",
        (4096,), (96,), ("bfloat16",), lambda s, d, causal, dtype: Case.square(4, s, 16, d, causal, dtype),
    ),
    "long": Suite(
        "one long sequence, 16 heads",
        (32768, 65536), (128,), ("bfloat16",), lambda s, d, causal, dtype: Case.square(1, s, 16, d, causal, dtype),
    ),
    "short": Suite(
        "many short sequences",
        (128,), (128,), ("bfloat16",), lambda s, d, causal, dtype: Case.square(128, s, 16, d, causal, dtype),
    ),
}  # fmt: skip
"""By name. "shapes" in the peers' table is gqa, wide, odd, long and short together."""
