"""flash_attn_with_kvcache: what is written, what is read, against attention over plain lists of keys."""

from __future__ import annotations

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from cases import BF16, DOUBLE, FLOAT, HALF

from flashtile import env, flash_attn_with_kvcache
from flashtile.cache import FP8
from flashtile.kvcache import PagedCache

B, SQ, HQ, HK, D, DV, CAPACITY = 3, 4, 4, 2, 16, 8, 64
INT = torch.int32
LENGTHS = torch.tensor([5, 40, 60 - SQ], dtype=torch.int32)
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (7, 2)}}
NEW = ["nothing new", "new keys", "turned", "turned by halves"]
LAYOUTS = ["in one piece", "rows", "left-padded", "pages of 1", "pages of 16"]
INTERPRETED, ON_GPU = pytest.mark.interpreter, pytest.mark.gpu
RUNS = [
    pytest.param("cpu", DOUBLE, 1e-12, 0, id="cpu-double"),
    pytest.param("cpu", FLOAT, 1e-5, 0, id="cpu-float"),
    pytest.param("cpu", BF16, 4e-2, 0, id="cpu-bf16"),
    pytest.param("cpu", FLOAT, 1e-5, 1, id="triton-interpreted-float-one-part", marks=INTERPRETED),
    pytest.param("cpu", HALF, 5e-3, 0, id="triton-interpreted-half-shares", marks=INTERPRETED),
    pytest.param("cuda", FLOAT, 1e-5, 0, id="triton-gpu-float-shares", marks=ON_GPU),
    pytest.param("cuda", BF16, 4e-2, 3, id="triton-gpu-bf16-parts", marks=ON_GPU),
]
"""(device, dtype, tolerance, num_splits)"""
# Of float8: half a step. Triton's interpreter loses the carry of a rounding, 0.49 becomes 0.25.
ROUNDING = 0.5 if env.triton_interpret() else 2**-4
PLAIN = [(layout, mask, new, "plain") for layout in LAYOUTS for mask in MASKS for new in NEW]
TERMS = {
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi of sequences": {"alibi_slopes": torch.arange(B * HQ).view(B, HQ) / 16},
    "sinks": {"sinks": torch.tensor([1.0, -math.inf, 4.0, -2.0])},
    "float8": {},
    "float8, scaled": {"k_descale": torch.tensor([0.5, 3.0]), "v_descale": torch.arange(1, 1 + B * HK).view(B, HK) / 4},
}
TERMS["all at once"] = TERMS["float8, scaled"] | TERMS["sinks"] | TERMS["alibi"] | TERMS["softcap"]
CASES = PLAIN + [
    (layout, mask, new, terms)
    for terms in TERMS
    for layout, mask, new in [
        ("in one piece", "full", "nothing new"),
        ("left-padded", "window", "turned by halves"),
        ("pages of 16", "causal", "turned"),
    ]
]


def turned(x, cos, sin, position, interleaved):
    """x (H, D) turned at one position, as complex numbers."""
    width = cos.shape[1]
    halves = slice(0, width), slice(width, 2 * width)
    first, second = (slice(0, 2 * width, 2), slice(1, 2 * width, 2)) if interleaved else halves
    z = torch.complex(x[:, first], x[:, second]) * torch.complex(cos[position], sin[position])
    x = x.clone()
    x[:, first], x[:, second] = z.real, z.imag
    return x


def attention(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None):
    """(out, lse) of one sequence: q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv), in float64; slopes and sinks (Hq,)."""
    left, right = window_size[0], 0 if causal else window_size[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    row, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
    hidden = ((key > row + right) if right >= 0 else key < 0) | ((key < row - left) if left >= 0 else key < 0)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (row - key).abs()
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    p = scores.softmax(-1).nan_to_num(0.0)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v), scores.logsumexp(-1)


def normal(*shape, dtype):
    return torch.randn(shape, dtype=DOUBLE).to(dtype)


