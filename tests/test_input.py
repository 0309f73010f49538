"""Bad input is refused before anything is launched, by an error that names the argument."""

from __future__ import annotations

import re

import pytest
import torch

from flashtile import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

NAN = float("nan")


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = {"q": tensor(2, 5, 4, 8), "k": tensor(2, 7, 2, 8), "v": tensor(2, 7, 2, 6)}

WRONG = {
    # what changes: (error, how its message begins, what it says of what is wanted)
    "q-not-a-tensor": ({"q": [1.0]}, TypeError, "q: got list", "torch.Tensor"),
    "q-of-rank-3": ({"q": tensor(5, 4, 8)}, ValueError, "q: got shape (5, 4, 8)", "4 dimensions"),
    "k-of-rank-5": ({"k": tensor(2, 7, 2, 8, 1)}, ValueError, "k: got shape", "4 dimensions"),
    "v-of-rank-2": ({"v": tensor(7, 2)}, ValueError, "v: got shape (7, 2)", "4 dimensions"),
    "k-batch": ({"k": tensor(3, 7, 2, 8)}, ValueError, "k: got batch 3", "the batch of q, 2"),
    "v-batch": ({"v": tensor(1, 7, 2, 6)}, ValueError, "v: got batch 1", "the batch of q, 2"),
    "k-head-dim": ({"k": tensor(2, 7, 2, 9)}, ValueError, "k: got head_dim 9", "the head_dim of q, 8"),
    "v-seqlen": ({"v": tensor(2, 6, 2, 6)}, ValueError, "v: got seqlen 6", "the seqlen of k, 7"),
    "v-heads": ({"v": tensor(2, 7, 4, 6)}, ValueError, "v: got 4 heads", "the heads of k, 2"),
    "q-heads-not-a-multiple": (
        {"q": tensor(2, 5, 3, 8)},
        ValueError,
        "q: got 3 heads",
        "multiple of the heads of k, 2",
    ),
    "no-heads": ({"q": tensor(2, 5, 0, 8)}, ValueError, "q: got 0 heads", "positive multiple"),
    "k-dtype": ({"k": tensor(2, 7, 2, 8, dtype=torch.float16)}, TypeError, "k: got torch.float16", "torch.float32"),
    "v-dtype": ({"v": tensor(2, 7, 2, 6, dtype=torch.float64)}, TypeError, "v: got torch.float64", "torch.float32"),
    "integers": ({"q": tensor(2, 5, 4, 8, dtype=torch.int64)}, TypeError, "q: got torch.int64", "float16"),
    "complex": ({"q": tensor(2, 5, 4, 8, dtype=torch.complex64)}, TypeError, "q: got torch.complex64", "float16"),
    "fp8": ({"q": tensor(2, 5, 4, 8).to(torch.float8_e4m3fn)}, TypeError, "q: got torch.float8_e4m3fn", "float16"),
    "k-device": ({"k": tensor(2, 7, 2, 8, device="meta")}, ValueError, "k: is on meta", "the device of q, cpu"),
    "q-head-dim-257": ({"q": tensor(2, 5, 4, 257)}, ValueError, "q: got head_dim 257", "1 to 256"),
    "v-head-dim-0": ({"v": tensor(2, 7, 2, 0)}, ValueError, "v: got head_dim 0", "1 to 256"),
    "scale-nan": ({"softmax_scale": NAN}, ValueError, "softmax_scale: got nan", "finite"),
    "scale-infinite": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale: got inf", "finite"),
    "scale-a-tensor": ({"softmax_scale": tensor(1)}, TypeError, "softmax_scale: got Tensor", "a number"),
    "softcap-negative": ({"softcap": -1.0}, ValueError, "softcap: got -1.0", ">= 0"),
    "softcap-nan": ({"softcap": NAN}, ValueError, "softcap: got nan", "finite"),
    "softcap-text": ({"softcap": "30"}, TypeError, "softcap: got str", "a number"),
    "causal-not-a-bool": ({"causal": 1.5}, TypeError, "causal: got 1.5", "a bool"),
    "deterministic-not-a-bool": ({"deterministic": "yes"}, TypeError, "deterministic: got 'yes'", "a bool"),
    "window-not-a-pair": ({"window_size": (1, 2, 3)}, ValueError, "window_size: got (1, 2, 3)", "a pair"),
    "window-an-int": ({"window_size": 3}, ValueError, "window_size: got 3", "a pair"),
    "window-below-minus-one": ({"window_size": (-2, 0)}, ValueError, "window_size: got (-2, 0)", "-1 for an open side"),
    "window-fraction": ({"window_size": (1.5, 0)}, ValueError, "window_size: got (1.5, 0)", "integers"),
    "backend-unknown": ({"backend": "cuda"}, ValueError, "backend: got 'cuda'", "'triton', 'cpu', 'reference'"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1", "0.0"),
    "alibi": ({"alibi_slopes": tensor(4)}, NotImplementedError, "alibi_slopes: ALiBi", "None"),
}


@pytest.mark.parametrize(("change", "error", "begins", "wanted"), WRONG.values(), ids=WRONG)
def test_bad_input_is_named(change, error, begins, wanted):
    with pytest.raises(error, match="^" + re.escape(begins)) as caught:
        flash_attn_func(**{**GOOD, **change})
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("function", "arguments", "begins"),
    [
        (flash_attn_qkvpacked_func, [tensor(2, 5, 2, 4, 8)], "qkv: got shape (2, 5, 2, 4, 8)"),
        (flash_attn_qkvpacked_func, [tensor(2, 5, 3, 8)], "qkv: got shape (2, 5, 3, 8)"),
        (flash_attn_kvpacked_func, [GOOD["q"], tensor(2, 7, 3, 2, 8)], "kv: got shape (2, 7, 3, 2, 8)"),
    ],
    ids=["qkv-of-two", "qkv-of-rank-4", "kv-of-three"],
)
def test_packed_shapes_are_named(function, arguments, begins):
    with pytest.raises(ValueError, match="^" + re.escape(begins)):
        function(*arguments)


def test_a_backend_that_cannot_run_the_call_says_why():
    with pytest.raises(ValueError, match="^backend: 'triton' cannot run this call: it takes GPU tensors"):
        flash_attn_func(**GOOD, backend="triton")


@pytest.mark.gpu
def test_the_cpu_backend_refuses_gpu_tensors():
    on_gpu = {name: x.cuda() for name, x in GOOD.items()}
    with pytest.raises(ValueError, match="^backend: 'cpu' cannot run this call: it takes CPU tensors"):
        flash_attn_func(**on_gpu, backend="cpu")


@pytest.mark.gpu
def test_the_triton_backend_refuses_float64_and_the_reference_takes_it():
    on_gpu = {name: x.double().cuda() for name, x in GOOD.items()}
    with pytest.raises(ValueError, match="^backend: 'triton' cannot run this call: it computes in float16"):
        flash_attn_func(**on_gpu, backend="triton")
    assert flash_attn_func(**on_gpu).dtype == torch.float64


def test_arguments_stay_in_flash_attns_order():
    """A positional call written for flash-attn 2.8 means the same here."""
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    by_position = flash_attn_func(q, k, v, 0.0, 0.3, True, (2, -1), 5.0, None, True, True)
    by_name = flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(2, 0), softcap=5.0, deterministic=True, return_lse=True
    )
    assert len(by_position) == 3
    torch.testing.assert_close(by_position[:2], by_name, rtol=0, atol=0)
    assert by_position[2].numel() == 0
