"""Which tiles each program of the Hopper kernels has, in which order, and the order in which they add to dQ."""

from __future__ import annotations

import functools
from itertools import groupby, pairwise

import pytest
import torch
from cases import BF16, spec
from hypothesis import given
from hypothesis import strategies as st

from flashtile.backends.hopper import config
from flashtile.backends.hopper.order import Team, order, team, visits
from flashtile.backends.hopper.schedule import (
    BACKWARD_TILE_COST,
    TILE_COST,
    backward_schedule,
    key_blocks,
    query_blocks,
    scattered,
    schedule,
    tile_costs,
    with_pieces,
)

PROGRAMS = 132

lengths = st.integers(1, 3000)
windows = st.integers(-1, 2000)


@given(lengths, lengths, windows, windows, st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 1)]))
def test_every_tile_is_scheduled_once(seqlen_q, seqlen_k, left, right, batch, heads):
    case = spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=batch, left=left, right=right)
    lists = schedule(case, 128, 2, 128, PROGRAMS)
    tiles = [tile for program in lists for tile in program]
    blocks = -(-seqlen_q // 128)
    assert sorted(tiles) == [(head, m_block) for head in range(batch * heads[0]) for m_block in range(blocks)]
    assert len(lists) <= PROGRAMS
    assert all(lists)


@given(lengths, lengths, windows, windows, st.sampled_from([64, 128]), st.sampled_from([128, 192]))
def test_key_blocks_hold_every_visible_key(seqlen_q, seqlen_k, left, right, tile_n, rows):
    case = spec((seqlen_q, seqlen_k), left=left, right=right)
    for m_block in range(-(-seqlen_q // rows)):
        seen = [case.visible_keys(row) for row in range(m_block * rows, min((m_block + 1) * rows, seqlen_q))]
        blocks = {key // tile_n for first, end in seen for key in (first, end - 1) if end > first}
        spread = max(blocks) - min(blocks) + 1 if blocks else 1
        assert key_blocks(case, m_block, rows, tile_n) >= spread


@given(lengths, lengths, windows, windows, st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 1)]))
def test_every_tile_of_the_backward_pass_is_scheduled_once(seqlen_q, seqlen_k, left, right, batch, heads):
    case = spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=batch, left=left, right=right)
    lists = backward_schedule(case, 128, 64, PROGRAMS)
    tiles = [tile for program in lists for tile in program]
    blocks = -(-seqlen_k // 128)
    assert sorted(tiles) == [(head, n_block) for head in range(batch * heads[1]) for n_block in range(blocks)]
    assert len(lists) <= PROGRAMS
    assert all(lists)


@given(st.integers(1, 500), st.data())
def test_the_first_tiles_of_a_head_begin_far_apart(count, data):
    places = scattered(count)
    assert sorted(places) == list(range(count))
    begun = sorted(places[: data.draw(st.integers(1, count))])
    gaps = [end - start for start, end in pairwise([*begun, begun[0] + count])]
    assert max(gaps) <= 1 + 2 * count / len(begun)


@given(
    st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([64, 128]), st.integers(1, 300),
)  # fmt: skip
def test_programs_share_out_the_last_round_of_tiles(seqlen_q, seqlen_k, batch, heads, tile_m, most):
    case = spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=batch)
    lists = backward_schedule(case, 128, tile_m, PROGRAMS)
    blocks = -(-seqlen_q // tile_m)
    tiles, pieces = with_pieces(case, lists, blocks, case.group, PROGRAMS, most)
    done = sorted((tile, 0, blocks) for program in tiles for tile in program)
    in_line = [piece for program in pieces for piece in program]
    assert len(in_line) <= most
    for tile, of_tile in groupby(in_line, key=lambda piece: piece.tile):
        edges = [(first, end) for _, first, end in of_tile]
        assert all(first < end for first, end in edges)
        assert [0, *(end for _, end in edges)] == [*(first for first, _ in edges), blocks]
        done.append((tile, 0, blocks))
    assert sorted(done) == sorted((tile, 0, blocks) for program in lists for tile in program)
    steps = [
        len(mine) * blocks + sum(end - first for *_, first, end in shared)
        for mine, shared in zip(tiles, pieces, strict=True)
    ]
    assert max(steps) <= max(map(len, lists)) * blocks
    assert len(tiles) <= PROGRAMS
    assert all(steps)


@given(
    lengths, lengths, windows, windows, st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([64, 128]),
)  # fmt: skip
def test_every_tile_has_its_place_in_the_order(seqlen_q, seqlen_k, left, right, batch, heads, tile_m):
    case = spec((seqlen_q, seqlen_k), heads, (128, 128), BF16, batch=batch, left=left, right=right)
    lists, turns, ranks, *_ = order(case, 128, tile_m, PROGRAMS)
    assert len(lists) <= PROGRAMS
    assert all(lists)
    n_blocks = -(-seqlen_k // 128)
    places = [(head, *divmod(place, n_blocks)) for program in lists for head, place in program]
    every_tile = [(head, n_block) for head in range(batch * heads[1]) for n_block in range(n_blocks)]
    assert sorted((head, n_block) for head, _, n_block in places) == every_tile
    way_of = {head: way for head, way, _ in places}
    assert all(way == way_of[head] for head, way, _ in places)
    row_blocks = -(-seqlen_q // tile_m)
    for way in set(way_of.values()):
        ranks_of = {}  # (query head of a group, block of queries): the ranks of its tiles
        for place in range(way * n_blocks, (way + 1) * n_blocks):
            for step, at in enumerate(steps(case, place % n_blocks, 128, tile_m, turns[place])):
                ranks_of.setdefault(at, []).append(int(ranks[place, step]))
        assert len(ranks_of) <= case.group * row_blocks
        assert all(sorted(found) == list(range(len(found))) for found in ranks_of.values())
    assert finished(case, 128, tile_m, 0.5) > 0  # none waits for ever


def steps(case, n_block, keys, tile_m, turn):
    """(query head of a group, block of queries) of each step of a tile."""
    first, end, *_ = query_blocks(case, n_block, keys, tile_m)
    return [(head, int(block)) for head in range(case.group) for block in visits(first, end, turn)]


def finished(case, keys, tile_m, add_time, known_after=0.0):
    """When the last program is done if a step and the end of a tile take 1 each, and an add that long, which the next
    knows of so much later: dQ of a step may wait to be added while the next is computed."""
    lists, turns, ranks, *_ = order(case, keys, tile_m, PROGRAMS)
    n_blocks = -(-case.seqlen_k // keys)
    steps_of = functools.cache(lambda place: steps(case, place % n_blocks, keys, tile_m, turns[place]))
    added = {}  # (key head, query head and block, rank): when

    def program(tiles):
        computed = adding = done = 0.0
        for head, place in tiles:
            for step, at in enumerate(steps_of(place)):
                rank = int(ranks[place, step])
                while rank and (head, at, rank - 1) not in added:
                    yield
                computed = max(computed + 1, adding)
                adding = max(computed, done, added.get((head, at, rank - 1), -known_after) + known_after)
                added[head, at, rank] = done = adding + add_time
            computed += BACKWARD_TILE_COST
        ends.append(computed)

    ends = []
    running = [program(tiles) for tiles in lists]
    while running:
        known = len(added)
        running = [x for x in running if next(x, done := object()) is not done]
        assert len(added) > known or not running
    return max(ends)


@pytest.mark.parametrize(
    ("dim", "add_time", "known_after"),
    [(dim, *times) for dim in (64, 128) for times in ((0.5, 0.0), (0.9, 0.0), (0.6, 0.3), (0.6, 1.0))],
)
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_the_order_takes_hardly_longer(seqlen, right, dim, add_time, known_after):
    case = spec((seqlen, seqlen), (2048 // dim, 2048 // dim), (dim, dim), BF16, batch=16384 // seqlen, right=right)
    tiles = config.choose_backward(case)
    cost = tile_costs(case, tiles.keys, tiles.tile_m)
    lists = backward_schedule(case, tiles.keys, tiles.tile_m, PROGRAMS)
    without = max(sum(cost[n_block] for _, n_block in of) for of in lists)
    assert finished(case, tiles.keys, tiles.tile_m, add_time, known_after) <= 1.05 * without


@pytest.mark.parametrize(
    ("dim", "heads", "right", "seqlen", "chosen"),
    [
        (64, (32, 32), -1, 2048, (16, 8, 2)), (64, (32, 32), 0, 2048, (16, 8, 2)),
        (128, (16, 16), 0, 2048, (8, 16, 1)), (128, (16, 16), -1, 8192, (2, 64, 1)),
        # two key heads at a time of sixteen teams are past the cache: rather tiles that come to dQ one step apart
        (64, (32, 8), -1, 2048, (16, 8, 2)), (64, (32, 8), 0, 2048, (8, 16, 1)),
    ],
)  # fmt: skip
def test_teams_come_to_dq_steps_apart_where_their_heads_fit_in_the_cache(dim, heads, right, seqlen, chosen):
    case = spec((seqlen, seqlen), heads, (dim, dim), BF16, batch=16384 // seqlen, right=right)
    tiles = config.choose_backward(case)
    assert team(case, tile_costs(case, tiles.keys, tiles.tile_m), tiles.keys, tiles.tile_m, PROGRAMS) == chosen


@given(st.integers(1, 300), st.integers(1, PROGRAMS), st.integers(1, 3), st.integers(0, 2))
def test_programs_of_a_team_share_out_all_blocks(blocks, size, stride, way):
    tiles = [Team(1, size, stride).tiles(blocks, program, way) for program in range(size)]
    assert sorted(block for of in tiles for block, _ in of) == list(range(blocks))


@given(st.integers(1, PROGRAMS), st.integers(1, 3), st.integers(1, 4))
def test_two_heads_at_a_time_are_as_long_for_all_programs(size, stride, spans):
    blocks = size * stride * spans
    walks = [Team(1, size, stride).walk(blocks, program, (0, 1)) for program in range(size)]
    for tile_of_each in zip(*walks, strict=True):
        at_a_time = sorted(block for *_, block, _ in tile_of_each)
        assert all(later - block == stride for block, later in pairwise(at_a_time))
    sums = [[one + other for (*_, one, _), (*_, other, _) in zip(of[::2], of[1::2], strict=True)] for of in walks]
    assert all(of == sums[0] for of in sums)


@given(lengths, lengths, windows, windows, st.sampled_from([64, 128]))
def test_query_blocks_hold_every_visible_pair_and_mask_where_one_is_not(seqlen_q, seqlen_k, left, right, tile_m):
    case = spec((seqlen_q, seqlen_k), left=left, right=right)
    queries, keys = torch.arange(seqlen_q)[:, None] + case.offset, torch.arange(seqlen_k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= keys >= queries - left
    if right >= 0:
        seen &= keys <= queries + right
    for n_block, of_tile in enumerate(seen.split(128, 1)):
        first, end, full_first, full_end = query_blocks(case, n_block, 128, tile_m)
        assert 0 <= first < end <= -(-seqlen_q // tile_m)
        blocks = of_tile.split(tile_m)
        assert not any(block.any() for block in (*blocks[:first], *blocks[end:]))
        for i in range(max(first, full_first), min(end, full_end)):
            assert blocks[i].all()
            assert blocks[i].shape[1] == 128


@pytest.mark.parametrize("seqlen", [2048, 4096, 4224, 8192, 16384])
@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_programs_finish_together(seqlen, right):
    """The busiest program has at most 1 % more to do than the mean, or one tile, where tiles are few."""
    case = spec((seqlen, seqlen), (16, 16), (128, 128), BF16, batch=16384 // seqlen, right=right)
    load = [
        sum(key_blocks(case, m_block, 128, 128) + TILE_COST for _, m_block in program)
        for program in schedule(case, 128, 2, 128, PROGRAMS)
    ]
    mean = sum(load) / len(load)
    shortest = min(key_blocks(case, m_block, 128, 128) for m_block in range(seqlen // 128))
    assert max(load) <= max(1.01 * mean, mean + shortest + TILE_COST)


@pytest.mark.parametrize("seqlen", [512, 2048, 8192])
@pytest.mark.parametrize("heads", [(16, 16), (32, 8), (16, 4)], ids=str)
def test_programs_of_the_backward_pass_finish_together(seqlen, heads):
    """Tiles are as long as their group is large: sections of few of them would leave programs idle."""
    case = spec((seqlen, seqlen), heads, (128, 128), BF16, batch=16384 // seqlen, right=0)
    load = [
        sum(query[1] - query[0] for _, n_block in program for query in [query_blocks(case, n_block, 128, 64)])
        for program in backward_schedule(case, 128, 64, PROGRAMS)
    ]
    assert max(load) <= 1.05 * sum(load) / len(load)


def test_short_calls_read_keys_from_memory_once():
    """Where programs are even enough, no tiles of the first heads come last, when their K and V have left the cache."""
    case = spec((1024, 1024), (8, 8), (256, 256), BF16, batch=16, right=0)
    last_heads = [program[-1][0] for program in schedule(case, 128, 2, 64, PROGRAMS)]
    assert min(last_heads) >= 3 / 4 * case.batch * case.heads_q


def test_within_a_program_and_section_tiles_get_shorter():
    case = spec((4096, 4096), (4, 4), (128, 128), BF16, batch=1, right=0)  # K and V of four heads: one section
    for program in schedule(case, 128, 2, 128, PROGRAMS):
        m_blocks = [m_block for _, m_block in program]
        assert m_blocks == sorted(m_blocks, reverse=True)
