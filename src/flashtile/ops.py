"""flashtile::attention_forward and ::attention_backward, and over a cache ::attention_with_kvcache, which writes to it,
and ::attention_over_kvcache, which does not: torch.library ops, fakes and autograd rules.

The only file that knows autograd. Being registered ops, the kernels are opaque to torch.compile,
torch.export, selective checkpointing and fake tensors; the backend is picked when an op really runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import cached, dispatch
from .backends import Backward, Forward
from .spec import AttentionSpec

_SETTINGS = (
    "float softmax_scale, SymInt window_left, SymInt window_right, float softcap, bool deterministic, str? backend"
)
_LIB = torch.library.Library("flashtile", "DEF")
_LIB.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor out, Tensor lse)")
_LIB.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SETTINGS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


_OVER_A_CACHE = (
    "Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_descale, "
    "Tensor? v_descale, SymInt? length, float? softmax_scale, bool causal, SymInt[2] window_size, float softcap, "
    "bool rotary_interleaved, int num_splits, str? backend) -> (Tensor out, Tensor lse)"
)
_LIB.define(f"attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_OVER_A_CACHE}")
_LIB.define(f"attention_over_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, {_OVER_A_CACHE}")


def needs_op(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call must go through the op, because something traces, transforms, watches or casts what is called.

    A plain eager call gains nothing from the op, and takes a third of its host time without.
    """
    return (
        is_observed()
        or not (type(q) is type(k) is type(v) is Tensor)
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def is_observed() -> bool:
    """Whether something traces, transforms or watches what is called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


_MOST_LAYOUTS = 8  # few callers have more than one or two; a launch in order holds a table on the GPU


class Known:
    """What plain eager calls run for q, k and v of one layout."""

    def __init__(self, spec: AttentionSpec, choice: dispatch.Choice, forward: Forward, wants_lse: bool) -> None:
        self.spec = spec
        self.choice = choice
        self.forward = forward
        self.wants_lse = wants_lse
        self._backwards: dict[tuple, Backward] = {}  # by the strides that `backward` finds

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv). A hook may have saved copies of q, k, v, out and lse; out and lse are always contiguous.

        What is rare, a tensor that is not aligned to 16 bytes or a gradient of lse, the backend looks up for itself.
        """
        if dout is None or dlse is not None or (
            dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr()
        ) & 15:  # fmt: skip
            return self.choice.backward(self.spec, dout, dlse, q, k, v, out, lse)
        key = (
            dout.is_contiguous() or dout.stride(), q.is_contiguous() or q.stride(), k.is_contiguous() or k.stride(),
            v.is_contiguous() or v.stride(),
        )  # fmt: skip
        backward = self._backwards.get(key)
        if backward is None:
            if len(self._backwards) >= _MOST_LAYOUTS:
                self._backwards.clear()
            backward = self._backwards[key] = self.choice.backward_like(self.spec, dout, dlse, q, k, v, out, lse)
        return backward(dout, dlse, q, k, v, out, lse)


class _PlainAttention(torch.autograd.Function):
    """The op's autograd rule for plain eager calls; lse is an output only if it is wanted, as each costs host time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, known: Known):
        out, lse = known.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.known = known
        if not known.wants_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None):
        known = ctx.known
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the op refuses when its gradient is differentiated again
            name = dispatch.name_of(known.choice.backward_of(q, k, v))
            return *_backward_op(dout, dlse, q, k, v, out, lse, *known.spec.settings, name), None
        return *known.backward(dout, dlse, q, k, v, out, lse), None


_apply = super(torch.autograd.Function, _PlainAttention).apply
"""What Function.apply calls where no functorch transform is active, which `needs_op` has seen to."""


def plain_attention(q: Tensor, k: Tensor, v: Tensor, known: Known) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` where nothing `needs_op`, from the backends chosen: out, or (out, lse) if lse is wanted."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply(q, k, v, known)
    found = known.forward(q, k, v)
    return found if known.wants_lse else found[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one checked attention call, differentiable in q, k and v."""
    return torch.ops.flashtile.attention_forward.default(
        q, k, v, softmax_scale, window_left, window_right, softcap, deterministic, backend
    )


def attention_with_kvcache(given: cached.Arguments, settings: cached.Settings) -> tuple[Tensor, Tensor]:
    """`cached.attention` as an op, whose arguments are checked when it runs. Without new keys none is written to, which
    lets what compiles it capture it in CUDA graphs.
    """
    lengths = given.cache_seqlens
    tensors = given if lengths is None or isinstance(lengths, Tensor) else given._replace(cache_seqlens=None)
    length = None if tensors is given else lengths
    kvcache_ops = torch.ops.flashtile
    op = kvcache_ops.attention_over_kvcache if given.k is None else kvcache_ops.attention_with_kvcache
    with torch.no_grad():
        return op.default(*tensors, length, *settings)


def _with_kvcache(*arguments):
    n = len(cached.Arguments._fields)
    given, length, settings = cached.Arguments(*arguments[:n]), arguments[n], cached.Settings(*arguments[n + 1 :])
    given = given if length is None else given._replace(cache_seqlens=length)
    left, right = settings.window_size  # a list, as it comes from an op
    return cached.attention(given, settings._replace(window_size=(left, right)), wants_lse=True)


def _with_kvcache_fake(q, k_cache, v_cache, *others):
    return _forward_fake(q, k_cache, v_cache)


def _forward(q, k, v, *settings):
    *numerics, backend = settings
    spec = AttentionSpec.of(q, k, v, *numerics)
    return dispatch.choose(spec, q.device, backend).forward(spec, q, k, v)


def _backward(dout, dlse, q, k, v, out, lse, *settings):
    *numerics, backend = settings
    spec = AttentionSpec.of(q, k, v, *numerics)
    return dispatch.choose(spec, q.device, backend).backward(spec, dout, dlse, q, k, v, out, lse)


def _forward_fake(q, k, v, *settings):
    batch, seqlen_q, heads_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, seqlen_q, heads_q, v.shape[3]), q.new_empty(batch, heads_q, seqlen_q, dtype=lse_dtype)


def _backward_fake(dout, dlse, q, k, v, out, lse, *settings):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    grads = _backward_op(dout, dlse, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None for _ in ctx.settings))


def _backward_op(dout: Tensor | None, dlse: Tensor | None, *saved_and_settings: Any) -> tuple:
    if dout is None and dlse is None:
        return None, None, None
    return torch.ops.flashtile.attention_backward.default(dout, dlse, *saved_and_settings)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple:
    raise NotImplementedError("flashtile: gradients of gradients (create_graph=True) are not implemented")


for _name in ("attention_with_kvcache", "attention_over_kvcache"):
    _LIB.impl(_name, _with_kvcache, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashtile::{_name}", _with_kvcache_fake, lib=_LIB)
_LIB.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_LIB.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashtile::attention_forward", _forward_fake, lib=_LIB)
torch.library.register_fake("flashtile::attention_backward", _backward_fake, lib=_LIB)
torch.library.register_autograd("flashtile::attention_forward", _gradients, setup_context=_save_for_backward, lib=_LIB)
torch.library.register_autograd("flashtile::attention_backward", _no_double_backward, lib=_LIB)
