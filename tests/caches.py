"""Calls over a cache, and attention over plain lists of keys, to compare them with."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DOUBLE

B, SQ, HQ, HK, D, DV, CAPACITY = 3, 4, 4, 2, 16, 8, 64
INT = torch.int32
LENGTHS = torch.tensor([5, 40, 60 - SQ], dtype=torch.int32)
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (7, 2)}}
NEW = ["nothing new", "new keys", "turned", "turned by halves"]
LAYOUTS = ["in one piece", "rows", "left-padded", "pages of 1", "pages of 16"]
INTERPRETED, ON_GPU = pytest.mark.interpreter, pytest.mark.gpu
PLAIN = [(layout, mask, new, "plain") for layout in LAYOUTS for mask in MASKS for new in NEW]
TERMS = {
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi of sequences": {"alibi_slopes": torch.arange(B * HQ).view(B, HQ) / 16},
    "sinks": {"sinks": torch.tensor([1.0, -math.inf, 4.0, -2.0])},
    "float8": {},
    "float8, scaled": {"k_descale": torch.tensor([0.5, 3.0]), "v_descale": torch.arange(1, 1 + B * HK).view(B, HK) / 4},
}
TERMS["all at once"] = TERMS["float8, scaled"] | TERMS["sinks"] | TERMS["alibi"] | TERMS["softcap"]
TERMED = [
    (layout, mask, new, terms)
    for terms in TERMS
    for layout, mask, new in [
        ("in one piece", "full", "nothing new"),
        ("left-padded", "window", "turned by halves"),
        ("pages of 16", "causal", "turned"),
    ]
]
CASES = PLAIN + TERMED


def turned(x, cos, sin, position, interleaved):
    """x (H, D) turned at one position, as complex numbers."""
    width = cos.shape[1]
    halves = slice(0, width), slice(width, 2 * width)
    first, second = (slice(0, 2 * width, 2), slice(1, 2 * width, 2)) if interleaved else halves
    z = torch.complex(x[:, first], x[:, second]) * torch.complex(cos[position], sin[position])
    x = x.clone()
    x[:, first], x[:, second] = z.real, z.imag
    return x


def attention(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None):
    """(out, lse) of one sequence: q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv), in float64; slopes and sinks (Hq,)."""
    left, right = window_size[0], 0 if causal else window_size[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    row, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
    hidden = ((key > row + right) if right >= 0 else key < 0) | ((key < row - left) if left >= 0 else key < 0)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (row - key).abs()
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    p = scores.softmax(-1).nan_to_num(0.0)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v), scores.logsumexp(-1)


def normal(*shape, dtype):
    return torch.randn(shape, dtype=DOUBLE).to(dtype)


def made(layout, dtype, stored=None):
    """(q, k_cache, v_cache), other arguments, and for each sequence a view of its row or pages: k and v to read."""
    torch.manual_seed(0)
    rows, arguments = torch.arange(B, dtype=torch.int32), {"cache_seqlens": LENGTHS.clone()}
    shape = 5 if layout == "rows" else B, CAPACITY
    if layout.startswith("pages"):
        size = int(layout.split()[-1])
        shape = B * CAPACITY // size, size
        arguments["block_table"] = torch.randperm(shape[0]).view(B, -1).int()
    elif layout == "rows":
        rows = arguments["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    elif layout == "left-padded":
        arguments["cache_leftpad"] = torch.tensor([2, 0, 31], dtype=torch.int32)
    k, v = (normal(*shape, HK, dims, dtype=stored or dtype) for dims in (D, DV))
    places = arguments.get("block_table", rows[:, None])
    arguments = {name: torch.stack((x, x), -1)[..., 0] for name, x in arguments.items()}  # read where they lie
    return (normal(B, SQ, HQ, D, dtype=dtype), k, v), arguments, places.long()


def lists_of(k_cache, v_cache, places, arguments, seqlens, terms):
    """The keys and values of each sequence, in float64: what the cache holds, times its scales."""
    first = arguments.get("cache_leftpad", torch.zeros(B, dtype=INT))
    for b, (f, n) in enumerate(zip(first.tolist(), seqlens.tolist(), strict=True)):
        kb, vb = (x.cpu().double()[places[b]].flatten(0, 1)[f:n] for x in (k_cache, v_cache))
        scales = (
            terms[name].expand(B, HK)[b, :, None] if name in terms else 1.0 for name in ("k_descale", "v_descale")
        )
        yield tuple(x * scale for x, scale in zip((kb, vb), scales, strict=True))