def made(layout, dtype, stored=None):
    """(q, k_cache, v_cache), other arguments, and for each sequence a view of its row or pages: k and v to read."""
    torch.manual_seed(0)
    rows, arguments = torch.arange(B, dtype=torch.int32), {"cache_seqlens": LENGTHS.clone()}
    shape = 5 if layout == "rows" else B, CAPACITY
    if layout.startswith("pages"):
        size = int(layout.split()[-1])
        shape = B * CAPACITY // size, size
        arguments["block_table"] = torch.randperm(shape[0]).view(B, -1).int()
    elif layout == "rows":
        rows = arguments["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    elif layout == "left-padded":
        arguments["cache_leftpad"] = torch.tensor([2, 0, 31], dtype=torch.int32)
    k, v = (normal(*shape, HK, dims, dtype=stored or dtype) for dims in (D, DV))
    places = arguments.get("block_table", rows[:, None])
    arguments = {name: torch.stack((x, x), -1)[..., 0] for name, x in arguments.items()}  # read where they lie
    return (normal(B, SQ, HQ, D, dtype=dtype), k, v), arguments, places.long()


def lists_of(k_cache, v_cache, places, arguments, seqlens, terms):
    """The keys and values of each sequence, in float64: what the cache holds, times its scales."""
    first = arguments.get("cache_leftpad", torch.zeros(B, dtype=INT))
    for b, (f, n) in enumerate(zip(first.tolist(), seqlens.tolist(), strict=True)):
        kb, vb = (x.cpu().double()[places[b]].flatten(0, 1)[f:n] for x in (k_cache, v_cache))
        scales = (
            terms[name].expand(B, HK)[b, :, None] if name in terms else 1.0 for name in ("k_descale", "v_descale")
        )
        yield tuple(x * scale for x, scale in zip((kb, vb), scales, strict=True))


@pytest.mark.parametrize(("layout", "mask", "new", "terms"), CASES, ids=["-".join(case) for case in CASES])
@pytest.mark.parametrize(("device", "dtype", "tolerance", "num_splits"), RUNS)
def test_queries_over_a_cache(layout, mask, new, terms, device, dtype, tolerance, num_splits):
    stored = FP8 if terms.startswith("float8") or terms == "all at once" else None
    (q, k_cache, v_cache), arguments, places = made(layout, dtype, stored)
    added = TERMS.get(terms, {})
    lists = list(lists_of(k_cache, v_cache, places, arguments, LENGTHS, added))
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
    settings = arguments | added | MASKS[mask] | {"num_splits": num_splits, "return_softmax_lse": True}
    settings = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(q, k_cache, v_cache, **settings))
    assert (new == "nothing new") == torch.equal(before.double(), k_cache.cpu().double())
    ends = LENGTHS + (0 if new == "nothing new" else SQ)
    held = lists_of(k_cache, v_cache, places, arguments, ends, added)
    for b, (wanted, found) in enumerate(zip(lists, held, strict=True)):
        for x, y in zip(wanted, found, strict=True):
            assert ((x - y).abs() <= x.abs() * ROUNDING + 2**-7).all() if stored else (x - y).abs().max() < tolerance
        of_heads = {name: x[b] if x.dim() == 2 else x for name, x in added.items() if name in ("alibi_slopes", "sinks")}
        of_heads |= {"softcap": added["softcap"]} if "softcap" in added else {}
        wanted, wanted_lse = attention(queries[b], *(found if stored else wanted), **MASKS[mask], **of_heads)
        assert (out[b].double() - wanted).abs().max() < tolerance * wanted.abs().max().clamp(min=1)
        assert (lse[b].double() - wanted_lse).nan_to_num(0.0).abs().max() < tolerance * 4


@pytest.fixture
def prepared(monkeypatch):
    """A call on a CPU, whose numbers are to be looked at each time, may run what was prepared for another."""
    cached = importlib.import_module("flashtile.cached")
    monkeypatch.setattr(cached, "PREPARED", {})
    monkeypatch.setattr(cached, "_has_numbers_to_check", lambda q: False)
    return cached


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(("layout", "mask", "new", "terms"), CASES, ids=["-".join(case) for case in CASES])
def test_a_call_like_one_before_is_not_checked_again(layout, mask, new, terms, device, prepared, monkeypatch):
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
    if device == "cpu" and "alibi_slopes" in added:  # there one sequence comes after the other
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


