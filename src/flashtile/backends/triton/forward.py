"""FlashAttention-2 forward pass (Algorithm 1) in Triton: one program per block of Q and head.

Legend: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq) float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...spec import AttentionSpec
from .. import Forward
from ..launcher import Launcher, forward_pass, forward_pass_like, strides
from .config import Tiles
from .few_queries import FEW_QUERIES, has_few_queries
from .launch import FLOAT32_TINY, NOT_SPECIALIZED, Kernel, Launch, constants, dense_rows, score_units
from .tile import LN2, load_tile, part_of, place, softmax_step, store_tile, tanh, visible, visible_blocks

SUMS = tl.constexpr(8)  # of a row of P: of every eight columns a thread has two


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    heads_q, group, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for one block of rows: grid (blocks of Q * Hq * B,)."""
    n_m_blocks = tl.cdiv(seqlen_q, TILE_M)
    m_block, head, batch = place(tl.program_id(0), n_m_blocks, heads_q)
    if HAS_RIGHT:
        m_block = n_m_blocks - 1 - m_block  # causal: the rows that see most first
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    stride_os = heads_q.to(tl.int64) * DV
    out_ptr += batch * seqlen_q * stride_os + head * DV
    lse_ptr += (batch * heads_q + head) * seqlen_q

    row = m_block * TILE_M
    rows = row + tl.arange(0, TILE_M)
    q = load_tile(q_ptr, stride_qs, row, seqlen_q, D, TILE_M, TILE_D, EDGE=True)  # line 4
    if EXACT:
        q *= softmax_scale
    if NEGATIVE:  # unit is positive: q carries the scale's sign
        q = -q
    acc = tl.zeros([TILE_M, TILE_DV], tl.float32)  # line 5
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M, SUMS], tl.float32)

    first, full_first, full_end, end = visible_blocks(
        m_block, seqlen_q, seqlen_k, window_left, window_right, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, EDGE=True
    )
    for part in tl.static_range(0 if HAS_LEFT else 1, 3):  # masked blocks on both sides, then the full ones
        begin, stop = part_of(part, first, full_first, full_end, end)
        for n_block in range(begin, stop):  # line 6
            col = n_block * TILE_N
            k = load_tile(k_ptr, stride_ks, col, seqlen_k, D, TILE_N, TILE_D, EDGE=part != 2)  # line 7
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # line 8: (TILE_M, TILE_N)
            if SOFTCAP:
                s = tanh(s * cap_in)
            if part != 2:
                cols = col + tl.arange(0, TILE_N)
                seen = visible(
                    rows[:, None], cols[None, :], seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                s = tl.where(seen, s, float("-inf"))
            p, alpha, m, l = softmax_step(s, unit, m, l, EXACT)  # line 9
            v = load_tile(v_ptr, stride_vs, col, seqlen_k, DV, TILE_N, TILE_DV, EDGE=part != 2)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # line 10

    l = tl.sum(l, 1)
    empty = l == 0  # rows that see no key
    out = acc / tl.where(empty, 1.0, l)[:, None]  # line 12
    lse = m + tl.log2(l) * LN2 if EXACT else (m * unit + tl.log2(l)) * LN2  # line 13
    lse = tl.where(empty, float("-inf"), lse)
    store_tile(out_ptr, stride_os, row, seqlen_q, out, DV, TILE_M, TILE_DV)  # line 14
    tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)  # line 15


def _launch(spec: AttentionSpec, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Launch:
    unit, cap_in = score_units(spec)
    return Launch(
        grid=triton.cdiv(spec.seqlen_q, tiles.tile_m) * spec.heads_q * spec.batch,
        scalars=(
            *strides(q), *strides(k), *strides(v), spec.heads_q, spec.group, spec.seqlen_q, spec.seqlen_k,
            # a running maximum needs unit > 0: the smallest float stands in for a scale of zero
            spec.softmax_scale, max(abs(unit), FLOAT32_TINY), cap_in, spec.window_left, spec.window_right,
        ),
        constants={**constants(spec, tiles), "NEGATIVE": unit < 0},
    )  # fmt: skip


FORWARD = Kernel("forward", forward_kernel, _launch)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q and lse (B, Hq, Sq) in float32, by Algorithm 1 or, of few queries, by
    Flash-Decoding."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    return forward_pass(_launcher(spec, q, k, v), spec, q, k, v)


def forward_like(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Forward | None:
    """`forward` for tensors that lie like these, None if it copies them first."""
    copies = any(x.stride(-1) != 1 for x in (q, k, v))
    return None if copies else forward_pass_like(_launcher(spec, q, k, v), spec, q, k, v)


def _launcher(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Launcher:
    return FEW_QUERIES if has_few_queries(spec, q, k, v) else FORWARD
