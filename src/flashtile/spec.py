"""What one attention call is: its shapes, dtype, mask and numerics, checked once.

The public functions put their arguments through these checks before anything is launched. Backends receive a
spec that is already valid and never check again.

Legend: B batch, Sq/Sk query/key length, Hq/Hk query/key heads, D query/key head dim, Dv value head dim.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
MAX_SPLITS = 128  # parts of the keys of a call over a cache


@dataclass(frozen=True)
class AttentionSpec:
    """One attention problem: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) -> out (B, Sq, Hq, Dv).

    Query i sees key j iff  i + offset - window_left <= j <= i + offset + window_right, where
    offset = Sk - Sq aligns the mask to the bottom right corner and -1 leaves a side open. A causal mask is
    window_right = 0. Scores are softmax_scale * q.k, then softcap * tanh(scores / softcap) if softcap > 0.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    softmax_scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = False

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> AttentionSpec:
        """The spec of tensors and settings that the checks below have accepted."""
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_k, _ = k.shape
        return AttentionSpec(
            batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, v.shape[3], q.dtype,
            softmax_scale, window_left, window_right, softcap, deterministic,
        )  # fmt: skip

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # kept: a spec is a key of every launch
        return hash(tuple(value for name, value in vars(self).items() if name != "_hash"))

    @property
    def settings(self) -> tuple[float, int, int, float, bool]:
        """What `of` takes beside the tensors: (softmax_scale, window_left, window_right, softcap, deterministic)."""
        return self.softmax_scale, self.window_left, self.window_right, self.softcap, self.deterministic

    @property
    def score_factors(self) -> tuple[float, float]:
        """(factor, cap_in): scores are factor * q.k, or with a soft cap factor * tanh(cap_in * q.k)."""
        if self.softcap > 0:
            return self.softcap, self.softmax_scale / self.softcap
        return self.softmax_scale, 0.0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1 for MHA, Hq for MQA)."""
        return self.heads_q // self.heads_k

    @property
    def masked(self) -> bool:
        """Whether each query has a position of its own."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def offset(self) -> int:
        """Column of the diagonal in row 0: the mask is aligned to the bottom right corner."""
        return self.seqlen_k - self.seqlen_q

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def visible_keys(self, row: int) -> tuple[int, int]:
        """First and one-past-last key that query `row` sees; an empty range where it sees none."""
        first, end = 0, self.seqlen_k
        if self.window_left >= 0:
            first = max(first, row + self.offset - self.window_left)
        if self.window_right >= 0:
            end = min(end, row + self.offset + self.window_right + 1)
        return first, max(first, end)