SHARING = [
    pytest.param("cpu", FLOAT, id="cpu"),
    pytest.param("cpu", FLOAT, id="triton-interpreted", marks=INTERPRETED),
    pytest.param("cuda", FLOAT, id="triton-gpu", marks=ON_GPU),
]


@pytest.mark.parametrize("mask", MASKS)
def test_sequences_at_once_are_as_one_after_the_other(mask, monkeypatch):
    """On a CPU, in blocks of four keys; what lies past the end of a sequence is no number."""
    monkeypatch.setattr(importlib.import_module("flashtile.backends.cpu.decode"), "NUMBERS_AT_ONCE", CAPACITY * HK * D)
    batch, lengths = 16, torch.arange(0, 64, 4, dtype=INT) + 1
    q, k, v = (normal(batch, *shape, dtype=FLOAT) for shape in ((SQ, HQ, D), (CAPACITY, HK, D), (CAPACITY, HK, DV)))
    past = torch.arange(CAPACITY) >= lengths[:, None]
    k[past], v[past] = math.nan, math.nan
    settings = MASKS[mask] | {"cache_seqlens": lengths, "return_softmax_lse": True}
    for found, wanted in zip(
        flash_attn_with_kvcache(q, k, v, **settings),
        flash_attn_with_kvcache(q, k, v, backend="reference", **settings),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("seqlen_q", "num_splits"), [(1, 0), (1, 1), (1, 2), (1, 7), (1, 128), (40, 0), (40, 7)])
@pytest.mark.parametrize(("device", "dtype"), SHARING)
def test_lengths_of_all_kinds_in_one_batch(seqlen_q, num_splits, device, dtype):
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 200, 16, 33], dtype=INT)
    q, k, v = (normal(5, *shape, dtype=dtype) for shape in ((seqlen_q, 4, D), (200, 2, D), (200, 2, DV)))
    settings = {"cache_seqlens": lengths, "causal": True, "num_splits": num_splits, "return_softmax_lse": True}
    settings["cache_seqlens"] = lengths.to(device)
    inputs = [x.to(device) for x in (q, k, v)]
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(*inputs, **settings))
    assert torch.equal(flash_attn_with_kvcache(*inputs, **settings | {"return_softmax_lse": False}).cpu(), out)
    for b, n in enumerate(lengths.tolist()):
        wanted, wanted_lse = attention(q[b].double(), k[b, :n].double(), v[b, :n].double(), causal=True)
        torch.testing.assert_close(out[b].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seqlen", [67 * 16, 68 * 16, 70 * 16 - 5])
@pytest.mark.parametrize("num_splits", [0, 3, 4])
@pytest.mark.parametrize(("device", "dtype"), SHARING)
def test_lengths_that_are_alike(seqlen, num_splits, device, dtype):
    """As many parts of each task, which begin with it, or nearly."""
    torch.manual_seed(0)
    q, k, v = (normal(1, *shape, dtype=dtype) for shape in ((1, 4, D), (1200, 2, D), (1200, 2, DV)))
    settings = {"cache_seqlens": seqlen, "num_splits": num_splits, "return_softmax_lse": True}
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(q.to(device), k.to(device), v.to(device), **settings))
    wanted, wanted_lse = attention(q[0].double(), k[0, :seqlen].double(), v[0, :seqlen].double())
    torch.testing.assert_close(out[0].double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[0].double(), wanted_lse, rtol=0, atol=1e-5)


ALIKE = [(1, 2, "full"), (3, 2, "causal"), (5, 1, "causal"), (5, 2, "full"), (5, 2, "window"), (132, 4, "window")]


