"""Standard attention (FlashAttention section 2.2, "Algorithm 0"): S, P and O all materialised.

The specification of every feature in plain PyTorch, and what runs where no other backend does.
Computes in float32 at least, float64 for float64 inputs.

Legend: B batch, Sq/Sk lengths, Hq/Hk heads (G = Hq / Hk query heads share one key head), D/Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import AttentionSpec


def supports(spec: AttentionSpec, device: torch.device) -> str | None:
    """Takes every spec on every device."""
    return None


def visible(spec: AttentionSpec, device: torch.device) -> Tensor:
    """(Sq, Sk) bool: True where query i sees key j, the mask aligned to the bottom right corner."""
    i = torch.arange(spec.seqlen_q, device=device)[:, None] + spec.offset
    j = torch.arange(spec.seqlen_k, device=device)[None, :]
    seen = torch.ones(spec.seqlen_q, spec.seqlen_k, dtype=torch.bool, device=device)
    if spec.window_left >= 0:
        seen &= j >= i - spec.window_left
    if spec.window_right >= 0:
        seen &= j <= i + spec.window_right
    return seen


def attend(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Differentiable standard attention in the dtype of q: out (B, Sq, Hq, Dv) and lse (B, Hq, Sq).

    A query that sees no key gets out = 0 and lse = -inf, and zero gradients. With alibi_slopes (B, Hq),
    -slope |i + Sk - Sq - j| is added to the score of query i and key j, behind the soft cap.
    """
    scores, seen = _scores(spec, q, k)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, :, None, None] * _distance(spec, q.device)
    empty = ~seen.any(-1, keepdim=True)  # (Sq, 1)
    scores = scores.masked_fill(~seen, float("-inf")).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1, keepdim=True)  # (B, Hq, Sq, 1)
    p = (scores - lse).exp().masked_fill(empty, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", p, _per_query_head(spec, v))
    return out, lse.masked_fill(empty, float("-inf")).squeeze(-1)


def forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) in float32 (float64 for float64 inputs)."""
    exact = spec.lse_dtype
    out, lse = attend(spec, q.to(exact), k.to(exact), v.to(exact), alibi_slopes)
    return out.to(spec.dtype).contiguous(), lse


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
    """dq, dk, dv by section 2.2's chain rule; dout or dlse may be None, which means zero."""
    exact = spec.lse_dtype
    q_, k_, v_ = q.to(exact), k.to(exact), v.to(exact)
    scores, seen = _scores(spec, q_, k_)
    # a row that sees no key has lse = -inf; exp(s - inf) makes its P zero
    p = (scores - lse.masked_fill(lse == float("-inf"), float("inf"))[..., None]).exp().masked_fill(~seen, 0.0)
    ds = torch.zeros_like(p)
    dv = torch.zeros_like(v_)
    if dout is not None:
        do = dout.to(exact)
        dv = _sum_over_group(spec, torch.einsum("bhqk,bqhd->bkhd", p, do))  # dV = P^T dO
        dp = torch.einsum("bqhd,bkhd->bhqk", do, _per_query_head(spec, v_))  # dP = dO V^T
        delta = (do * out.to(exact)).sum(-1).transpose(1, 2)  # D = rowsum(dO o O), (B, Hq, Sq)
        ds = p * (dp - delta[..., None])  # dS = dsoftmax(dP)
    if dlse is not None:
        ds = ds + p * dlse.to(exact)[..., None]
    if spec.softcap > 0:
        ds = ds * (1 - (scores / spec.softcap).square())
    ds = ds.masked_fill(~seen, 0.0) * spec.softmax_scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, _per_query_head(spec, k_))  # dQ = dS K
    dk = _sum_over_group(spec, torch.einsum("bhqk,bqhd->bkhd", ds, q_))  # dK = dS^T Q
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _scores(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """S = softmax_scale * Q K^T, soft-capped, (B, Hq, Sq, Sk), and which of it is visible, (Sq, Sk)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _per_query_head(spec, k)) * spec.softmax_scale
    if spec.softcap > 0:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores, visible(spec, q.device)


def _distance(spec: AttentionSpec, device: torch.device) -> Tensor:
    """(Sq, Sk): how far key j is from query i, the last of each beside each other."""
    i = torch.arange(spec.seqlen_q, device=device)[:, None] + spec.offset
    return (i - torch.arange(spec.seqlen_k, device=device)).abs()


def _per_query_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """(B, Sk, Hk, D) -> (B, Sk, Hq, D): each key head repeated for the query heads that share it."""
    return x.repeat_interleave(spec.group, dim=2)


def _sum_over_group(spec: AttentionSpec, x: Tensor) -> Tensor:
    """(B, Sk, Hq, D) -> (B, Sk, Hk, D): gradients of a shared key head add up over its query heads."""
    return x.unflatten(2, (spec.heads_k, spec.group)).sum(3)
