"""What is special to the CPU backend: its block bounds, its memory, and the threads it runs on."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile import flash_attn_func
from flashtile.backends import cpu, reference
from flashtile.backends.cpu import tile, workers
from flashtile.spec import AttentionSpec
from flashtile.testing import Result, errors, make_inputs

CPU = torch.device("cpu")


def spec_of(seqlen_q, seqlen_k, *, batch=1, heads_q=2, heads_k=2, head_dim=16, dtype=torch.float32, left=-1, right=-1):
    return AttentionSpec(
        batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim, dtype, head_dim**-0.5, left, right
    )  # fmt: skip


def run(spec, inputs):
    out, lse = cpu.forward(spec, *inputs[:3])
    return Result(out, lse, *cpu.backward(spec, inputs.dout, inputs.dlse, *inputs[:3], out, lse))


def wrong(spec, inputs, result):
    return [str(error) for error in errors(spec, inputs, result) if not error.ok]


@pytest.fixture
def thread_count():
    """Sets torch's thread count, and puts it back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


lengths = st.integers(0, 1500)
windows = st.integers(-1, 900)
groups = st.sampled_from([1, 3, 8])


@settings(deadline=None, max_examples=100)
@given(lengths, lengths, windows, windows, groups)
def test_tiles_cover_every_visible_pair_once(seqlen_q, seqlen_k, left, right, group):
    spec = spec_of(seqlen_q, seqlen_k, heads_q=group, heads_k=1, left=left, right=right)
    visible = reference.visible(spec, CPU)
    covered = torch.zeros(seqlen_q, seqlen_k, dtype=torch.uint8)
    for queries in tile.query_blocks(spec):
        for keys, tiles in tile.tiles_of_queries(spec, queries):
            for part in tiles:
                pairs = (slice(*part.queries), slice(*part.keys))
                covered[pairs] += visible[pairs]
                assert part.masked or visible[pairs].all()
                rows = range(queries.start * group, queries.end * group)[slice(*part.rows)]
                cols = range(*keys)[slice(*part.cols)]
                assert (rows.start, rows.stop) == (part.queries.start * group, part.queries.end * group)
                assert (cols.start, cols.stop) == part.keys
    assert torch.equal(covered, visible.to(torch.uint8))


@settings(deadline=None, max_examples=100)
@given(lengths, lengths, windows, windows)
def test_both_algorithms_compute_the_same_tiles(seqlen_q, seqlen_k, left, right):
    spec = spec_of(seqlen_q, seqlen_k, left=left, right=right)
    by_queries = [
        part for block in tile.query_blocks(spec) for _, tiles in tile.tiles_of_queries(spec, block) for part in tiles
    ]
    by_keys = [
        part for block in tile.key_blocks(spec) for _, tiles in tile.tiles_of_keys(spec, block) for part in tiles
    ]
    assert sorted(part[:3] for part in by_queries) == sorted(part[:3] for part in by_keys)


@settings(deadline=None, max_examples=100)
@given(lengths, lengths, windows, windows, groups, st.sampled_from([0.0, float("-inf")]))
def test_hide_writes_over_the_hidden_pairs_alone(seqlen_q, seqlen_k, left, right, group, value):
    spec = spec_of(seqlen_q, seqlen_k, heads_q=group, heads_k=1, left=left, right=right)
    visible = reference.visible(spec, CPU)
    for queries in tile.query_blocks(spec):
        for _, tiles in tile.tiles_of_queries(spec, queries):
            for part in (part for part in tiles if part.masked):
                seen = visible[slice(*part.queries), slice(*part.keys)].repeat_interleave(group, 0)
                for heads in ((), (2,)):
                    x = torch.where(seen, 1.0, torch.nan).repeat(*heads, 1, 1)
                    tile.hide_(spec, part, x, value)
                    assert torch.equal(x, torch.where(seen, 1.0, value).expand_as(x))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 1500), windows, st.integers(1, 64))
def test_groups_take_every_head_once(batch, heads, length, right, each):
    spec = spec_of(length, length, batch=batch, heads_q=heads, heads_k=heads, right=right)
    taken = [(group.batch, head) for group in tile.head_groups(spec, each) for head in range(group.start, group.end)]
    assert taken == [(element, head) for element in range(batch) for head in range(heads)]


def test_the_parts_of_a_tile_take_every_head_once():
    spec = spec_of(1300, 1300, heads_q=7, heads_k=7, right=0)
    for _, tiles in tile.tiles_of_queries(spec, tile.query_blocks(spec)[0]):
        for part in tiles:
            at_once = part.heads_at_once(7)
            assert [head for x in at_once for head in (range(*x) if isinstance(x, tuple) else [x])] == list(range(7))


def test_extra_memory_is_linear_in_the_length(monkeypatch, thread_count):
    """Bytes that all operations of a pass allocate, added up: an upper bound of what it holds at once."""
    thread_count(1)  # the profiler sees the calling thread

    def allocated(length):
        monkeypatch.setattr(tile.Scratch, "_spare", [])
        spec = spec_of(length, length, heads_q=1, heads_k=1)
        inputs = make_inputs(spec)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run(spec, inputs)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    short, middle, long = (allocated(length) for length in (3072, 6144, 9216))
    assert 0 < long - middle < 1.2 * (middle - short)
    assert long < 9216 * 9216  # a quarter of S


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_settings_stay(threads, thread_count):
    thread_count(threads)
    spec = spec_of(600, 600, heads_q=4)
    run(spec, make_inputs(spec))
    elsewhere = []
    other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert (torch.get_num_threads(), *elsewhere) == (threads, threads)


