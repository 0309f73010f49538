"""How Flash-Decoding's key blocks are shared out: whose blocks a program has, and which programs have a task's.

A line is the blocks of some tasks, task after task, and its shares go to as many programs, in order. Where sequences
are not alike a task has a place more in it, as it costs time beside its keys. Both kernels of decode.py do this
arithmetic, and what launches them some of it. Where programs have whole tasks, not shares, those of the longest
sequences come first; or pieces of these, where what is longer than an equal share is split.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .decode_config import MANY_SEQUENCES

TASK_COST = tl.constexpr(1)  # blocks of keys that could be read while a task begins and ends (decode_task_cost)


class Batch(NamedTuple):
    """What kernels are told of its sequences: how many; where the keys of each begin and end, of those that are there
    and those that are new; and which a query sees."""

    sequences: Any
    seqlens_ptr: Any  # None: all are as long as the cache has place
    leftpad_ptr: Any  # None: all begin with its first
    seqlen_new: Any
    capacity: Any
    seqlen_q: Any
    window_left: Any  # None: those on the left are seen
    window_right: Any  # None: those on the right are seen


@triton.constexpr_function
def at_a_time(sequences):
    """Of so many, a power of two: as many as a warp has lanes, so that each warp looks through all of them by itself,
    and waits for no other; all, by all warps, where that would take long.
    """
    return min(sequences, 32) if sequences <= MANY_SEQUENCES else sequences


@triton.jit
def span_of(sequence, here, batch):
    """(first, n_keys) of a sequence, or of a vector of them; never past the cache."""
    end = batch.capacity
    if batch.seqlens_ptr is not None:
        end = tl.minimum(tl.load(batch.seqlens_ptr + sequence, here, 0).to(tl.int32) + batch.seqlen_new, end)
    first = 0
    if batch.leftpad_ptr is not None:
        first = tl.load(batch.leftpad_ptr + sequence, here, 0).to(tl.int32)
    return first, tl.maximum(end - first, 0)


@triton.jit
def key_blocks(n_keys, batch, TILE_N: tl.constexpr):
    """(first, how many): the key blocks that any query of a sequence sees; one at least: its rows must be written."""
    offset = n_keys - batch.seqlen_q
    first = n_keys * 0
    end = n_keys
    if batch.window_left is not None:
        first = tl.maximum(offset - batch.window_left, 0) // TILE_N
    if batch.window_right is not None:
        end = tl.minimum(n_keys, tl.maximum(offset + batch.seqlen_q + batch.window_right, 0))
    return first, tl.maximum(tl.cdiv(end, TILE_N) - first, 1)


@triton.jit
def blocks_from(first, batch, LANES: tl.constexpr, TILE_N: tl.constexpr):
    """(LANES,) key blocks of the sequences from `first` on, 0 behind the last."""
    sequence = first + tl.arange(0, LANES)
    here = sequence < batch.sequences
    _, n_keys = span_of(sequence, here, batch)
    _, blocks = key_blocks(n_keys, batch, TILE_N)
    return tl.where(here, blocks, 0)


@triton.jit
def places_of_line(sequence, tasks, batch, TILE_B: tl.constexpr, LANES: tl.constexpr, TILE_N: tl.constexpr):
    """(places, cost, begin): of a line in which each sequence has so many `tasks`, of each task `cost` places and then
    its key blocks; and where those of `sequence` begin. Where all have as many blocks a task costs nothing: whole ones
    then stay whole. LANES at a time."""
    of_all = tl.zeros([LANES], tl.int32)
    of_those_before = tl.zeros([LANES], tl.int32)
    most = tl.zeros([LANES], tl.int32)
    for first in tl.static_range(0, TILE_B, LANES):
        blocks = blocks_from(first, batch, LANES, TILE_N)
        of_all += blocks
        of_those_before += tl.where(first + tl.arange(0, LANES) < sequence, blocks, 0)
        most = tl.maximum(most, blocks)
    n_blocks = tl.sum(of_all, 0)
    cost = 0
    if TILE_B > 1:  # one sequence is alike
        cost = tl.where(tl.max(most, 0) * batch.sequences == n_blocks, 0, TASK_COST)
    places = tasks * (n_blocks + batch.sequences * cost)
    return places, cost, tasks * (tl.sum(of_those_before, 0) + sequence * cost)


@triton.jit
def start_of_share(
    position, stop, tasks, cost, batch, TILE_B: tl.constexpr, LANES: tl.constexpr, TILE_N: tl.constexpr,
    TASK_EACH: tl.constexpr,
):  # fmt: skip
    """(sequence, inside, steps): whose a place of such a line is, which of its it is, and how many key blocks lie from
    there to `stop`. TASK_EACH: a sequence has one task in it. One sequence is not looked for."""
    if TILE_B == 1:
        return position * 0, position, stop - position
    sequences = tl.zeros([LANES], tl.int32)
    passed = tl.zeros([LANES], tl.int32)
    steps = tl.zeros([LANES], tl.int32)
    begin = 0
    for first in tl.static_range(0, TILE_B, LANES):
        blocks = blocks_from(first, batch, LANES, TILE_N)
        places = tl.where(blocks > 0, tasks * (blocks + cost), 0)
        end = begin + tl.cumsum(places, 0)
        ended = end <= position
        sequences += ended
        passed += tl.where(ended, places, 0)
        if TASK_EACH:
            steps += tl.maximum(tl.minimum(stop, end) - tl.maximum(position, end - blocks), 0)
        else:
            before = end - places
            steps += blocks_inside(stop - before, places, blocks, cost)
            steps -= blocks_inside(position - before, places, blocks, cost)
        begin += tl.sum(places, 0)
    return tl.sum(sequences, 0), position - tl.sum(passed, 0), tl.sum(steps, 0)


@triton.jit
def blocks_inside(end, places, blocks, cost):
    """How many of a sequence's places before `end` are key blocks, of which each of its tasks has so many."""
    end = tl.minimum(tl.maximum(end, 0), places)
    of_task = tl.maximum(blocks + cost, 1)
    return end // of_task * blocks + tl.maximum(end % of_task - cost, 0)


