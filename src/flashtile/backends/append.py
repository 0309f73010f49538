"""New keys and values into a cache, and rotary positions, in one launch: `append_kernel`.

Legend: q (B, Sq, Hq, D) · k, v (B, Sn, Hk, D | Dv) · caches (rows, capacity, Hk, D | Dv) or
(pages, page_size, Hk, D | Dv) · cos, sin (positions, R).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache import FP8, FP8_MAX, CachedCall
from ..spec import AttentionSpec
from .launcher import KernelCall, call_of, rows_apart, strides

OPTIONS = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True}
HEADS = 8  # of one program: 16 bytes for each of its threads at D 128


@triton.jit
def page_of_keys(places_ptr, key, n_keys, batch, stride_pb, TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The row or page, int64, of the keys key ... key + TILE_N of a sequence; each key's where pages are less."""
    if PAGE_SIZE == 0:
        page = batch
        if places_ptr is not None:
            page = tl.load(places_ptr + batch)
    else:
        table_ptr = places_ptr + batch * stride_pb
        if PAGE_SIZE < TILE_N:
            key += tl.arange(0, TILE_N)
        page = tl.load(table_ptr + key // PAGE_SIZE, key < n_keys, 0)
    return page.to(tl.int64)


@triton.jit
def load_turned(
    ptr, heads, n_heads, stride_h, position, cos_ptr, sin_ptr, stride_cos, stride_sin,
    D: tl.constexpr, HEADS: tl.constexpr, TILE_D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """(HEADS, TILE_D) float32: one token of some heads, its first 2 R dims turned by the angles of its position.

    Pairs (x0, x1) become (x0 cos - x1 sin, x1 cos + x0 sin).
    """
    dims = tl.arange(0, TILE_D)
    rows = ptr + (heads.to(tl.int64) * stride_h)[:, None]
    here = (heads < n_heads)[:, None] & (dims < D)[None, :]
    x = tl.load(rows + dims[None, :], here, 0.0).to(tl.float32)
    if R > 0:
        turning = dims < 2 * R
        if INTERLEAVED:
            pair, other, is_first = dims // 2, dims ^ 1, dims % 2 == 0
        else:
            pair, other, is_first = dims % R, tl.where(dims < R, dims + R, dims - R), dims < R
        cos = tl.load(cos_ptr + (position * stride_cos + pair), turning, 1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + (position * stride_sin + pair), turning, 0.0).to(tl.float32)[None, :]
        x_other = tl.load(rows + other[None, :], here & turning[None, :], 0.0).to(tl.float32)
        x = x * cos + tl.where(is_first[None, :], -x_other, x_other) * sin
    return x


@triton.jit
def store_new(
    ptr, x, heads, n_heads, stride_h, descale_ptr, descale_at, limit,
    D: tl.constexpr, TILE_D: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Stores one token of some heads, (HEADS, TILE_D), in the cache's dtype; float8 ends at `limit`."""
    here = heads < n_heads
    if QUANTIZED:
        if descale_ptr is not None:
            x = x / tl.load(descale_ptr + descale_at + heads, here, 1.0)[:, None]
        x = tl.minimum(tl.maximum(x, -limit), limit)
    dims = tl.arange(0, TILE_D)
    at = (heads.to(tl.int64) * stride_h)[:, None] + dims[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), here[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=[
    "stride_pb", "stride_cos", "stride_sin", "stride_k_descale", "stride_v_descale", "seqlen_q", "seqlen_new",
    "seqlen", "heads_q", "heads_k", "capacity",
])  # fmt: skip
def append_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, seqlens_ptr, leftpad_ptr, places_ptr, cos_ptr, sin_ptr,
    k_descale_ptr, v_descale_ptr, capacity, turned_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch,
    stride_pb, stride_cos, stride_sin, stride_k_descale, stride_v_descale,
    seqlen_q, seqlen_new, seqlen, heads_q, heads_k, limit,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr, HEADS: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCING: tl.constexpr, PAGE_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, of k and v or, behind those, of q: grid (blocks of heads * seqlen * B,).

    seqlen is the larger of Sq and Sn. With R > 0 q is turned into `turned` (B, Sq, Hq, D), each query by its own
    position if ADVANCING, else by that of the first new key; without, programs for q are not launched. Where the new
    keys do not fit nothing is written.
    """
    k_blocks = tl.cdiv(heads_k, HEADS)
    blocks = k_blocks + (tl.cdiv(heads_q, HEADS) if R > 0 else 0)
    block = tl.program_id(0) % blocks
    token = tl.program_id(0) // blocks % seqlen
    batch = (tl.program_id(0) // blocks // seqlen).to(tl.int64)
    start = (capacity - seqlen_new).to(tl.int64)  # of the new keys, in the row or in the pages
    if seqlens_ptr is not None:
        start = tl.load(seqlens_ptr + batch).to(tl.int64)
    position = start
    if leftpad_ptr is not None:
        position -= tl.load(leftpad_ptr + batch)
    if position >= 0 and start + seqlen_new <= capacity:
        if block < k_blocks:
            if token < seqlen_new:
                heads = block * HEADS + tl.arange(0, HEADS)
                page = page_of_keys(places_ptr, start + token, capacity, batch, stride_pb, 1, PAGE_SIZE)
                place = (start + token) % PAGE_SIZE if PAGE_SIZE > 0 else start + token
                k = load_turned(
                    k_ptr + batch * stride_kb + token.to(tl.int64) * stride_ks, heads, heads_k, stride_kh,
                    position + token, cos_ptr, sin_ptr, stride_cos, stride_sin, D, HEADS, TILE_D, R, INTERLEAVED,
                )  # fmt: skip
                v = load_turned(
                    v_ptr + batch * stride_vb + token.to(tl.int64) * stride_vs, heads, heads_k, stride_vh,
                    position, None, None, 0, 0, DV, HEADS, TILE_DV, 0, INTERLEAVED,
                )  # fmt: skip
                store_new(
                    k_cache_ptr + page * stride_kcb + place * stride_kcs, k, heads, heads_k, stride_kch,
                    k_descale_ptr, batch * stride_k_descale, limit, D, TILE_D, QUANTIZED,
                )  # fmt: skip
                store_new(
                    v_cache_ptr + page * stride_vcb + place * stride_vcs, v, heads, heads_k, stride_vch,
                    v_descale_ptr, batch * stride_v_descale, limit, DV, TILE_DV, QUANTIZED,
                )  # fmt: skip
        elif token < seqlen_q:
            heads = (block - k_blocks) * HEADS + tl.arange(0, HEADS)
            q = load_turned(
                q_ptr + batch * stride_qb + token.to(tl.int64) * stride_qs, heads, heads_q, stride_qh,
                position + token if ADVANCING else position, cos_ptr, sin_ptr, stride_cos, stride_sin,
                D, HEADS, TILE_D, R, INTERLEAVED,
            )  # fmt: skip
            turned_at = (batch * seqlen_q + token) * heads_q * D
            store_new(turned_ptr + turned_at, q, heads, heads_q, D, None, 0, limit, D, TILE_D, False)


class AppendSpec(NamedTuple):
    """What a prepared launch depends on. attention: of all sequences, its seqlen_k the cache's capacity."""

    attention: AttentionSpec
    page_size: int  # 0: not in pages
    seqlen_new: int
    rotary_dims: int  # R; 0: nothing is turned
    interleaved: bool
    quantized: bool


def append_spec(call: CachedCall) -> AppendSpec | None:
    """None where nothing is new."""
    if call.given.k is None:
        return None
    cache, dims = call.cache, call.rotary_dims
    return AppendSpec(
        call.spec, cache.page_size, cache.seqlen_new, dims, dims > 0 and call.interleaved, cache.k.dtype == FP8
    )


def queries_of(moving: dict[str, Any]) -> str:
    """The queries that attend: turned, where there is room for such."""
    return "q" if moving["turned"] is None else "turned"


def places_of(page_size: int) -> str:
    """The argument that says where in the caches sequences lie: in pages, or each in a row."""
    return "block_table" if page_size else "cache_batch_idx"


def append_call(spec: AppendSpec, moving: dict[str, Any]) -> KernelCall:
    """`append_kernel`, of the new tokens and of where they go to the turned queries."""
    of, places = spec.attention, places_of(spec.page_size)
    names = (
        "q", "k", "v", "k_cache", "v_cache", "cache_seqlens", "cache_leftpad", places, "rotary_cos", "rotary_sin",
        "k_descale", "v_descale", "end", queries_of(moving),
    )  # fmt: skip
    seqlen = max(of.seqlen_q, spec.seqlen_new) if spec.rotary_dims else spec.seqlen_new
    scalars = (
        *(stride for name in names[:5] for stride in strides(moving[name])),
        *(rows_apart(moving[name]) for name in (places, "rotary_cos", "rotary_sin", "k_descale", "v_descale")),
        of.seqlen_q, spec.seqlen_new, seqlen, of.heads_q, of.heads_k, FP8_MAX,
        of.head_dim, of.head_dim_v, triton.next_power_of_2(of.head_dim), triton.next_power_of_2(of.head_dim_v),
        HEADS, spec.rotary_dims, spec.interleaved, of.masked, spec.page_size,
        spec.quantized,
    )  # fmt: skip
    blocks = -(-of.heads_k // HEADS) + (-(-of.heads_q // HEADS) if spec.rotary_dims else 0)
    return call_of(append_kernel, blocks * seqlen * of.batch, moving, names, scalars, OPTIONS)