def test_right_without_gomp(monkeypatch, thread_count):
    thread_count(2)
    monkeypatch.setattr(workers, "_GOMP_PARALLEL", None)
    spec = spec_of(1100, 900, heads_q=4, right=0)
    inputs = make_inputs(spec)
    assert not wrong(spec, inputs, run(spec, inputs))


def test_python_threads_do_not_disturb_each_other():
    specs = [spec_of(700, 300 + 100 * i, heads_q=4, heads_k=2, right=0) for i in range(4)]
    problems = [(spec, make_inputs(spec, seed=i)) for i, spec in enumerate(specs)]
    alone = [run(*problem) for problem in problems]
    together: list[list[Result]] = [[] for _ in problems]
    threads = [
        threading.Thread(target=lambda i=i: together[i].extend(run(*problems[i]) for _ in range(3))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 3
        assert all(torch.equal(x, y) for result in results for x, y in zip(result, expected, strict=True))


@pytest.mark.skipif(workers._MKL_THREADS is None, reason="torch without MKL in it")
def test_products_of_a_task_take_one_core_and_others_as_many_as_before(thread_count):
    thread_count(2)
    before = workers._MKL_THREADS(2)
    try:
        inside = []

        def task(_):
            inside.append(workers._MKL_THREADS(1))

        workers.run(lambda: task, [(i,) for i in range(8)])
        assert inside == [1] * 8
        assert workers._MKL_THREADS(2) == 2
        workers.run(lambda: task, [(0,)])  # alone it has all cores
        assert inside[8:] == [2]
    finally:
        workers._MKL_THREADS(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("failing", ["start", "task"])
def test_an_exception_reaches_the_caller(threads, failing, thread_count):
    thread_count(threads)

    def task(i):
        if i == 3:
            raise IndexError("in a task")

    def start():
        if failing == "start":
            raise IndexError("in start")
        return task

    with pytest.raises(IndexError, match=f"in .*{failing}"):
        workers.run(start, [(i,) for i in range(10)])


@pytest.mark.parametrize("amplitude", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_and_without_a_running_maximum(amplitude, dtype, monkeypatch):
    spec = spec_of(1300, 1300, dtype=dtype, right=0)
    inputs = make_inputs(spec, amplitude=amplitude)
    taken = set()
    for step in ("_bounded_step", "_online_step"):
        original = getattr(cpu.forward.__globals__["_QueryBlocks"], step)

        def counted(self, *args, step=step, original=original):
            taken.add(step)
            original(self, *args)

        monkeypatch.setattr(cpu.forward.__globals__["_QueryBlocks"], step, counted)
    assert not wrong(spec, inputs, run(spec, inputs))
    assert taken == {"_bounded_step" if amplitude == 1.0 else "_online_step"}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_query_spoils_its_row_alone(bad):
    spec = spec_of(600, 600, right=0)
    inputs = make_inputs(spec)
    good = run(spec, inputs)
    inputs.q[0, 300, 1] = bad
    spoiled = run(spec, inputs)
    others = torch.arange(600) != 300
    assert spoiled.out[0, 300, 1].isnan().all()
    torch.testing.assert_close(spoiled.out[0, others], good.out[0, others])
    torch.testing.assert_close(spoiled.dq[0, others], good.dq[0, others])
    torch.testing.assert_close(spoiled.dv[0, 301:], good.dv[0, 301:])  # keys that the row does not see


def test_hidden_keys_may_hold_anything():
    spec = spec_of(600, 600, right=0)
    inputs = make_inputs(spec)
    good, _ = cpu.forward(spec, *inputs[:3])
    inputs.k[0, 300:] = torch.nan
    out, _ = cpu.forward(spec, *inputs[:3])
    torch.testing.assert_close(out[0, :300], good[0, :300])


def test_inference_mode_before_autograd():
    """Memory kept from a call in inference mode serves a later one outside it."""
    spec = spec_of(300, 300)
    inputs = make_inputs(spec)
    with torch.inference_mode():
        first, _ = cpu.forward(spec, *inputs[:3])
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    second = flash_attn_func(q, k, v, backend="cpu")
    second.backward(inputs.dout)
    assert torch.equal(first, second)


def test_autocast_leaves_the_products_alone():
    spec = spec_of(300, 300)
    inputs = make_inputs(spec)
    expected = run(spec, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(spec, inputs)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_short_problems_repeat_bitwise_on_several_threads(thread_count):
    """Memory that one thread still reads must not go to another."""
    thread_count(2)
    spec = spec_of(7, 33, batch=4, heads_q=4, dtype=torch.float64, right=0)
    inputs = make_inputs(spec)
    first = run(spec, inputs)
    for _ in range(200):
        assert all(torch.equal(x, y) for x, y in zip(run(spec, inputs), first, strict=True))
