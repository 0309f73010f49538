"""FlashAttention-2 backward pass (Algorithm 2) in Triton.

Legend: q, dout (B, Sq, Hq, D | Dv), k, v (B, Sk, Hk, D | Dv), lse (B, Hq, Sq) float32, shift and delta as lse with
every row of Sq numbers padded to a multiple of ROW_PAD.

Two kernels. dQ: one program per block of Q and head; on its way it leaves two numbers per row for the other,
delta = rowsum(dO o O) - dlse (Algorithm 2's D, and the gradient of lse) and shift (lse as exp_of_scores wants
it). Then dK and dV: one program per block of K/V and key head, which adds up over the query heads of its group.
S and P are computed in both, seven products instead of Algorithm 2's five: on an H200 five products with dQ
summed by float32 atomics take as long at S = 512 and longer from 2k on, before dQ is zeroed and converted
(benchmarks/results/backward-atomics-h200.json). Nor is a float32 dQ needed, and gradients are bitwise the same
in every run. Where there are so few programs that all run at the same time, both kinds are in one launch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arch import arch_of
from ...spec import AttentionSpec
from .. import Backward
from ..launcher import Launcher, Run, backward_pass, backward_pass_like, multiprocessors_of, strides
from .config import Tiles, choose, has_tiles
from .launch import NOT_SPECIALIZED, Kernel, Launch, constants, dense_rows, score_units
from .tile import (
    LOG2E,
    ROW_PAD,
    exp_of_scores,
    load_tile,
    part_of,
    place,
    row_dot,
    store_tile,
    tanh,
    visible,
    visible_blocks,
)


@triton.jit
def shift_and_delta(
    dout, out, rows, lse_ptr, dlse_ptr, stride_ls, seqlen_q, EXACT: tl.constexpr
):  # fmt: skip
    """Of a block of rows of a head; line 4."""
    delta = row_dot(dout, out, EXACT)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + rows.to(tl.int64) * stride_ls, mask=rows < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=rows < seqlen_q, other=float("-inf"))
    # +inf where a row sees no key, or is none: its P = exp(scores - inf) is then 0 by itself
    return tl.where(lse == float("-inf"), float("inf"), lse if EXACT else lse * LOG2E), delta


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, shift_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_ls,
    programs_before, heads_q, group, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, line 4 and dQ, and shift and delta if there is room for them: grid (blocks of Q * Hq * B,), after
    programs_before of another kind, if that is not None."""
    program = tl.program_id(0)
    if programs_before is not None:
        program -= programs_before
    n_m_blocks = tl.cdiv(seqlen_q, TILE_M)
    m_block, head, batch = place(program, n_m_blocks, heads_q)
    if HAS_RIGHT:
        m_block = n_m_blocks - 1 - m_block  # causal: the rows that see most first
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    dout_ptr += batch * stride_ob + head * stride_oh
    stride_outs = heads_q.to(tl.int64) * DV
    out_ptr += batch * seqlen_q * stride_outs + head * DV

    row = m_block * TILE_M
    q = load_tile(q_ptr, stride_qs, row, seqlen_q, D, TILE_M, TILE_D, EDGE=True)
    if EXACT:
        q *= softmax_scale
    dout = load_tile(dout_ptr, stride_os, row, seqlen_q, DV, TILE_M, TILE_DV, EDGE=True)
    out = load_tile(out_ptr, stride_outs, row, seqlen_q, DV, TILE_M, TILE_DV, EDGE=True)
    rows = row + tl.arange(0, TILE_M)
    if dlse_ptr is not None:
        dlse_ptr += batch * stride_lb + head * stride_lh
    lse_ptr += (batch * heads_q + head) * seqlen_q
    shift, delta = shift_and_delta(dout, out, rows, lse_ptr, dlse_ptr, stride_ls, seqlen_q, EXACT)
    if shift_ptr is not None:
        padded = tl.cdiv(seqlen_q, ROW_PAD) * ROW_PAD
        tl.store(shift_ptr + (batch * heads_q + head) * padded + rows, shift)
        tl.store(delta_ptr + (batch * heads_q + head) * padded + rows, delta)
    dq = tl.zeros([TILE_M, TILE_D], tl.float32)

    first, full_first, full_end, end = visible_blocks(
        m_block, seqlen_q, seqlen_k, window_left, window_right, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, EDGE=True
    )
    for part in tl.static_range(0 if HAS_LEFT else 1, 3):  # masked blocks on both sides, then the full ones
        begin, stop = part_of(part, first, full_first, full_end, end)
        for n_block in range(begin, stop):
            col = n_block * TILE_N
            k = load_tile(k_ptr, stride_ks, col, seqlen_k, D, TILE_N, TILE_D, EDGE=part != 2)
            v = load_tile(v_ptr, stride_vs, col, seqlen_k, DV, TILE_N, TILE_DV, EDGE=part != 2)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # line 10: (TILE_M, TILE_N)
            if SOFTCAP:
                s = tanh(s * cap_in)
            p = exp_of_scores(s, shift[:, None], unit, EXACT)  # line 11
            if part != 2:
                cols = col + tl.arange(0, TILE_N)
                seen = visible(
                    rows[:, None], cols[None, :], seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # line 13
            ds = p * (dp - delta[:, None])  # line 14
            if SOFTCAP:
                ds *= 1 - s * s
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # line 15
    dq_ptr += batch * stride_dqb + head * stride_dqh
    store_tile(dq_ptr, stride_dqs, row, seqlen_q, dq * softmax_scale, D, TILE_M, TILE_D)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, shift_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    stride_lb, stride_lh, stride_ls,
    heads_k, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 5-19, with shift and delta, or from out, lse and dlse if shift_ptr is None: grid (blocks of
    K * Hk * B,)."""
    # causal: the keys most rows see come first
    n_block, head_k, batch = place(tl.program_id(0), tl.cdiv(seqlen_k, TILE_N), heads_k)
    k_ptr += batch * stride_kb + head_k * stride_kh
    v_ptr += batch * stride_vb + head_k * stride_vh
    q_ptr += batch * stride_qb
    dout_ptr += batch * stride_ob
    if shift_ptr is not None:
        padded = tl.cdiv(seqlen_q, ROW_PAD) * ROW_PAD
        shift_ptr += batch * heads_k * GROUP * padded
        delta_ptr += batch * heads_k * GROUP * padded
    else:
        stride_outs = heads_k.to(tl.int64) * GROUP * DV
        out_ptr += batch * seqlen_q * stride_outs
        lse_ptr += batch * heads_k * GROUP * seqlen_q
        if dlse_ptr is not None:
            dlse_ptr += batch * stride_lb

    col = n_block * TILE_N
    cols = col + tl.arange(0, TILE_N)
    k = load_tile(k_ptr, stride_ks, col, seqlen_k, D, TILE_N, TILE_D, EDGE=True)  # line 6
    v = load_tile(v_ptr, stride_vs, col, seqlen_k, DV, TILE_N, TILE_DV, EDGE=True)
    dk = tl.zeros([TILE_N, TILE_D], tl.float32)  # line 7
    dv = tl.zeros([TILE_N, TILE_DV], tl.float32)

    # Rows past the last query need no mask, as their shift is inf, and without a window one loop takes all blocks.
    # Past D 64 dk and dv then leave no registers for pointers.
    WINDOWED: tl.constexpr = HAS_LEFT or HAS_RIGHT
    KEEP: tl.constexpr = WINDOWED or TILE_D <= 64
    # the mask seen from the keys: rows and columns exchanged, and with them the window's sides
    first, full_first, full_end, end = visible_blocks(
        n_block, seqlen_k, seqlen_q, window_right, window_left, TILE_N, TILE_M, HAS_RIGHT, HAS_LEFT, EDGE=WINDOWED
    )
    for part in tl.static_range(0 if WINDOWED else 2, 3):  # masked blocks on both sides, then the full ones
        begin, stop = part_of(part, first, full_first, full_end, end)
        # lines 8-17, for one query head of the group after the other; a window's few masked blocks are not worth
        # the registers that a pipeline takes
        for step in tl.range(0, (stop - begin) * GROUP, num_stages=1 if part != 2 else None):
            if GROUP == 1:
                head = head_k
                row = (begin + step) * TILE_M
            else:
                head = head_k * GROUP + step // (stop - begin)
                row = (begin + step % (stop - begin)) * TILE_M
            q_head = q_ptr + head * stride_qh
            dout_head = dout_ptr + head * stride_oh
            q = load_tile(
                q_head, stride_qs, row, seqlen_q, D, TILE_M, TILE_D, part != 2 or not WINDOWED, KEEP
            )  # line 9
            if EXACT:
                q *= softmax_scale
            dout = load_tile(dout_head, stride_os, row, seqlen_q, DV, TILE_M, TILE_DV, part != 2 or not WINDOWED, KEEP)
            rows = row + tl.arange(0, TILE_M)
            if shift_ptr is not None:
                shift = tl.load(shift_ptr + head * padded + rows)
                delta = tl.load(delta_ptr + head * padded + rows)
            else:
                out_head = out_ptr + head * DV
                out = load_tile(out_head, stride_outs, row, seqlen_q, DV, TILE_M, TILE_DV, part != 2 or not WINDOWED)
                dlse_head = None if dlse_ptr is None else dlse_ptr + head * stride_lh
                shift, delta = shift_and_delta(
                    dout, out, rows, lse_ptr + head * seqlen_q, dlse_head, stride_ls, seqlen_q, EXACT
                )
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # line 10: (TILE_N, TILE_M)
            if SOFTCAP:
                s = tanh(s * cap_in)
            p = exp_of_scores(s, shift[None, :], unit, EXACT)  # line 11
            if part != 2:
                seen = visible(
                    rows[None, :], cols[:, None], seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                p = tl.where(seen, p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")  # line 12
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")  # line 13
            ds = p * (dp - delta[None, :])  # line 14
            if SOFTCAP:
                ds *= 1 - s * s
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")  # line 16
    dk_ptr += batch * stride_dkb + head_k * stride_dkh
    dv_ptr += batch * stride_dvb + head_k * stride_dvh
    if not EXACT:  # else q was scaled
        dk *= softmax_scale
    store_tile(dk_ptr, stride_dks, col, seqlen_k, dk, D, TILE_N, TILE_D)  # line 18
    store_tile(dv_ptr, stride_dvs, col, seqlen_k, dv, DV, TILE_N, TILE_DV)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def gradients_kernel(
    dout_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dqb, stride_dqs, stride_dqh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, stride_lb, stride_lh, stride_ls,
    heads_q, heads_k, batch, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
    D: tl.constexpr, DV: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 in one launch, where all programs of both kinds run at the same time: grid (blocks of K * Hk * B and
    blocks of Q * Hq * B,). dK and dV work delta out again."""
    n_dkdv = tl.cdiv(seqlen_k, TILE_N) * heads_k * batch
    if tl.program_id(0) < n_dkdv:
        dkdv_kernel(
            q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, None, None, dk_ptr, dv_ptr,
            stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            stride_ob, stride_os, stride_oh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
            stride_lb, stride_lh, stride_ls,
            heads_k, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
            D, DV, TILE_D, TILE_DV, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, SOFTCAP, EXACT, GROUP,
        )  # fmt: skip
    else:
        dq_kernel(
            q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, None, None, dq_ptr,
            stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            stride_ob, stride_os, stride_oh, stride_dqb, stride_dqs, stride_dqh, stride_lb, stride_lh, stride_ls,
            n_dkdv, heads_q, GROUP, seqlen_q, seqlen_k, softmax_scale, unit, cap_in, window_left, window_right,
            D, DV, TILE_D, TILE_DV, TILE_M, TILE_N, HAS_LEFT, HAS_RIGHT, SOFTCAP, EXACT,
        )  # fmt: skip


def _problem(spec: AttentionSpec) -> tuple[int | float, ...]:
    unit, cap_in = score_units(spec)
    return (
        spec.seqlen_q, spec.seqlen_k, spec.softmax_scale, unit, cap_in, spec.window_left, spec.window_right
    )  # fmt: skip


def _launch_dkdv(spec, tiles, q, k, v, out, dout, lse, dlse, shift, delta, dk, dv) -> Launch:
    return Launch(
        grid=triton.cdiv(spec.seqlen_k, tiles.tile_n) * spec.heads_k * spec.batch,
        scalars=(*(n for x in (q, k, v, dout, dk, dv) for n in strides(x)), 0, 0, 0, spec.heads_k, *_problem(spec)),
        constants={**constants(spec, tiles), "GROUP": spec.group},
    )


def _launch_dq(spec, tiles, q, k, v, out, dout, lse, dlse, shift, delta, dq) -> Launch:
    return Launch(
        grid=triton.cdiv(spec.seqlen_q, tiles.tile_m) * spec.heads_q * spec.batch,
        scalars=(
            *(n for x in (q, k, v, dout, dq) for n in strides(x)),
            *((0, 0, 0) if dlse is None else dlse.stride()),
            None,
            spec.heads_q,
            spec.group,
            *_problem(spec),
        ),
        constants=constants(spec, tiles),
    )


def _all_programs(spec: AttentionSpec, tiles: Tiles) -> int:
    of_keys, of_queries = -(-spec.seqlen_k // tiles.tile_n), -(-spec.seqlen_q // tiles.tile_m)
    return (of_keys * spec.heads_k + of_queries * spec.heads_q) * spec.batch


def _launch_gradients(spec, tiles, dout, dlse, q, k, v, out, lse, dq, dk, dv) -> Launch:
    return Launch(
        grid=_all_programs(spec, tiles),
        scalars=(
            *(n for x in (q, k, v, dout, dq, dk, dv) for n in strides(x)),
            *((0, 0, 0) if dlse is None else dlse.stride()),
            spec.heads_q,
            spec.heads_k,
            spec.batch,
            *_problem(spec),
        ),
        constants={**constants(spec, tiles), "GROUP": spec.group},
    )


def row_numbers(spec: AttentionSpec) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """room(lse): for shift and delta, B * Hq * (Sq rounded up to a multiple of ROW_PAD) float32, the padding filled in.

    By the host, as a branch for it in dq_kernel takes registers that a second program on the multiprocessor needs. Of
    one dimension each: views of one tensor for both are more work for it.
    """
    seqlen = spec.seqlen_q
    padded = -(-seqlen // ROW_PAD.value) * ROW_PAD.value
    size = spec.batch * spec.heads_q * padded

    def room(lse: Tensor) -> tuple[Tensor, Tensor]:
        shift, delta = lse.new_empty(size), lse.new_empty(size)
        if padded > seqlen:
            shift.view(-1, padded)[:, seqlen:] = float("inf")  # P = exp(scores - inf) = 0
            delta.view(-1, padded)[:, seqlen:] = 0.0
        return shift, delta

    return room


DQ = Kernel("dq", dq_kernel, _launch_dq)
DKDV = Kernel("dkdv", dkdv_kernel, _launch_dkdv)
GRADIENTS = Kernel("gradients", gradients_kernel, _launch_gradients)


def programs_at_once(device: torch.device) -> int:
    """How many programs of `GRADIENTS` run at the same time at least: two on a multiprocessor (tests/test_aot.py)."""
    if device.type == "cpu":
        return 16  # interpreted: so that some problems take one launch and others two
    return 2 * multiprocessors_of(device)


def at_once(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether one launch is for all, as its programs are at work at the same time."""
    arch = arch_of(device)
    return (
        arch is not None
        and has_tiles("gradients", spec, arch)
        and _all_programs(spec, choose("gradients", spec, arch)) <= programs_at_once(device)
    )


class BackwardPass(Launcher):
    """Both, from dout, dlse, q, k, v, out and lse to dq, dk and dv: one launch to look up, for the sake of small
    calls."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        dout, dlse, q, k, v, out, lse, dq, dk, dv = tensors
        if at_once(spec, q.device):
            return GRADIENTS.prepare(spec, tensors)
        room = row_numbers(spec)
        shift, delta = room(lse)
        launch_dq = DQ.prepare(spec, (q, k, v, out, dout, lse, dlse, shift, delta, dq))
        launch_dkdv = DKDV.prepare(spec, (q, k, v, None, dout, None, None, shift, delta, dk, dv))

        def launch(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            dq: Tensor, dk: Tensor, dv: Tensor,
        ) -> None:  # fmt: skip
            shift, delta = room(lse)
            launch_dq(q, k, v, out, dout, lse, dlse, shift, delta, dq)
            launch_dkdv(q, k, v, None, dout, None, None, shift, delta, dk, dv)

        return launch


BACKWARD = BackwardPass()


def backward(
    spec: AttentionSpec,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k and v, by Algorithm 2; bitwise the same in every run."""
    dout = torch.zeros_like(out) if dout is None else dense_rows(dout)
    if _dense(q, k, v):
        return backward_pass(BACKWARD, spec, dout, dlse, q, k, v, out, lse)
    dq, dk, dv = backward_pass(BACKWARD, spec, dout, dlse, q.contiguous(), k.contiguous(), v.contiguous(), out, lse)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def backward_like(
    spec: AttentionSpec, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> Backward | None:
    """`backward` for tensors that lie like these, None if it copies them first."""
    if dout is None or dout.stride(-1) != 1 or not _dense(q, k, v):
        return None
    return backward_pass_like(BACKWARD, spec, dout, dlse, q, k, v, *others)


def _dense(*tensors: Tensor) -> bool:
    """Whether the last dimension has stride 1, in tensors and in their gradients, which torch may lay out otherwise."""
    return all(x.stride(-1) == 1 == torch.empty_like(x).stride(-1) for x in tensors)
