"""What must hold of attention for any input, found by hypothesis."""

from __future__ import annotations

import pytest
import torch
from cases import spec
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile import flash_attn_func
from flashtile.merge import merge
from flashtile.testing import make_inputs

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
lengths = st.integers(1, 80)
windows = st.sampled_from([(-1, -1), (-1, 0), (5, 3), (0, -1), (20, 0)])
close = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def problems(draw):
    """A small float64 spec and its inputs."""
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dims = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    left, right = draw(windows)
    case = spec(
        (draw(lengths), draw(lengths)), (heads_k * group, heads_k), dims, torch.float64, batch=draw(st.integers(1, 2)),
        left=left, right=right, softcap=draw(st.sampled_from([0.0, 2.0])),
    )  # fmt: skip
    return case, make_inputs(case, seed=draw(st.integers(0, 2**31)))


def attend(case, q, k, v, backend, **changes):
    arguments = {"window_size": (case.window_left, case.window_right), "softcap": case.softcap, **changes}
    return flash_attn_func(q, k, v, softmax_scale=case.softmax_scale, return_lse=True, backend=backend, **arguments)


@BACKENDS
@given(problem=problems(), cut=st.floats(0, 1))
def test_splitting_the_keys_and_merging_by_lse_changes_nothing(problem, cut, backend):
    case, (q, k, v, *_) = problem
    at = round(cut * case.seqlen_k)
    whole = attend(case, q, k, v, backend, window_size=(-1, -1))
    parts = [
        attend(case, q, k[:, part], v[:, part], backend, window_size=(-1, -1)) for part in (slice(at), slice(at, None))
    ]
    merged = merge(*zip(*parts, strict=True))
    torch.testing.assert_close(merged, whole, **close)


@BACKENDS
@given(problem=problems(), data=st.data())
def test_permuting_the_keys_changes_nothing_without_a_mask(problem, data, backend):
    case, (q, k, v, *_) = problem
    order = data.draw(st.permutations(range(case.seqlen_k)))
    shuffled = attend(case, q, k[:, order], v[:, order], backend, window_size=(-1, -1))
    torch.testing.assert_close(shuffled, attend(case, q, k, v, backend, window_size=(-1, -1)), **close)


@BACKENDS
@given(problem=problems(), data=st.data())
def test_a_causal_row_equals_attention_over_the_keys_it_sees(problem, data, backend):
    case, (q, k, v, *_) = problem
    row = data.draw(st.integers(0, case.seqlen_q - 1))
    out, lse = attend(case, q, k, v, backend, window_size=(-1, 0))
    keys = max(0, row + 1 + case.offset)
    alone = attend(case, q[:, row : row + 1], k[:, :keys], v[:, :keys], backend, window_size=(-1, -1))
    torch.testing.assert_close((out[:, row : row + 1], lse[..., row : row + 1]), alone, **close)


@BACKENDS
@given(problem=problems(), shift=st.floats(-50, 50))
def test_shifting_all_scores_shifts_lse_and_nothing_else(problem, shift, backend):
    case, (q, k, v, *_) = problem
    # one more dimension, constant in q and in k, adds the same to every score
    wider_q = torch.cat((q, torch.full_like(q[..., :1], shift / case.softmax_scale)), -1)
    wider_k = torch.cat((k, torch.ones_like(k[..., :1])), -1)
    out, lse = attend(case, q, k, v, backend, softcap=0.0)
    shifted, shifted_lse = attend(case, wider_q, wider_k, v, backend, softcap=0.0)
    torch.testing.assert_close(shifted, out, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(shifted_lse, lse + shift, rtol=1e-8, atol=1e-8)


@BACKENDS
@settings(max_examples=15)
@given(problem=problems())
def test_gradients_match_finite_differences(problem, backend):
    case, (q, k, v, *_) = problem
    q, k, v = (x[:1, :7, ..., :5].clone().requires_grad_() for x in (q, k, v))

    def outputs(q, k, v):
        out, lse = attend(case, q, k, v, backend)
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(outputs, (q, k, v), atol=1e-6)


def test_merging_rows_without_keys_gives_zero_and_minus_infinity():
    outs = [torch.zeros(1, 2, 1, 3)] * 2
    lses = [torch.tensor([[[float("-inf"), 0.0]]]), torch.tensor([[[float("-inf"), float("-inf")]]])]
    out, lse = merge(outs, lses)
    assert torch.equal(lse, torch.tensor([[[float("-inf"), 0.0]]]))
    assert not out.isnan().any()


@pytest.mark.parametrize(("outs", "lses"), [([], []), ([torch.zeros(1, 1, 1, 1)], [])])
def test_merge_wants_one_lse_for_each_out(outs, lses):
    with pytest.raises(ValueError, match="outs, lses"):
        merge(outs, lses)
