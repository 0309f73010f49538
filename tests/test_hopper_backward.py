"""The Hopper backend's backward kernels on a CPU, by `gluon_on_cpu`: roles, barriers, tiles and masks."""

from __future__ import annotations

import random
from dataclasses import replace

import cases
import gluon_on_cpu
import pytest
import torch
from cases import BF16, HALF, spec, takes

from flashtile.backends import hopper, reference
from flashtile.backends.hopper import backward_apart_launch, backward_launch, config, launch, schedule
from flashtile.backends.hopper.backward_problem import WRITTEN
from flashtile.spec import AttentionSpec
from flashtile.testing import Inputs, Result, errors, make_inputs

CASES = {
    "full": spec((320, 256), (1, 1), (64, 64), BF16, batch=2),
    "causal": spec((300, 300), (2, 2), (64, 64), BF16, batch=1, right=0),
    "group": spec((130, 400), (6, 2), (64, 64), HALF, batch=1, right=0),
    "more queries": spec((400, 130), (2, 1), (64, 64), BF16, batch=1, right=0),
    "window": spec((300, 420), (2, 1), (64, 64), BF16, batch=2, left=70, right=30),
    "rows without keys": spec((300, 60), (1, 1), (64, 64), BF16, right=0),
    "softcap": spec((200, 200), (2, 2), (64, 64), BF16, softcap=4.0, right=0),
    "one of each": spec((1, 1), (2, 1), (64, 64), BF16),
    "D 128": spec((260, 700), (2, 1), (128, 96), BF16, batch=1, right=0),
    "D 128 window and cap": spec((300, 700), (2, 1), (112, 128), HALF, batch=1, left=300, right=90, softcap=4.0),
    "D 128, few keys": spec((260, 390), (4, 2), (128, 96), BF16, batch=1, right=0),
    "D 128, few keys, window and cap": spec((200, 400), (2, 2), (104, 128), HALF, left=40, right=20, softcap=4.0),
    "D 96": spec((130, 260), (2, 2), (96, 64), BF16, batch=1),
    "D 96 cap": spec((130, 140), (2, 2), (40, 96), BF16, batch=1, softcap=4.0),
    "D 80 window": spec((150, 260), (4, 2), (80, 72), HALF, batch=1, left=70, right=30),
    "tiles of one step, D 96": spec((60, 900), (2, 2), (96, 96), BF16, batch=2),
    "D 192": spec((100, 130), (2, 2), (192, 128), BF16, batch=1),
    "D 192 window and cap": spec((130, 130), (2, 2), (160, 192), HALF, batch=1, left=40, right=20, softcap=4.0),
    "tiles of one step": spec((100, 900), (2, 2), (64, 64), BF16, batch=2),
    "tiles of one step, D 128": spec((60, 900), (2, 2), (128, 128), BF16, batch=2),
    "D 192, Dv 128": spec((200, 200), (4, 2), (192, 128), BF16, batch=1, right=0),
    "D 192, Dv 128 window and cap": spec((200, 130), (2, 1), (192, 128), HALF, batch=2, left=40, right=20, softcap=4.0),
    "D 96, Dv 160": spec((150, 200), (2, 1), (96, 160), BF16, batch=1),
    "D 256, Dv 128": spec((150, 200), (2, 1), (256, 128), BF16, batch=1),
    "D 256": spec((200, 200), (4, 2), (256, 192), BF16, batch=1, right=0),
    "D 256 window and cap": spec((200, 130), (2, 1), (256, 256), HALF, batch=2, left=40, right=20, softcap=4.0),
}


