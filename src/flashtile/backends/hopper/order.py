"""The order in which tiles add to dQ where it must not change from run to run (`deterministic=True`).

Programs make teams. A team takes whole key heads, one after the other, and shares out the tiles of each head in the
same way, so that one order serves all heads. Tiles add to a block of dQ in the order in which they would come to it if
the programs of a team went in step: then hardly any of them waits. As a program adds in that order too, the first add
that is missing waits for no other: one program can always go on, if all run at the same time; the launch asks for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from .config import BackwardTiles
from .schedule import BACKWARD_TILE_COST, Tile, assign, backward_head_bytes, query_blocks, tile_costs, turn_of

# What the heads of all teams may take where small teams are preferred. What order costs on an H200, causal: D 64 at 1k
# by 64 teams of 2 programs, 50 MB, 10 %, by 32 of 4 15 %; D 128 at 2k by 64 of 2, 201 MB, 30 %, by 16 of 8, 50 MB, 8 %.
TEAMS_BYTES = 80_000_000
# About what waits add where tiles differ in length and those side by side are gone through at a time: 0 to 20 % of it
# all if an add takes 0.6 of a step and is known 0.3 later (`order_by_model` in hopper-runs-h200.json).
SIDE_BY_SIDE = 1.1
MAX_RANKS = 1 << 24  # in a table of 32 MB, which the host makes in some seconds


class Order(NamedTuple):
    lists: list[list[Tile]]  # the tiles of every program
    turns: list[int]  # of the tiles of a head
    ranks: Tensor | None  # (tiles of a head, group * row_blocks) int16: how many add before, step by step of each tile


def team(spec: AttentionSpec, cost: list[float], programs: int) -> tuple[int, list[list[int]]]:
    """(how many teams, the key blocks of each program of a team): what is done first, waits included; of what is done
    at the same time the smallest teams, where tiles differ in length and so wait for others, else the fewest."""
    heads = spec.batch * spec.heads_k
    alike = min(cost) == max(cost)
    fitting = 0 if alike else TEAMS_BYTES // backward_head_bytes(spec)

    def candidates() -> Iterator[tuple[float, int, list[list[int]]]]:
        for teams in range(1, min(heads, programs) + 1):
            by_length = assign(cost, [range(1)], programs // teams)
            yield 1.0 if alike else SIDE_BY_SIDE, teams, [[block for _, block in tiles] for tiles in by_length]
            if not alike:
                yield 1.0, teams, apart(len(cost), programs // teams)

    def time_and_size(candidate: tuple[float, int, list[list[int]]]) -> tuple[float, float]:
        waits, teams, blocks_of = candidate
        longest = max(sum(cost[block] for block in blocks) for blocks in blocks_of)
        return waits * -(-heads // teams) * longest, len(blocks_of) if teams <= fitting else math.inf

    _, teams, blocks_of = min(candidates(), key=time_and_size)
    return teams, blocks_of


def apart(blocks: int, programs: int) -> list[list[int]]:
    """Blocks of each program, at most so many, such that those gone through at a time lie as far apart as may be.

    A tile that comes to a block of dQ a step after its neighbour waits whenever that one did; two steps after, hardly.
    In every second round in the other direction, so that all have as much to do where lengths grow from block to block.
    """
    rounds = 2 * -(-blocks // (2 * programs))
    count = -(-blocks // rounds)
    places = ([program if i % 2 == 0 else count - 1 - program for i in range(rounds)] for program in range(count))
    return [[place * rounds + i for i, place in enumerate(of) if place * rounds + i < blocks] for of in places]


def visits(first: int, end: int, turn: int) -> Tensor:
    """Blocks first ... end in the order of `turned` in backward_problem.py."""
    if turn < 0:
        return torch.arange(first, end).flip(0)
    return torch.arange(first, end).roll(-turn)


def order(spec: AttentionSpec, keys: int, tile_m: int, programs: int) -> Order:
    """Schedule and ranks of the backward pass."""
    cost = tile_costs(spec, keys, tile_m)
    teams, blocks_of = team(spec, cost, programs)
    heads = spec.batch * spec.heads_k
    lists = [
        [(head, block) for head in range(start, heads, teams) for block in blocks]
        for start in range(teams)
        for blocks in blocks_of
    ]
    turns, steps_of = [0] * len(cost), [torch.empty(0)] * len(cost)
    row_blocks = -(-spec.seqlen_q // tile_m)
    when = torch.full((len(cost), spec.group * row_blocks), torch.inf, dtype=torch.float64)
    for program, blocks in enumerate(blocks_of):
        steps = program / len(blocks_of)  # at the same step one program after the other
        for place, block in enumerate(blocks):
            first, end, *_ = query_blocks(spec, block, keys, tile_m)
            turns[block] = turn_of(spec, block, keys, tile_m, backwards=place % 2 == 1)
            of_head = visits(first, end, turns[block])
            steps_of[block] = torch.cat([of_head + head * row_blocks for head in range(spec.group)])
            when[block, steps_of[block]] = steps + torch.arange(len(steps_of[block])).double()
            steps += len(steps_of[block]) + BACKWARD_TILE_COST
    by_time = when.argsort(dim=0, stable=True)
    places = torch.arange(len(cost), dtype=torch.int16)[:, None].expand_as(by_time)
    by_block = torch.empty_like(by_time, dtype=torch.int16).scatter_(0, by_time, places)
    ranks = torch.zeros(len(cost) + 1, when.shape[1], dtype=torch.int16)  # the step after the last is looked up too
    for block, visited in enumerate(steps_of):
        ranks[block, : len(visited)] = by_block[block, visited]
    return Order(lists, turns, ranks)


def refuses(spec: AttentionSpec, tiles: BackwardTiles) -> str | None:
    """Why there is none."""
    if not tiles.dq_buffer:
        return "above 192 dims its dQ is summed in no fixed order"
    n_ranks = -(-spec.seqlen_k // tiles.keys) * spec.group * -(-spec.seqlen_q // tiles.tile_m)
    if n_ranks > MAX_RANKS:
        return f"the order of dQ would take a table of {n_ranks} numbers: it makes at most {MAX_RANKS}"
    return None
