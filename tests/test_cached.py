"""flash_attn_with_kvcache: what is written, what is read, against attention over plain lists of keys."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, DOUBLE, FLOAT, HALF

from flashtile import flash_attn_with_kvcache
from flashtile.kvcache import PagedCache

B, SQ, HQ, HK, D, DV, CAPACITY = 3, 4, 4, 2, 16, 8, 64
LENGTHS = torch.tensor([5, 40, 60 - SQ], dtype=torch.int32)
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (7, 2)}}
LAYOUTS = ["in one piece", "rows", "left-padded", "pages of 1", "pages of 16"]
INTERPRETED, ON_GPU = pytest.mark.interpreter, pytest.mark.gpu
RUNS = [
    pytest.param("cpu", DOUBLE, 1e-12, 0, id="cpu-double"),
    pytest.param("cpu", FLOAT, 1e-5, 0, id="cpu-float"),
    pytest.param("cpu", BF16, 4e-2, 0, id="cpu-bf16"),
    pytest.param("cpu", FLOAT, 1e-5, 1, id="triton-interpreted-float-one-part", marks=INTERPRETED),
    pytest.param("cpu", HALF, 5e-3, 5, id="triton-interpreted-half-parts", marks=INTERPRETED),
    pytest.param("cuda", FLOAT, 1e-5, 0, id="triton-gpu-float", marks=ON_GPU),
    pytest.param("cuda", BF16, 4e-2, 3, id="triton-gpu-bf16-parts", marks=ON_GPU),
]
"""(device, dtype, tolerance, num_splits)"""


def turned(x, cos, sin, position, interleaved):
    """x (H, D) turned at one position, as complex numbers."""
    width = cos.shape[1]
    halves = slice(0, width), slice(width, 2 * width)
    first, second = (slice(0, 2 * width, 2), slice(1, 2 * width, 2)) if interleaved else halves
    z = torch.complex(x[:, first], x[:, second]) * torch.complex(cos[position], sin[position])
    x = x.clone()
    x[:, first], x[:, second] = z.real, z.imag
    return x


def attention(q, k, v, causal=False, window_size=(-1, -1)):
    """(out, lse) of one sequence: q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv), in float64."""
    left, right = window_size[0], 0 if causal else window_size[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    row, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
    hidden = ((key > row + right) if right >= 0 else key < 0) | ((key < row - left) if left >= 0 else key < 0)
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def normal(*shape, dtype):
    return torch.randn(shape, dtype=DOUBLE).to(dtype)


def made(layout, dtype):
    """(q, k_cache, v_cache), other arguments, and the lists of each sequence's keys and values."""
    torch.manual_seed(0)
    first, rows = torch.zeros(B, dtype=torch.int32), torch.arange(B, dtype=torch.int32)
    arguments = {"cache_seqlens": LENGTHS.clone()}
    if layout.startswith("pages"):
        size = int(layout.split()[-1])
        table = torch.randperm(B * CAPACITY // size).view(B, -1).int()
        k, v = (normal(B * CAPACITY // size, size, HK, dims, dtype=dtype) for dims in (D, DV))
        arguments["block_table"] = table
        whole = [(k[table[b].long()].flatten(0, 1), v[table[b].long()].flatten(0, 1)) for b in range(B)]
    else:
        k, v = (normal(5 if layout == "rows" else B, CAPACITY, HK, dims, dtype=dtype) for dims in (D, DV))
        if layout == "rows":
            rows = arguments["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
        elif layout == "left-padded":
            first = arguments["cache_leftpad"] = torch.tensor([2, 0, 31], dtype=torch.int32)
        whole = [(k[row].clone(), v[row].clone()) for row in rows.tolist()]
    arguments = {name: torch.stack((x, x), -1)[..., 0] for name, x in arguments.items()}  # read where they lie
    lists = [(kb[f:n].double(), vb[f:n].double()) for (kb, vb), f, n in zip(whole, first, LENGTHS, strict=True)]
    return (normal(B, SQ, HQ, D, dtype=dtype), k, v), arguments, lists


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("new", ["nothing new", "new keys", "turned", "turned by halves"])
@pytest.mark.parametrize(("device", "dtype", "tolerance", "num_splits"), RUNS)
def test_queries_over_a_cache(layout, mask, new, device, dtype, tolerance, num_splits):
    (q, k_cache, v_cache), arguments, lists = made(layout, dtype)
    queries = q.double().clone()
    if new != "nothing new":
        k, v = normal(B, SQ, HK, D, dtype=dtype), normal(B, SQ, HK, DV, dtype=dtype)
        arguments |= {"k": k, "v": v}
        keys = k.double().clone()
        if new != "new keys":
            angles, interleaved = torch.rand(CAPACITY, D // 4, dtype=DOUBLE), new == "turned"
            tables = angles.cos().to(dtype), angles.sin().to(dtype)
            arguments |= {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": interleaved}
            tables = [table.double() for table in tables]
            for b, start in enumerate(len(kb) for kb, _ in lists):
                for i in range(SQ):
                    of_query = start + (0 if mask == "full" else i)
                    queries[b, i] = turned(queries[b, i], *tables, of_query, interleaved)
                    keys[b, i] = turned(keys[b, i], *tables, start + i, interleaved)
        lists = [(torch.cat((kb, keys[b])), torch.cat((vb, v[b].double()))) for b, (kb, vb) in enumerate(lists)]
    before = k_cache.clone()
    q, k_cache, v_cache = (x.to(device) for x in (q, k_cache, v_cache))
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    arguments |= {"num_splits": num_splits, "return_softmax_lse": True}
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(q, k_cache, v_cache, **arguments, **MASKS[mask]))
    assert (new == "nothing new") == torch.equal(before, k_cache.cpu())
    for b, (kb, vb) in enumerate(lists):
        wanted, wanted_lse = attention(queries[b], kb, vb, **MASKS[mask])
        assert (out[b].double() - wanted).abs().max() < tolerance
        assert (lse[b].double() - wanted_lse).nan_to_num(0.0).abs().max() < tolerance


def test_the_next_call_sees_what_the_last_wrote():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=DOUBLE) for _ in range(3))

    def empty():
        return torch.zeros(1, 32, 2, 8, dtype=DOUBLE), torch.zeros(1, 32, 2, 8, dtype=DOUBLE)

    cache = empty()
    steps = [
        flash_attn_with_kvcache(*(x[:, i : i + 1] if x.shape[1] == 6 else x for x in (q, *cache, k, v)),
                                cache_seqlens=i, causal=True)
        for i in range(6)
    ]  # fmt: skip
    whole = flash_attn_with_kvcache(q, *empty(), k, v, cache_seqlens=0, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_a_paged_cache_serves_sequences_of_different_ages():
    cache = PagedCache(20, 4, HK, D, DV, dtype=DOUBLE, device="cpu")
    torch.manual_seed(0)
    lists: dict[int, list] = {}
    for step in range(9):
        if step % 3 == 0:
            lists[cache.new()] = [torch.empty(0, HK, D, dtype=DOUBLE), torch.empty(0, HK, DV, dtype=DOUBLE)]
        sequences = list(lists)
        q, k, v = (normal(len(sequences), 2, heads, dims, dtype=DOUBLE) for heads, dims in ((HQ, D), (HK, D), (HK, DV)))
        for sequence in sequences:
            cache.reserve(sequence, 2)
        lengths, table = cache.cache_seqlens(sequences), cache.block_table(sequences)
        out = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=lengths, block_table=table, causal=True)
        for b, sequence in enumerate(sequences):
            cache.advance(sequence, 2)
            lists[sequence] = [torch.cat(pair) for pair in zip(lists[sequence], (k[b], v[b]), strict=True)]
            torch.testing.assert_close(out[b], attention(q[b], *lists[sequence], causal=True)[0])


def of(*shape, fill=0, dtype=FLOAT):
    return torch.full(shape, fill, dtype=dtype)


INT = torch.int32
BAD = {
    "page out of range": ({"block_table": of(B, 4, fill=99, dtype=INT)}, ValueError, "block_table: got numbers"),
    "past the cache": ({"cache_seqlens": 62}, ValueError, "cache_seqlens: got numbers from 62 to 62; want 0 to 60"),
    "shape of lengths": ({"cache_seqlens": LENGTHS[:2]}, ValueError, "cache_seqlens: got shape"),
    "dtype of lengths": ({"cache_seqlens": LENGTHS.float()}, TypeError, "cache_seqlens: got torch.float32"),
    "rows": ({"cache_batch_idx": torch.tensor([0, 1, 7])}, ValueError, "cache_batch_idx: got numbers from 0 to 7"),
    "only k": ({"v": None}, ValueError, "k, v: got only k"),
    "heads": ({"k": of(B, SQ, 1, D), "v": of(B, SQ, 1, DV)}, ValueError, "k: got .* heads and dims"),
    "short tables": (
        {"rotary_cos": of(9, 4), "rotary_sin": of(9, 4)},
        ValueError,
        "rotary_cos: got 9 positions; want 64",
    ),
    "one table": ({"rotary_cos": of(64, 4)}, ValueError, "got no rotary_sin"),
    "splits": ({"num_splits": 129}, ValueError, "num_splits: got 129; want 0 to 128"),
    "alibi": ({"alibi_slopes": of(HQ)}, NotImplementedError, "alibi_slopes"),
    "padding": ({"cache_leftpad": of(B, fill=50, dtype=INT)}, ValueError, "cache_leftpad: got more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_writes_nothing(name):
    change, error, message = BAD[name]
    (q, k_cache, v_cache), arguments, _ = made("in one piece", FLOAT)
    arguments |= {"k": normal(B, SQ, HK, D, dtype=FLOAT), "v": normal(B, SQ, HK, DV, dtype=FLOAT)} | change
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert torch.equal(before[0], k_cache)
    assert torch.equal(before[1], v_cache)