@pytest.mark.parametrize(("batch", "heads_k", "mask"), ALIKE)
@pytest.mark.parametrize(("device", "dtype"), SHARING)
def test_a_cache_without_lengths_is_read_whole(batch, heads_k, mask, device, dtype):
    """More programs than tasks, one for each, or for two, and others that share tasks."""
    torch.manual_seed(0)
    shapes = (2, 4, D), (300, heads_k, D), (300, heads_k, DV)
    q, k, v = (normal(batch, *shape, dtype=dtype) for shape in shapes)
    inputs = (x.to(device) for x in (q, k, v))
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(*inputs, **MASKS[mask], return_softmax_lse=True))
    for b in range(batch):
        wanted, wanted_lse = attention(*(x[b].double() for x in (q, k, v)), **MASKS[mask])
        torch.testing.assert_close(out[b].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.interpreter
def test_whole_tasks_stay_whole_where_a_window_leaves_less_than_the_least_share(monkeypatch):
    """Two tasks of three blocks for each program, of seven at least elsewhere: nobody would merge a part of a third."""
    from flashtile.backends.triton import decode_launch
    from flashtile.backends.triton.decode_config import DecodeTiles

    monkeypatch.setattr(decode_launch, "choose", lambda *_: DecodeTiles(16, 1, 1, programs=4, least=7))
    torch.manual_seed(0)
    q, k, v = (normal(4, *shape, dtype=FLOAT) for shape in ((1, 4, D), (160, 2, D), (160, 2, DV)))
    out, lse = flash_attn_with_kvcache(q, k, v, window_size=(40, 0), return_softmax_lse=True)
    for b in range(4):
        wanted, wanted_lse = attention(*(x[b].double() for x in (q, k, v)), window_size=(40, 0))
        torch.testing.assert_close(out[b].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-5)


EMPTY = {"no sequence": (0, 4, 4, 8), "no query": (2, 0, 4, 8), "no new key": (2, 4, 0, 8), "no room": (2, 4, 0, 0)}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(("device", "dtype"), SHARING)
def test_nothing_to_do(empty, device, dtype):
    batch, seqlen_q, seqlen_new, capacity = EMPTY[empty]
    q, k_cache, k = (
        torch.ones(batch, *shape, D, dtype=dtype, device=device)
        for shape in ((seqlen_q, HQ), (capacity, HK), (seqlen_new, HK))
    )
    lengths = torch.zeros(batch, dtype=INT, device=device)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, k_cache.clone(), k, k, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    assert out.shape == q.shape
    assert lse.shape == (batch, HQ, seqlen_q)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


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


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("n_shares", [1, 5, 33, 132])
def test_shares_of_a_line_are_even_and_have_each_block_once(n_shares, least):
    shares = importlib.import_module("flashtile.backends.triton.decode_shares")
    for n_blocks in (1, 4, 16, 100, 272, 1000, 4097):
        share, longer = shares.shares_of_line.fn(n_blocks, n_shares, least)
        begins = [min(shares.begin_of_share.fn(rank, share, longer), n_blocks) for rank in range(n_shares + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(begins)]
        blocks_of = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        assert [shares.share_of_block.fn(block, share, longer) for block in range(n_blocks)] == blocks_of
        assert share >= least
        assert max(sizes) <= share + 1
        if n_blocks >= least * n_shares:  # a sixteenth of the shares at most has none, where the last may be less
            assert 16 * (sizes.count(0) - 1) <= n_shares


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


@pytest.mark.interpreter
def test_rows_of_float16_are_what_they_stand_for():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from flashtile.backends.triton.decode import as_float16

    @triton.jit
    def kernel(x_ptr, rows_ptr, powers_ptr, as_float16: tl.constexpr):
        at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
        rows, power = as_float16(tl.load(x_ptr + at))
        tl.store(rows_ptr + at, rows)
        tl.store(powers_ptr + tl.arange(0, 8), power)

    sizes = torch.tensor([0.0, 1e-38, 1e-20, 1e-3, 1.0, 1e6, 1e20, 1e38])
    x = (normal(8, 16, dtype=FLOAT) * sizes[:, None]).to(BF16).float()  # what a bfloat16 holds
    rows, powers = torch.empty(8, 16, dtype=HALF), torch.empty(8)
    kernel[(1,)](x, rows, powers, as_float16)
    assert torch.equal(powers.frexp().mantissa, torch.full((8,), 0.5))
    assert rows.abs().max() < 2
    assert ((rows.double() * powers[:, None].double() - x.double()).abs() <= 2**-24 * powers[:, None].double()).all()


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


BAD = {
    "page out of range": ({"block_table": of(B, 4, fill=99, dtype=INT)}, ValueError, "block_table: got numbers"),
    "past the cache": ({"cache_seqlens": 62}, ValueError, "cache_seqlens: got 62; want 0 to 60"),
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
    "table too short": (
        {"block_table": torch.zeros(B, 1, dtype=INT), "cache_seqlens": 61},
        ValueError,
        "cache_seqlens: got 61; want 0 to 60: block_table, 1 pages wide, has room for 64 keys, 4 of them new",
    ),
    "more new keys than room": ({"k": of(B, 65, HK, D), "v": of(B, 65, HK, DV)}, ValueError, "k: got 65 new keys"),
    "dtype of a cache": ({"v_cache": of(B, CAPACITY, HK, DV, dtype=HALF)}, TypeError, "v_cache: got torch.float16"),
    "caches of two dtypes": ({"v_cache": of(B, CAPACITY, HK, DV, dtype=FP8)}, TypeError, "v_cache: got .*float8"),
    "heads of a cache": ({"v_cache": of(B, CAPACITY, 1, DV)}, ValueError, "v_cache: got shape"),
    "scales without float8": ({"k_descale": of(HK, fill=1)}, ValueError, "k_descale: got scales for a cache"),
    "slopes of heads": ({"alibi_slopes": of(3)}, ValueError, "alibi_slopes: got shape .3,.; want .4,. or .3, 4."),
    "dtype of slopes": ({"alibi_slopes": of(HQ, dtype=HALF)}, TypeError, "alibi_slopes: got torch.float16"),
    "sinks of heads": ({"sinks": of(B, HQ)}, ValueError, "sinks: got shape"),
    "alibi elsewhere": ({"alibi_slopes": of(HQ), "backend": "cpu"}, ValueError, "backend: 'cpu' cannot run"),
    "no such backend here": ({"backend": "hopper"}, ValueError, "backend: 'hopper' cannot run"),
    "splits": ({"num_splits": 129}, ValueError, "num_splits: got 129; want 0 to 128"),
    "padding": ({"cache_leftpad": of(B, fill=50, dtype=INT)}, ValueError, "cache_leftpad: got more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_writes_nothing(name):
    change, error, message = BAD[name]
    (q, k_cache, v_cache), arguments, _ = made("in one piece", FLOAT)
    new = {"k": normal(B, SQ, HK, D, dtype=FLOAT), "v": normal(B, SQ, HK, DV, dtype=FLOAT)}
    before = k_cache.clone(), v_cache.clone()
    arguments |= {"q": q, "k_cache": k_cache, "v_cache": v_cache} | new | change
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(before[0], k_cache)
    assert torch.equal(before[1], v_cache)


@pytest.mark.parametrize(
    ("what", "arch", "query", "pairs"),
    [
        ("dense", "sm_90", BF16, True),
        ("odd dims", "sm_90", BF16, False),
        ("odd strides", "sm_90", BF16, False),
        ("odd address", "sm_90", BF16, False),
        ("dense", "sm_90", FLOAT, False),
        ("dense", "gfx942", BF16, False),
    ],
)
def test_float8_is_loaded_in_pairs_where_no_pair_lies_apart(what, arch, query, pairs):
    from flashtile.backends.triton.decode_launch import in_pairs

    caches = {
        "dense": torch.empty(2, 8, 2, 64, dtype=FP8),
        "odd dims": torch.empty(2, 8, 2, 63, dtype=FP8),
        "odd strides": torch.empty(2, 8, 2, 65, dtype=FP8)[..., :64],
        "odd address": torch.empty(2 * 8 * 2 * 64 + 2, dtype=FP8)[1:-1].view(2, 8, 2, 64),
    }
    of_arch = SimpleNamespace(arch=arch)
    assert in_pairs(of_arch, torch.empty(2, 1, 4, 64, dtype=query), caches["dense"], caches[what]) is pairs
