"""The Hopper forward kernel on a CPU, by `gluon_on_cpu`: roles, barriers, tiles, masks and the second walk."""

from __future__ import annotations

import math
from dataclasses import replace

import gluon_on_cpu
import pytest
import torch
from cases import BF16, HALF, spec

from flashtile.backends.hopper import config, launch
from flashtile.spec import AttentionSpec
from flashtile.testing import Inputs, Result, errors, make_inputs

CASES = {
    "full": spec((320, 256), (1, 1), (64, 64), BF16, batch=2),
    "causal": spec((300, 300), (2, 2), (64, 64), BF16, batch=1, right=0),
    "group": spec((130, 400), (6, 2), (64, 64), HALF, batch=1, right=0),
    "more queries": spec((400, 130), (2, 1), (64, 64), BF16, batch=1, right=0),
    "window": spec((300, 520), (2, 1), (64, 64), BF16, batch=2, left=200, right=30),
    "rows without keys": spec((300, 60), (1, 1), (64, 64), BF16, right=0),
    "softcap": spec((200, 500), (2, 2), (64, 64), BF16, softcap=4.0, right=0),
    "one of each": spec((1, 1), (2, 1), (64, 64), BF16),
    "long": spec((100, 700), (1, 1), (64, 64), BF16, batch=1),
    "packed": spec((40, 300), (4, 1), (64, 64), BF16, batch=2),
    "packed causal": spec((37, 500), (8, 2), (64, 64), BF16, batch=1, right=0),
    "packed window": spec((20, 700), (16, 1), (128, 128), BF16, batch=1, left=200, right=5),
    "packed, one query": spec((1, 600), (12, 3), (256, 256), BF16, batch=2),
    "D 128": spec((260, 390), (2, 1), (128, 96), BF16, batch=1, right=0),
    "D 80, Dv 72": spec((200, 300), (2, 1), (80, 72), BF16, batch=1, right=0),
    "D 64, Dv 128": spec((200, 300), (2, 1), (64, 128), BF16, batch=1, right=0),
    "D 160, Dv 192": spec((200, 300), (2, 1), (160, 192), BF16, batch=1, right=0),
    "D 192, Dv 128": spec((200, 700), (4, 2), (192, 128), BF16, batch=1, right=0),
    "D 192, Dv 256": spec((200, 300), (2, 1), (192, 256), HALF, batch=1, right=0, softcap=4.0),
    "D 256": spec((200, 200), (4, 2), (256, 192), BF16, batch=1, right=0),
    "D 256, keys past the last whole block": spec((200, 330), (4, 2), (256, 256), BF16, batch=1),
}


def forward_on_cpu(case: AttentionSpec, tiles: config.Tiles, inputs: Inputs, programs: int) -> Result:
    """What launch does."""
    q, k, v, dout, dlse = inputs
    out, lse = torch.full_like(dout, float("nan")), torch.full_like(dlse, float("nan"))
    descriptors = [
        gluon_on_cpu.Descriptor(x, [1, *box]) for x, box in zip((q, k, v, out), launch.boxes(case, tiles), strict=True)
    ]
    of = launch.shares(case, tiles, programs)
    table = launch.entries(of)
    pieces = torch.full((sum(map(len, of.pieces)), tiles.rows * (tiles.head_dim_v + 2)), float("nan"))
    *written, schedule = (gluon_on_cpu.Pointer(x.view(-1)) for x in (lse, pieces, table.contiguous()))
    kernel = gluon_on_cpu.load("forward").forward_kernel
    scalars = launch.scalars(case, tiles, rounds=table.shape[1])
    gluon_on_cpu.run(kernel, len(table), (*descriptors, *written, *launch.NO_CACHE, case.seqlen_k, schedule, *scalars))
    if len(pieces):
        merge = launch.merge_call(case, tiles, of, pieces, out, lse)
        gluon_on_cpu.run_call("forward_pieces", merge)
    return Result(out, lse)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [1, 3])
def test_out_and_lse_are_right_whatever_comes_first(name, programs):
    case = CASES[name]
    inputs = make_inputs(case)
    result = forward_on_cpu(case, config.choose(case), inputs, programs)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []


SHARED = {
    "D 64": (spec((200, 900), (4, 2), (64, 56), BF16, batch=2), 5),
    "three warpgroups, keys past the last whole block": (spec((1100, 900), (1, 1), (64, 64), BF16, batch=1), 4),
    "fewer tiles than programs": (spec((100, 1100), (8, 1), (64, 64), HALF, batch=1), 11),
    "packed": (spec((7, 1500), (8, 2), (64, 64), BF16, batch=1), 5),
    "D 96": (spec((200, 700), (3, 3), (96, 80), HALF, batch=1), 4),
    "D 128": (spec((200, 1000), (4, 2), (128, 128), BF16, batch=1), 5),
    "D 128 cap": (spec((300, 700), (2, 2), (104, 128), BF16, batch=1, softcap=4.0), 4),
    "D 192, Dv 128": (spec((300, 700), (2, 2), (192, 128), BF16, batch=1), 4),
    "D 192": (spec((300, 400), (2, 2), (192, 168), BF16, batch=1), 4),
    "D 256": (spec((300, 400), (2, 2), (256, 256), BF16, batch=1), 4),
}


@pytest.mark.usefixtures("shared_at_once")
@pytest.mark.parametrize("name", SHARED)
def test_out_and_lse_are_right_where_programs_share_tiles(name):
    case, programs = SHARED[name]
    tiles = config.choose(case)
    assert sum(map(len, launch.shares(case, tiles, programs).pieces)) >= 3
    inputs = make_inputs(case)
    result = forward_on_cpu(case, tiles, inputs, programs)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []


@pytest.mark.parametrize("in_shares", [False, True])
@pytest.mark.parametrize("n_pieces", [2, 8, 16, 100])
@pytest.mark.parametrize("name", SHARED)
def test_pieces_of_tiles_are_merged(name, n_pieces, in_shares):
    """However many they are said to be; pieces of shares lie in other slots, and tiles that are whole have one."""
    torch.manual_seed(0)
    case, _ = SHARED[name]
    tiles = config.choose(case)
    pack = config.heads_per_tile(case, tiles)
    last = case.batch - 1, case.heads_q // pack - 1, (case.seqlen_q - 1) * pack // tiles.rows * (tiles.rows // pack)
    shared = torch.tensor([[0, 0, 0, 0, 2], [*last, 4, 11], [0, 0, 0, 0, 1]])[: 2 + in_shares].int()
    pieces = torch.randn(26, tiles.rows * (tiles.head_dim_v + 2))
    pieces[:3, -2 * tiles.rows : -2 * tiles.rows + 5] = -math.inf  # rows that see no key of these
    shape = case.batch, case.seqlen_q, case.heads_q, case.head_dim_v
    (out, lse), (expected, expected_lse) = (
        (torch.zeros(shape, dtype=HALF), torch.zeros(case.batch, case.heads_q, case.seqlen_q)) for _ in range(2)
    )
    programs, numbers, constants = launch.merge_scalars(case, tiles, len(shared), n_pieces)
    merge_rows = gluon_on_cpu.load("forward_pieces").merge_rows
    tensors = (gluon_on_cpu.Pointer(x.view(-1)) for x in (pieces, out, lse, shared))
    gluon_on_cpu.run(merge_rows, programs, (*tensors, *numbers, *constants, in_shares))
    sizes = tiles.rows * tiles.head_dim_v, tiles.rows, tiles.rows
    for batch, head, query, first, count in shared[:2].tolist():
        slots = [first + (2 * i + (i == 0) if in_shares else i) for i in range(count)]
        outs, lses, inverses = pieces[slots].split(sizes, 1)
        weights = lses.softmax(0).nan_to_num(0.0) * inverses
        merged = (weights[:, :, None] * outs.view(count, tiles.rows, -1)).sum(0)
        for row in range(tiles.rows):
            if (at := query + row // pack) < case.seqlen_q:
                expected_lse[batch, head * pack + row % pack, at] = lses[:, row].logsumexp(0)
                expected[batch, at, head * pack + row % pack] = merged[row, : case.head_dim_v].to(HALF)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("dim", "change"),
    [
        (64, {"q_stages": 1}),
        (64, {"stages": 3}),
        (64, {"warpgroups": 2}),
        (128, {"q_kept": 64}),
        (128, {"q_stages": 1, "q_kept": 64}),
    ],
    ids=str,
)
def test_other_tiles_are_right_too(dim, change):
    case = spec((500, 390), (2, 2), (dim, dim), BF16, batch=1, right=0)
    inputs = make_inputs(case)
    result = forward_on_cpu(case, replace({64: config.D64, 128: config.D128}[dim], **change), inputs, 2)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []


OWN_BLOCKS = {
    "three warpgroups": (spec((500, 390), (2, 2), (64, 64), BF16, batch=1, right=0), config.D64),
    "the longest tile's last block is seen by its last rows alone": (
        spec((192, 641), (1, 1), (64, 64), BF16, batch=1, right=0), config.D64,
    ),
    "window": (spec((400, 700), (1, 1), (64, 64), BF16, batch=2, left=300, right=30), config.D64),
    "window of few keys": (spec((400, 400), (1, 1), (64, 64), BF16, batch=1, left=3, right=2), config.D64),
    "more queries": (spec((500, 130), (2, 1), (64, 64), BF16, batch=1, right=0), config.D64),
    "packed": (spec((50, 600), (8, 2), (64, 64), BF16, batch=1, right=0), config.D64),
    "D 128": (spec((200, 500), (2, 1), (128, 128), BF16, batch=1, right=0), config.D128),
    "D 192": (spec((300, 500), (2, 1), (192, 192), BF16, batch=1, right=0), config.D192),
    "D 256": (spec((200, 450), (2, 1), (256, 256), BF16, batch=1, right=0), config.D256),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_BLOCKS)
@pytest.mark.parametrize("many", [0, 8192], ids=["as if keys were many", "few keys"])
def test_warpgroups_end_where_their_own_rows_see_no_more(name, many, monkeypatch):
    monkeypatch.setattr(gluon_on_cpu.load("forward_problem"), "MANY_KEYS", many)
    case, tiles = OWN_BLOCKS[name]
    inputs = make_inputs(case)
    result = forward_on_cpu(case, tiles, inputs, 2)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []


PAST_BLOCKS = {
    "D 64": (spec((130, 0), (2, 2), (64, 64), BF16, batch=1), config.D64),
    "Q in registers": (spec((130, 0), (2, 1), (64, 64), BF16, batch=1), config.D64_SHORT),
    "window": (spec((300, 0), (1, 1), (64, 64), BF16, batch=1, left=150), config.D64_SHORT),
    "window of few keys": (spec((130, 0), (1, 1), (64, 64), BF16, batch=2, left=3), config.D64_SHORT),
    "softcap": (spec((130, 0), (2, 2), (64, 64), BF16, batch=1, softcap=4.0), config.D64),
    "packed": (spec((40, 0), (8, 2), (64, 64), BF16, batch=2), config.D64),
    "float16": (spec((130, 0), (2, 1), (128, 128), HALF, batch=1), config.D128),
    "D 96": (spec((130, 0), (2, 1), (96, 96), BF16, batch=1), config.D96),
    "D 192, Dv 128": (spec((130, 0), (2, 1), (192, 128), BF16, batch=1), config.D192_DV128),
    "D 192": (spec((130, 0), (2, 1), (192, 192), BF16, batch=1), config.D192),
    "D 256": (spec((130, 0), (2, 1), (256, 256), BF16, batch=1), config.D256),
}


@pytest.mark.parametrize("name", PAST_BLOCKS)
@pytest.mark.parametrize(("blocks", "past"), [(0, 1), (0, 16), (1, 1), (2, 15), (2, 16), (1, 17)])
def test_keys_past_the_last_whole_block(name, blocks, past):
    case, tiles = PAST_BLOCKS[name]
    case = replace(case, seqlen_k=blocks * tiles.tile_n + past)
    inputs = make_inputs(case)
    result = forward_on_cpu(case, tiles, inputs, 1)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("growth", "value"), [(60.0, 1.0), (20.0, 1e37)], ids=["scores that overflow", "products that overflow"]
)
def test_rows_that_outgrow_the_maximum_of_their_last_keys(right, growth, value):
    """The program walks its tiles again, all of its roles, or this stands still."""
    case = spec((300, 1030), (2, 2), (64, 64), BF16, batch=1, right=right)
    inputs = make_inputs(case)
    k = inputs.k * (1 + growth * torch.linspace(1, 0, case.seqlen_k)[None, :, None, None]).to(BF16)
    inputs = inputs._replace(k=k, v=inputs.v * value)
    result = forward_on_cpu(case, config.choose(case), inputs, 2)
    assert [str(e) for e in errors(case, inputs, result) if not e.ok] == []