def mask_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """(window_left, window_right) of the `causal` and `window_size` arguments; -1 is an open side."""
    check_flag("causal", causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size: got {window_size!r}; want a pair (left, right)")
    for side in window_size:
        if isinstance(side, (bool, float)) or side < -1:
            raise ValueError(f"window_size: got {tuple(window_size)!r}; want integers >= 0, or -1 for an open side")
    left, right = window_size
    return left, 0 if causal else right


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The softmax scale: `softmax_scale`, or 1/sqrt(D) where it is None. Any finite number."""
    if softmax_scale is None:
        return head_dim**-0.5
    _check_number("softmax_scale", softmax_scale)
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: got {softmax_scale}; want a finite number or None for 1/sqrt(D)")
    return softmax_scale


def checked_softcap(softcap: float) -> float:
    """The soft cap on the scores; 0.0 switches it off."""
    _check_number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: got {softcap}; want a finite number >= 0 (0.0 switches it off)")
    return softcap


def check_flag(name: str, value: bool) -> None:
    """TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}; want a bool")


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {type(value).__name__}; want a number")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError or ValueError, naming the argument, unless q, k and v make one attention problem."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_like(name, tensor, q)
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: got batch {tensor.shape[0]}; want the batch of q, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: got head_dim {k.shape[3]}; want the head_dim of q, {q.shape[3]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: got seqlen {v.shape[1]}; want the seqlen of k, {k.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: got {v.shape[2]} heads; want the heads of k, {k.shape[2]}")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q: got {q.shape[2]} heads; want a positive multiple of the heads of k, {k.shape[2]}")


def check_like(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raises unless `tensor` has four dimensions, a head_dim that there is, and the dtype and device of q."""
    check_heads(name, tensor, q)
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name}: got {tensor.dtype}; want float16, bfloat16, float32 or float64")
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name}: got {tensor.dtype}; want the dtype of q, {q.dtype}")


def check_heads(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raises unless `tensor` has four dimensions, a head_dim that there is, and the device of q."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; want a torch.Tensor")
    if tensor.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; want 4 dimensions (batch, seqlen, heads, head_dim)")
    if tensor.device != q.device:
        raise ValueError(f"{name}: is on {tensor.device}; want the device of q, {q.device}")
    if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {tensor.shape[3]}; want 1 to {MAX_HEAD_DIM}")


def check_packed(name: str, packed: Tensor, parts: int) -> None:
    """Raises unless `packed` is (batch, seqlen, parts, heads, head_dim), the layout of a packed projection."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name}: got {type(packed).__name__}; want a torch.Tensor")
    if packed.dim() != 5 or packed.shape[2] != parts:
        raise ValueError(
            f"{name}: got shape {tuple(packed.shape)}; want 5 dimensions (batch, seqlen, {parts}, heads, head_dim)"
        )


def check_index(
    name: str, index: Tensor, shape: tuple[int | None, ...], end: int, device: torch.device, why: str = ""
) -> None:
    """Raises unless `index` is an integer tensor of `shape` on `device` with numbers in 0 ... end - 1, `why` so.

    The numbers are looked at on a CPU alone: to read a GPU's would wait for it, and cannot be captured in a graph.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"{name}: got {got}; want a tensor of int32")
    pairs = zip(shape, index.shape, strict=False)
    if index.dim() != len(shape) or any(want not in (None, size) for want, size in pairs):
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name}: got shape {tuple(index.shape)}; want {wanted}")
    if index.device != device:
        raise ValueError(f"{name}: is on {index.device}; want the device of q, {device}")
    if device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < end:
        raise ValueError(f"{name}: got numbers from {int(index.min())} to {int(index.max())}; want 0 to {end - 1}{why}")


def check_numbers(
    name: str,
    numbers: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises unless `numbers` is a tensor of one of the dtypes and shapes, on `device`."""
    if not isinstance(numbers, Tensor) or numbers.dtype not in dtypes:
        got = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"{name}: got {got}; want a tensor of {' or '.join(str(x) for x in dict.fromkeys(dtypes))}")
    if tuple(numbers.shape) not in shapes:
        raise ValueError(f"{name}: got shape {tuple(numbers.shape)}; want {' or '.join(map(str, shapes))}")
    if numbers.device != device:
        raise ValueError(f"{name}: is on {numbers.device}; want the device of q, {device}")


def check_rotary(cos: Tensor, sin: Tensor, head_dim: int, positions: int, like: Tensor) -> None:
    """Raises unless cos and sin are tables (at least `positions`, R) for a head dim of at least 2 R."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            raise TypeError(
                f"{name}: got {getattr(table, 'dtype', type(table).__name__)}; want a floating-point tensor"
            )
        if table.dim() != 2 or table.shape != cos.shape or not 0 < 2 * table.shape[1] <= head_dim:
            raise ValueError(
                f"{name}: got shape {tuple(table.shape)}; want (positions, R), both tables alike, R from 1 to "
                f"{head_dim // 2}"
            )
        if table.device != like.device:
            raise ValueError(f"{name}: is on {table.device}; want the device of q, {like.device}")
        if table.shape[0] < positions:
            raise ValueError(
                f"{name}: got {table.shape[0]} positions; want {positions}, as many as a sequence may have keys"
            )


def check_splits(num_splits: int) -> None:
    """ValueError unless `num_splits` is a number of parts, or 0."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: got {num_splits!r}; want 0 to {MAX_SPLITS}")
