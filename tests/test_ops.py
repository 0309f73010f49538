"""The ops behave like PyTorch's own: opcheck, compile, export, autocast, checkpointing, graphs, several devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import HALF, on_every_backend, spec
from torch.utils.checkpoint import checkpoint

from flashtile import flash_attn_func, flash_attn_with_kvcache, ops
from flashtile.spec import AttentionSpec
from flashtile.testing import make_inputs

CASES = {
    "gqa-causal": (spec((33, 40), (4, 2), (32, 16), right=0),),
    "window-softcap": (spec((33, 40), (2, 2), (16, 16), left=9, right=3, softcap=3.0),),
    "half": (spec((64, 64), (2, 2), (64, 64), HALF),),
}
every_backend = pytest.mark.parametrize(("backend", "device", "case"), on_every_backend(CASES))
same = {"rtol": 0, "atol": 0}


def attend(case: AttentionSpec, backend: str):
    """q, k, v -> (out, lse) as one function of tensors."""

    def function(q, k, v):
        return flash_attn_func(
            q, k, v, softmax_scale=case.softmax_scale, window_size=(case.window_left, case.window_right),
            softcap=case.softcap, return_lse=True, backend=backend,
        )  # fmt: skip

    return function


def gradients(function, inputs):
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = function(q, k, v)
    return torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))


@every_backend
def test_opcheck(backend, device, case):
    inputs = make_inputs(case, device)
    settings = (case.softmax_scale, case.window_left, case.window_right, case.softcap, False, backend)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, (q, k, v, *settings))
    out, lse = (x.detach() for x in attend(case, backend)(q, k, v))
    qkv = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.flashtile.attention_backward.default, (inputs.dout, inputs.dlse, *qkv, out, lse, *settings)
    )


@every_backend
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_graph_breaks(dynamic, backend, device, case):
    torch._dynamo.reset()
    function = attend(case, backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs = make_inputs(case, device)
    torch.testing.assert_close(compiled(*inputs[:3]), function(*inputs[:3]), **same)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(function, inputs), **same)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "device", "case"), on_every_backend({"gqa-causal": CASES["gqa-causal"]}))
def test_compile_with_inductor_and_new_lengths(backend, device, case):
    torch._dynamo.reset()
    function = attend(case, backend)
    compiled = torch.compile(lambda q, k, v: function(q * 2, k, v)[0] + 1, fullgraph=True, dynamic=True)
    for seqlens in ((33, 40), (20, 70), (64, 64)):
        q, k, v, *_ = make_inputs(spec(seqlens, (4, 2), (32, 16), right=0), device)
        torch.testing.assert_close(compiled(q, k, v), function(q * 2, k, v)[0] + 1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = {"causal": True, "window_size": [20, -1], "softcap": 3.0, "return_softmax_lse": True}


def over_a_cache(device: str):
    """q, two caches, new keys and values, and lengths, which leave room for them."""
    torch.manual_seed(0)
    sizes = (3, 2, 4, 16), (3, 40, 2, 16), (3, 40, 2, 16), (3, 2, 2, 16), (3, 2, 2, 16)
    return *(torch.randn(size, device=device, dtype=HALF) for size in sizes), torch.arange(3, device=device).int() + 9


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_a_call_over_a_cache(device):
    *tensors, lengths = over_a_cache(device)
    others = None, None, lengths, *[None] * 7, None, 0.5, True, [20, -1], 3.0, True, 0, None
    torch.library.opcheck(torch.ops.flashtile.attention_with_kvcache.default, (*tensors, *others))
    torch.library.opcheck(torch.ops.flashtile.attention_over_kvcache.default, (*tensors[:3], None, None, *others))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_over_a_cache_compiles_without_graph_breaks(device, dynamic, compiler):
    torch._dynamo.reset()

    def step(q, k_cache, v_cache, k, v, lengths):
        out, lse = flash_attn_with_kvcache(q * 2, k_cache, v_cache, k, v, cache_seqlens=lengths, **OPTIONS)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=compiler)
    for lengths in (None, 7, 21, over_a_cache(device)[-1]):
        ours, theirs = over_a_cache(device)[:-1], over_a_cache(device)[:-1]
        torch.testing.assert_close(compiled(*ours, lengths), step(*theirs, lengths))
        for found, wanted in zip(ours, theirs, strict=True):  # new keys are in the cache
            torch.testing.assert_close(found, wanted, **same)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("appending", [False, True], ids=["nothing new", "new keys"])
def test_a_compiled_call_over_a_cache_is_captured_in_a_graph(appending):
    """Where it writes, into a cache whose address stays."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    q, k_cache, v_cache, k, v, lengths = over_a_cache("cuda")
    new = (k, v) if appending else (None, None)
    for cache in (k_cache, v_cache):
        torch._dynamo.mark_static_address(cache)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        lengths += 1
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k_cache, v_cache, *new, cache_seqlens=lengths)
        wanted = flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=lengths)
        torch.testing.assert_close(out, wanted, **same)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_call_over_a_cache_is_checked_when_it_runs_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    q, k_cache, v_cache, k, v, _ = over_a_cache("cpu")
    before = k_cache.clone()
    with pytest.raises(ValueError, match="cache_seqlens: got 39; want 0 to 38"):
        compiled(q, k_cache, v_cache, k, v, cache_seqlens=39)
    assert torch.equal(k_cache, before)


