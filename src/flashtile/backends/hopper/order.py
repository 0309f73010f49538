"""The order in which tiles add to dQ where it must not change from run to run (`deterministic=True`).

Programs make teams. A team takes whole key heads, one after the other, and shares out the tiles of each head. Tiles add
to a block of dQ in the order in which they would come to it if the programs of a team went in step: then hardly any of
them waits. As a program adds in that order too, the first add that is missing waits for no other: one program can
always go on, if all run at the same time; the launch asks for that.

Where tiles differ in length a team goes through its heads in pairs: through the first with every program's tiles from
their first query on, through the second with those of the program opposite, from their last query back. So all programs
have as much to do, and no two meet at a block of dQ, as they would if one went back while others still go on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from .config import BackwardTiles
from .schedule import BACKWARD_TILE_COST, Tile, backward_head_bytes, query_blocks, tile_costs, turn_of

# An add is known to the next tile 1 to 1.35 steps after it might have begun: those gone through at a time come to a
# block of dQ two steps apart. One step apart cost 1.01 to 1.35 on an H200 (`counts_by_a_warp_backward`).
STEPS_APART = 2
TOO_CLOSE = 1.2
# What the heads of all teams may take of the cache: by twice as much it takes 1.3 to 1.5 as long at D 256.
CACHE_BYTES = 55_000_000
PAST_CACHE = 0.4
MAX_RANKS = 1 << 24  # in a table of 32 MB, which the host makes in some seconds


class Order(NamedTuple):
    lists: list[list[Tile]]  # the tiles of every program: key heads and places in `turns`
    turns: list[int]  # of the tiles of a head, for each way to go through it
    ranks: Tensor | None  # (len(turns), group * row_blocks) int16: how many add before, step by step of each tile


class Team(NamedTuple):
    """How a team of `size` programs goes through a head: blocks that lie side by side go to one program, `stride` of
    them, the next to the next."""

    teams: int
    size: int
    stride: int

    def tiles(self, blocks: int, program: int, way: int) -> list[tuple[int, bool]]:
        """(key block, whether backwards) of a program: in way 0 forwards, in way 1 backwards and opposite, in way 2 in
        turns as in the one and in the other."""
        found = []
        for i in range(self.stride * -(-blocks // (self.stride * self.size))):
            back = way == 1 or (way == 2 and i % 2 == 1)
            of_round, side = divmod(i, self.stride)
            place = self.size - 1 - program if back else program
            found.append(((of_round * self.size + place) * self.stride + side, back))
        return [(block, back) for block, back in found if block < blocks]

    def ways(self, heads: int, alike: bool) -> list[int]:
        """How it goes through one head after the other."""
        rounds = -(-heads // self.teams)
        return [0 if alike else 2 if i == rounds - 1 and i % 2 == 0 else i % 2 for i in range(rounds)]


def team(spec: AttentionSpec, cost: list[float], keys: int, tile_m: int, programs: int) -> Team:
    """That which is done first, waits included; of those done at the same time, where tiles differ in length, the one
    with the smallest teams that fits in the cache, else with the fewest."""
    heads, head_bytes = spec.batch * spec.heads_k, backward_head_bytes(spec)
    alike = min(cost) == max(cost)
    apart = -(-STEPS_APART * tile_m // keys)

    def time_and_size(it: Team) -> tuple[float, float]:
        def done(way: int) -> Tensor:
            tiles = [it.tiles(len(cost), program, way) for program in range(it.size)]
            return torch.tensor([sum(cost[block] for block, _ in of) for of in tiles])

        ways = it.ways(heads, alike)
        time = float(sum(done(way) * ways.count(way) for way in set(ways)).max())
        reach = 1.0 if alike else min(1.0, 2 * it.size * it.stride / len(cost))  # of a head, at a time
        past = max(0.0, it.teams * reach * head_bytes / CACHE_BYTES - 1)
        time *= (1 + PAST_CACHE * past) * (TOO_CLOSE if it.stride < min(apart, len(cost)) else 1)
        return time, it.size if not alike and it.teams * head_bytes <= CACHE_BYTES else math.inf

    return min(
        (
            Team(teams, min(programs // teams, -(-len(cost) // stride)), stride)
            for teams in range(1, min(heads, programs) + 1)
            for stride in range(1, apart + 1)
        ),
        key=time_and_size,
    )


def visits(first: int, end: int, turn: int) -> Tensor:
    """Blocks first ... end in the order of `turned` in backward_problem.py."""
    if turn < 0:
        return torch.arange(first, end).flip(0)
    return torch.arange(first, end).roll(-turn)


def order(spec: AttentionSpec, keys: int, tile_m: int, programs: int) -> Order:
    """Schedule and ranks of the backward pass."""
    cost = tile_costs(spec, keys, tile_m)
    blocks, heads, row_blocks = len(cost), spec.batch * spec.heads_k, -(-spec.seqlen_q // tile_m)
    it = team(spec, cost, keys, tile_m, programs)
    ways = it.ways(heads, min(cost) == max(cost))
    lists = [
        [
            (head, way * blocks + block)
            for head, way in zip(range(start, heads, it.teams), ways, strict=False)
            for block, _ in it.tiles(blocks, program, way)
        ]
        for start in range(it.teams)
        for program in range(it.size)
    ]
    turns, steps_of = [0] * (max(ways) + 1) * blocks, [torch.empty(0)] * (max(ways) + 1) * blocks
    when = torch.full((max(ways) + 1, blocks, spec.group * row_blocks), torch.inf, dtype=torch.float64)
    for program in range(it.size):
        steps = program / it.size  # at the same step one program after the other
        for way in sorted(set(ways)):
            for block, back in it.tiles(blocks, program, way):
                first, end, *_ = query_blocks(spec, block, keys, tile_m)
                at = way * blocks + block
                turns[at] = turn_of(spec, block, keys, tile_m, back)
                of_head = visits(first, end, turns[at])
                steps_of[at] = torch.cat([of_head + head * row_blocks for head in range(spec.group)])
                when[way, block, steps_of[at]] = steps + torch.arange(len(steps_of[at])).double()
                steps += len(steps_of[at]) + BACKWARD_TILE_COST
    by_time = when.argsort(dim=1, stable=True)
    places = torch.arange(blocks, dtype=torch.int16)[:, None].expand_as(by_time)
    by_block = torch.empty_like(by_time, dtype=torch.int16).scatter_(1, by_time, places).flatten(0, 1)
    ranks = torch.zeros(len(turns) + 1, when.shape[2], dtype=torch.int16)  # the step after the last is looked up too
    for at, visited in enumerate(steps_of):
        ranks[at, : len(visited)] = by_block[at, visited.long()]
    return Order(lists, turns, ranks)


def refuses(spec: AttentionSpec, tiles: BackwardTiles) -> str | None:
    """Why there is none."""
    n_ranks = -(-spec.seqlen_k // tiles.keys) * spec.group * -(-spec.seqlen_q // tiles.tile_m)
    if n_ranks > MAX_RANKS:
        return f"the order of dQ would take a table of {n_ranks} numbers: it makes at most {MAX_RANKS}"
    return None