def backward_on_cpu(
    case: AttentionSpec, tiles: config.BackwardTiles, inputs: Inputs, programs: int
) -> tuple[torch.Tensor, ...]:
    """What backward_launch does, with the kernels for the rows written out in torch."""
    q, k, v, dout, dlse = inputs
    out, lse = reference.forward(case, q, k, v)
    blocks = backward_launch.row_blocks(case, tiles)
    padded = blocks * tiles.tile_m
    rows = torch.zeros(2, case.batch, case.heads_q, padded)
    rows[0] = float("-inf")
    rows[0, :, :, : case.seqlen_q] = torch.where(lse == float("-inf"), lse, -lse / case.score_factors[0])
    rows[1, :, :, : case.seqlen_q] = dlse - (out.float() * dout.float()).sum(-1).transpose(1, 2)
    if tiles.dq_apart:
        return apart_backward_on_cpu(case, tiles, inputs, (out, lse, rows), programs)
    of = backward_launch.ordered(case, tiles, programs)
    sums = torch.full((case.batch * case.heads_q * padded * tiles.head_dim,), 0.0 if of.zeros else float("nan"))
    dk, dv = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    matrices = (q, dout, k, v, dk, dv)
    descriptors = described(matrices, backward_launch.boxes(tiles))
    of_rows = gluon_on_cpu.Descriptor(rows.flatten(), [tiles.tile_m])
    table = backward_launch.table(case, tiles, of)
    scalars = backward_launch.scalars(case, tiles, rounds=table.shape[1])
    kernel = gluon_on_cpu.load("backward").backward_kernel
    box = list(backward_launch.sums_box(tiles))
    pieces = torch.full((sum(map(len, of.pieces)), tiles.keys, tiles.head_dim_v + tiles.head_dim), float("nan"))
    of_blocks = case.batch * case.heads_q * blocks
    added = torch.full((of_blocks + of.together,), WRITTEN.value if of.zeros else 0, dtype=torch.int32)
    ranks = None if of.ranks is None else gluon_on_cpu.Pointer(of.ranks.flatten())
    pointers = gluon_on_cpu.Pointer(pieces.view(-1)), gluon_on_cpu.Pointer(added), ranks
    of_sums = gluon_on_cpu.Descriptor(sums.view(-1, box[1]), box)
    arguments = (*descriptors, of_rows, of_sums, *pointers, gluon_on_cpu.Pointer(table.flatten()), *scalars)
    gluon_on_cpu.run(kernel, len(table), arguments, together=case.deterministic or random.random() < 0.5)
    add_pieces(case, pieces, tiles.head_dim_v, launch.shared_tiles(case.heads_k, tiles.keys, of.pieces), dk, dv)
    assert (added[of_blocks + 1 :] == WRITTEN.value + len(table)).all()  # all that begin a round are counted
    there = added[:of_blocks, None] != 0
    sums = torch.where(there, sums.view(len(there), -1), 0.0)
    return in_order(sums, case, tiles, blocks), dk, dv


def add_pieces(case, pieces, dim_v, shared, dx, dv=None):
    """What `add_kernel` does."""
    for batch, head, row, first, count in shared.tolist():
        x = pieces[first : first + count].sum(0)[: dx.shape[1] - row]
        if dv is not None:
            dv[batch, row : row + len(x), head] = x[:, : dv.shape[3]].to(dv.dtype)
        dx[batch, row : row + len(x), head] = (x[:, dim_v:][:, : dx.shape[3]] * case.softmax_scale).to(dx.dtype)


def described(matrices, boxes):
    return [gluon_on_cpu.Descriptor(x, [1, *box]) for x, box in zip(matrices, boxes, strict=True)]


