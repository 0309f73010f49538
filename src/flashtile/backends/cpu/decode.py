"""Flash-Decoding on a CPU (FlashAttention-2 section 3.2): the keys of all sequences at once, block after block.

One sequence after the other takes a millisecond each for what is not arithmetic.

Legend: B sequences, n of them with keys in a block of N; R = Sq * G rows, the queries of one key head ·
Q: (B, Hk, R, D) · K: (n, N, Hk, D) · V: (n, N, Hk, Dv) · S, P: (n, Hk, R, N) · O: (B, Hk, R, Dv) · m, l: (B, Hk, R, 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...cache import Arguments, CachedCall
from ...merge import with_sinks
from ...spec import AttentionSpec
from .. import Attend
from .forward import DECODING_ROWS
from .tile import by_key_head

# Of K, or of V, in a block; a sequence with more in all is left to `forward`, which takes as long then, or less. On two
# cores, in pages, one after the other and at once: 16 sequences of 256 keys, 2 heads of 64, float32, 25 and 3 ms; 16 of
# 2k, 8 heads of 128, 98 and 92; 8 of 8k, bfloat16, 193 and 232.
NUMBERS_AT_ONCE = 1 << 21


def passes_over(call: CachedCall) -> str | None:
    """Why a call over a cache is left to `forward`, one sequence after the other."""
    rows = call.spec.seqlen_q * call.spec.group
    if rows > DECODING_ROWS:
        return f"{rows} queries of a key head are no decoding step: that has at most {DECODING_ROWS}"
    if call.alibi_slopes is not None:
        return "it has no alibi_slopes"
    first, end = call.cache.spans(call.spec.batch)
    longest = int((end - first).max()) if call.spec.batch else 0
    if longest * _numbers(call.spec) > NUMBERS_AT_ONCE:
        return f"sequences of {longest} keys are long enough to come one after the other"
    return None


def attend_like(call: CachedCall, num_splits: int, wants_lse: bool) -> Attend:
    """attend(given), which has lse anyway; num_splits is for programs, of which there are none."""

    def attend(given: tuple) -> tuple[Tensor, Tensor]:
        like = call._replace(given=Arguments(*given))
        return _decode(like, like.append())

    return attend


def _decode(call: CachedCall, q: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq)."""
    spec, cache, exact = call.spec, call.cache, call.spec.lse_dtype
    first, end = cache.spans(spec.batch)
    n_keys = end - first
    out = torch.empty(spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    lse = torch.empty(spec.batch, spec.heads_q, spec.seqlen_q, dtype=exact)
    q = by_key_head(spec, q).flatten(2, 3).to(exact)
    o = q.new_zeros(*q.shape[:3], spec.head_dim_v)
    l = q.new_zeros(*q.shape[:3], 1)
    m = torch.full_like(l, -math.inf)
    queries = torch.arange(spec.seqlen_q).repeat_interleave(spec.group)
    diagonal = (n_keys[:, None] - spec.seqlen_q + queries)[:, None, :, None]
    stop = int(n_keys.max()) if spec.batch else 0
    start = max(0, int(n_keys.min()) - spec.seqlen_q - spec.window_left) if spec.window_left >= 0 and stop else 0
    width = max(1, NUMBERS_AT_ONCE // max(1, spec.batch * _numbers(spec)))
    for begin in range(start, stop, width):
        here = (n_keys > begin).nonzero()[:, 0]
        keys = torch.arange(begin, min(begin + width, stop))
        inside = keys < n_keys[here, None]  # (n, N)
        k, v = (x.to(exact) for x in cache.block(here, first[here, None] + keys))
        s = _scores(call, q[here], k, here)
        s.masked_fill_(~_seen(spec, inside, keys, diagonal[here]), -math.inf)
        if not inside.all():  # what lies past the end may be no number, of which 0 times is none
            v = v.masked_fill(~inside[..., None, None], 0.0)
        m_new = torch.maximum(m[here], s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -math.inf, 0.0)  # a row that has seen no key yet
        alpha, p = (m[here] - shift).exp(), s.sub_(shift).exp_()
        l[here] = l[here] * alpha + p.sum(-1, keepdim=True)
        o[here] = o[here] * alpha + torch.stack([p[:, h] @ v[:, :, h] for h in range(spec.heads_k)], 1)
        m[here] = m_new
    o /= l.masked_fill(l == 0, 1.0)
    if cache.v_descale is not None:
        o *= cache.v_descale[:, :, None, None]
    for x, by_row in ((out, o), (lse.transpose(1, 2), (m + l.log()).squeeze(-1))):
        by_key_head(spec, x).copy_(by_row.unflatten(2, (spec.seqlen_q, spec.group)))
    if call.sinks is not None:
        out, lse = with_sinks(out, lse, call.sinks)
    return out, lse


def _numbers(spec: AttentionSpec) -> int:
    """Of K or V, for each token of a sequence."""
    return spec.heads_k * max(spec.head_dim, spec.head_dim_v)


def _scores(call: CachedCall, q: Tensor, k: Tensor, here: Tensor) -> Tensor:
    """S, head by head: a product of all heads would copy K."""
    s = torch.stack([q[:, h] @ k[:, :, h].mT for h in range(call.spec.heads_k)], 1)
    if call.cache.k_descale is not None:
        s *= call.cache.k_descale[here, :, None, None]
    factor, cap_in = call.spec.score_factors
    return s.mul_(cap_in).tanh_().mul_(factor) if call.spec.softcap > 0 else s.mul_(factor)


def _seen(spec: AttentionSpec, inside: Tensor, keys: Tensor, diagonal: Tensor) -> Tensor:
    """(n, 1, R, N), or (n, 1, 1, N) without a mask: which keys each row sees."""
    seen = inside[:, None, None]
    if spec.window_left >= 0:
        seen = seen & (keys >= diagonal - spec.window_left)
    if spec.window_right >= 0:
        seen = seen & (keys <= diagonal + spec.window_right)
    return seen
