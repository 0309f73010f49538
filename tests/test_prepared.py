"""Calls over a cache that follow one another: what later ones take over from the first, and in which order they run."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from caches import (
    CAPACITY,
    CASES,
    DV,
    HK,
    HQ,
    INT,
    INTERPRETED,
    MASKS,
    ON_GPU,
    SQ,
    TERMED,
    TERMS,
    B,
    D,
    made,
    normal,
)
from cases import BF16, FLOAT

from flashtile import env, flash_attn_with_kvcache
from flashtile.cache import FP8


@pytest.fixture
def prepared(monkeypatch):
    """A call on a CPU, whose numbers are to be looked at each time, may run what was prepared for another."""
    cached = importlib.import_module("flashtile.cached")
    monkeypatch.setattr(cached, "PREPARED", {})
    monkeypatch.setattr(cached, "_has_numbers_to_check", lambda q: False)
    return cached


LIKE = [
    *(pytest.param("cpu", *case, id=f"cpu-{'-'.join(case)}") for case in CASES),
    *(pytest.param("cpu", *case, id=f"triton-interpreted-{'-'.join(case)}", marks=INTERPRETED) for case in TERMED),
    *(pytest.param("cuda", *case, id=f"triton-gpu-{'-'.join(case)}", marks=ON_GPU) for case in CASES),
]


@pytest.mark.parametrize(("device", "layout", "mask", "new", "terms"), LIKE)
def test_a_call_like_one_before_is_not_checked_again(device, layout, mask, new, terms, prepared, monkeypatch):
    """And does what it would do alone, with other numbers, in other memory."""
    dtype = BF16 if device == "cuda" else FLOAT
    stored = FP8 if terms.startswith("float8") or terms == "all at once" else None
    added = TERMS.get(terms, {})
    settings = MASKS[mask] | {"rotary_interleaved": new == "turned", "return_softmax_lse": True}
    settings |= {"softcap": added.get("softcap", 0.0)}

    def call(seed):
        (_, k_cache, v_cache), arguments, _ = made(layout, dtype, stored)
        indices = list(arguments)
        torch.manual_seed(seed)
        arguments |= {"q": normal(B, SQ, HQ, D, dtype=dtype), "k_cache": k_cache, "v_cache": v_cache}
        arguments["cache_seqlens"] -= seed
        if new != "nothing new":
            arguments |= {name: normal(B, SQ, HK, n, dtype=dtype) for name, n in (("k", D), ("v", DV))}
        if new.startswith("turned"):
            arguments |= {name: torch.rand(CAPACITY, D // 4).to(dtype) for name in ("rotary_cos", "rotary_sin")}
        arguments |= {name: x for name, x in added.items() if name != "softcap"}
        arguments = {
            name: torch.stack((x, x), -1).to(device)[..., 0] if name in indices else x.to(device)
            for name, x in arguments.items()
        }
        found = flash_attn_with_kvcache(**arguments, **settings)
        return *found, arguments["k_cache"].float(), arguments["v_cache"].float()

    alone = call(1)
    if device == "cpu" and "alibi_slopes" in added and not env.triton_interpret():  # one sequence after the other
        assert not prepared.PREPARED
        return
    prepared.PREPARED.clear()
    call(0)
    monkeypatch.setattr(prepared, "checked", None)
    for found, wanted in zip(call(1), alone, strict=True):
        assert torch.equal(found, wanted)


def test_a_length_for_all_is_checked_in_each_call(prepared):
    (q, k_cache, v_cache), _, _ = made("in one piece", FLOAT)
    new = normal(B, SQ, HK, D, dtype=FLOAT), normal(B, SQ, HK, DV, dtype=FLOAT)
    for length in (3, 60):
        flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=length)
    assert len(prepared.PREPARED) == 1
    before = k_cache.clone()
    for length in (-1, 61):
        with pytest.raises(ValueError, match=f"cache_seqlens: got {length}; want 0 to 60"):
            flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=length)
    assert torch.equal(k_cache, before)


def test_what_was_prepared_serves_no_other_layout(prepared):
    (q, k_cache, v_cache), arguments, _ = made("rows", FLOAT)
    rows, lengths = (arguments[name].contiguous() for name in ("cache_batch_idx", "cache_seqlens"))

    def call(q, rows, window_size):
        flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_batch_idx=rows, cache_seqlens=lengths, window_size=window_size
        )
        return len(prepared.PREPARED)

    assert call(q, rows, (7, 2)) == call(q.clone(), rows.clone(), (7, 2)) == 1
    assert call(q, rows, [7, 2]) == 1  # not hashable
    assert call(q, arguments["cache_batch_idx"], (7, 2)) == 2  # every other number
    assert call(q.transpose(1, 2).contiguous().transpose(1, 2), rows, (7, 2)) == 3
    assert call(q, rows, (7, 3)) == 4
    assert call(q, rows.long(), (7, 3)) == 5


@pytest.mark.gpu
def test_a_graph_serves_lengths_that_change():
    q, k, v = (normal(B, SQ, heads, D, dtype=BF16).cuda() for heads in (HQ, HK, HK))
    caches = [normal(B, CAPACITY, HK, D, dtype=BF16).cuda() for _ in "kv"]
    cos, sin = (torch.rand(CAPACITY, D // 2, device="cuda") for _ in range(2))
    lengths = torch.zeros(B, dtype=INT, device="cuda")

    def step(caches):
        return flash_attn_with_kvcache(q, *caches, k, v, cos, sin, cache_seqlens=lengths, causal=True)

    step([x.clone() for x in caches])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(caches)
    for length in ([0, 0, 0], [1, 30, 60], [60, 2, 17]):
        lengths.copy_(torch.tensor(length))
        alone = [x.clone() for x in caches]
        graph.replay()
        assert torch.equal(out, step(alone))
        assert all(torch.equal(x, y) for x, y in zip(caches, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in a graph"])
@pytest.mark.parametrize("appending", [False, True], ids=["nothing new", "new keys"])
def test_calls_close_together_are_as_calls_alone(captured, appending):
    """The merge starts while parts are computed: it must see all of these, and nothing of the kernels behind it."""
    torch.manual_seed(0)
    sizes = (2, 1, 8, 64), *[(2, 4096, 2, 64)] * 2, *[(2, 1, 2, 64)] * (2 if appending else 0)
    given = [
        (*(normal(*size, dtype=BF16).cuda() for size in sizes), torch.tensor(lengths, dtype=INT, device="cuda"))
        for lengths in ([4095, 700], [1, 4000], [2500, 2500])
    ]
    used = [torch.empty_like(x) for x in given[0]]

    def step(tensors):
        for x, new in zip(used, tensors, strict=True):
            x.copy_(new)
        *inputs, lengths = used
        found = flash_attn_with_kvcache(*inputs, cache_seqlens=lengths, return_softmax_lse=True)
        lengths.zero_()
        for x in inputs:
            x.fill_(math.nan)
        return found

    alone = []
    for tensors in given:
        alone.append(step(tensors))
        torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            together = [step(tensors) for tensors in given]
    for _ in range(100):
        if captured:
            graph.replay()
        else:
            together = [step(tensors) for tensors in given]
        for found, wanted in zip(together, alone, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_a_call_does_not_wait_for_the_gpu():
    (q, k_cache, v_cache), arguments, _ = made("pages of 16", BF16)
    q, k_cache, v_cache, k, v = (
        x.cuda() for x in (q, k_cache, v_cache, *(normal(B, SQ, HK, n, dtype=BF16) for n in (D, DV)))
    )
    arguments = {name: x.cuda() for name, x in arguments.items()}
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments)
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, block_table=arguments["block_table"], cache_seqlens=7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
