"""Merging attention over parts of the keys: softmax over all keys from (out, lse) of each part.

The rule of Flash-Decoding (FlashAttention-2 section 3.2): with lse = log(sum_i exp(lse_i)),
out = sum_i exp(lse_i - lse) * out_i. Exact, associative, and differentiable in every out_i and lse_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse over all keys, from those over disjoint parts of the keys.

    Args:
        outs: each (B, Sq, Hq, Dv), one part's output.
        lses: each (B, Hq, Sq), the same part's lse; -inf in rows that see none of its keys.

    Returns:
        out (B, Sq, Hq, Dv) in the dtype of the parts, lse (B, Hq, Sq). Rows that see no key in any part get
        out = 0 and lse = -inf.

    Raises:
        ValueError: no parts, or not as many lses as outs.
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"outs, lses: got {len(outs)} and {len(lses)} parts; want one lse for each out, and at least one"
        )
    lse_parts = torch.stack(list(lses))  # (parts, B, Hq, Sq)
    empty = (lse_parts == float("-inf")).all(0)
    lse = lse_parts.masked_fill(empty, 0.0).logsumexp(0)
    weights = (lse_parts - lse).exp().masked_fill(empty, 0.0)  # (parts, B, Hq, Sq)
    out = (weights.transpose(2, 3).unsqueeze(-1) * torch.stack(list(outs)).to(lse.dtype)).sum(0)
    return out.to(outs[0].dtype), lse.masked_fill(empty, float("-inf"))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse with one more score in the softmax of each row: an attention sink, a head's logit without a value.

    Args:
        out: (B, Sq, Hq, Dv).
        lse: (B, Hq, Sq), -inf in rows that see no key.
        sinks: (Hq,), -inf in heads without one.

    Returns:
        out (B, Sq, Hq, Dv) in its dtype, lse (B, Hq, Sq): the sink counts in it, so that P = exp(scores - lse).
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    weight = (lse - total).exp().masked_fill(lse == float("-inf"), 0.0)
    return (out * weight.transpose(1, 2).unsqueeze(-1)).to(out.dtype), total
