"""Every shipped configuration compiles, without a GPU, for every architecture that has a table."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
from aot import (
    arguments_of_roles,
    barriers_by_threads,
    barriers_left_alone,
    barriers_of_roles,
    cached_call,
    cached_calls,
    calls_of,
    compile_cached,
    compile_call,
    compile_hopper,
    compile_hopper_backward,
    compile_hopper_cached,
    compile_kernel,
    kernels_and_tensors,
    loops_with_products,
    machine_code,
    overwritten_operands,
    serializes_products,
    spills_in_loops,
)
from cases import BF16, FLOAT, spec

from flashtile.backends.hopper import compiling
from flashtile.backends.hopper import config as hopper_config
from flashtile.backends.hopper.compat import SINCE_3_9
from flashtile.backends.hopper.llvm_ir import for_roles
from flashtile.backends.triton import config, decode_config, decode_launch
from flashtile.cache import FP8

ARCHITECTURES = ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1201"]
SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_120": 101_376, "gfx942": 65_536, "gfx1201": 65_536}
MASKS = {"full": {}, "causal": {"right": 0}}
WINDOWS = {**MASKS, "window": {"left": 300, "right": 40}}
FEATURES = {"left": 300, "right": 40, "softcap": 20.0}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bfloat16", "float32"])
def test_shipped_configs_compile_fit_and_do_not_spill(arch, mask, dim, dtype):
    case = spec((4096, 4096), (16, 16), (dim, dim), dtype, **MASKS[mask])
    for name, (kernel, tensors) in kernels_and_tensors(case, arch).items():
        usage, compiled = compile_kernel(kernel, case, arch, *tensors)
        programs = 2 if name == "gradients" else 1  # that run on a multiprocessor at the same time, at least
        assert programs * usage.shared <= SHARED_MEMORY[arch], f"{name}: {usage}"
        if arch in ("sm_80", "sm_90"):
            assert not usage.spills, f"{name} spills registers: {usage}"
        if arch == "sm_90" and dtype == BF16:
            assert not serializes_products(compiled), f"{name} does not overlap its products"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 8, 16], ids=["16 rows", "32 rows", "64 rows"])
@pytest.mark.parametrize("stored", [BF16, FP8, FLOAT], ids=["bfloat16", "float8", "float32"])
def test_decode_kernels_compile_fit_and_do_not_spill(arch, dim, seqlen_q, stored):
    if arch == "sm_80" and stored == FP8:
        pytest.skip("sm_80 has no float8: passes_over says so")
    if dim == 256 and seqlen_q > 1:
        pytest.skip("wide heads have 16 rows in a tile")
    case = spec((seqlen_q, 32768), (32, 8), (dim, dim), FLOAT if stored == FLOAT else BF16, right=0)
    for usage, _ in compile_cached(cached_call(case, stored, page_size=16), arch):
        assert usage.shared <= SHARED_MEMORY[arch], usage
        if (arch, dim, seqlen_q, stored) == ("sm_90", 128, 16, BF16):
            assert usage.stack <= 120, usage  # nearly twice as fast as tiles that do not: decode_tiles_of_64_rows
        else:
            assert not usage.spills or arch not in ("sm_80", "sm_90"), usage


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("dim", "heads_q"), [(64, 32), (64, 256), (128, 32), (128, 256), (256, 32)],
    ids=["64, 16 rows", "64, 32 rows", "128, 16 rows", "128, 32 rows", "256"],
)  # fmt: skip
@pytest.mark.parametrize("load", decode_config.LOADS)
@pytest.mark.parametrize("page_size", [0, 256], ids=["in one piece", "pages of 256"])
def test_decode_tiles_of_every_head_dim_compile_fit_and_do_not_spill(page_size, load, dim, heads_q, arch, monkeypatch):
    monkeypatch.setattr(decode_config, "load_of", lambda *_: load)
    page_size = 16 if load == "scattered" else page_size
    case = spec((1, 32768), (heads_q, 8), (dim, dim), BF16, batch=8)
    for usage, _ in compile_cached(cached_call(case, BF16, page_size), arch):
        assert usage.shared <= SHARED_MEMORY[arch], usage
        assert not usage.spills, usage


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("load", "batch", "heads_k", "capacity", "page_size"),
    [("short", 1, 8, 1024, 16), ("scattered", 8, 8, 32768, 16), ("few", 8, 8, 32768, 0), ("many", 8, 8, 32768, 64),
     ("few", 8, 8, 32768, 128), ("few", 64, 8, 16384, 0), ("few", 1, 1, 65536, 0), ("two", 64, 8, 1024, 0),
     ("split", 64, 8, 4096, 0), ("split", 64, 8, 4096, 16), ("split", 64, 8, 4096, 256), ("split", 128, 4, 8192, 0),
     ("even", 64, 8, 16384, 64), ("three", 96, 8, 1024, 0), ("even", 512, 1, 2048, 0), ("one", 16, 8, 1024, 0),
     ("many", 16, 8, 1024, 64), ("few", 11, 8, 2048, 0), ("three", 160, 8, 1024, 0), ("three", 320, 1, 1024, 64),
     ("one_if_alike", 12, 8, 2048, 0), ("one_if_alike", 16, 8, 8192, 256), ("one_if_alike", 132, 1, 4096, 0),
     ("few", 17, 8, 4096, 0),
     ("scattered", 32, 8, 1024, 16), ("three", 48, 8, 1024, 16), ("four", 128, 8, 2048, 0), ("many", 20, 8, 1024, 0)],
)  # fmt: skip
def test_decode_tiles_of_every_load_compile_fit_and_do_not_spill(load, batch, heads_k, capacity, page_size, arch):
    """Loads are by tasks, and bytes: of heads of 64 keys may be twice as many, and pages hold twice as many. Where
    lengths are on the device all but those of whole tasks are merged. Only those of 128 are split."""
    for dim, times in ((128, 1),) if load == "split" else ((128, 1), (64, 2)):
        case = spec((1, capacity * times), (32, heads_k), (dim, dim), BF16, batch=batch)
        call = cached_call(case, BF16, page_size * times)
        assert decode_config.load_of(call, 132) == load
        assert decode_launch.decode_spec(call, 0, arch, 132).merges == (load not in decode_config.ROUND)
        for usage, _ in compile_cached(call, arch):
            assert usage.shared <= SHARED_MEMORY[arch], usage
            assert not usage.spills, usage


@pytest.mark.parametrize("tile_n", [8, 512])
def test_decode_tiles_that_no_kernel_takes_say_so(tile_n):
    with pytest.raises(ValueError, match=f"tile_n: got {tile_n}; want 16, for the matrix units, to 256"):
        decode_config.DecodeTiles(tile_n, num_warps=4, num_stages=3, programs=1, least=1)


def test_a_cache_whose_keys_lie_far_apart_is_left_to_others():
    """Places in a block are 32-bit numbers."""
    call = cached_call(spec((1, 32768), (32, 8), (128, 128), BF16), BF16, page_size=0)
    for apart, left in ((1 << 22, False), (1 << 23, True)):
        v = torch.empty_strided(call.cache.v.shape, (1 << 40, apart, 128, 1), dtype=BF16, device="meta")
        reason = decode_launch.passes_over(call._replace(given=call.given._replace(v_cache=v)))
        assert reason == ("keys or values lie 8388608 numbers apart; it wants fewer than 8388608" if left else None)


@pytest.mark.parametrize(
    ("tasks", "programs"), [(1, 132), (8, 128), (64, 128), (72, 132), (132, 132), (300, 132), (512, 128)]
)
def test_tasks_have_as_many_programs_each_or_these_tasks_if_hardly_any_is_left_out(tasks, programs):
    assert decode_launch.shares_for(tasks, 132) == programs


@pytest.mark.parametrize("batch", [12, 14, 15, 16])
def test_programs_that_may_have_whole_tasks_or_none_are_as_many_as_run(batch):
    call = cached_call(spec((1, 4096), (32, 8), (128, 128), BF16, batch=batch), BF16, page_size=0)
    launched = decode_launch.decode_spec(call, 0, "sm_90", 132)
    assert launched.whole_if_alike
    assert launched.programs == 128


@pytest.mark.parametrize(("tasks", "width"), [(1, 1), (7, 7), (8, 8), (40, 10), (131, 131), (254, 127)])
def test_tasks_of_a_sequence_lie_in_as_many_lines_as_have_programs_for_all_but_a_sixteenth(tasks, width):
    assert decode_launch.width_for(tasks, 132) == width


@pytest.mark.parametrize(
    ("load", "batch", "heads_k", "capacity", "programs"),
    [("few", 8, 8, 1024, 128), ("one", 9, 8, 1024, 0), ("few", 9, 8, 3072, 128), ("one", 10, 8, 3072, 0),
     ("one_filled", 16, 8, 1024, 0), ("two", 18, 8, 512, 0), ("two", 18, 8, 1024, 0), ("few", 18, 8, 2048, 128),
     ("two", 24, 8, 1024, 0), ("two_filled", 32, 8, 2048, 0), ("two", 33, 8, 1024, 0), ("four", 36, 8, 1024, 0),
     ("few", 36, 8, 2048, 128), ("four", 64, 8, 3072, 0), ("eight", 72, 8, 1024, 0), ("eight", 96, 8, 1024, 0),
     ("many", 140, 1, 512, 264), ("three", 200, 8, 3072, 0), ("few", 11, 8, 4096, 128), ("one", 12, 8, 4096, 0),
     ("one", 13, 8, 4096, 0), ("one_filled", 14, 8, 4096, 0), ("few", 22, 8, 4096, 128), ("two", 26, 8, 4096, 0),
     ("two_filled", 28, 8, 4096, 0), ("few", 44, 8, 4096, 120), ("one", 48, 8, 4096, 0),
     ("two", 64, 8, 4096, 0), ("few", 88, 8, 4096, 120)],
)  # fmt: skip
@pytest.mark.parametrize("length", [None, 1000], ids=["the whole cache", "one number for all"])
def test_without_lengths_tasks_that_fill_a_gpu_have_a_program_each(length, load, batch, heads_k, capacity, programs):
    """In a round of so many on each multiprocessor, or in many rounds; else programs share them, or have some each."""
    call = cached_call(spec((1, capacity), (32, heads_k), (128, 128), BF16, batch=batch), BF16, page_size=0)
    call = call._replace(given=call.given._replace(cache_seqlens=length))
    assert decode_config.load_of(call, 132) == load
    assert not decode_config.choose(call, "sm_90", 132, num_splits=2).whole
    launched = decode_launch.decode_spec(call, 0, "sm_90", 132)
    assert (launched.programs, launched.merges) == (programs, programs > 0 and batch * heads_k % programs > 0)
    kernels = list(compile_cached(call, "sm_90"))
    assert len(kernels) == 2 + launched.merges
    assert not any(usage.spills for usage, _ in kernels)


@pytest.mark.parametrize(
    ("batch", "heads_k", "capacity", "arch", "programs"),
    [(1, 1, 32768, "sm_90", 1), (1, 1, 8192, "sm_90", 0), (1, 8, 1024, "sm_90", 0), (8, 8, 32768, "sm_90", 1),
     (64, 8, 1024, "sm_90", 2), (96, 8, 1024, "sm_90", 3), (1, 1, 32768, "sm_80", 0)],
    ids=["some blocks", "a block each", "a block each, 8 heads", "many blocks", "two", "three", "no early start"],
)  # fmt: skip
def test_decode_programs_of_several_blocks_that_start_early_lie_evenly(batch, heads_k, capacity, arch, programs):
    """No multiprocessor has more of them than its tiles say, which all have room for."""
    call = cached_call(spec((1, capacity), (32, heads_k), (128, 128), BF16, batch=batch), BF16, page_size=0)
    decode = cached_calls(call, arch)[1]
    assert decode.most_at_once == programs
    usage, _ = compile_call(decode, arch)
    threads = 32 * decode.options["num_warps"]
    assert programs * threads * -(-usage.registers // 8) * 8 <= 1 << 16
    assert programs * (usage.shared + 1024) <= 228 << 10


@pytest.mark.parametrize(
    ("batch", "capacity", "length", "starts"),
    [(64, 16384, "of each", [False, True]), (16, 8192, "of each", [False, True]), (12, 8192, "of each", [True, True]),
     (64, 4096, "of each", [True, True]), (64, 2048, "of each", [True]), (17, 8192, None, [True, True]),
     (64, 4096, None, [True])],
    ids=["shares of many keys", "as many for each", "fewer", "pieces", "whole tasks", "no lengths",
         "no lengths, whole tasks"],
)  # fmt: skip
def test_shares_of_many_keys_start_when_the_kernel_before_has_ended(batch, capacity, length, starts):
    """Their merge starts early even so."""
    call = cached_call(spec((1, capacity), (32, 8), (128, 128), BF16, batch=batch), BF16, page_size=0)
    if length is None:
        call = call._replace(given=call.given._replace(cache_seqlens=None))
    _, *calls = cached_calls(call, "sm_90")
    assert [kernel.options.get("launch_pdl", False) for kernel in calls] == starts


@pytest.mark.parametrize(
    ("batch", "capacity", "load"),
    [(9, 1024, None), (10, 1024, "one"), (16, 1024, "one"), (20, 1024, None), (24, 1024, "two"), (32, 1024, "two"),
     (35, 1024, "three"), (48, 1024, "three"), (56, 1024, "two"), (64, 1024, "two"), (72, 1024, "three"),
     (80, 1024, "three"), (96, 1024, "three"), (112, 1024, "four"), (128, 1024, "four"), (200, 1024, "three"),
     (32, 2048, None), (64, 2048, "two"), (64, 2112, "split"), (64, 8192, "split"), (64, 8256, None), (62, 4096, None),
     (66, 4096, "split"), (67, 4096, None), (128, 3072, "four"), (128, 4096, None), (200, 4096, None)],
)  # fmt: skip
def test_tasks_in_order_of_length_have_a_program_each_where_most_of_their_last_round_is_used(batch, capacity, load):
    """But not where one sequence may be so long that all wait for it, unless it is split."""
    call = cached_call(spec((1, capacity), (32, 8), (128, 128), BF16, batch=batch), BF16, page_size=0)
    assert decode_config.whole_tasks(call, 132) == load


@pytest.mark.parametrize(
    ("batch", "heads_q", "load"),
    [(136, 32, "few"), (144, 32, "three"), (150, 32, "three"), (160, 32, "two"), (176, 32, "few"), (224, 32, "two"),
     (320, 32, "three"), (160, 256, "three")],
)  # fmt: skip
def test_tasks_of_many_rounds_that_are_alike_are_whole_unless_their_last_round_leaves_much_unused(batch, heads_q, load):
    """Of 16 rows; those of 32 are whole anyway."""
    call = cached_call(spec((1, 1024), (heads_q, 8), (128, 128), BF16, batch=batch), BF16, page_size=0)
    call = call._replace(given=call.given._replace(cache_seqlens=None))
    assert decode_config.load_of(call, 132) == load


@pytest.mark.parametrize(
    ("batch", "capacity", "ordered"),
    [(16, 1024, False), (64, 1024, True), (64, 4096, True), (257, 1024, False), (64, None, False)],
)
def test_the_longest_sequences_come_first_where_tasks_wait(batch, capacity, ordered):
    """Not where all run at once, where there are too many sequences to look through, and where all are as long."""
    call = cached_call(spec((1, capacity or 1024), (32, 8), (128, 128), BF16, batch=batch), BF16, page_size=0)
    if capacity is None:
        call = call._replace(given=call.given._replace(cache_seqlens=None))
    assert decode_launch.decode_spec(call, 0, "sm_90", 132).in_order == ordered


@pytest.mark.parametrize(
    ("batch", "heads_k", "capacity", "arch", "shared"),
    [(1, 8, 1024, "sm_90", 32 << 10), (16, 1, 16384, "sm_90", 19 << 10), (1, 8, 1024, "sm_120", 0)],
    ids=["one for each multiprocessor", "four", "a GPU that leaves less"],
)
def test_programs_that_merge_share_the_memory_that_is_left_on_a_multiprocessor(batch, heads_k, capacity, arch, shared):
    call = cached_call(spec((1, capacity), (32, heads_k), (128, 128), BF16, batch=batch), BF16, page_size=0)
    *_, merge = cached_calls(call, arch)
    assert merge.shared == shared


@pytest.mark.parametrize("heads_k", [1, 8])
@pytest.mark.parametrize("num_splits", [0, 1], ids=["shares", "one part"])
def test_decode_asks_for_the_first_keys_before_it_waits_for_queries(num_splits, heads_k):
    case = spec((1, 4096), (32, heads_k), (128, 128), BF16)
    _, (_, compiled), *_ = compile_cached(cached_call(case, BF16, page_size=0), "sm_90", num_splits)
    code = [text for _, text in machine_code(compiled)]
    first = next(i for i, text in enumerate(code) if "LDGSTS" in text)
    assert not any(re.search(r"STS\.128", text) for text in code[:first])  # q, on its way to a product


@pytest.mark.parametrize("page_size", [0, 16, 256], ids=["in one piece", "pages of 16", "pages of 256"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("stored", [BF16, FP8], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("num_splits", [0, 1], ids=["shares", "one part"])
def test_decode_loads_keys_and_values_16_bytes_wide_and_blocks_ahead(num_splits, stored, dim, page_size):
    case = spec((1, 32768), (32, 8), (dim, dim), BF16, right=0)
    call = cached_call(case, stored, page_size)
    _, (usage, compiled), *_ = compile_cached(call, "sm_90", num_splits)
    widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)", compiled.asm["ptx"])
    assert set(widths) == {"0x10"}
    tiles = decode_config.choose(call, "sm_90", 132)
    assert not usage.spills, usage
    in_flight = (tiles.num_stages - 1) * tiles.tile_n * 2 * dim * stored.itemsize  # blocks of K and V
    waits = set(re.findall(r"cp\.async\.wait_group\s+(\w+)", compiled.asm["ptx"]))
    assert {int(groups, 0) for groups in waits} == {0, 2 * (tiles.num_stages - 2)}  # K, V of later blocks
    loops = re.findall(r"scf\.(for|while)", compiled.asm["ttgir"])
    assert loops == ["for"]  # over the blocks of all tasks: none ends with a task
    beside = 16 * max((dim + tiles.tile_n) * BF16.itemsize, dim * FLOAT.itemsize)  # q and p, or out
    assert in_flight <= usage.shared <= in_flight + beside + 1024, usage  # and what numbers go from thread to thread


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("heads_k", [1, 8])
def test_the_merge_starts_early_and_then_waits_for_memory_once(arch, heads_k):
    case = spec((1, 32768), (32, heads_k), (128, 128), BF16)
    _, (_, decoding), (_, merging) = compile_cached(cached_call(case, BF16, page_size=0), arch)
    early = arch != "sm_80"
    for kernel in (decoding, merging):
        ptx = kernel.asm["ptx"]
        starts, waits = "griddepcontrol.launch_dependents" in ptx, "griddepcontrol.wait" in ptx
        assert starts == waits == kernel.metadata.launch_pdl == early
    if early:  # what the merge reads before it waits must be there when it starts
        marks = ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global", "cp.async")
        found = [decoding.asm["ptx"].index(mark) for mark in marks]
        assert found == sorted(found)
    code = [text for _, text in machine_code(merging)]
    of_parts = [i for i, text in enumerate(code) if re.search(r"LDG\S*\.STRONG", text)]
    assert not any("SHFL" in text for text in code[of_parts[0] : of_parts[-1]])
    if early:  # all whole-number division before the wait, and an end for programs with nothing to merge
        divisions = [i for i, text in enumerate(code) if re.search(r"I2F\S*\.RP", text)]
        ends = next(i for i, text in enumerate(code) if "EXIT" in text and "PREEXIT" not in text)
        waits = [i for i, text in enumerate(code) if "ACQBULK" in text]  # of the first program, if it is to end; of all
        assert ends < waits[0]
        assert max(divisions) < waits[-1] < of_parts[0]


@pytest.mark.parametrize("length", [None, 1000], ids=["the whole cache", "one number for all"])
def test_programs_of_a_whole_task_let_the_next_kernel_start_when_they_are_done_with_their_keys(length):
    """Earlier, its programs would take the places of those that end first, two or more in one multiprocessor."""
    call = cached_call(spec((1, 1024), (32, 8), (128, 128), BF16, batch=16), BF16, page_size=0)
    call = call._replace(given=call.given._replace(cache_seqlens=length))
    _, (_, decoding) = compile_cached(call, "sm_90")
    code = [text for _, text in machine_code(decoding)]
    marks = "ACQBULK", "HMMA", "PREEXIT", "STG"  # waits, multiplies, lets others start, stores
    found = [max(i for i, text in enumerate(code) if mark in text) for mark in marks]
    assert found == sorted(found)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("page_size", "num_splits"), [(0, 1), (16, 0)])
def test_every_feature_of_a_cached_call_at_once_compiles(arch, page_size, num_splits):
    case = spec((5, 1024), (6, 2), (80, 48), torch.float16, scale=-0.3, **FEATURES)
    stored = torch.float16 if arch == "sm_80" else FP8
    call = cached_call(case, stored, page_size, terms=True)
    assert len(list(compile_cached(call, arch, num_splits))) == 3 - num_splits


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_feature_at_once_compiles(arch):
    case = spec((1000, 777), (6, 2), (80, 48), torch.float16, scale=-0.3, **FEATURES)
    for kernel, tensors in kernels_and_tensors(case, arch).values():
        compile_kernel(kernel, case, arch, *tensors)


HOPPER_FORWARD = pytest.mark.parametrize(
    ("dims", "seqlen"),
    [
        ((64, 64), 512), ((64, 64), 4096), ((96, 96), 4096), ((96, 128), 4096), ((128, 128), 4096), ((192, 128), 4096),
        ((192, 192), 4096), ((256, 256), 4096),
    ],
)  # fmt: skip


@pytest.mark.parametrize("mask", WINDOWS)
@HOPPER_FORWARD
def test_hopper_configs_compile_fit_and_do_not_spill_in_loops_with_products(mask, dims, seqlen):
    case = spec((seqlen, seqlen), (16, 16), dims, BF16, **WINDOWS[mask])
    usage, compiled = compile_hopper(case)
    assert usage.shared <= SHARED_MEMORY["sm_90"], usage
    assert not serializes_products(compiled), usage
    spills = spills_in_loops(compiled)
    message = f"triton {triton.__version__}, {usage}: spills by loop, the shortest first: {spills}"
    assert len(spills) == 2, message  # of all warpgroups: steady, and with a mask or a running maximum
    assert not any(spills), message
    for body in loops_with_products(compiled):
        assert sum("BAR.SYNC" in text for text in body) == 1  # its turn: the warps of a warpgroup do not meet
    assert not overwritten_operands(compiled), f"triton {triton.__version__}"
    assert not barriers_left_alone(compiled)
    assert barriers_by_threads(compiled)[0] == {1}  # with which roles begin and end
    numbers, own_barriers = arguments_of_roles(compiled)
    assert numbers == set(range(hopper_config.choose(case).warpgroups))
    assert own_barriers == ({0, *(1 + number for number in numbers - {0})} if SINCE_3_9 else set())


@pytest.mark.parametrize(
    ("dims", "seqlen", "page_size", "batch"),
    [
        ((128, 128), 1024, 0, 1), ((128, 128), 1024, 256, 1), ((128, 128), 1024, 16, 1), ((64, 64), 1024, 16, 1),
        ((64, 64), 4096, 16, 1), ((96, 96), 1024, 16, 1), ((192, 128), 1024, 16, 1), ((192, 192), 1024, 16, 1),
        ((256, 256), 1024, 16, 1), ((128, 128), 64, 0, 1), ((128, 128), 16, 16, 1), ((256, 256), 64, 0, 1),
        ((128, 128), 16, 0, 12), ((128, 128), 16, 16, 12), ((128, 128), 16, 0, 200), ((64, 64), 16, 0, 12),
        ((96, 96), 16, 16, 12), ((96, 128), 16, 0, 12), ((192, 128), 16, 0, 12), ((192, 192), 16, 0, 12),
    ],
)  # fmt: skip
def test_hopper_kernels_over_a_cache_compile_fit_and_do_not_spill_in_loops_with_products(
    page_size, dims, seqlen, batch
):
    """Keys of up to 64 queries are shared, of 12 sequences by as many programs as tiles, but those of 200 by none."""
    case = spec((seqlen, 8192), (32, 8), dims, BF16, batch=batch, right=0)
    usage, compiled = compile_hopper_cached(case, page_size)[0]
    assert usage.shared <= SHARED_MEMORY["sm_90"], usage
    assert not serializes_products(compiled), usage
    assert not any(spills := spills_in_loops(compiled)), f"triton {triton.__version__}, {usage}: {spills}"
    assert not overwritten_operands(compiled), f"triton {triton.__version__}"
    assert not barriers_left_alone(compiled)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("batch", "alike"), [(1, False), (2, False), (2, True), (16, False)])
def test_hopper_merges_compile_and_leave_place_for_others(dim, batch, alike):
    """Of 16 queries, of one sequence or two whose tiles have many pieces, of more that have few."""
    case = spec((16, 8192), (32, 8), (dim, dim), BF16, batch=batch, right=0)
    _, (usage, _) = compile_hopper_cached(case, alike=alike)
    assert usage.stack <= 8, usage
    assert usage.registers <= 128, usage
    assert usage.shared <= (0 if batch == 16 else 4 << 10), usage  # sums over warps, where these have other pieces


def test_a_merge_of_shares_may_read_the_lengths_before_it_waits():
    """It starts when these are there: the kernel before has waited for what came before it."""
    (_, sharing), _ = compile_hopper_cached(spec((16, 8192), (32, 8), (128, 128), BF16, batch=16, right=0))
    marks = ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global")
    found = [sharing.asm["ptx"].index(mark) for mark in marks]
    assert found == sorted(found)


@pytest.mark.skipif(not SINCE_3_9, reason="barriers are a pass of their own since triton 3.9")
@pytest.mark.parametrize("options", [*WINDOWS.values(), FEATURES], ids=[*WINDOWS, "window and soft cap"])
@HOPPER_FORWARD
def test_triton_finds_no_barrier_to_add_to_a_hopper_forward_kernel(options, dims, seqlen):
    case = spec((seqlen, seqlen), (16, 16), dims, BF16, **options)
    _, compiled = compile_hopper(case)
    before, *roles = barriers_of_roles(compiled)
    assert before[:2] == (0, 0)
    computing = roles[: hopper_config.choose(case).warpgroups]  # the others are one warp
    assert all(own == with_triton > 0 and not allocates for own, with_triton, allocates in computing), roles


@HOPPER_FORWARD
def test_what_warps_of_a_hopper_warpgroup_leave_for_each_other_has_barriers_of_its_own(dims, seqlen):
    _, compiled = compile_hopper(spec((seqlen, seqlen), (16, 16), dims, BF16))
    kinds = {
        "meets": r"barrier\.cta\.sync|bar\.sync",
        "copies": r"cp\.async\.bulk\.tensor",
        "writes": r"^ +store .*addrspace\(3\)|stmatrix",
        "reads": r"= (?:tail )?load .*addrspace\(3\)",
    }
    (function,) = re.findall(r"(?ms)^define internal .*?^}$", for_roles(compiled.asm["llir"]))
    done = [kind for line in function.splitlines() for kind, text in kinds.items() if re.search(text, line)]
    assert set(done) == set(kinds)
    for before, behind in pairwise(done):
        assert "meets" in (before, behind) or before == behind, (before, behind)


def test_triton_knows_a_hopper_kernel_by_what_is_done_to_it_too():
    _, compiled = compile_hopper(spec((512, 512), (16, 16), (64, 64), BF16))
    (_, backward), *_ = compile_hopper_backward(spec((512, 512), (16, 16), (64, 64), BF16))
    assert compiled.metadata.flashtile == backward.metadata.flashtile == compiling._what_is_done()


def test_hopper_kernels_are_compiled_by_a_ptxas_of_cuda_12(monkeypatch):
    def used():
        return compiling.compiler().get_ptxas(90).version

    by_itself = used()
    with compiling.for_hopper({}) as options:
        assert used().startswith("12.")
        assert set(options) == ({"ptx_version"} if used() != by_itself else set())
    assert used() == by_itself
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", compiling.compiler().get_ptxas(90).path)  # a choice of the user's
    with compiling.for_hopper({}) as options:
        assert used() == by_itself
        assert options == {}


@pytest.mark.parametrize(("said", "noted"), [(None, False), ("0", True), ("1", False)])
def test_hopper_kernels_have_line_numbers_if_the_environment_asks_for_them(said, noted, monkeypatch):
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    if said is not None:
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", said)
    compilation = triton.knobs.compilation
    before = compilation.disable_line_info
    with compiling.for_hopper({}):
        assert compilation.disable_line_info != noted
    assert compilation.disable_line_info == before


@pytest.mark.parametrize("mask", MASKS)
def test_a_steady_step_waits_for_its_last_product_half_way_through_the_softmax(mask):
    _, compiled = compile_hopper(spec((4096, 4096), (16, 16), (128, 128), BF16, **MASKS[mask]))
    for body in loops_with_products(compiled)[:1]:
        *_, last_wait = (i for i, text in enumerate(body) if "DEPBAR.LE gsb0" in text)
        exponentials = ["MUFU.EX2" in text for text in body]
        assert sum(exponentials) == 64  # of a thread: 64 x 128 scores, 128 threads
        assert 32 <= sum(exponentials[:last_wait]) < 42


WIDE = [(192, 128), (192, 192), (256, 128), (256, 256)]


def fits_and_keeps_its_products_in_flight(usage, compiled):
    """Whether a kernel of the backward pass does, and spills no register in a step."""
    spills = spills_in_loops(compiled)
    assert len(spills) in (2, 4), spills  # of each warpgroup one loop, or one for blocks with a mask, too
    assert usage.shared <= SHARED_MEMORY["sm_90"], usage
    assert not serializes_products(compiled), usage
    assert not any(spills), f"triton {triton.__version__}, {usage}"
    assert not barriers_left_alone(compiled)


@pytest.mark.parametrize("mask", WINDOWS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), *WIDE])
def test_hopper_backward_configs_compile_and_fit(mask, dims):
    case = spec((4096, 4096), (16, 16), dims, BF16, **WINDOWS[mask])
    kernels = compile_hopper_backward(case)
    for usage, compiled in kernels:
        fits_and_keeps_its_products_in_flight(usage, compiled)
    # outside the loops neither, but for two words of a tile, and two by 3.6; that of dQ where a tile begins, but for
    # these
    without = {(64, 64): kernels, (192, 128): kernels if mask != "window" else kernels[:1]}
    words = (2 if SINCE_3_9 else 4) if dims == (64, 64) and mask != "full" else 0
    for usage, _ in without.get(dims, kernels[:1] if dims in WIDE else []):
        assert usage.stack <= 4 * words, usage


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)])
def test_a_step_of_the_hopper_backward_pass_fences_what_it_wrote_once(dims):
    ((_, compiled),) = compile_hopper_backward(spec((4096, 4096), (16, 16), dims, BF16, right=0))
    for body in loops_with_products(compiled):
        assert sum("FENCE.VIEW.ASYNC" in text for text in body) == 1


@pytest.mark.parametrize("mask", WINDOWS)
def test_hopper_backward_config_for_few_keys_compiles_and_fits(mask):
    window = {"left": 30, "right": 40}
    case = spec((4096, 128), (16, 16), (128, 128), BF16, **{**WINDOWS, "window": window}[mask])
    for usage, compiled in compile_hopper_backward(case):
        fits_and_keeps_its_products_in_flight(usage, compiled)
        assert not usage.spills, usage


@pytest.mark.parametrize("dims", [(64, 64), (96, 72), (128, 128)])
def test_hopper_kernels_before_and_after_the_backward_pass_compile_and_do_not_spill(dims):
    from flashtile.backends.hopper.backward_launch import BEGIN, FINISH

    case = spec((4000, 4096), (16, 16), dims, BF16, batch=2)
    q, out = (torch.empty(2, 4000, 16, dim, dtype=BF16, device="meta") for dim in dims)
    lse, sums, added = torch.empty(2, 16, 4000, device="meta"), torch.empty(1), torch.empty(1, dtype=torch.int32)
    for launcher, tensors in ((BEGIN, (out, out, lse, lse, sums, added)), (FINISH, (q, sums, added))):
        (call,) = calls_of(launcher, case, *tensors)
        usage, _ = compile_call(call, "sm_90")
        assert not usage.spills, usage


def test_lengths_batch_and_heads_compile_no_other_variant_of_a_hopper_kernel():
    from flashtile.backends.hopper.backward import backward_kernel
    from flashtile.backends.hopper.backward_keys import keys_kernel
    from flashtile.backends.hopper.backward_queries import queries_kernel
    from flashtile.backends.hopper.backward_rows import begin_kernel, finish_kernel
    from flashtile.backends.hopper.forward import forward_kernel

    of_sizes = {
        "seqlen_q", "seqlen_k", "heads_q", "group", "row_blocks", "heads", "rounds", "window_left", "window_right",
        "stride_lb", "stride_lh", "stride_ls",  # of (B, Hq, Sq)
    }  # fmt: skip
    for kernel in (forward_kernel, backward_kernel, keys_kernel, queries_kernel, begin_kernel, finish_kernel):
        found = {p.name: p.do_not_specialize for p in kernel.params if p.name in of_sizes}
        assert found
        assert all(found.values()), (kernel.fn.__name__, found)


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)])
def test_hopper_backward_in_order_keeps_its_products_in_flight(dims, right):
    case = replace(spec((4096, 4096), (16, 16), dims, BF16, right=right), deterministic=True)
    ((usage, compiled),) = compile_hopper_backward(case)
    fits_and_keeps_its_products_in_flight(usage, compiled)
    assert "ld.acquire.gpu" in compiled.asm["ptx"]


def test_a_walk_over_tiles_carries_what_it_changes():
    """Triton does not carry a name round a loop that is bound, before it, to the value of another carried name."""
    ((_, compiled),) = compile_hopper_backward(spec((4096, 4096), (16, 16), (64, 64), BF16))
    loops = re.findall(r"scf\.for .*iter_args\((.*?)\) ->", compiled.asm["ttgir"])
    walks = [carried for carried in loops if "%dk" in carried and "%entry" in carried]
    assert len(walks) == hopper_config.BACKWARD_D64.keys // hopper_config.BACKWARD_D64.box_keys
    assert all(name in carried for carried in walks for name in ("%tile_before", "%before"))


def test_every_feature_at_once_compiles_for_hopper():
    case = spec((1000, 777), (6, 2), (80, 48), torch.float16, **FEATURES)
    compile_hopper(case)
    compile_hopper_backward(case)


def test_the_hopper_kernel_compiles_without_each_choice_that_the_ablation_switches_off():
    path = Path(__file__).parent.parent / "benchmarks/hopper_ablation.py"
    ablation = importlib.util.module_from_spec(found := importlib.util.spec_from_file_location("hopper_ablation", path))
    sys.modules["hopper_ablation"] = ablation  # where dataclass looks for it
    found.loader.exec_module(ablation)
    for choice in ablation.CHOICES.values():
        if choice.source:
            kernel = ablation.module_without(choice).forward_kernel
            compile_hopper(spec((4096, 4096), (16, 16), (192, 192), BF16, right=0), kernel)


def test_the_tables_are_the_architectures_tested_here():
    assert sorted(config.TABLES) == sorted(decode_config.TABLES) == sorted([*ARCHITECTURES, "interpreter"])


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "lengths", "told"),
    [(32, 8, True, True), (32, 8, False, True), (32, 1, True, True), (32, 1, False, False), (100, 100, True, False)],
    ids=["8 heads", "without lengths", "32 rows", "32 rows without lengths", "too many heads"],
)
def test_kernels_are_told_where_each_task_of_a_sequence_has_a_line(heads_q, heads_k, lengths, told):
    call = cached_call(spec((1, 8192), (heads_q, heads_k), (128, 128), BF16), BF16, page_size=0)
    if not lengths:
        call = call._replace(given=call.given._replace(cache_seqlens=None))
    decode = decode_launch.decode_spec(call, 0, "sm_90", 132)
    assert decode.line_each == told
    assert decode.width == (heads_k if heads_k < 100 else 25)


@pytest.mark.parametrize(
    ("batch", "heads", "capacity", "sums"),
    [(1, (32, 8), 8192, 32), (1, (32, 8), 512, 1), (1, (32, 1), 65536, 32), (240, (32, 1), 1024, 1),
     (1, (64, 1), 65536, 1)],
    ids=["blocks", "a block", "32 rows", "32 rows, two programs", "64 rows"],
)  # fmt: skip
def test_threads_keep_their_own_sums_where_programs_have_blocks_and_registers(batch, heads, capacity, sums):
    call = cached_call(spec((1, capacity), heads, (128, 128), BF16, batch=batch), BF16, page_size=0)
    decode = decode_launch.decode_spec(call, 0, "sm_90", 132)
    assert decode.sums == sums
    assert sums in (1, 8 * decode.tiles.num_warps)
