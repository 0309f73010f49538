"""The Hopper forward kernel over a cache: lengths, rows, pages, what lies past an end. On a CPU by `gluon_on_cpu`."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import gluon_on_cpu
import pytest
import torch
from aot import cached_call, calls_of, of_a_call
from cases import BF16, HALF, spec
from torch import Tensor

from flashtile import cached, flash_attn_func, flash_attn_with_kvcache
from flashtile.backends import hopper
from flashtile.backends.hopper import cached_launch, cached_schedule, choice, config, few_queries
from flashtile.backends.hopper.cached_launch import CachedSpec
from flashtile.cache import FP8
from flashtile.spec import AttentionSpec
from flashtile.testing import Inputs, Result, errors, make_inputs

CPU = torch.device("cpu")
CAPACITY = 768
LAYOUTS = {"in one piece": 0, "rows": 0, "left-padded": 0} | {f"pages of {n}": n for n in (8, 16, 64, 128, 256)}
"""How the keys of sequences lie in a cache: how many a page has."""
CASES = {
    "D 128": spec((130, CAPACITY), (2, 1), (128, 128), BF16, right=0),
    "D 64, two warpgroups": spec((130, CAPACITY), (2, 1), (64, 64), BF16, right=0),
    "D 64, three warpgroups": spec((1030, CAPACITY), (1, 1), (64, 64), BF16, right=0),
    "no mask": spec((130, CAPACITY), (2, 2), (64, 64), BF16),
    "window": spec((150, CAPACITY), (2, 1), (64, 64), BF16, left=200, right=30),
    "softcap": spec((130, CAPACITY), (2, 1), (64, 64), HALF, softcap=4.0),
    "packed": spec((20, CAPACITY), (8, 2), (64, 64), BF16, right=0),
    "few rows": spec((15, CAPACITY), (8, 2), (128, 128), BF16, right=0),
    "few rows, D 64": spec((15, CAPACITY), (8, 2), (64, 64), BF16),
    "few rows, D 96": spec((15, CAPACITY), (8, 2), (96, 96), BF16, right=0),
    "few rows, D 192, Dv 128": spec((15, CAPACITY), (8, 2), (192, 128), BF16, right=0),
    "one block of rows": spec((20, CAPACITY), (8, 2), (128, 128), BF16, right=0),
    "D 96, Dv 80": spec((130, CAPACITY), (1, 1), (96, 80), BF16, right=0),
    "D 192, Dv 128": spec((130, CAPACITY), (1, 1), (192, 128), BF16, right=0),
    "D 192": spec((130, CAPACITY), (1, 1), (192, 192), BF16, right=0),
    "D 256": spec((130, CAPACITY), (2, 1), (256, 256), BF16, right=0),
}
LENGTHS = {
    "full": CAPACITY, "alike": 517, "of each": (CAPACITY, 0, 5), "of each, a block's end": (300, 384, 15),
    "many": tuple(range(CAPACITY, 0, -19)),  # more tiles than an H200 has multiprocessors
}  # fmt: skip
PAIRS = [(name, layout, "of each") for name in CASES for layout in LAYOUTS] + [
    ("D 128", layout, lengths) for layout in ("in one piece", "left-padded", "pages of 16", "pages of 256")
    for lengths in LENGTHS if lengths not in ("of each", "many")
]  # fmt: skip


class Problem:
    """Queries over a cache that has no numbers but where keys are. places: (B, capacity), of each sequence's tokens
    among all; settings: what says where they are."""

    def __init__(self, name: str, layout: str, lengths: str) -> None:
        torch.manual_seed(0)
        self.lengths = LENGTHS[lengths]
        self.alike = isinstance(self.lengths, int)
        self.ends = torch.full((2,), self.lengths) if self.alike else torch.tensor(self.lengths)
        self.case = case = replace(CASES[name], batch=len(self.ends))
        self.settings: dict[str, Tensor] = {}
        shape = case.batch, CAPACITY
        self.page_size = page_size = LAYOUTS[layout]
        if page_size:
            pages = CAPACITY // page_size
            shape = case.batch * pages + 3, page_size
            table = torch.randperm(shape[0])[: case.batch * pages].view(case.batch, pages)
            self.places = (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
            unused = torch.arange(pages) >= -(-self.ends[:, None] // page_size)
            self.settings["block_table"] = torch.where(unused, 1 << 30, table).int()
        else:
            rows = torch.arange(case.batch)
            if layout == "rows":
                shape = case.batch + 2, CAPACITY
                rows = torch.randperm(shape[0])[: case.batch]
                self.settings["cache_batch_idx"] = rows.int()
            self.places = rows[:, None] * CAPACITY + torch.arange(CAPACITY)
        if layout == "left-padded":
            self.settings["cache_leftpad"] = (self.ends // 3).int()
        self.q = torch.randn(case.batch, case.seqlen_q, case.heads_q, case.head_dim).to(case.dtype)
        self.k, self.v = (self.cache(shape, dim) for dim in (case.head_dim, case.head_dim_v))

    def cache(self, shape: tuple[int, int], dim: int) -> Tensor:
        x = torch.full((shape[0] * shape[1], self.case.heads_k, dim), math.nan, dtype=self.case.dtype)
        for places, end in zip(self.places, self.ends.tolist(), strict=True):
            x[places[:end]] = torch.randn(end, self.case.heads_k, dim).to(x.dtype)
        return x.view(*shape, self.case.heads_k, dim)

    def wrong(self, out: Tensor, lse: Tensor) -> list[str]:
        """What is not right, of each sequence by itself."""
        firsts = self.settings.get("cache_leftpad", torch.zeros_like(self.ends)).tolist()
        found = []
        for b, (first, end) in enumerate(zip(firsts, self.ends.tolist(), strict=True)):
            at, of = self.places[b, first:end], slice(b, b + 1)
            k, v = (x.flatten(0, 1)[at][None] for x in (self.k, self.v))
            inputs = Inputs(self.q[of], k, v, torch.zeros_like(out[of]), torch.zeros_like(lse[of]))
            alone = replace(self.case, batch=1, seqlen_k=end - first)
            found += [f"{b}: {e}" for e in errors(alone, inputs, Result(out[of], lse[of])) if not e.ok]
        return found


def heads_of(case: AttentionSpec) -> int:
    """Of a sequence, in tiles."""
    return case.heads_q // config.heads_per_tile(case, config.choose(case))


def of_sequences(table: Tensor, problem: Problem) -> Tensor:
    """What `longest_first` is to make of what was dealt."""
    heads = heads_of(problem.case)
    keys = problem.ends - problem.settings.get("cache_leftpad", 0)
    order = keys.sort(descending=True, stable=True).indices
    found = table.clone()
    for row, entries in zip(found, table.tolist(), strict=True):
        for i in range(1, 1 + entries[0]):
            head, m_block = entries[i] >> 32, entries[i] & 0xFFFFFFFF
            row[i] = int(order[head // heads] * heads + head % heads) << 32 | m_block
    return found


@pytest.mark.parametrize("layout", ["in one piece", "left-padded"])
@pytest.mark.parametrize("batch", [2, 5, 16, 100, 128])
def test_tiles_dealt_by_length_are_those_of_sequences(batch, layout):
    """Some sequences are as long as others."""
    problem = Problem("packed", layout, "of each")
    problem.case = case = replace(problem.case, batch=batch)
    problem.ends = torch.randint(0, 40, (batch,))
    if layout == "left-padded":
        problem.settings["cache_leftpad"] = (problem.ends // 3).int()
    table = cached_schedule.schedule_of(case, False, 3, CPU).dealt
    assert table is not None
    assert sorted(x for row in table.tolist() for x in row[1 : 1 + row[0]]) == [
        head << 32 for head in range(batch * heads_of(case))
    ]
    found, forward_schedule = torch.full_like(table, -1), gluon_on_cpu.load("forward_schedule")
    lengths, leftpad, dealt, schedule = (
        x if x is None else gluon_on_cpu.Pointer(x.view(-1))
        for x in (problem.ends.int(), problem.settings.get("cache_leftpad"), table, found)
    )
    keys = gluon_on_cpu.load("forward_cache").CachedKeys(lengths, leftpad, None, None, 0, True, 0)
    p = SimpleNamespace(keys=keys, seqlen_k=CAPACITY, heads_q=heads_of(case), PACK=1, schedule=schedule)
    p.rounds = table.shape[1]
    gluon_on_cpu.run(forward_schedule.longest_first, len(table), (p, dealt, batch))
    wanted = of_sequences(table, problem)
    for row, mine in zip(wanted.tolist(), found.tolist(), strict=True):
        assert mine[: 1 + row[0]] == row[: 1 + row[0]]


M_BLOCKS, SEQLEN_Q, TILE_N = 3, 300, 128


def shared_out(ends: Tensor, shares: int, right: int, pieces_cost: int) -> tuple[dict, Tensor]:
    """What `share_out` makes of three lines, a head and three blocks of rows: of each tile (sequence, m_block) the
    pieces (first key block, end, slot or -1), in order, and what the merge is told."""
    programs, batch = shares * M_BLOCKS, len(ends)
    table = torch.full((programs, 2 * (batch + 2)), -1)
    shared = torch.full((min(batch, shares) * M_BLOCKS, 5), -1, dtype=torch.int32)
    lengths, schedule, told = (gluon_on_cpu.Pointer(x.view(-1)) for x in (ends.int(), table, shared))
    keys = gluon_on_cpu.load("forward_cache").CachedKeys(lengths, None, None, None, 0, True, 0)
    numbers = SEQLEN_Q, 4096, 1, 1, -1, right, 1.0, 1.0, 1.0, schedule, table.shape[1], keys
    constants = 2, 64, TILE_N, False, right >= 0, False, True, False, True, 2, 0, True, 1
    p = gluon_on_cpu.load("forward_problem").Problem(*numbers, *constants)
    arguments = p, told, batch, M_BLOCKS, pieces_cost
    gluon_on_cpu.run(gluon_on_cpu.load("forward_schedule").share_out, programs, arguments)
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for program, row in enumerate(table.tolist()):
        for i in range(1, 1 + row[0]):
            sequence, m_block = row[i] >> 32 & 0x7FFFFFFF, row[i] & 0xFFFFFFFF
            slot, first, end = (row[len(row) // 2 + i] >> bits & (1 << 21) - 1 for bits in (42, 21, 0))
            found.setdefault((sequence, m_block), []).append((first, end, slot - 1 if row[i] < 0 else -1))
            assert program % M_BLOCKS == m_block
    return {tile: sorted(pieces) for tile, pieces in found.items()}, shared


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
@pytest.mark.parametrize("batch", [1, 5, 16, 100, 128])
@pytest.mark.parametrize("shares", [2, 13, 44])
def test_every_block_of_keys_is_in_one_share_and_every_tile_knows_its_pieces(shares, batch, right):
    torch.manual_seed(0)
    ends = torch.randint(0, 3000, (batch,))
    found, shared = shared_out(ends, shares, right, pieces_cost=0)
    assert len(found) == batch * M_BLOCKS
    slots = [slot for pieces in found.values() for *_, slot in pieces if slot >= 0]
    assert len(set(slots)) == len(slots)
    assert (shared[:, 4] >= 1).all()
    told = {(b, query / 128): (head, slot, count) for b, head, query, slot, count in shared.tolist() if count > 1}
    assert told.keys() == {tile for tile, pieces in found.items() if len(pieces) > 1}
    for (sequence, m_block), pieces in found.items():
        seen = int(ends[sequence]) if right < 0 else int(ends[sequence]) - SEQLEN_Q + min(128 * (m_block + 1), SEQLEN_Q)
        assert [first for first, *_ in pieces] == [0] + [end for _, end, _ in pieces[:-1]]
        assert pieces[-1][1] == max(-(-seen // TILE_N), 1)
        if len(pieces) > 1:
            head, first_slot, count = told[sequence, m_block]
            assert (head, count) == (0, len(pieces))
            assert [slot for *_, slot in pieces] == [first_slot + 1] + [first_slot + 2 * i for i in range(1, count)]


@pytest.mark.parametrize("longest", [2900, 4096])
@pytest.mark.parametrize("batch", [12, 13, 14])
def test_tiles_are_whole_where_that_takes_no_longer_than_pieces_and_their_merging(batch, longest):
    """Of 12 or 13 sequences of 23 blocks of keys, by 13 programs, but not where one has 32, nor by fewer programs."""
    ends = torch.full((batch,), 2900)
    ends[5] = longest
    found, shared = shared_out(ends, 13, -1, pieces_cost=5)
    are_whole = {len(pieces) for pieces in found.values()} == {1}
    assert are_whole == (batch <= 13 and longest == 2900)
    assert are_whole == bool((shared[:, 4] == 1).all())


def computed(problem: Problem, programs: int, monkeypatch) -> tuple[Tensor, Tensor, cached_schedule.Schedule]:
    """out, lse and what each program did; where each sequence has its own length, the last key counts as new."""
    case, seqlen_new = problem.case, 0 if problem.alike else 1
    out = torch.full((case.batch, case.seqlen_q, case.heads_q, case.head_dim_v), math.nan, dtype=case.dtype)
    lse = torch.full((case.batch, case.heads_q, case.seqlen_q), math.nan)
    given = {"q": problem.q, "k_cache": problem.k, "v_cache": problem.v, "out": out, "lse": lse, "end": CAPACITY}
    if problem.alike:
        given["end"] = problem.lengths
    else:
        given["cache_seqlens"] = (problem.ends - seqlen_new).int()
    alike = problem.alike and "cache_leftpad" not in problem.settings
    schedule = cached_schedule.schedule_of(case, alike, programs, CPU)
    for x in schedule.scratch:
        x.fill_(math.nan if x.is_floating_point() else -1)
    moving = dict.fromkeys(cached_launch.MOVING) | given | problem.settings | schedule.moving
    monkeypatch.setattr(cached_launch, "describe", lambda x, box: gluon_on_cpu.Descriptor(x, [1, *box]))
    of = CachedSpec(case, problem.page_size, seqlen_new, len(problem.k))
    call = cached_launch.forward_call(of, moving, {}, schedule)
    gluon_on_cpu.run_call("forward", call)
    if schedule.shared is not None:
        gluon_on_cpu.run_call("forward_pieces", cached_launch.merge_call(of, moving, schedule.tiles, schedule.shared))
    return out, lse, schedule


@pytest.mark.parametrize(("name", "layout", "lengths"), PAIRS, ids=map("-".join, PAIRS))
def test_queries_see_their_sequence_and_nothing_past_its_end(name, layout, lengths, monkeypatch):
    problem = Problem(name, layout, lengths)
    out, lse, schedule = computed(problem, 3, monkeypatch)
    assert schedule.shared is None
    assert problem.wrong(out, lse) == []


IN_SHARES = [("D 128", "in one piece", "alike"), ("D 128", "in one piece", "full")]
IN_SHARES += [(name, "in one piece", "of each") for name in CASES if name != "window"]
IN_SHARES += [("D 128", layout, "of each, a block's end") for layout in LAYOUTS]


@pytest.fixture
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call finds what one before it has looked up."""
    monkeypatch.setattr(cached_launch, "CACHED", cached_launch.CachedForward())
    monkeypatch.setattr(cached, "PREPARED", {})


