"""The order in which tiles add to dQ where it must not change from run to run (`deterministic=True`).

Programs make teams. A team takes whole key heads, one after the other, and shares out the tiles of each head. Tiles add
to a block of dQ in the order in which they would come to it if the programs of a team went in step: then hardly any of
them waits. As a program adds in that order too, the first add that is missing waits for no other: one program can
always go on, if all run at the same time; the launch asks for that.

Where tiles differ in length a team goes through two heads at a time: each of its programs takes a tile of the first
from its first query on, then one of the second from its last query back, that of the program opposite. Both together
are as long for all programs, and at no block of dQ do two meet, as they would if some went back where others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import AttentionSpec
from .config import BackwardTiles
from .schedule import BACKWARD_TILE_COST, Piece, Tile, backward_head_bytes, query_blocks, tile_costs, turn_of

# An add is known to the next tile 1 to 1.35 steps after it might have begun. So tiles gone through at a time come to a
# block of dQ two steps apart; one step apart took 1.3 and 1.15 as long on an H200 at 192 and 256 dims, when those were
# added up too (`order_by_team_backward`).
STEPS_APART = 2
TOO_CLOSE = 1.2
# What heads that are gone through at a time may take of the cache: 256 dims took 1.2 to 1.5 as long with twice as much.
CACHE_BYTES = 55_000_000
PAST_CACHE = 0.4
# By so much longer it takes for each byte of the heads of all teams, as what a team reads serves few programs: D 96 at
# 8k took 1.09 of the default's time by 21 teams, 198 MB, 0.95 by 6, 57 MB.
SMALL_TEAMS = 1e-9
THERE, BACK, BY_TURNS = range(3)  # ways to go through a head, see `Team.tiles`
MAX_RANKS = 1 << 24  # of a way; in a table of up to 96 MB, which the host makes in some seconds


class Order(NamedTuple):
    lists: list[list[Tile]]  # the tiles of every program: key heads and places in `turns`
    turns: list[int]  # of the tiles of a head, for each way to go through it
    ranks: Tensor | None  # (len(turns), group * row_blocks) int16: how many add before, step by step of each tile
    pieces: list[list[Piece]]  # what programs have of tiles that they share
    zeros: bool = False  # sums of dQ are zero before
    together: int = 0  # so many rounds, a tile for each program, begin close together


class Team(NamedTuple):
    """How a team of `size` programs goes through a head: blocks that lie side by side go to one program, `stride` of
    them, the next to the next."""

    teams: int
    size: int
    stride: int

    def tiles(self, blocks: int, program: int, way: int) -> list[tuple[int, bool]]:
        """(key block, whether backwards) of a program: THERE forwards, BACK backwards and of the program opposite,
        BY_TURNS as in the one and in the other."""
        found = []
        for i in range(self.stride * -(-blocks // (self.stride * self.size))):
            back = way == BACK or (way == BY_TURNS and i % 2 == 1)
            span, side = divmod(i, self.stride)
            place = self.size - 1 - program if back else program
            found.append(((span * self.size + place) * self.stride + side, back))
        return [(block, back) for block, back in found if block < blocks]

    def walk(self, blocks: int, program: int, ways: tuple[int, ...]) -> list[tuple[int, int, int, bool]]:
        """(which head, way, key block, whether backwards) of a program, tile by tile of heads gone through at a time in
        these ways."""
        of_heads = [[(i, way, *tile) for tile in self.tiles(blocks, program, way)] for i, way in enumerate(ways)]
        return [tile for of_each in zip_longest(*of_heads) for tile in of_each if tile]

    def rounds(self, heads: int, alike: bool) -> list[tuple[int, ...]]:
        """The ways to go through heads at a time, one after the other."""
        count = -(-heads // self.teams)
        return [(THERE,)] * count if alike else [(THERE, BACK)] * (count // 2) + [(BY_TURNS,)] * (count % 2)


def team(spec: AttentionSpec, cost: list[float], keys: int, tile_m: int, programs: int) -> Team:
    """That which is done first, what it waits for others and for memory included; else that with the fewest teams."""
    heads, head_bytes, alike = spec.batch * spec.heads_k, backward_head_bytes(spec), min(cost) == max(cost)
    apart = min(-(-STEPS_APART * tile_m // keys), len(cost))

    def time(it: Team) -> float:
        def longest(ways: tuple[int, ...]) -> float:
            walks = (it.walk(len(cost), program, ways) for program in range(it.size))
            return max(sum(cost[block] for *_, block, _ in walk) for walk in walks)

        rounds = it.rounds(heads, alike)
        reach = len(rounds[0]) * (1 if alike else min(1, it.size * it.stride / len(cost)))  # of heads, at a time
        past = max(0.0, it.teams * reach * head_bytes / CACHE_BYTES - 1)
        waits = (TOO_CLOSE if it.stride < apart else 1) * (1 + PAST_CACHE * past)
        waits += SMALL_TEAMS * it.teams * head_bytes
        return waits * sum(rounds.count(ways) * longest(ways) for ways in set(rounds))

    candidates = (
        Team(teams, min(programs // teams, -(-len(cost) // stride)), stride)
        for teams in range(1, min(heads, programs) + 1)
        for stride in range(1, apart + 1)
    )
    return min(candidates, key=time)


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
    rounds = it.rounds(heads, alike=min(cost) == max(cost))

    def tiles_of(start: int, program: int) -> Iterator[Tile]:
        heads_left = iter(range(start, heads, it.teams))
        for ways in rounds:
            at_a_time = list(islice(heads_left, len(ways)))
            for i, way, block, _ in it.walk(blocks, program, ways):
                if i < len(at_a_time):
                    yield at_a_time[i], way * blocks + block

    lists = [list(tiles_of(start, program)) for start in range(it.teams) for program in range(it.size)]
    ways = 1 + max(way for ways in rounds for way in ways)
    turns, steps_of = [0] * (ways * blocks), [torch.empty(0)] * (ways * blocks)
    when = torch.full((ways, blocks, spec.group * row_blocks), torch.inf, dtype=torch.float64)
    for program in range(it.size):
        steps = program / it.size  # at the same step one program after the other
        for _, way, block, back in (tile for ways in sorted(set(rounds)) for tile in it.walk(blocks, program, ways)):
            first, end, *_ = query_blocks(spec, block, keys, tile_m)
            place = way * blocks + block
            turns[place] = turn_of(spec, block, keys, tile_m, back)
            of_head = visits(first, end, turns[place])
            steps_of[place] = torch.cat([of_head + head * row_blocks for head in range(spec.group)])
            when[way, block, steps_of[place]] = steps + torch.arange(len(steps_of[place])).double()
            steps += len(steps_of[place]) + BACKWARD_TILE_COST
    by_time = when.argsort(dim=1, stable=True)
    places = torch.arange(blocks, dtype=torch.int16)[:, None].expand_as(by_time)
    by_block = torch.empty_like(by_time, dtype=torch.int16).scatter_(1, by_time, places).flatten(0, 1)
    ranks = torch.zeros(len(turns), when.shape[2], dtype=torch.int16)
    for place, visited in enumerate(steps_of):
        ranks[place, : len(visited)] = by_block[place, visited.long()]
    return Order(lists, turns, ranks, [[] for _ in lists])


def refuses(spec: AttentionSpec, tiles: BackwardTiles) -> str | None:
    """Why there is none, where dQ is added up."""
    if tiles.dq_apart:
        return None
    n_ranks = -(-spec.seqlen_k // tiles.keys) * spec.group * -(-spec.seqlen_q // tiles.tile_m)
    if n_ranks > MAX_RANKS:
        return f"the order of dQ would take a table of {n_ranks} numbers: it makes at most {MAX_RANKS}"
    return None