@every_backend
def test_export_keeps_the_op(backend, device, case):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(case, backend)(q, k, v)

    inputs = make_inputs(case, device)[:3]
    program = torch.export.export(Attention(), inputs)
    assert torch.ops.flashtile.attention_forward.default in [node.target for node in program.graph.nodes]
    torch.testing.assert_close(program.module()(*inputs), attend(case, backend)(*inputs), **same)


def test_meta_tensors_give_shapes():
    q, k, v = (torch.empty(2, 9, heads, 16, device="meta", dtype=HALF) for heads in (4, 2, 2))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 9, 4, 16), HALF, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_casts_float32_and_leaves_float64(device):
    case = spec((20, 20), (2, 2), (16, 16))
    q, k, v, *_ = make_inputs(case, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attn_func(q, k.bfloat16(), v).dtype == torch.bfloat16
        assert flash_attn_func(q.double(), k.double(), v.double()).dtype == torch.float64
    assert flash_attn_func(q, k, v).dtype == torch.float32


@every_backend
def test_activation_checkpointing_gives_the_same_gradients(backend, device, case):
    inputs = make_inputs(case, device)
    function = attend(case, backend)
    recomputed = gradients(lambda *qkv: checkpoint(function, *qkv, use_reentrant=False), inputs)
    torch.testing.assert_close(recomputed, gradients(function, inputs), **same)


def test_no_gradient_is_computed_twice():
    q, k, v = (torch.randn(1, 5, 1, 4, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        dq.sum().backward()


def test_an_input_changed_before_the_backward_pass_is_noticed():
    q, k, v = (torch.randn(1, 5, 1, 4, requires_grad=True) for _ in range(3))
    changed = q * 1
    out = flash_attn_func(changed, k, v)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_backward_pass_is_prepared_for_each_layout_of_what_flows_in():
    prepared, others = [], []

    def backward_like(spec, *tensors):
        prepared.append(tensors)
        return lambda *tensors: None

    choice = SimpleNamespace(backward_like=backward_like, backward=lambda spec, *tensors: others.append(tensors))
    known = ops.Known(spec(), choice, None, wants_lse=True)
    x, y = torch.zeros(2, 4, 4)
    saved = [x] * 5
    for dout in (x, y, x.t(), x, y.t()):
        known.backward(dout, None, *saved)
    assert (len(prepared), len(others)) == (2, 0)
    for i in range(3):  # as hooks may have saved them
        known.backward(x, None, *saved[:i], x.t(), *saved[i + 1 :])
    assert (len(prepared), len(others)) == (5, 0)
    unaligned = torch.zeros(5, 4).view(-1)[1:17].view(4, 4)
    for i in range(6):
        dout, *others_saved = (unaligned if j == i else x for j in range(6))
        known.backward(dout, None, *others_saved)
    for dout, dlse in ((None, y), (x, y)):
        known.backward(dout, dlse, *saved)
    assert (len(prepared), len(others)) == (5, 8)
    for width in range(2 * ops._MOST_LAYOUTS):
        known.backward(torch.zeros(1, width + 5)[:, :4].expand(4, 4), None, *saved)
        known.backward(torch.zeros(4, width + 5)[:, :4], None, *saved)
    assert len(known._backwards) <= ops._MOST_LAYOUTS


def test_a_gradient_of_lse_alone_and_none_at_all():
    q, k, v = (torch.randn(1, 5, 1, 4, requires_grad=True) for _ in range(3))
    _, lse = flash_attn_func(q, k, v, return_lse=True)
    given = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    wanted = torch.autograd.grad(torch.logsumexp(torch.einsum("bihd,bjhd->bhij", q, k) / 2, -1).sum(), (q, k))
    torch.testing.assert_close(given[:2], wanted)
    assert not given[2].any()
    assert flash_attn_func(q, k, v).grad_fn.apply(None) == (None, None, None, None)


@pytest.mark.gpu
def test_cuda_graph_capture_replays_on_new_data():
    case = spec((200, 200), (4, 2), (64, 64), HALF, right=0)
    q, k, v, dout, _ = make_inputs(case, "cuda")
    static = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        out = flash_attn_func(*static, causal=True)
        return out, *torch.autograd.grad(out, static, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    new = make_inputs(case, "cuda", seed=1)
    with torch.no_grad():
        for old, fresh in zip(static, new[:3], strict=True):
            old.copy_(fresh)
    graph.replay()
    replayed = [x.clone() for x in captured]
    torch.testing.assert_close(replayed, list(step()), **same)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_several_gpus_in_one_process(backend):
    case = spec((100, 100), (2, 2), (64, 64), HALF, right=0)
    inputs = make_inputs(case, "cuda:0")
    first = gradients(attend(case, backend), inputs)
    there = type(inputs)(*(x.to("cuda:1") for x in inputs))
    second = gradients(attend(case, backend), there)
    assert all(x.device.index == 1 for x in second)
    torch.testing.assert_close([x.cpu() for x in second], [x.cpu() for x in first], **same)


@pytest.mark.gpu
def test_a_call_runs_on_the_current_stream():
    case = spec((512, 512), (8, 8), (64, 64), HALF)
    q, k, v, *_ = make_inputs(case, "cuda")
    expected = flash_attn_func(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        moved = q * 1
        out = flash_attn_func(moved, k, v)
    stream.synchronize()
    torch.testing.assert_close(out, expected, **same)
