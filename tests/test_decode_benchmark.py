"""benchmarks/decode.py without a GPU: its points are valid calls, its truth is right, its figure is drawn."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parent.parent / "benchmarks/decode.py"
decode = importlib.util.module_from_spec(found := importlib.util.spec_from_file_location("decode_benchmark", PATH))
sys.modules["decode_benchmark"] = decode  # where dataclass looks for it
found.loader.exec_module(decode)

SMALL = [
    replace(point, batch=min(point.batch, 3), seqlen=512, seqlen_q=min(point.seqlen_q, 4)) for point in decode.POINTS
]
SMALL += [replace(point, dim=64) for point in SMALL[:1]]


def steps(point, count=1):
    return decode.make_steps(point, decode.make_caches([point], torch.device("cpu"), 2 * count << 20), count)


@pytest.mark.parametrize("point", dict.fromkeys(SMALL), ids=lambda point: point.name)
def test_the_truth_is_what_the_call_gives(point):
    (step,) = steps(point)
    k, v = ((x.float() if x.dtype == torch.bfloat16 else x) for x in (step.k, step.v))
    assert decode.relative_error(decode.ours(decode.Step(step.q.float(), k, v, step.settings)), step) < 1e-4


@pytest.mark.parametrize("name", ["flashtile", "naive PyTorch"])
def test_a_right_provider_is_within_the_budget_and_a_wrong_one_is_not(name):
    (step,) = steps(decode.Point(3, 32, 8, 512))
    out = ({"flashtile": decode.ours} | decode.PYTORCH)[name](step)
    assert decode.relative_error(out, step) < decode.BUDGET
    assert decode.relative_error(out.roll(1, dims=2), step) > decode.BUDGET
    out[-1] = torch.nan
    assert not decode.relative_error(out, step) < decode.BUDGET


def test_steps_have_caches_of_their_own():
    point = decode.Point(1, 32, 1, 512)
    found = steps(point, count=3)
    assert len({step.k.data_ptr() for step in found} | {step.v.data_ptr() for step in found}) == 6
    assert point.bytes_read == found[0].k.nbytes + found[0].v.nbytes


@pytest.mark.interpreter
def test_what_is_not_merged_launches_no_merge(monkeypatch):
    point = decode.Point(1, 4, 1, 512)
    (step,) = steps(point)
    step = decode.Step(step.q.float(), step.k.float(), step.v.float(), step.settings)
    monkeypatch.setattr(decode.decode_launch, "merge_kernel", None)  # of which there are no programs to be had
    decode.not_merged(step)
    with pytest.raises(TypeError):
        decode.ours(step)


def test_what_is_left_of_the_caches_makes_no_step():
    point = decode.Point(1, 32, 1, 512)
    caches = {torch.bfloat16: tuple(torch.zeros(5 * point.cache_elements // 2, dtype=torch.bfloat16) for _ in "kv")}
    assert len(decode.make_steps(point, caches, count=3)) == 2


@pytest.mark.parametrize("page_size", [0, 16, 256], ids=["in one piece", "pages of 16", "pages of 256"])
def test_the_pages_used_hold_the_keys_of_every_sequence(page_size):
    point = decode.Point(3, 32, 8, 512, ragged=True, page_size=page_size)
    (step,) = steps(point)
    (k, _), (begin, pages, in_last) = decode.in_pages(step), decode.pages_used(step)
    assert begin[-1] == len(pages)
    for b, length in enumerate(step.settings["cache_seqlens"].tolist()):
        mine = pages[begin[b] : begin[b + 1]].long()
        keys = k[mine].flatten(0, 1)[: (len(mine) - 1) * k.shape[1] + in_last[b]]
        at = step.settings["block_table"][b].long() if page_size else slice(b, b + 1)
        assert torch.equal(keys, step.k[at].flatten(0, 1)[:length])


def test_points_have_names_and_ratios_of_their_own():
    names = [point.name for point in decode.POINTS]
    assert len(set(names)) == len(names)
    rows = [{"point": name, "provider": "flashtile", "us": 2.0} for name in names]
    assert list(decode.ratios(rows, decode.POINTS)) == [
        "8,32,8,32768, Sq 4 / 8,32,8,32768",
        "8,32,8,32768, float8 / 8,32,8,32768",
        "64,32,8,1024…65536, float8 / 64,32,8,1024…65536",
    ]


def test_the_figure_is_drawn_from_a_document_with_gaps(tmp_path):
    rows = [
        {
            "point": point.name, "provider": name, "bytes_read": point.bytes_read, "of_copy": 0.9,
            "us": None if name == "SDPA cuDNN" or point.seqlen == 1024 else 5 + i,
        }
        for i, point in enumerate(decode.POINTS)
        for name in point.providers
    ]  # fmt: skip
    path = tmp_path / "decode.png"
    decode.save_figure({"device": {"name": "a GPU"}, "rows": rows}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