@pytest.fixture
def in_shares(nothing_prepared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs share keys however little that saves."""
    monkeypatch.setattr(cached_schedule, "PIECES_COST", -1e3)


@pytest.mark.usefixtures("in_shares")
@pytest.mark.parametrize("programs", [20, 60])
@pytest.mark.parametrize(("name", "layout", "lengths"), IN_SHARES, ids=map("-".join, IN_SHARES))
def test_queries_see_as_much_where_programs_share_keys(name, layout, lengths, programs, monkeypatch):
    """A few programs for each tile, and more than have a block."""
    problem = Problem(name, layout, lengths)
    out, lse, schedule = computed(problem, programs, monkeypatch)
    assert schedule.shared is not None
    assert schedule.shared.tiles[:, 4].max() > 1
    assert problem.wrong(out, lse) == []


@pytest.mark.parametrize("lengths", ["of each", "of each, a block's end", "alike"])
def test_queries_see_as_much_where_shared_tiles_turn_out_whole(lengths, monkeypatch):
    """Of no piece there is anything then."""
    monkeypatch.setattr(cached_schedule, "are_shared", lambda *_: True)
    monkeypatch.setattr(cached_schedule, "PIECES_COST", 1e3)
    problem = Problem("few rows", "in one piece", lengths)
    out, lse, schedule = computed(problem, 60, monkeypatch)
    assert schedule.shared is not None
    assert schedule.shared.pieces.isnan().all()
    assert problem.wrong(out, lse) == []


TILES = {  # batch, queries, keys, lengths on the device, head dim, left edge: tiles, whether spread, programs
    "64 rows, shared": ((16, 16, 8192, True, 128, -1), (config.D128_SHARED, False, 128)),
    "64 rows, few, shared": ((8, 16, 8192, True, 128, -1), (config.D128_SHARED, False, 128)),
    "64 rows, spread": ((12, 16, 8192, True, 128, -1), (config.D128_FEW_ROWS, True, 96)),
    "64 rows, one length, spread": ((12, 16, 4096, False, 128, -1), (config.D128_FEW_ROWS, True, 96)),
    "64 rows, one length": ((16, 16, 8192, False, 128, -1), (config.D128_FEW_ROWS, False, 128)),
    "64 rows, fewer keys": ((12, 16, 2048, True, 128, -1), (config.D128_FEW_ROWS, False, 96)),
    "64 rows, a window": ((12, 16, 8192, True, 128, 5000), (config.D128_FEW_ROWS, False, 96)),
    "68 rows": ((16, 17, 8192, True, 128, -1), (config.D128, False, 128)),
    "128 rows": ((10, 32, 8192, True, 128, -1), (config.D128, True, 80)),
    "128 rows, fewer": ((9, 32, 8192, True, 128, -1), (config.D128, False, 128)),
    "128 rows, more": ((15, 32, 8192, True, 128, -1), (config.D128, True, 120)),
    "128 rows, one length": ((14, 32, 2048, False, 128, -1), (config.D128, True, 112)),
    "128 rows, D 64": ((12, 32, 16384, True, 64, -1), (config.D64_SHORT, False, 128)),
    "256 rows": ((6, 64, 8192, True, 128, -1), (config.D128, False, 128)),
    "64 rows, D 64, shared": ((16, 16, 16384, True, 64, -1), (config.D64_FEW_ROWS, False, 128)),
    "64 rows, D 96, shared": ((16, 16, 8192, True, 96, -1), (config.D96_FEW_ROWS, False, 128)),
    "64 rows, D 192, spread": ((12, 16, 4096, True, 192, -1), (config.D192_FEW_ROWS, True, 96)),
    "64 rows, D 256, spread": ((12, 16, 4096, True, 256, -1), (config.D256, True, 96)),
}  # fmt: skip


@pytest.mark.parametrize("name", TILES)
def test_tiles_of_few_rows_ask_for_fewer_keys_at_a_time_and_those_that_fill_most_of_a_gpu_have_a_program_each(name):
    (batch, seqlen_q, seqlen_k, lengths, dim, left), wanted = TILES[name]
    case = spec((seqlen_q, seqlen_k), (32, 8), (dim, dim), BF16, batch=batch, left=left, right=0)
    schedule = cached_schedule.schedule_of(case, not lengths, 132, torch.device("meta"))
    assert (schedule.tiles, schedule.spread, len(schedule.table)) == wanted


def test_programs_that_are_as_many_as_tiles_start_when_the_kernel_before_has_ended(monkeypatch):
    """Merges start while they run, and other calls while the kernel before does."""
    monkeypatch.setattr(cached_launch, "programs_on", lambda _: 132)
    early = []
    for batch in (12, 16):
        case = spec((16, 8192), (32, 8), (128, 128), BF16, batch=batch, right=0)
        given, (*_, out, lse) = cached_call(case, BF16, page_size=0).given, of_a_call(case)
        cached_spec = CachedSpec(case, 0, 0, batch)
        calls = calls_of(cached_launch.CACHED, (None, cached_spec), *given, case.seqlen_k, given.q, out, lse)
        early.append([call.options.get("launch_pdl", False) for call in calls])
    assert early == [[False, True], [True, True]]


@pytest.fixture
def spread(nothing_prepared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are as many as tiles, however few keys these have."""
    monkeypatch.setattr(cached_schedule, "LONG_TILE", 0)


SPREAD = [("few rows", layout, lengths) for layout in LAYOUTS for lengths in ("of each", "of each, a block's end")]
SPREAD += [("few rows, D 64", "in one piece", lengths) for lengths in ("of each", "alike", "full")]
SPREAD += [(name, "in one piece", "of each") for name in ("few rows, D 96", "few rows, D 192, Dv 128")]
SPREAD += [("one block of rows", layout, "of each") for layout in ("in one piece", "pages of 16")]


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(("name", "layout", "lengths"), SPREAD, ids=map("-".join, SPREAD))
def test_queries_see_as_much_where_programs_are_as_many_as_tiles(name, layout, lengths, monkeypatch):
    problem = Problem(name, layout, lengths)
    n_tiles = problem.case.batch * heads_of(problem.case)
    out, lse, schedule = computed(problem, n_tiles + 2, monkeypatch)
    assert schedule.spread
    assert len(schedule.table) == n_tiles
    assert problem.wrong(out, lse) == []


ON_A_GPU = [pair for pair in PAIRS if pair[0] == "D 128" or pair[1] in ("left-padded", "pages of 16")]
ON_A_GPU += [("D 128", layout, "many") for layout in ("left-padded", "pages of 16")]


def computed_on_a_gpu(problem: Problem) -> tuple[Tensor, Tensor]:
    ends = problem.lengths if problem.alike else problem.ends.int().cuda()
    settings = {key: x.cuda() for key, x in problem.settings.items()} | {"cache_seqlens": ends}
    settings |= {"window_size": (problem.case.window_left, problem.case.window_right), "softcap": problem.case.softcap}
    inputs = (x.cuda() for x in (problem.q, problem.k, problem.v))
    out, lse = flash_attn_with_kvcache(*inputs, **settings, backend="hopper", return_softmax_lse=True)
    return out.cpu(), lse.cpu()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(("name", "layout", "lengths"), ON_A_GPU, ids=map("-".join, ON_A_GPU))
def test_on_a_gpu_too_queries_see_their_sequence_and_nothing_past_its_end(name, layout, lengths):
    problem = Problem(name, layout, lengths)
    assert problem.wrong(*computed_on_a_gpu(problem)) == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.usefixtures("in_shares")
@pytest.mark.parametrize(("name", "layout", "lengths"), IN_SHARES, ids=map("-".join, IN_SHARES))
def test_on_a_gpu_too_queries_see_as_much_where_programs_share_keys(name, layout, lengths):
    """Twice: the second time nothing is looked up again, and pieces of the first lie where those of the second will."""
    problem = Problem(name, layout, lengths)
    for _ in range(2):
        assert problem.wrong(*computed_on_a_gpu(problem)) == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(("name", "layout", "lengths"), SPREAD, ids=map("-".join, SPREAD))
def test_on_a_gpu_too_queries_see_as_much_where_programs_are_as_many_as_tiles(name, layout, lengths, monkeypatch):
    """Twice: the second time nothing is looked up again, and kernels of the first may still run."""
    problem = Problem(name, layout, lengths)
    n_tiles = problem.case.batch * heads_of(problem.case)
    monkeypatch.setattr(cached_launch, "programs_on", lambda _: n_tiles + 2)
    for _ in range(2):
        assert problem.wrong(*computed_on_a_gpu(problem)) == []


NO_CACHE = {  # queries and keys of a call without a cache, right edge: whether it is better one over a cache
    "causal": ((64, 8192, 0), True),
    "a right edge": ((64, 8192, 7), True),
    "no mask": ((64, 2048, None), True),
    "no mask, many keys": ((64, 8192, None), False),  # it shares out the last round of its tiles
    "too few keys": ((64, 255, 0), False),
    "more queries": ((2048, 8192, 0), False),
}


@pytest.mark.parametrize("name", NO_CACHE)
def test_few_queries_without_a_cache_share_keys(name):
    (seqlen_q, seqlen_k, right), few = NO_CACHE[name]
    case = spec((seqlen_q, seqlen_k), (32, 8), (128, 128), BF16, batch=1, **({} if right is None else {"right": right}))
    assert few_queries.are_few(case, 132) == few


def test_a_plan_has_the_programs_that_share_keys(monkeypatch):
    monkeypatch.setattr(hopper, "programs_on", lambda _: 132)
    case = spec((64, 8192), (32, 8), (128, 128), BF16, batch=1, right=0)  # two tiles for each of 8 heads
    cases = case, replace(case, window_left=100), replace(case, seqlen_q=16)
    plans = [hopper.plan(x, torch.device("cuda")) for x in cases]
    assert [plan.grid for plan in plans] == [128, 16, 128]
    assert [plan.tile_n for plan in plans] == [128, 128, 64]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("name", [name for name, (_, few) in NO_CACHE.items() if few])
def test_on_a_gpu_too_few_queries_without_a_cache_share_keys(name):
    (seqlen_q, seqlen_k, right), _ = NO_CACHE[name]
    case = spec((seqlen_q, seqlen_k), (32, 8), (128, 128), BF16, batch=1, **({} if right is None else {"right": right}))
    inputs = make_inputs(case)
    window = case.window_left, case.window_right
    tensors = (x.cuda() for x in inputs[:3])
    out, lse, *_ = flash_attn_func(*tensors, window_size=window, backend="hopper", return_attn_probs=True)
    assert [str(e) for e in errors(case, inputs, Result(out.cpu(), lse.cpu())) if not e.ok] == []


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("layout", ["left-padded", "pages of 16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_keys_are_in_the_cache_and_turned_before_they_are_seen(layout, interleaved):
    """As by the portable kernels, twice: the second time nothing is looked up again."""
    problem = Problem("D 128", layout, "of each, a block's end")
    case, seqlen_new = problem.case, 100
    new = [torch.randn(case.batch, seqlen_new, case.heads_k, 128, dtype=case.dtype, device="cuda") for _ in "kv"]
    angles = torch.rand(CAPACITY + case.seqlen_q, 32, device="cuda")
    tables = {"rotary_cos": angles.cos().to(case.dtype), "rotary_sin": angles.sin().to(case.dtype)}
    settings = {key: x.cuda() for key, x in problem.settings.items()} | tables
    settings |= {"cache_seqlens": problem.ends.int().cuda(), "rotary_interleaved": interleaved, "causal": True}
    settings["sinks"] = torch.tensor([1.0, -math.inf], device="cuda") if interleaved else None
    if "block_table" in settings:  # pages for the new ones, too
        pages = torch.arange(settings["block_table"].numel(), device="cuda").view_as(settings["block_table"])
        settings["block_table"] = pages.int()
    found = {}
    for backend in ("hopper", "triton"):
        k, v = (x.nan_to_num(0.0).cuda() for x in (problem.k, problem.v))
        for _ in range(2):
            results = flash_attn_with_kvcache(
                problem.q.cuda(), k, v, *new, **settings, backend=backend, return_softmax_lse=True
            )
        found[backend] = (*results, k, v)
    for ours, theirs, tolerance in zip(found["hopper"], found["triton"], (2e-2, 1e-4, 0, 0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


GQA, MQA, ONE_LENGTH, OF_EACH = (32, 8), (32, 1), False, True
CHOICES = {  # batch, queries, keys, heads, lengths on the device, head dim: whether it takes them
    "a chunk": ((1, 1024, 8192, GQA, OF_EACH, 128), True),
    "a chunk of few tiles": ((1, 64, 8192, GQA, OF_EACH, 128), True),
    "a chunk of few tiles, few keys": ((1, 64, 1024, GQA, OF_EACH, 128), False),
    "64 rows": ((12, 16, 8192, GQA, OF_EACH, 128), True),
    "64 rows, few tiles": ((4, 16, 8192, GQA, OF_EACH, 128), True),
    "64 rows, few tiles, few keys": ((4, 16, 1024, GQA, OF_EACH, 128), True),
    "64 rows, fewer tiles, few keys": ((2, 16, 1024, GQA, OF_EACH, 128), False),
    "64 rows, few tiles, more keys": ((5, 16, 2048, GQA, OF_EACH, 128), False),
    "64 rows, half a round of tiles, more keys": ((8, 16, 2048, GQA, OF_EACH, 128), True),
    "256 rows, few tiles, more keys": ((5, 64, 2048, GQA, OF_EACH, 128), True),
    "64 rows, few tiles, one length": ((5, 16, 8192, GQA, ONE_LENGTH, 128), True),
    "64 rows of one sequence": ((1, 16, 8192, GQA, OF_EACH, 128), True),
    "64 rows of one sequence, few keys": ((1, 16, 2048, GQA, OF_EACH, 128), False),
    "many rows of one long sequence, one key head": ((1, 4, 65536, MQA, OF_EACH, 128), False),
    "64 rows, more sequences than have shares": ((129, 16, 8192, (8, 2), OF_EACH, 128), True),
    "32 rows": ((24, 8, 2048, GQA, OF_EACH, 128), True),
    "32 rows, few tiles": ((16, 8, 2048, GQA, OF_EACH, 128), False),
    "32 rows, few long tiles": ((10, 8, 8192, GQA, OF_EACH, 128), False),
    "32 rows, long tiles for most programs": ((12, 8, 8192, GQA, OF_EACH, 128), True),
    "32 rows of one key head": ((112, 1, 8192, MQA, OF_EACH, 128), True),
    "32 rows, a tile for most programs": ((112, 1, 4096, MQA, OF_EACH, 128), True),
    "32 rows, a tile for each program": ((128, 1, 4096, MQA, OF_EACH, 128), False),
    "32 rows, a round of long tiles": ((24, 8, 8192, GQA, OF_EACH, 128), True),
    "32 rows, few tiles, one length": ((12, 8, 2048, GQA, ONE_LENGTH, 128), True),
    "32 rows, few tiles of few keys": ((8, 8, 1024, GQA, OF_EACH, 128), True),
    "32 rows, few tiles, D 256": ((16, 8, 2048, GQA, OF_EACH, 256), True),
    "32 rows, many tiles": ((64, 8, 2048, GQA, OF_EACH, 128), False),
    "32 rows, many long tiles": ((64, 8, 4096, GQA, OF_EACH, 128), True),
    "32 rows, a round of tiles": ((128, 1, 1024, MQA, ONE_LENGTH, 64), True),
    "32 rows, two rounds": ((240, 1, 1024, MQA, ONE_LENGTH, 64), False),
    "32 rows, two rounds of unlike lengths": ((240, 1, 1024, MQA, OF_EACH, 64), True),
    "32 rows, more sequences than are put in order": ((512, 1, 1024, MQA, OF_EACH, 128), True),
    "32 rows, D 96, many tiles": ((64, 8, 2048, GQA, OF_EACH, 96), True),
    "16 rows": ((64, 4, 4096, GQA, OF_EACH, 128), False),
    "16 rows, D 96": ((64, 4, 4096, GQA, OF_EACH, 96), True),
    "16 rows, D 96, few keys": ((64, 4, 1024, GQA, OF_EACH, 96), False),
}  # fmt: skip


def is_taken(batch, seqlen_q, capacity, heads, lengths, dim, monkeypatch, num_splits=0, sinks=None, left=-1):
    monkeypatch.setattr(choice, "programs_on", lambda _: 132)
    case = spec((seqlen_q, capacity), heads, (dim, dim), BF16, batch=batch, left=left, right=0)
    call = cached_call(case, BF16, page_size=256)
    given = call.given._replace(sinks=sinks)
    call = call._replace(given=given if lengths else given._replace(cache_seqlens=None))
    return hopper.passes_on_cached(call, num_splits) is None


@pytest.mark.parametrize("name", CHOICES)
def test_tiles_that_are_few_or_split_nowhere_are_left_to_flash_decoding(name, monkeypatch):
    call, taken = CHOICES[name]
    assert is_taken(*call, monkeypatch) == taken


@pytest.mark.parametrize(("batch", "seqlen_q"), [(8, 16), (5, 64)])
def test_few_long_tiles_that_nobody_shares_are_left_to_who_splits_them(batch, seqlen_q, monkeypatch):
    """Pieces have no edge on the left: all would wait for the tiles of one sequence."""
    call = batch, seqlen_q, 65536, GQA, OF_EACH, 128
    assert is_taken(*call, monkeypatch)
    assert not is_taken(*call, monkeypatch, left=32768)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_who_asks_for_splits_has_flash_decoding(num_splits, monkeypatch):
    assert not is_taken(1, 1024, 8192, GQA, OF_EACH, 128, monkeypatch, num_splits)


def test_few_rows_with_sinks_are_left_to_who_takes_them_along(monkeypatch):
    sinks = torch.zeros(32)
    assert is_taken(1, 1024, 8192, GQA, OF_EACH, 128, monkeypatch, sinks=sinks)
    assert not is_taken(16, 8, 8192, GQA, OF_EACH, 128, monkeypatch, sinks=sinks)


NOT_TAKEN = {
    "pages of 4": (4, BF16, False),
    "float8": (16, FP8, False),
    "ALiBi": (16, BF16, True),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_a_cache_that_it_cannot_read_is_left_to_others(name):
    page_size, stored, terms = NOT_TAKEN[name]
    call = cached_call(spec((1024, 8192), (32, 8), (128, 128), BF16, right=0), stored, page_size, terms)
    assert hopper.passes_over(call) is not None