def apart_backward_on_cpu(case, tiles, inputs, given, programs):
    """What backward_apart_launch does; given: out, lse and the rows that are to be found."""
    q, k, v, dout, dlse = inputs
    out, lse, expected_rows = given
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    pointer = gluon_on_cpu.Pointer
    rows = torch.full_like(expected_rows, float("nan"))
    of_rows = gluon_on_cpu.Descriptor(rows.flatten(), [tiles.tile_m])
    queries = config.choose_queries(case)
    of = backward_apart_launch.query_shares(case, queries, programs)
    pieces = torch.full((sum(map(len, of.pieces)), queries.rows, queries.head_dim), float("nan"))
    table = launch.entries(of)
    scalars = backward_apart_launch.query_scalars(case, queries, table.shape[1], dout, dlse)
    numbers = (pointer(x.flatten()) for x in (out, dout, lse, dlse))
    of_queries = described((q, dout, k, v, dq), backward_apart_launch.query_boxes(queries))
    arguments = (
        *of_queries,
        *numbers,
        pointer(of_rows.tensor),
        pointer(pieces.view(-1)),
        pointer(table.flatten()),
        *scalars,
    )
    gluon_on_cpu.run(gluon_on_cpu.load("backward_queries").queries_kernel, len(table), arguments)
    add_pieces(case, pieces, 0, launch.shared_tiles(case.heads_q, queries.rows, of.pieces), dq)
    torch.testing.assert_close(rows, expected_rows, atol=1e-4, rtol=1e-4)
    of_keys = described((q, dout, k, v, dk, dv), backward_launch.boxes(tiles))
    of = backward_launch.ordered(case, tiles, programs)
    pieces = torch.full((sum(map(len, of.pieces)), tiles.keys, tiles.head_dim_v + tiles.head_dim), float("nan"))
    table = backward_launch.table(case, tiles, of)
    scalars = backward_launch.scalars(case, tiles, rounds=table.shape[1])
    arguments = (*of_keys, of_rows, pointer(pieces.view(-1)), pointer(table.flatten()), *scalars)
    gluon_on_cpu.run(gluon_on_cpu.load("backward_keys").keys_kernel, len(table), arguments)
    add_pieces(case, pieces, tiles.head_dim_v, launch.shared_tiles(case.heads_k, tiles.keys, of.pieces), dk, dv)
    return dq, dk, dv


def in_order(sums, case, tiles, blocks):
    """dQ from its sums, as `finish_kernel` puts it right."""
    width = tiles.head_dim // tiles.parts
    x = sums.view(-1, tiles.parts, tiles.tile_m // 64, width // 8, 4, 8, 4, 2, 2)
    x = x.permute((0, 2, 4, 7, 5, 1, 3, 6, 8))
    x = x.reshape(case.batch, case.heads_q, blocks * tiles.tile_m, tiles.head_dim) * case.softmax_scale
    return x[:, :, : case.seqlen_q, : case.head_dim].transpose(1, 2)


def wrong(case, inputs, gradients):
    """What errors say of gradients of which dQ is in float32 yet."""
    dq, dk, dv = gradients
    result = Result(*reference.forward(case, *inputs[:3]), dq.to(case.dtype), dk, dv)
    return [str(e) for e in errors(case, inputs, result) if e.name[0] == "d" and not e.ok]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [1, 3])
def test_gradients_are_right_whatever_comes_first(name, programs):
    case = CASES[name]
    inputs = make_inputs(case)
    gradients = backward_on_cpu(case, config.choose_backward(case), inputs, programs)
    assert wrong(case, inputs, gradients) == []


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_keys_past_the_end_count_for_nothing_where_scores_are_low(dim):
    """Scores of 0, which they have, would there be exponentials that overflow."""
    case = spec((100, 300), (1, 1), (dim, dim), BF16, batch=1, scale=1.0)
    inputs = make_inputs(case)
    inputs = inputs._replace(q=inputs.q.abs() + 1, k=-inputs.k.abs() - 1)
    _, lse = reference.forward(case, *inputs[:3])
    assert lse.max() < -100
    gradients = backward_on_cpu(case, config.choose_backward(case), inputs, programs=1)
    assert wrong(case, inputs, gradients) == []


SHARED = {
    "D 64": (spec((700, 300), (4, 2), (64, 56), BF16, batch=2), 5),
    "D 64, many programs": (spec((700, 300), (4, 2), (64, 64), BF16, batch=2), 9),
    "fewer tiles than programs": (spec((1000, 100), (8, 1), (64, 64), HALF, batch=1), 4),
    "D 96": (spec((1300, 200), (4, 4), (96, 80), HALF, batch=1), 5),
    "D 128": (spec((1200, 350), (4, 2), (128, 128), BF16, batch=1), 4),
    "D 128 cap": (spec((1200, 350), (4, 2), (104, 128), BF16, batch=1, softcap=4.0), 5),
    "D 128, few keys": (spec((700, 150), (4, 2), (112, 128), BF16, batch=1), 5),
    "D 192, Dv 128": (spec((600, 150), (4, 2), (192, 128), BF16, batch=1), 5),
    "D 192": (spec((600, 150), (4, 4), (168, 192), HALF, batch=1), 5),
    "D 256": (spec((600, 150), (4, 2), (256, 256), BF16, batch=1), 4),
}


