"""The Hopper backend: its configs and what it takes, on a CPU, and what only it does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import slow_warps
import torch
from cases import BF16, HALF, spec

import flashtile
from flashtile import dispatch, flash_attn_func
from flashtile.backends import hopper
from flashtile.backends.hopper import config, leaves_backward, refusal
from flashtile.backends.hopper.schedule import begins_with_zeros
from flashtile.testing import Result, Sample, make_inputs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stages", 4, "shared memory: got"),
        ("warpgroups", 4, "warpgroups: got 4; want 2 or 3"),
        ("q_kept", 96, r"q_kept: got 96; want one of \(0, 64\) at 128 dims"),
        ("tile_n", 32, "tile_n: got 32; want at least 64"),
        ("o_awaited", "never", "o_awaited: got 'never'; want before, half way or behind"),
    ],
)
def test_a_config_that_cannot_run_says_so(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(config.D128, **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 128}, "tile_m: got 128; want 64"),
        ({"parts": 3}, "head_dim: want one width"),
        ({"parts": 2, "parts_v": 2}, "parts: got 2; want 1, or 3"),
        ({"key_stages": 1}, "key_stages: got 1; want 2"),
        ({"masked": "dS"}, "masked: got 'dS'; want S or, with dQ, exponents"),
        ({"masked": "exponents", "dq_apart": True}, "masked: got 'exponents'; want S or, with dQ, exponents"),
        ({"stages": 4}, "shared memory: got"),
    ],
)
def test_a_config_of_the_backward_pass_that_cannot_run_says_so(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config.BACKWARD_D128, **changes)


@pytest.mark.parametrize(
    ("dims", "name"),
    [
        ((16, 64), "BACKWARD_D64"), ((65, 8), "BACKWARD_D96"), ((40, 96), "BACKWARD_D96"), ((97, 97), "BACKWARD_D128"),
        ((128, 64), "BACKWARD_D128"), ((64, 129), "KEYS_D192"), ((192, 128), "KEYS_D192_DV128"),
        ((193, 8), "KEYS_D256_DV128"),
    ],
)  # fmt: skip
def test_d_and_dv_choose_the_config_of_the_backward_pass(dims, name):
    assert config.choose_backward(spec((600, 600), (1, 1), dims, BF16)) is getattr(config, name)


@pytest.mark.parametrize(
    ("seqlens", "window", "name"),
    [
        ((256, 256), {"right": 0}, "KEYS_D128"), ((256, 256), {}, "BACKWARD_D128"),
        ((512, 512), {"right": 0}, "BACKWARD_D128"), ((256, 2048), {"right": 0}, "BACKWARD_D128"),
        ((4096, 128), {}, "KEYS_D128"), ((8192, 8192), {"left": 100, "right": 0}, "KEYS_D128"),
    ],
)  # fmt: skip
def test_where_queries_see_few_keys_dq_has_a_kernel_of_its_own_at_128_dims(seqlens, window, name):
    case = spec(seqlens, (16, 16), (128, 128), BF16, **window)
    assert config.choose_backward(case) is getattr(config, name)
    assert config.choose_queries(case) is config.QUERIES_D128


@pytest.mark.parametrize(
    ("dims", "name"),
    [
        ((64, 129), "QUERIES_D192"), ((192, 128), "QUERIES_D192_DV128"), ((193, 8), "QUERIES_D256_DV128"),
        ((256, 256), "QUERIES_D256"),
    ],
)  # fmt: skip
def test_above_128_dims_d_and_dv_choose_the_config_of_dq(dims, name):
    assert config.choose_queries(spec(dims=dims, dtype=BF16)) is getattr(config, name)


def test_a_config_of_dq_that_cannot_run_says_so():
    with pytest.raises(ValueError, match="shared memory: got"):
        replace(config.QUERIES_D256, value_stages=2)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("contiguous", None),
        ("heads-first", None),
        ("packed", None),
        ("one head of many", None),
        ("last-dim-strided", "last stride"),
        ("expanded", "strides"),
        ("odd strides", "strides"),
        ("misaligned", "aligned"),
    ],
)
def test_what_tma_can_read(layout, reason):
    x = torch.empty(2, 8, 4, 64, dtype=BF16)
    tensors = {
        "contiguous": x,
        "heads-first": x.transpose(1, 2),
        "packed": torch.empty(2, 8, 3, 4, 64, dtype=BF16).unbind(2)[1],
        "one head of many": x[:, :, 1:2],
        "last-dim-strided": x.transpose(2, 3),
        "expanded": x[:, :, :1].expand(2, 8, 4, 64),
        "odd strides": torch.empty(2, 8, 4, 68, dtype=BF16)[..., :64],
        "misaligned": torch.empty(2 * 8 * 4 * 64 + 8, dtype=BF16)[1:-7].view(2, 8, 4, 64),
    }
    found = refusal(tensors[layout])
    assert found is None if reason is None else reason in found


def passes_on(case):
    with mock.patch.object(hopper.choice, "programs_on", return_value=132):
        return hopper.passes_on(case, torch.device("cuda"))


def test_small_problems_are_left_to_the_next_backend():
    assert "GFLOP" in passes_on(spec((128, 128), (8, 8), (64, 64), BF16))
    for seqlen_q, seqlen_k, heads in ((16, 2048, (32, 8)), (64, 1024, (32, 8)), (256, 1024, (16, 16))):
        assert "GFLOP" in passes_on(spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=1))
    assert passes_on(spec((2048, 2048), (16, 16), (128, 128), BF16, right=0)) is None


FEW = {  # batch, queries, keys, heads: whether Flash-Decoding has them
    "one query": ((64, 1, 32768, (32, 8)), True),
    "8 queries of one key head": ((1, 8, 65536, (32, 1)), True),
    "64 queries of one sequence": ((1, 64, 65536, (32, 8)), False),
    "64 queries of many": ((16, 64, 8192, (32, 8)), False),
    "a round of 32 rows": ((16, 8, 8192, (32, 8)), False),
    "256 queries of 16 heads": ((1, 256, 8192, (16, 16)), False),
    "512 queries of 16 heads": ((1, 512, 8192, (16, 16)), False),
}


@pytest.mark.parametrize("name", FEW)
def test_few_queries_over_many_keys_are_left_to_who_splits_keys(name):
    (batch, seqlen_q, seqlen_k, heads), left = FEW[name]
    reason = passes_on(spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=batch))
    assert left == ("rows" in (reason or ""))


def test_head_dims_that_one_triton_cannot_compile_go_elsewhere(monkeypatch):
    monkeypatch.setattr(hopper, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(hopper, "_TRITON", (3, 8))
    cases = {dim: spec(dims=(dim, dim), dtype=BF16) for dim in (64, 96, 128, 192, 256)}
    assert [dim for dim, case in cases.items() if hopper.supports(case, torch.device("cuda"))] == [96, 192]


def test_soft_caps_past_the_precision_of_its_tanh_go_elsewhere(monkeypatch):
    monkeypatch.setattr(hopper, "arch_of", lambda _: "sm_90")
    gpu = torch.device("cuda")
    assert hopper.supports(spec(softcap=64.0, dtype=BF16), gpu) is None
    assert "softcap of up to 64, not 65" in hopper.supports(spec(softcap=65.0, dtype=BF16), gpu)


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "packed"), [(1, (16, 1), 16), (1, (12, 3), 4), (100, (8, 2), 1), (4097, (8, 2), 1)]
)
def test_query_heads_of_a_group_share_a_tile_where_queries_are_short(seqlen_q, heads, packed):
    case = spec((seqlen_q, 4097), heads, (128, 128), BF16)
    assert config.heads_per_tile(case, config.choose(case)) == packed


def test_what_of_the_backward_pass_goes_elsewhere():
    case = spec(dims=(128, 256), dtype=BF16)
    assert leaves_backward(case) is None
    assert leaves_backward(replace(case, head_dim_v=128, deterministic=True)) is None
    assert "table" in leaves_backward(
        replace(case, seqlen_q=1 << 20, seqlen_k=1 << 20, head_dim_v=64, deterministic=True)
    )
    assert "float32" in leaves_backward(replace(case, softmax_scale=1e-38))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("layout", ["heads-first", "packed", "odd strides"])
def test_tensors_are_read_where_they_lie_or_by_another_backend(layout):
    case = spec((2000, 2000), (16, 16), (64, 64), BF16, right=0)
    inputs = make_inputs(case, "cuda")
    q, k, v = inputs[:3]
    if layout == "heads-first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "packed":
        q, k, v = torch.stack((q, k, v), 2).unbind(2)
    else:
        q, k, v = (torch.cat((x, x[..., :4]), -1)[..., :64] for x in (q, k, v))
        with pytest.raises(ValueError, match="'hopper' cannot run this call: TMA wants strides"):
            flash_attn_func(q, k, v, causal=True, backend="hopper")
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    assert [e for e in Sample.of(case, inputs).errors(Result(out, lse, *gradients)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dout", ["heads-first", "expanded", "none", "without dlse"])
def test_gradients_of_out_may_lie_anyhow(dout):
    case = spec((900, 900), (8, 2), (128, 128), BF16, right=0)
    inputs = make_inputs(case, "cuda")
    if dout == "heads-first":
        inputs = inputs._replace(dout=inputs.dout.transpose(1, 2).contiguous().transpose(1, 2))
    elif dout == "expanded":
        inputs = inputs._replace(dout=inputs.dout[:1, :1].expand_as(inputs.dout))
    elif dout == "none":
        inputs = inputs._replace(dout=torch.zeros_like(inputs.dout))
    else:
        inputs = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
    choice = dispatch.choose(case, inputs.q.device, "hopper")
    out, lse = choice.forward(case, *inputs[:3])
    given = (None if dout == "none" else inputs.dout, None if dout == "without dlse" else inputs.dlse)
    gradients = choice.backward(case, *given, *inputs[:3], out, lse)
    assert [e for e in Sample.of(case, inputs).errors(Result(out, lse, *gradients)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [96, 128])
def test_gradients_where_a_head_is_too_large_for_the_cache(dim):
    case = spec((32_000, 32_000), (2, 2), (dim, dim), BF16, batch=1)
    assert begins_with_zeros(case)
    inputs = make_inputs(case, "cuda")
    choice = dispatch.choose(case, inputs.q.device, "hopper")
    out, lse = choice.forward(case, *inputs[:3])
    gradients = choice.backward(case, inputs.dout, inputs.dlse, *inputs[:3], out, lse)
    assert [e for e in Sample.of(case, inputs).errors(Result(out, lse, *gradients)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [1628, 9000])
@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("growth", "value"),
    [(0.0, 1.0), (60.0, 1.0), (20.0, 1e37)],
    ids=["scores alike", "scores that overflow", "products that overflow"],
)
def test_rows_that_outgrow_the_maximum_of_their_last_keys(dim, seqlen_k, right, growth, value):
    """Scores grow towards the first keys, which are computed after the last."""
    case = spec((1500, seqlen_k), (8, 8), (dim, dim), BF16, right=right)
    inputs = make_inputs(case, "cuda")
    k = inputs.k * (1 + growth * torch.linspace(1, 0, case.seqlen_k, device="cuda")[None, :, None, None]).to(BF16)
    inputs = inputs._replace(k=k, v=inputs.v * value)
    out, lse = flash_attn_func(*inputs[:3], window_size=(-1, right), return_lse=True, backend="hopper")
    assert [e for e in Sample.of(case, inputs, gradients=False).errors(Result(out, lse)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 50.0, 64.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0], ids=["scores near zero", "scores", "scores past the cap"])
@pytest.mark.parametrize(("dtype", "right"), [(BF16, -1), (HALF, 0)], ids=["full", "float16, causal"])
def test_soft_caps(dims, softcap, scale, dtype, right):
    case = spec((1100, 1300), (4, 2), dims, dtype, scale=scale * dims[0] ** -0.5, right=right, softcap=softcap)
    inputs = make_inputs(case, "cuda")
    choice = dispatch.choose(case, inputs.q.device, "hopper")
    out, lse = choice.forward(case, *inputs[:3])
    gradients = choice.backward(case, inputs.dout, inputs.dlse, *inputs[:3], out, lse)
    assert [e for e in Sample.of(case, inputs).errors(Result(out, lse, *gradients)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1200, 9300])
@pytest.mark.parametrize("window", [(-1, 0), (5000, 100), (150, 3)], ids=["causal", "window", "window of few keys"])
def test_many_keys_and_a_mask(dims, seqlen_q, window):
    case = spec((seqlen_q, 9000), (4, 2), dims, BF16, batch=1, left=window[0], right=window[1])
    inputs = make_inputs(case, "cuda")
    out, lse = flash_attn_func(*inputs[:3], window_size=window, return_lse=True, backend="hopper")
    assert [e for e in Sample.of(case, inputs, gradients=False).errors(Result(out, lse)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("dims", "seqlen_q"),
    [
        ((64, 64), 300), ((64, 64), 1100), ((96, 96), 300), ((96, 128), 300), ((128, 128), 300), ((192, 128), 300),
        ((192, 192), 300), ((256, 256), 300),
    ],
)  # fmt: skip
@pytest.mark.parametrize("past", [1, 15, 16, 17])
@pytest.mark.parametrize(("left", "dtype"), [(-1, BF16), (-1, HALF), (200, BF16)], ids=["full", "float16", "window"])
def test_keys_past_the_last_whole_block(dims, seqlen_q, past, left, dtype):
    case = spec((seqlen_q, 1024 + past), (48, 16), dims, dtype, left=left)
    inputs = make_inputs(case, "cuda")
    out, lse = flash_attn_func(*inputs[:3], window_size=(left, -1), return_lse=True, backend="hopper")
    assert [e for e in Sample.of(case, inputs, gradients=False).errors(Result(out, lse)) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside another stream"])
def test_a_thousand_repeats_give_the_same_bits(dim, busy):
    case = spec((2000, 2000), (16, 4), (dim, dim), BF16, right=0)
    q, k, v = make_inputs(case, "cuda")[:3]
    choice = dispatch.choose(case, q.device, "hopper")
    first = choice.forward(case, q, k, v)
    other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for i in range(1000):
        if busy and i % 10 == 0:
            with torch.cuda.stream(other):
                matrix @ matrix
        assert all(torch.equal(x, y) for x, y in zip(choice.forward(case, q, k, v), first, strict=True))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside another stream"])
def test_a_thousand_deterministic_repeats_give_the_same_bits(dim, right, busy):
    case = replace(spec((2000, 2000), (16, 4), (dim, dim), BF16, right=right), deterministic=True)
    q, k, v, dout, dlse = make_inputs(case, "cuda")
    assert leaves_backward(case) is None
    choice = dispatch.choose(case, q.device, "hopper")
    out, lse = choice.forward(case, q, k, v)
    first = choice.backward(case, dout, dlse, q, k, v, out, lse)
    other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for i in range(1000):
        if busy and i % 10 == 0:
            with torch.cuda.stream(other):
                matrix @ matrix
        again = choice.backward(case, dout, dlse, q, k, v, out, lse)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_dk_and_dv_are_the_same_bits_every_time_and_dq_nearly(dim):
    case = spec((2000, 2000), (16, 4), (dim, dim), BF16, right=0)
    q, k, v, dout, dlse = make_inputs(case, "cuda")
    choice = dispatch.choose(case, q.device, "hopper")
    out, lse = choice.forward(case, q, k, v)
    first = choice.backward(case, dout, dlse, q, k, v, out, lse)
    for _ in range(200):
        dq, dk, dv = choice.backward(case, dout, dlse, q, k, v, out, lse)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert (dq.float() - first[0].float()).abs().max() <= 2**-7 * first[0].float().abs().max()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_results_are_right_however_slow_a_warp_is(dims):
    assert set(slow_warps.run(dims)) == {slow_warps.CHECKED}


def test_warps_are_slow_wherever_they_meet(tmp_path):
    package = tmp_path / "flashtile"
    shutil.copytree(Path(flashtile.__file__).parent, package)
    slow_warps.make_slow(package)
    for path in slow_warps.meeting(package):
        lines = path.read_text().splitlines()
        for before, line in pairwise(lines):
            if line.lstrip().startswith(("arrive(", "fence_async_shared()", "tma.store_wait(")):
                assert "dawdle()" in before, f"{path.name}: {line}"
