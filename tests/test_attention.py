"""flash_attn_func is exact attention, forward and backward, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, EVERY_CASE, FLOAT32_RUNS, HALF, on_every_backend, spec

from flashtile import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flashtile.spec import AttentionSpec
from flashtile.testing import Inputs, Result, errors, make_inputs

every_backend = pytest.mark.parametrize(("backend", "device"), FLOAT32_RUNS)


def settings(case: AttentionSpec) -> dict:
    """flash_attn_func's keyword arguments for a spec."""
    return {
        "softmax_scale": case.softmax_scale,
        "window_size": (case.window_left, case.window_right),
        "softcap": case.softcap,
        "deterministic": case.deterministic,
    }


def run(case: AttentionSpec, inputs: Inputs, backend: str) -> Result:
    """Forward, lse and all gradients through autograd."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = flash_attn_func(q, k, v, **settings(case), return_lse=True, backend=backend)
    dlse = inputs.dlse.masked_fill(lse.isinf(), 0)
    return Result(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, dlse)))


@pytest.mark.parametrize(("backend", "device", "case", "amplitude"), on_every_backend(EVERY_CASE))
def test_forward_lse_and_gradients_are_exact(backend, device, case, amplitude):
    inputs = make_inputs(case, device, amplitude=amplitude)
    result = run(case, inputs, backend)
    assert [e for e in errors(case, inputs, result) if not e.ok] == []


@every_backend
def test_a_query_without_keys_gets_zero_and_no_gradient(backend, device):
    case = spec((120, 40), (1, 1), (16, 16), left=3, right=0)
    inputs = make_inputs(case, device)
    result = run(case, inputs, backend)
    empty = slice(0, 79)  # rows 0 ... 78 lie left of the first key; row 79 sees key -1 + 1 = 0 at the earliest
    assert (result.out[:, empty] == 0).all()
    assert (result.lse[..., empty] == float("-inf")).all()
    assert (result.dq[:, empty] == 0).all()


@every_backend
@pytest.mark.parametrize("layout", ["heads-first", "packed", "sliced", "expanded", "last-dim-strided"])
def test_any_strides(layout, backend, device):
    case = spec((50, 50), (4, 4), (32, 32), right=0, batch=2)
    inputs = make_inputs(case, device)
    q, k, v, dout, dlse = inputs
    if layout == "heads-first":
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    elif layout == "packed":
        q, k, v = torch.stack((q, k, v), 2).unbind(2)
    elif layout == "sliced":
        q, k, v = (torch.cat((x, x), -1)[..., :32] for x in (q, k, v))
        dlse = torch.stack((dlse, dlse), -1)[..., 0]
    elif layout == "expanded":
        k, v = (x[:1, :, :1].expand(2, 50, 4, 32) for x in (k, v))
        dout = dout[:, :1, :1, :1].expand(2, 50, 4, 32)
    else:
        q, v, dout = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, v, dout))
    inputs = Inputs(q, k, v, dout, dlse)
    result = run(case, inputs, backend)
    assert [e for e in errors(case, inputs, result) if not e.ok] == []


@every_backend
def test_a_launch_for_dense_rows_is_not_for_those_that_are_copied_first(backend, device):
    case = spec((50, 50), (4, 4), (32, 32), batch=2)
    inputs = make_inputs(case, device)
    heads_first = inputs.q.transpose(1, 2).repeat_interleave(2, dim=-1).transpose(1, 2)
    for q in (inputs.q, heads_first[..., ::2]):  # the second's gradient has dense rows, but the heads first
        result = run(case, inputs._replace(q=q), backend)
        assert [e for e in errors(case, inputs, result) if not e.ok] == []


@every_backend
def test_what_flows_in_may_lie_otherwise_in_every_backward_pass(backend, device):
    case = spec((50, 50), (2, 2), (32, 32), right=0)
    inputs = make_inputs(case, device)
    dout = inputs.dout
    heads_first = dout.transpose(1, 2).contiguous().transpose(1, 2)
    strided = dout.repeat_interleave(2, dim=-1)[..., ::2]
    for flows_in in (dout, heads_first, strided, dout[:, :1, :1, :1].expand_as(dout), dout):
        given = inputs._replace(dout=flows_in)
        assert [e for e in errors(case, given, run(case, given, backend)) if not e.ok] == []


@every_backend
def test_what_is_saved_may_lie_otherwise_than_what_came_in(backend, device):
    """As by hooks that keep it elsewhere until the backward pass."""
    case = spec((50, 50), (2, 2), (32, 32), right=0)
    inputs = make_inputs(case, device)
    q, k, v = torch.stack([inputs.q, inputs.k, inputs.v], dim=2).unbind(2)
    packed = inputs._replace(q=q, k=k, v=v)
    for keep in (lambda x: x, lambda x: x.contiguous(), lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = run(case, packed, backend)
        assert [e for e in errors(case, packed, result) if not e.ok] == []


@every_backend
def test_packed_functions_equal_the_unpacked_one(backend, device):
    case = spec((40, 40), (2, 2), (32, 32), right=0)
    q, k, v, dout, _ = make_inputs(case, device)
    qkv = torch.stack((q, k, v), 2).requires_grad_()
    kv = torch.stack((k, v), 2).requires_grad_()
    q_, k_, v_ = (x.requires_grad_() for x in (q.clone(), k.clone(), v.clone()))
    out = flash_attn_func(q_, k_, v_, causal=True, backend=backend)
    from_qkv = flash_attn_qkvpacked_func(qkv, causal=True, backend=backend)
    from_kv = flash_attn_kvpacked_func(q_, kv, causal=True, backend=backend)
    torch.testing.assert_close(from_qkv, out, rtol=0, atol=0)
    torch.testing.assert_close(from_kv, out, rtol=0, atol=0)
    dq, dk, dv = torch.autograd.grad(out, (q_, k_, v_), dout)
    torch.testing.assert_close(
        torch.autograd.grad(from_qkv, qkv, dout)[0], torch.stack((dq, dk, dv), 2), rtol=0, atol=0
    )
    torch.testing.assert_close(torch.autograd.grad(from_kv, kv, dout)[0], torch.stack((dk, dv), 2), rtol=0, atol=0)


@every_backend
def test_only_out_or_only_lse_may_be_differentiated(backend, device):
    case = spec((30, 30), (2, 1), (16, 16), right=0)
    inputs = make_inputs(case, device)
    for name in ("dout", "dlse"):
        alone = inputs._replace(**{name: torch.zeros_like(getattr(inputs, name))})
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        out, lse = flash_attn_func(q, k, v, **settings(case), return_lse=True, backend=backend)
        output, gradient = (lse, inputs.dlse) if name == "dout" else (out, inputs.dout)
        gradients = torch.autograd.grad(output, (q, k, v), gradient)
        result = Result(out.detach(), lse.detach(), *gradients)
        assert [e for e in errors(case, alone, result) if not e.ok] == []


@every_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_rows(value, backend, device):
    case = spec((70, 70), (2, 1), (16, 16), right=0, batch=1)
    q, k, v, *_ = make_inputs(case, device)
    clean = flash_attn_func(q, k, v, causal=True, backend=backend)
    bad_query = q.clone()
    bad_query[0, 33, 1, 5] = value
    out = flash_attn_func(bad_query, k, v, causal=True, backend=backend)
    assert out[0, 33, 1].isnan().all()
    untouched = torch.ones(70, 2, dtype=torch.bool, device=device)
    untouched[33, 1] = False
    torch.testing.assert_close(out[0][untouched], clean[0][untouched])

    bad_key = k.clone()
    bad_key[0, 33, 0, 5] = float("nan")
    out = flash_attn_func(q, bad_key, v, causal=True, backend=backend)
    assert out[0, 33:].isnan().all()
    torch.testing.assert_close(out[0, :33], clean[0, :33])


REPEATED = {
    "gqa-float16": (spec((150, 150), (4, 2), dtype=HALF, right=0),),
    "gqa-bfloat16": (spec((150, 150), (4, 2), dtype=BF16, right=0),),
    "D-96-Dv-64": (spec((90, 200), (2, 2), (96, 64), dtype=HALF),),
}


@pytest.mark.parametrize(("backend", "device", "case"), on_every_backend(REPEATED))
def test_deterministic_gradients_are_bitwise_equal(backend, device, case):
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    first = run(case, inputs, backend)
    for _ in range(3):
        for one, other in zip(first, run(case, inputs, backend), strict=True):
            assert torch.equal(one, other)


@every_backend
@pytest.mark.slow
def test_rows_too_far_apart_for_32_bit_offsets(backend, device):
    """The last rows of one tile lie more than 2^31 elements from its first."""
    stride = 2**31 // 30
    case = spec((32, 32), (1, 1), (16, 16), HALF, batch=1)
    inputs = make_inputs(case, device)
    memory = torch.zeros(31 * stride + 16, dtype=HALF, device=device)
    q = memory.as_strided((1, 32, 1, 16), (0, stride, 16, 1))
    q.copy_(inputs.q)
    inputs = inputs._replace(q=q)
    out, lse = flash_attn_func(
        q, inputs.k, inputs.v, return_lse=True, softmax_scale=case.softmax_scale, backend=backend
    )
    assert [e for e in errors(case, inputs, Result(out, lse)) if not e.ok] == []
