"""flash_attn_with_kvcache: what is written, what is read, against attention over plain lists of keys."""

from __future__ import annotations

import importlib
import itertools
import math
from types import SimpleNamespace

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
    LENGTHS,
    MASKS,
    ON_GPU,
    SQ,
    TERMS,
    B,
    D,
    attention,
    lists_of,
    made,
    normal,
    turned,
)
from cases import BF16, DOUBLE, FLOAT, HALF

from flashtile import env, flash_attn_with_kvcache
from flashtile.cache import FP8
from flashtile.kvcache import PagedCache

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


@pytest.mark.parametrize("seqlen", [0, 1, 100, 1187])
@pytest.mark.parametrize("heads_k", [1, 4, 8])
@pytest.mark.parametrize(("device", "dtype"), SHARING)
def test_one_sequence_whose_length_is_on_the_device(seqlen, heads_k, device, dtype):
    """Heads have programs of their own, or share some; no sequence is looked for."""
    torch.manual_seed(0)
    q, k, v = (normal(1, *shape, dtype=dtype) for shape in ((1, 8, D), (1200, heads_k, D), (1200, heads_k, DV)))
    settings = {"cache_seqlens": torch.tensor([seqlen], dtype=INT, device=device), "return_softmax_lse": True}
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


PIECES = {
    "one long": [272, 1, 1, 1], "all long": [272] * 4, "some long": [1, 272, 3, 272], "falling": [200, 100, 50, 7],
    "one with keys": [272, 0, 0, 0], "twice two": [17, 17, 240, 240],
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("window", [(-1, -1), (40, 0)], ids=["full", "window"])
def test_tasks_longer_than_an_equal_share_are_split(window, lengths, monkeypatch):
    """By 6 programs at once, or one task by as many as any: lengths say."""
    from flashtile.backends.triton import decode_launch
    from flashtile.backends.triton.decode_config import DecodeTiles

    monkeypatch.setattr(decode_launch, "choose", lambda *_: DecodeTiles(16, 1, 1, 6, 1, whole=True, split=True))
    torch.manual_seed(0)
    q, k, v = (normal(4, *shape, dtype=FLOAT) for shape in ((1, 4, D), (272, 2, D), (272, 2, DV)))
    settings = {"window_size": window, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor(lengths, dtype=INT), **settings)
    for b, n in enumerate(lengths):
        wanted, wanted_lse = attention(*(x[b].double() for x in (q, k[:, :n], v[:, :n])), window_size=window)
        torch.testing.assert_close(out[b].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-5)


ALIKE = {
    "as long": [272] * 4, "as many blocks": [272, 257, 260, 271], "empty": [0] * 4, "one": [272],
    "ragged": [272, 1, 100, 17],
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("left", [-1, 40], ids=["full", "window"])
def test_tasks_are_whole_where_all_have_as_many_blocks_and_programs_share_them_elsewhere(left, lengths, monkeypatch):
    """Of 8 tasks or 2, for 12 programs: the result of a whole one is what it is if none is split, to the last bit."""
    from flashtile.backends.triton import decode_launch
    from flashtile.backends.triton.decode_config import DecodeTiles

    monkeypatch.setattr(decode_launch, "choose", lambda *_: DecodeTiles(16, 1, 1, 12, 1, whole_if_alike=True))
    torch.manual_seed(0)
    q, k, v = (normal(len(lengths), *shape, dtype=FLOAT) for shape in ((1, 4, D), (272, 2, D), (272, 2, DV)))
    settings = {"cache_seqlens": torch.tensor(lengths, dtype=INT), "window_size": (left, 0), "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k, v, **settings)
    for b, n in enumerate(lengths):
        wanted, wanted_lse = attention(*(x[b].double() for x in (q, k[:, :n], v[:, :n])), window_size=(left, 0))
        torch.testing.assert_close(out[b].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-5)
    unsplit, unsplit_lse = flash_attn_with_kvcache(q, k, v, num_splits=1, **settings)
    firsts = [0 if left < 0 else max(n - 1 - left, 0) // 16 for n in lengths]
    are_whole = len({-(-n // 16) - first for n, first in zip(lengths, firsts, strict=True)}) == 1
    assert (torch.equal(out, unsplit) and torch.equal(lse, unsplit_lse)) == are_whole


@pytest.mark.parametrize(("programs", "tasks"), [(128, 96), (128, 112), (132, 93), (132, 132), (12, 8)])
def test_few_tasks_are_spread_over_programs_in_order_and_no_two_without_one_are_neighbours(programs, tasks):
    shares = importlib.import_module("flashtile.backends.triton.decode_shares")
    spread = [shares.spread.fn(program, programs, tasks) for program in range(programs)]
    assert [task for task, here in spread if here] == list(range(tasks))
    assert all(here or next_here for (_, here), (_, next_here) in itertools.pairwise(spread))


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


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("batch", "tasks", "most"),
    [(1, 2, None), (5, 2, None), (32, 1, None), (33, 1, None), (100, 1, None), (1, 2, 3), (5, 2, 3), (33, 1, 8)],
)
def test_the_longest_sequences_come_first(batch, tasks, most):
    """Each of their pieces once, behind so many of other sequences; and none behind the last."""
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from flashtile.backends.triton import decode_shares as shares

    @triton.jit
    def kernel(
        found_ptr, lengths_ptr, batches, tasks, longest_first: tl.constexpr, pieces_before: tl.constexpr,
        Batch: tl.constexpr, TILE_B: tl.constexpr, most: tl.constexpr,
    ):  # fmt: skip
        rank = tl.program_id(0)
        batch = Batch(batches, lengths_ptr, None, 0, 1024, 1, None, None)
        sequence, inside = longest_first(rank, tasks, most, batch, TILE_B, 64)
        blocks = tl.cdiv(tl.maximum(tl.load(lengths_ptr + sequence, sequence < batches, 0), 1), 64)
        before = pieces_before(sequence, blocks, most, batch, TILE_B, 64)
        tl.store(found_ptr + 3 * rank, sequence)
        tl.store(found_ptr + 3 * rank + 1, inside)
        tl.store(found_ptr + 3 * rank + 2, before)

    torch.manual_seed(0)
    for lengths in (torch.randint(0, 1025, (batch,)), torch.full((batch,), 1024), torch.zeros(batch)):
        blocks = (-(-lengths.to(INT) // 64)).clamp(min=1)
        wanted, before = [], 0
        for sequence in blocks.argsort(descending=True, stable=True).tolist():
            pieces = 1 if most is None else -(-int(blocks[sequence]) // most)
            wanted += [[sequence, inside, before] for inside in range(tasks * pieces)]
            before += pieces
        found = torch.full((len(wanted) + 2, 3), -1, dtype=INT)
        given = shares.longest_first, shares.pieces_before, shares.Batch
        kernel[(len(found),)](found, lengths.to(INT), batch, tasks, *given, triton.next_power_of_2(batch), most)
        assert found[:-2].tolist() == wanted
        assert found[-2:, 0].tolist() == [batch] * 2


@pytest.mark.interpreter
def test_pieces_are_no_more_than_tasks_and_as_many_as_run_at_once():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from flashtile.backends.triton.decode_shares import Batch, most_of_a_piece

    @triton.jit
    def kernel(found_ptr, lengths_ptr, at_once, tasks, most_of_a_piece: tl.constexpr, Batch: tl.constexpr):
        batch = Batch(40, lengths_ptr, None, 0, 1024, 1, None, None)
        tl.store(found_ptr, most_of_a_piece(tasks, at_once, batch, 64, 64))

    torch.manual_seed(0)
    for lengths in (torch.randint(0, 1025, (40,)), torch.full((40,), 1024), torch.zeros(40)):
        blocks = (-(-lengths.to(INT) // 64)).clamp(min=1)
        for at_once in (1, 7, 80, 160):
            most = torch.zeros(1, dtype=INT)
            kernel[(1,)](most, lengths.to(INT), at_once, 2, most_of_a_piece, Batch)
            assert most.item() == -(-2 * int(blocks.sum()) // at_once)
            assert 2 * int((-(-blocks // most)).sum()) <= 2 * 40 + at_once


@pytest.mark.interpreter
@pytest.mark.parametrize("alike", [False, True], ids=["of each", "alike"])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("lanes", [32, 64], ids=["by each warp", "by all"])
def test_a_place_of_a_line_is_its_sequence_s(lanes, tasks, alike):
    """Behind it lie so many blocks, up to the end of a share; what a task costs lies before its own."""
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from flashtile.backends.triton import decode_shares as shares

    @triton.jit
    def kernel(
        found_ptr, lengths_ptr, size, tasks, places_of_line: tl.constexpr, start_of_share: tl.constexpr,
        Batch: tl.constexpr, LANES: tl.constexpr, TASK_EACH: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0)
        batch = Batch(40, lengths_ptr, None, 0, 256, 1, None, None)
        places, cost, begin = places_of_line(0, tasks, batch, 64, LANES, 64)
        sequence, inside, steps = start_of_share(place, place + size, tasks, cost, batch, 64, LANES, 64, TASK_EACH)
        places, cost, begin = places_of_line(sequence, tasks, batch, 64, LANES, 64)
        tl.store(found_ptr + 5 * place, places)
        tl.store(found_ptr + 5 * place + 1, sequence)
        tl.store(found_ptr + 5 * place + 2, inside)
        tl.store(found_ptr + 5 * place + 3, begin + inside)
        tl.store(found_ptr + 5 * place + 4, steps)

    torch.manual_seed(0)
    lengths, size = torch.full((40,), 200, dtype=INT) if alike else torch.randint(0, 257, (40,), dtype=INT), 7
    blocks, cost = (-(-lengths // 64)).clamp(min=1).tolist(), 0 if alike else shares.TASK_COST.value
    are_keys = [place >= cost for n in blocks for _ in range(tasks) for place in range(cost + n)]
    starts = [(sequence, inside) for sequence, n in enumerate(blocks) for inside in range(tasks * (n + cost))]
    wanted = [[len(starts), *start, place, sum(are_keys[place : place + size])] for place, start in enumerate(starts)]
    found = torch.full((len(wanted), 5), -1, dtype=INT)
    given = shares.places_of_line, shares.start_of_share, shares.Batch
    kernel[(len(wanted),)](found, lengths, size, tasks, *given, lanes, tasks == 1)
    assert found.tolist() == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16, 256], ids=["in one piece", "pages of 16", "pages of 256"])
@pytest.mark.parametrize("stored", [BF16, FP8], ids=["bfloat16", "float8"])
@pytest.mark.parametrize(
    ("batch", "keys"), [(32, 256), (48, 256), (64, 2304), (70, 256), (110, 256)],
    ids=["two", "three", "split", "shares", "four"],
)  # fmt: skip
def test_tasks_of_sequences_of_all_lengths(batch, keys, stored, page_size):
    """As many as run at once, with two programs on a multiprocessor, or three, or four, or that wait for others; or
    long ones, of which two may be split."""
    torch.manual_seed(0)
    capacity = 2 * keys if stored == FP8 else keys
    lengths = torch.randint(0, capacity + 1, (batch,), dtype=INT)
    if keys > 256:
        lengths[2:] //= 8
    q = normal(batch, 1, 32, 128, dtype=BF16)
    k, v = stores = [normal(batch, capacity, 8, 128, dtype=BF16).to(stored).to(BF16) for _ in "kv"]
    settings = {"cache_seqlens": lengths.cuda(), "return_softmax_lse": True}
    if page_size:
        table = torch.randperm(batch * capacity // page_size)
        stores = [x.view(-1, page_size, 8, 128)[table.argsort()] for x in (k, v)]
        settings["block_table"] = table.view(batch, -1).to(INT).cuda()
    out, lse = flash_attn_with_kvcache(q.cuda(), *(x.to(stored).cuda() for x in stores), **settings)
    for b, n in enumerate(lengths.tolist()):
        wanted, wanted_lse = attention(*(x[b].double() for x in (q, k[:, :n], v[:, :n])))
        torch.testing.assert_close(out[b].cpu().double(), wanted, rtol=0, atol=2e-2 * max(wanted.abs().max(), 1))
        torch.testing.assert_close(lse[b].cpu().double(), wanted_lse, rtol=0, atol=1e-2)


@pytest.mark.interpreter
def test_rows_of_float16_are_what_they_stand_for():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from flashtile.backends.triton.decode_blocks import as_float16

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