@pytest.mark.usefixtures("shared_at_once")
@pytest.mark.parametrize("name", SHARED)
def test_gradients_are_right_where_programs_share_tiles(name):
    case, programs = SHARED[name]
    tiles = config.choose_backward(case)
    assert sum(map(len, backward_launch.ordered(case, tiles, programs).pieces)) >= 3
    inputs = make_inputs(case)
    assert wrong(case, inputs, backward_on_cpu(case, tiles, inputs, programs)) == []


@pytest.mark.interpreter
@pytest.mark.usefixtures("shared_at_once")
@pytest.mark.parametrize("name", SHARED)
def test_pieces_of_tiles_are_added_up(name):
    case, programs = SHARED[name]
    tiles = config.choose_backward(case)
    of = backward_launch.ordered(case, tiles, programs)
    q, k, v, *_ = make_inputs(case)
    pieces = torch.randn(sum(map(len, of.pieces)), tiles.keys, tiles.head_dim_v + tiles.head_dim)
    held = pieces
    if not tiles.dq_apart:  # in the memory of dq
        held = torch.empty_like(q)
        held.view(-1).view(torch.float32)[: pieces.numel()] = pieces.flatten()
    found = torch.zeros_like(k).transpose(1, 2).contiguous().transpose(1, 2), torch.zeros_like(v)
    expected = torch.zeros_like(k), torch.zeros_like(v)
    backward_launch.ADD.prepare(case, (held, *found), of)(held, *found)
    add_pieces(case, pieces, tiles.head_dim_v, launch.shared_tiles(case.heads_k, tiles.keys, of.pieces), *expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.interpreter
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_before_nothing_of_dq_is_there_and_after_what_no_tile_came_to_is_0(dim):
    case = spec((1000, 850), (2, 1), (dim, dim), HALF, batch=1, right=0)  # the first 150 queries see no key
    tiles = config.choose_backward(case)
    q, k, v, dout, dlse = make_inputs(case)
    out, lse = reference.forward(case, q, k, v)
    blocks = backward_launch.row_blocks(case, tiles)
    rows = torch.full((2, 1, 2, blocks * tiles.tile_m), float("nan"))
    added = torch.full((2 * blocks,), 7, dtype=torch.int32)
    begin = backward_launch.BEGIN.prepare(case, (out, dout, lse, dlse, rows, added))
    begin(out, dout, lse, dlse, rows, added)
    assert added.count_nonzero() == 0
    shifts, deltas = rows[..., : case.seqlen_q]
    torch.testing.assert_close(deltas, dlse - (out.float() * dout.float()).sum(-1).transpose(1, 2))
    torch.testing.assert_close(shifts, torch.where(lse == float("-inf"), lse, -lse / case.score_factors[0]))
    sums = torch.randn(2 * blocks, tiles.tile_m * tiles.head_dim)
    seen = torch.arange(2 * blocks) % blocks >= 150 // tiles.tile_m
    sums[~seen] = float("nan")
    added[seen] = WRITTEN.value
    dq = torch.full_like(q, float("nan"))
    backward_launch.FINISH.prepare(case, (dq, sums, added))(dq, sums, added)
    expected = in_order(torch.where(seen[:, None], sums, 0.0), case, tiles, blocks)
    torch.testing.assert_close(dq, expected.to(case.dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [2, 5])
def test_in_order_gradients_are_right_and_the_same_bits_whatever_comes_first(name, programs):
    case = replace(CASES[name], deterministic=True)
    inputs = make_inputs(case)
    first, again = (backward_on_cpu(case, config.choose_backward(case), inputs, programs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert wrong(case, inputs, first) == []


@pytest.mark.parametrize("change", [{"value_stages": 1}, {"tile_m": 64}, {"tile_m": 64, "stages": 3}], ids=str)
def test_other_tiles_are_right_too(change):
    case = spec((300, 390), (2, 2), (64, 64), BF16, batch=1, right=0)
    inputs = make_inputs(case)
    tiles = config.BackwardTiles(**(vars(config.BACKWARD_D64) | change))
    gradients = backward_on_cpu(case, tiles, inputs, 2)
    assert wrong(case, inputs, gradients) == []


@pytest.fixture
def kernels(monkeypatch):
    """(name and how many tensors of each kernel that is prepared, name -> the tensors that it was given last)."""
    prepared, given = [], {}
    for name in ("BEGIN", "MAIN", "ADD", "FINISH"):

        def prepare(spec, tensors, *_, name=name):
            prepared.append((name, len(tensors)))
            return lambda *tensors: given.update({name: tensors})

        monkeypatch.setattr(getattr(backward_launch, name), "prepare", prepare)
    monkeypatch.setattr(hopper, "BACKWARD", backward_launch.BackwardPass())
    monkeypatch.setattr(backward_launch, "programs_on", lambda _device: 132)
    return prepared, given


def same(found, expected):
    return len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


def test_a_pass_is_prepared_once_and_hands_its_kernels_their_tensors(kernels):
    prepared, given = kernels
    case = CASES["causal"]
    q, k, v, dout, _ = make_inputs(case)
    out, lse = torch.empty_like(q), torch.empty(case.batch, case.heads_q, case.seqlen_q)
    for _ in range(2):
        dq, dk, dv = hopper.backward(case, dout, None, q, k, v, out, lse)
        *begun, rows, added = given["BEGIN"]
        assert same(begun, (out, dout, lse, None))
        sums = given["MAIN"][7]
        assert same(given["MAIN"], (q, dout, k, v, dk, dv, rows, sums, dq, added))
        assert same(given["ADD"], (dq, dk, dv))
        assert same(given["FINISH"], (dq, sums, added))
    assert prepared == [("BEGIN", 6), ("MAIN", 10), ("ADD", 3), ("FINISH", 3)]


@pytest.mark.parametrize("name", ["full", "causal", "D 96", "tiles of one step"])
def test_where_a_head_is_too_large_for_the_cache_and_has_no_mask_sums_are_zero_and_programs_stay_together(
    name, kernels, monkeypatch
):
    monkeypatch.setattr(schedule, "SECTION_BYTES", 0)
    monkeypatch.setattr(gluon_on_cpu.load("backward_problem"), "STEPS_AHEAD", 1)
    case = CASES[name]
    zeros = name != "causal"
    inputs = make_inputs(case)
    tiles = config.choose_backward(case)
    for programs in (2, 3):
        assert wrong(case, inputs, backward_on_cpu(case, tiles, inputs, programs)) == []
    of = backward_launch.ordered(case, tiles, programs=2)
    assert of.zeros == zeros
    assert of.turns == sorted(of.turns)
    assert (of.together > 1) == (zeros and name != "D 96")
    q, k, v, dout, _ = inputs
    lse = torch.empty(case.batch, case.heads_q, case.seqlen_q)
    hopper.backward(case, dout, None, q, k, v, torch.empty_like(dout), lse)
    *_, sums, _, added = kernels[1]["MAIN"]
    assert not zeros or (sums.count_nonzero() == 0 and (added == WRITTEN.value).all())
    assert not backward_launch.ordered(replace(case, deterministic=True), tiles, 3).zeros


def test_a_kernel_that_stands_still_is_noticed():
    def stuck(barrier):
        gluon_on_cpu.MBarrier.wait(barrier, 0)

    def kernel():
        gluon_on_cpu.warp_specialize([(stuck, (gluon_on_cpu.Barrier(),))], [], [])

    with pytest.raises(TimeoutError, match="program 0 stands still"):
        gluon_on_cpu.run(kernel, 1, (), seconds=0.2)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("name", [*CASES, *(name for name, case in cases.CASES.items() if takes("hopper", case))])
def test_gradients_on_a_gpu(name):
    case = (cases.CASES | CASES)[name]
    inputs = make_inputs(case, "cuda")
    out, lse = hopper.forward(case, *inputs[:3])
    gradients = hopper.backward(case, inputs.dout, inputs.dlse, *inputs[:3], out, lse)
    assert [str(e) for e in errors(case, inputs, Result(out, lse, *gradients)) if not e.ok] == []
