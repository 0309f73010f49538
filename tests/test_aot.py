"""Every shipped configuration compiles, without a GPU, for every architecture that has a table."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import triton
from aot import (
    compile_hopper,
    compile_hopper_backward,
    compile_kernel,
    compile_launch,
    kernels_and_tensors,
    overwritten_operands,
    serializes_products,
    spills_in_loops,
)
from cases import BF16, FLOAT, spec

from flashtile.backends.hopper import config as hopper_config
from flashtile.backends.triton import config
from flashtile.backends.triton.decode import DECODE, MERGE, DecodeSpec

ARCHITECTURES = ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1201"]
SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_120": 101_376, "gfx942": 65_536, "gfx1201": 65_536}
MASKS = {"full": {}, "causal": {"right": 0}}
FEATURES = {"left": 300, "right": 40, "softcap": 20.0}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bfloat16", "float32"])
def test_shipped_configs_compile_fit_and_do_not_spill(arch, mask, dim, dtype):
    case = spec((4096, 4096), (16, 16), (dim, dim), dtype, **MASKS[mask])
    for name, (kernel, tensors) in kernels_and_tensors(case).items():
        usage, compiled = compile_kernel(kernel, case, arch, *tensors)
        assert usage.shared <= SHARED_MEMORY[arch], f"{name}: {usage}"
        if arch in ("sm_80", "sm_90"):
            assert not usage.spills, f"{name} spills registers: {usage}"
        if arch == "sm_90" and dtype == BF16:
            assert not serializes_products(compiled), f"{name} does not overlap its products"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_decode_kernels_compile_fit_and_do_not_spill(arch, dim, seqlen_q):
    case = DecodeSpec(spec((seqlen_q, 32768), (32, 8), (dim, dim), BF16, right=0), page_size=16, splits=7)
    q = torch.empty(2, seqlen_q, 32, dim, dtype=BF16)
    pages = torch.empty(9, 16, 8, dim, dtype=BF16)
    lengths, table = torch.empty(2, dtype=torch.int64), torch.empty(2, 2048, dtype=torch.int32)
    out_parts, lse_parts = torch.empty(7, 2, 32, seqlen_q, dim), torch.empty(7, 2, 32, seqlen_q)
    result = torch.empty(2, seqlen_q, 32, dim, dtype=BF16), torch.empty(2, 32, seqlen_q)
    for launcher, tensors in (
        (DECODE, (q, pages, pages, lengths, lengths, table, out_parts, lse_parts)),
        (MERGE, (out_parts, lse_parts, *result)),
    ):
        usage = compile_launch(launcher, case, arch, *tensors)
        assert usage.shared <= SHARED_MEMORY[arch], usage
        assert not usage.spills or arch not in ("sm_80", "sm_90"), usage


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_feature_at_once_compiles(arch):
    case = spec((1000, 777), (6, 2), (80, 48), torch.float16, scale=-0.3, **FEATURES)
    for kernel, tensors in kernels_and_tensors(case).values():
        compile_kernel(kernel, case, arch, *tensors)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dim", "seqlen"), [(64, 512), (64, 4096), (128, 4096), (256, 4096)])
def test_hopper_configs_compile_fit_and_do_not_spill_in_loops_with_products(mask, dim, seqlen):
    case = spec((seqlen, seqlen), (16, 16), (dim, dim), BF16, **MASKS[mask])
    usage, compiled = compile_hopper(case)
    assert usage.shared <= SHARED_MEMORY["sm_90"], usage
    assert not serializes_products(compiled), usage
    spills = spills_in_loops(compiled)
    loops = hopper_config.choose(case).warpgroups * (3 if mask == "causal" else 2)  # with a mask, careful, steady
    assert spills == [0] * loops, f"triton {triton.__version__}, {usage}: spills by loop, the shortest first: {spills}"
    assert not overwritten_operands(compiled), f"triton {triton.__version__}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_backward_configs_compile_and_fit(mask, dim):
    case = spec((4096, 4096), (16, 16), (dim, dim), BF16, **MASKS[mask])
    usage, compiled = compile_hopper_backward(case)
    assert usage.shared <= SHARED_MEMORY["sm_90"], usage
    assert not serializes_products(compiled), usage
    if dim == 64:  # above, some addresses are kept in memory, most by the compiler of Triton 3.9
        assert not usage.spills, usage


def test_a_walk_over_tiles_carries_what_it_changes():
    """Triton does not carry a name round a loop that is bound, before it, to the value of another carried name."""
    _, compiled = compile_hopper_backward(spec((4096, 4096), (16, 16), (64, 64), BF16))
    loops = re.findall(r"scf\.for .*iter_args\((.*?)\) ->", compiled.asm["ttgir"])
    walks = [carried for carried in loops if "%dk" in carried and "%entry" in carried]
    assert len(walks) == hopper_config.BACKWARD_D64.keys // hopper_config.BACKWARD_D64.box_keys
    assert all("%tile_before" in carried and "%sums_row" in carried for carried in walks)


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
            compile_hopper(spec((4096, 4096), (16, 16), (128, 128), BF16), kernel)


def test_the_tables_are_the_architectures_tested_here():
    assert sorted(config.TABLES) == sorted([*ARCHITECTURES, "interpreter"])