@triton.jit
def most_of_a_piece(tasks, at_once, batch, TILE_B: tl.constexpr, TILE_N: tl.constexpr):
    """Key blocks that a piece of a task has at most, where each sequence has so many `tasks`: an equal share of all for
    each of so many programs. So there are at most as many pieces as tasks and such programs."""
    LANES: tl.constexpr = at_a_time(TILE_B)
    blocks = tl.zeros([LANES], tl.int32)
    for first in tl.static_range(0, TILE_B, LANES):
        blocks += blocks_from(first, batch, LANES, TILE_N)
    return tl.cdiv(tasks * tl.sum(blocks, 0), at_once)


@triton.jit
def pieces_of(blocks, most):
    """Of a task of so many key blocks, with at most so many each; a task is one if `most` is None."""
    return 1 if most is None else tl.cdiv(blocks, most)


@triton.jit
def longest_first(rank, tasks, most, batch, TILE_B: tl.constexpr, TILE_N: tl.constexpr):
    """(sequence, inside): whose the rank-th piece is, and which of its, where each sequence has so many `tasks` and
    those of more key blocks come first. Behind the last piece it is the one behind the last. `most`: see `pieces_of`.

    By halves it finds the most blocks that sequences of more than `rank` pieces have, then the sequence among those of
    as many. Where all have as many there is nothing to be found by halves.
    """
    LANES: tl.constexpr = at_a_time(TILE_B)
    NONE: tl.constexpr = 1 << 30
    fewest = tl.full([LANES], NONE, tl.int32)
    longest = tl.zeros([LANES], tl.int32)
    for first in tl.static_range(0, TILE_B, LANES):
        blocks = blocks_from(first, batch, LANES, TILE_N)
        longest = tl.maximum(longest, blocks)
        fewest = tl.minimum(fewest, tl.where(blocks > 0, blocks, NONE))
    low, high = tl.min(fewest, 0), tl.max(longest, 0)  # what is looked for is between these
    before = high * 0  # pieces of sequences of more than `high`
    while low < high:
        middle = (low + high + 1) // 2
        pieces = tl.zeros([LANES], tl.int32)
        for first in tl.static_range(0, TILE_B, LANES):
            blocks = blocks_from(first, batch, LANES, TILE_N)
            pieces += tl.where(blocks >= middle, tasks * pieces_of(blocks, most), 0)
        n_pieces = tl.sum(pieces, 0)
        if n_pieces > rank:
            low = middle
        else:
            high = middle - 1
            before = n_pieces
    of_sequence = tasks * pieces_of(low, most)
    place = (rank - before) // of_sequence  # among sequences of as many blocks
    found = tl.zeros([LANES], tl.int32)
    passed = high * 0
    for first in tl.static_range(0, TILE_B, LANES):
        as_long = low == blocks_from(first, batch, LANES, TILE_N)
        places = passed + tl.cumsum(as_long.to(tl.int32), 0) - 1
        found += tl.where(as_long & (places == place), first + tl.arange(0, LANES), 0)
        passed += tl.sum(as_long.to(tl.int32), 0)
    return tl.where(place < passed, tl.sum(found, 0), batch.sequences), (rank - before) % of_sequence


