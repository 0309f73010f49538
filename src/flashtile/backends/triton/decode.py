"""Flash-Decoding in Triton (FlashAttention-2 section 3.2): the keys of a sequence split over programs, parts merged.

A program has one part of the keys of one key head of one sequence; the queries of its group, all Sq of each head, are
the rows of its one tile: row r is query r // group of head r % group. How many keys there are is read on the device.

Legend: q (B, Sq, Hq, D) · caches (rows, capacity, Hk, D | Dv) or (pages, page_size, Hk, D | Dv) · parts: out
(splits, B, Hq, Sq, Dv) and lse (splits, B, Hq, Sq), float32 · out (B, Sq, Hq, Dv) · lse (B, Hq, Sq).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import MAX_SPLITS, AttentionSpec
from ..launcher import Launcher, Run, prepared
from .launch import FLOAT32_TINY, dense_rows, exact, score_units, strides
from .tile import LN2, softmax_step, tanh

OPTIONS = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}  # with 4 warps registers spill from D 128 on
# Keys of a part at least: fewer are not worth what merging costs. An estimate, as are the two programs wanted for each
# multiprocessor.
KEYS_OF_A_PART = 256
PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit
def key_range(
    n_keys, seqlen_q, split, n_splits, window_left, window_right,
    TILE_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, stop): the key blocks of a part, of those that any query of the sequence sees."""
    offset = n_keys - seqlen_q
    first = 0
    end = n_keys
    if HAS_LEFT:
        first = tl.maximum(offset - window_left, 0) // TILE_N
    if HAS_RIGHT:
        end = tl.minimum(n_keys, tl.maximum(offset + seqlen_q + window_right, 0))
    blocks = tl.maximum(tl.cdiv(end, TILE_N) - first, 0)
    return first + blocks * split // n_splits, first + blocks * (split + 1) // n_splits


