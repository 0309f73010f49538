"""The implementations of attention, each a module with `supports`, `forward` and mostly `backward`.

    supports(spec, device)                             -> None, or the reason why it cannot take the spec there
    forward(spec, q, k, v)                             -> out, lse
    forward_like(spec, q, k, v)                        -> f(q, k, v) for tensors that lie like these, or None (optional)
    attend_like(call, num_splits, wants_lse)           -> f(given) -> out, lse, for the arguments of calls like a
                                                          CachedCall, whose new keys are in the cache then; lse may be
                                                          None where it is not wanted (optional, as is its neighbour)
    passes_over(call)                                  -> None, or why it leaves a CachedCall to `forward`
    passes_on_cached(call, num_splits)                 -> None, or why another is as good for a CachedCall (optional)
    backward(spec, dout, dlse, q, k, v, out, lse)      -> dq, dk, dv      (dout or dlse may be None: zero)
    backward_like(spec, dout, dlse, q, k, v, out, lse) -> f of tensors that lie like these, or None (optional)
    passes_on(spec, device)                            -> None, or why another is as good for it (optional)
    leaves_backward(spec)                              -> None, or why the backward pass goes to another (optional)
    refusal(q, k, v)                                   -> None, or why it cannot read tensors that lie so (optional)

out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) are contiguous; dq, dk, dv are laid out as torch.empty_like(q), (k), (v).
Backends never import each other; those that launch kernels share launcher.py, and append.py for new keys of a cache.
"""

from collections.abc import Callable

from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""forward(q, k, v) -> (out, lse)"""

Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""backward(dout, dlse, q, k, v, out, lse) -> (dq, dk, dv)"""

Attend = Callable[[tuple], tuple[Tensor, Tensor | None]]
"""attend(given) -> (out, lse), given as a `cache.Arguments`, tidied"""