@triton.jit
def pieces_before(sequence, of_sequence, most, batch, TILE_B: tl.constexpr, TILE_N: tl.constexpr):
    """Those of a task of each sequence that `longest_first` puts before this one, which has so many key blocks."""
    LANES: tl.constexpr = at_a_time(TILE_B)
    pieces = tl.zeros([LANES], tl.int32)
    for first in tl.static_range(0, TILE_B, LANES):
        blocks = blocks_from(first, batch, LANES, TILE_N)
        before = (blocks > of_sequence) | ((blocks == of_sequence) & (first + tl.arange(0, LANES) < sequence))
        pieces += tl.where(before, pieces_of(blocks, most), 0)
    return tl.sum(pieces, 0)


@triton.jit
def shares_of_line(n_blocks, n_shares, least):
    """(share, longer): blocks of each share of a line, and how many shares, the first, have one more.

    `least` blocks at least, so that short lines go to fewer programs. Else as many for each, rounded up, where whole
    tasks then stay whole, unless more than a sixteenth of the programs would have none.
    """
    share = (n_blocks + n_shares - 1) // n_shares
    longer = n_blocks * 0
    if share < least:
        share = least
    elif (share > least) & (16 * (share * n_shares - n_blocks) > share * n_shares):
        share -= 1
        longer = n_blocks - share * n_shares
    return share, longer


@triton.jit
def spread(program, programs, tasks):
    """(task, whether there is one) of a program, where there are no more tasks than programs: evenly spread over them,
    as programs beside one another share what leads to memory."""
    task = program * tasks // programs
    return task, (program + 1) * tasks // programs > task


@triton.jit
def begin_of_share(rank, share, longer):
    """The first block of a share of a line."""
    return rank * share + min(rank, longer)


@triton.jit
def share_of_block(block, share, longer):
    """Which share of a line has a block."""
    of_longer = longer * (share + 1)
    return block // (share + 1) if block < of_longer else longer + (block - of_longer) // share


@triton.jit
def shares_of_task(
    sequence, task, blocks, of_line, width, n_shares, least, batch, TILE_B: tl.constexpr, TILE_N: tl.constexpr,
    LINE_EACH: tl.constexpr, WHOLE_IF_ALIKE: tl.constexpr,
):  # fmt: skip
    """(first, how many) shares of its line that have a part of a task of a sequence, of so many key blocks, if
    `of_line` of a sequence's tasks are in a line."""
    if batch.seqlens_ptr is None and batch.leftpad_ptr is None:
        cost = 0
        of_sequence = blocks * of_line
        n_blocks = of_sequence * batch.sequences
        begin = of_sequence * sequence
    else:
        n_blocks, cost, begin = places_of_line(sequence, of_line, batch, TILE_B, at_a_time(TILE_B), TILE_N)
    if not LINE_EACH:
        begin += task // width * (blocks + cost)
    begin += cost
    if WHOLE_IF_ALIKE and cost == 0:
        least = blocks  # a share is a task
    share, longer = shares_of_line(n_blocks, n_shares, least)
    first = share_of_block(begin, share, longer)
    return first, share_of_block(begin + blocks - 1, share, longer) - first + 1


@triton.jit
def pieces_of_task(sequence, task, blocks, tasks, at_once, batch, TILE_B: tl.constexpr, TILE_N: tl.constexpr):
    """(first, how many): the pieces of such a task among all, in the order of `longest_first`."""
    most = most_of_a_piece(tasks, at_once, batch, TILE_B, TILE_N)
    n_pieces = pieces_of(blocks, most)
    return task * n_pieces + tasks * pieces_before(sequence, blocks, most, batch, TILE_B, TILE_N), n_pieces