@triton.jit(do_not_specialize=["n_splits", "seqlen_q", "heads_k", "group", "window_left", "window_right", "page_size"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, end_ptr, places_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_pb,
    n_splits, seqlen_q, heads_k, group, page_size, softmax_scale, unit, cap_in, window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One part of the keys: grid (splits * blocks of rows * Hk * B,). `places` are pages, or rows of the cache."""
    blocks = tl.cdiv(seqlen_q * group, TILE_M)
    split = tl.program_id(0) % n_splits
    m_block = tl.program_id(0) // n_splits % blocks
    head_k = (tl.program_id(0) // n_splits // blocks % heads_k).to(tl.int64)
    batch = (tl.program_id(0) // n_splits // blocks // heads_k).to(tl.int64)
    row = m_block * TILE_M + tl.arange(0, TILE_M)
    query = row // group
    head = head_k * group + row % group
    dims, dims_v = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    here = query < seqlen_q
    q_at = batch * stride_qb + query.to(tl.int64) * stride_qs + head * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], here[:, None] & (dims < D)[None, :], 0.0)
    if EXACT:
        q *= softmax_scale
    if NEGATIVE:  # unit is positive: q carries the scale's sign
        q = -q
    first = tl.load(first_ptr + batch)
    n_keys = (tl.load(end_ptr + batch) - first).to(tl.int32)
    acc = tl.zeros([TILE_M, TILE_DV], tl.float32)
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    begin, stop = key_range(n_keys, seqlen_q, split, n_splits, window_left, window_right, TILE_N, HAS_LEFT, HAS_RIGHT)
    for n_block in range(begin, stop):
        key = n_block * TILE_N + tl.arange(0, TILE_N)
        inside = key < n_keys
        token = first + key
        if PAGED:
            page = tl.load(places_ptr + batch * stride_pb + token // page_size, inside, 0).to(tl.int64)
            token = token % page_size
        else:
            page = tl.load(places_ptr + batch).to(tl.int64)
        k_at = page * stride_kb + token * stride_ks + head_k * stride_kh
        k = tl.load(k_ptr + k_at[:, None] + dims[None, :], inside[:, None] & (dims < D)[None, :], 0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            s = tanh(s * cap_in)
        seen = inside[None, :]
        diagonal = query[:, None] + (n_keys - seqlen_q)
        if HAS_LEFT:
            seen &= key[None, :] >= diagonal - window_left
        if HAS_RIGHT:
            seen &= key[None, :] <= diagonal + window_right
        p, alpha, m, l = softmax_step(tl.where(seen, s, float("-inf")), unit, m, l, EXACT)
        v_at = page * stride_vb + token * stride_vs + head_k * stride_vh
        v = tl.load(v_ptr + v_at[:, None] + dims_v[None, :], inside[:, None] & (dims_v < DV)[None, :], 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    empty = l == 0
    out = acc / tl.where(empty, 1.0, l)[:, None]
    lse = m + tl.log2(l) * LN2 if EXACT else (m * unit + tl.log2(l)) * LN2
    lse = tl.where(empty, float("-inf"), lse)
    batches = tl.num_programs(0) // n_splits // blocks // heads_k
    at = ((split * batches + batch) * heads_k * group + head) * seqlen_q + query
    tl.store(lse_ptr + at, lse, here)
    tl.store(out_ptr + at[:, None] * DV + dims_v[None, :], out, here[:, None] & (dims_v < DV)[None, :])


@triton.jit(do_not_specialize=["n_splits", "seqlen_q", "heads_q"])
def merge_kernel(
    out_parts_ptr, lse_parts_ptr, out_ptr, lse_ptr, n_splits, seqlen_q, heads_q,
    DV: tl.constexpr, TILE_DV: tl.constexpr, TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """out and lse of one row from those of its parts: grid (B * Hq * Sq,)."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, TILE_SPLITS)
    here = split < n_splits
    lses = tl.load(lse_parts_ptr + split * rows + row, here, float("-inf"))
    most = tl.max(lses, 0)
    shift = tl.where(most == float("-inf"), 0.0, most)  # a row that sees no key
    weights = tl.exp(lses - shift)
    total = tl.sum(weights, 0)
    dims = tl.arange(0, TILE_DV)
    parts = tl.load(
        out_parts_ptr + (split * rows + row)[:, None] * DV + dims[None, :], here[:, None] & (dims < DV)[None, :], 0.0
    )
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    batch, head, query = row // seqlen_q // heads_q, row // seqlen_q % heads_q, row % seqlen_q
    at = ((batch * seqlen_q + query) * heads_q + head) * DV
    tl.store(out_ptr + at + dims, out.to(out_ptr.dtype.element_ty), dims < DV)
    tl.store(lse_ptr + row, tl.where(total == 0, float("-inf"), shift + tl.log(total)))


class DecodeSpec(NamedTuple):
    """What a prepared launch depends on. attention: of all sequences, its seqlen_k the cache's capacity."""

    attention: AttentionSpec
    page_size: int  # 0: not in pages
    splits: int
    index_dtype: torch.dtype  # of places; first and end are int64

    @property
    def tile_m(self) -> int:
        """Rows of a tile: the queries of a group, at least the matrix units' 16, at most what registers hold."""
        rows = self.attention.seqlen_q * self.attention.group
        return min(16 if self.wide else 64, max(16, triton.next_power_of_2(rows)))

    @property
    def tile_n(self) -> int:
        """Keys of a block."""
        return 32 if self.wide else 64

    @property
    def wide(self) -> bool:
        return max(self.attention.head_dim, self.attention.head_dim_v) > 128


def parts(spec: AttentionSpec, device: torch.device) -> int:
    """Into how many parts the keys are split, so that all multiprocessors have work."""
    programs = 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    blocks = spec.batch * spec.heads_k
    wanted = -(-programs * PROGRAMS_PER_MULTIPROCESSOR // max(1, blocks))
    return max(1, min(wanted, -(-spec.seqlen_k // KEYS_OF_A_PART), MAX_SPLITS))


class DecodeKernel(Launcher):
    """`decode_kernel`, of q, the caches, first, end and places to the parts of out and lse."""

    def prepare(self, spec: DecodeSpec, tensors: tuple) -> Run:
        q, k, v, _, _, places, *_ = tensors
        of = spec.attention
        unit, cap_in = score_units(of)
        blocks = -(-of.seqlen_q * of.group // spec.tile_m)
        arguments = (
            *tensors, *strides(q), *strides(k), *strides(v), places.stride(0), spec.splits, of.seqlen_q, of.heads_k,
            of.group, spec.page_size, of.softmax_scale, max(abs(unit), FLOAT32_TINY), cap_in, of.window_left,
            of.window_right, of.head_dim, of.head_dim_v, max(16, triton.next_power_of_2(of.head_dim)),
            max(16, triton.next_power_of_2(of.head_dim_v)), spec.tile_m, spec.tile_n, of.window_left >= 0,
            of.window_right >= 0, of.softcap > 0, exact(of), unit < 0, spec.page_size > 0,
        )  # fmt: skip
        grid = spec.splits * blocks * of.heads_k * of.batch
        return prepared(decode_kernel, q.device, grid, arguments, len(tensors), OPTIONS)


class MergeKernel(Launcher):
    """`merge_kernel`, of the parts to out and lse."""

    def prepare(self, spec: DecodeSpec, tensors: tuple) -> Run:
        of = spec.attention
        arguments = (
            *tensors, spec.splits, of.seqlen_q, of.heads_q, of.head_dim_v,
            max(16, triton.next_power_of_2(of.head_dim_v)), triton.next_power_of_2(spec.splits),
        )  # fmt: skip
        grid = of.batch * of.heads_q * of.seqlen_q
        return prepared(merge_kernel, tensors[0].device, grid, arguments, len(tensors), OPTIONS)


DECODE = DecodeKernel()
MERGE = MergeKernel()


def decode(
    spec: AttentionSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, first: Tensor, end: Tensor, places: Tensor,
    paged: bool, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, by Flash-Decoding; num_splits of 0: as many parts as the GPU has room for."""
    splits = num_splits or parts(spec, q.device)
    of = DecodeSpec(spec, k_cache.shape[1] if paged else 0, splits, places.dtype)
    rows = (spec.batch, spec.heads_q, spec.seqlen_q)
    out_parts = torch.empty((splits, *rows, spec.head_dim_v), dtype=torch.float32, device=q.device)
    lse_parts = torch.empty((splits, *rows), dtype=torch.float32, device=q.device)
    out = torch.empty((spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    DECODE(of, (dense_rows(q), k_cache, v_cache, first, end, places), (out_parts, lse_parts))
    MERGE(of, (out_parts, lse_parts), (out, lse))
    return out, lse
