"""Decoding over a cache of keys: microseconds, and how near reading the cache comes to the GPU's own copy; chunks of a
prompt over one: TFLOP/s.

    python benchmarks/decode.py benchmarks/results/decode-h200.json --plot benchmarks/results/decode-h200.png

Beside PyTorch's own, flash-attn-4, flashinfer and, by nvidia-cudnn-frontend, cuDNN with lengths and pages are timed
where they are installed. Every provider is checked against float64 first. Then calls over distinct caches, together
several times the L2 cache, are captured in a CUDA graph, six at least, as a model's layers make, which is timed in
random order among the providers' graphs. bfloat16, D 128 or --head-dim.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import typer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile import cached, flash_attn_with_kvcache
from flashtile.backends.hopper import cached_launch
from flashtile.backends.triton import decode_launch
from flashtile.bench.report import atomically, describe_machine
from flashtile.bench.timing import copy_bytes

DIM = 128  # unless another is asked for
BUDGET = 0.02  # of the largest |out|: a few roundings of bfloat16, which is what P and V enter a product in
BIG = 256 << 20  # bytes of K and V from which on the bandwidth counts, not the launches
ROUND_MS = 6
CALLS = 6  # of a graph at least: they follow one another, and may start early, as those of a model's layers
NOT_MERGED = "flashtile, not merged"
NO_LENGTHS, ONE_LENGTH = "flashtile, no lengths", "flashtile, one length"
Caches = dict[torch.dtype, tuple[Tensor, Tensor]]
Provider = Callable[["Step"], Tensor]


@dataclass(frozen=True)
class Point:
    """The sizes of a decode step, and how its cache is stored. ragged: lengths from a 64th of seqlen to seqlen; skewed:
    two of seqlen, the others of a 64th."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen: int
    ragged: bool = False
    skewed: bool = False
    page_size: int = 0  # 0: in one piece
    seqlen_q: int = 1
    stored: torch.dtype = torch.bfloat16
    dim: int = DIM

    @property
    def name(self) -> str:
        between = "…" if self.ragged else "|"
        length = f"{self.seqlen // 64}{between}{self.seqlen}" if self.ragged or self.skewed else f"{self.seqlen}"
        name = f"{self.batch},{self.heads_q},{self.heads_k},{length}"
        name += f", pages of {self.page_size}" if self.page_size else ""
        name += f", Sq {self.seqlen_q}" if self.seqlen_q > 1 else ""
        name += f", D {self.dim}" if self.dim != DIM else ""
        return name + (", float8" if self.stored == torch.float8_e4m3fn else "")

    @property
    def lengths(self) -> Tensor:
        """(B,) int32, in an order of no meaning."""
        first = self.seqlen // 64 if self.ragged or self.skewed else self.seqlen
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0))
        lengths = torch.linspace(first, self.seqlen, self.batch).int()
        if self.skewed:
            lengths[:-2], lengths[-2:] = first, self.seqlen
        return lengths[order]

    @property
    def is_chunk(self) -> bool:
        """Whether queries are so many that computing takes longer than reading keys."""
        return self.seqlen_q * self.heads_q // self.heads_k > 128

    @property
    def operations(self) -> float:
        """Floating-point operations, of the keys that each query sees."""
        pairs = self.seqlen_q * (self.lengths.double() - (self.seqlen_q - 1) / 2).sum().item()
        return 4 * self.heads_q * self.dim * pairs

    @property
    def cache_elements(self) -> int:
        return self.batch * self.seqlen * self.heads_k * self.dim

    @property
    def bytes_read(self) -> int:
        """Of K and V, those that are before a sequence's end."""
        return 2 * int(self.lengths.long().sum()) * self.heads_k * self.dim * self.stored.itemsize

    @property
    def providers(self) -> dict[str, Provider]:
        """PyTorch's own have neither lengths, pages, scales nor a mask aligned to the bottom right: beside them stands
        what ours takes without lengths, and with one for all sequences, too.
        """
        plain = self == Point(self.batch, self.heads_q, self.heads_k, self.seqlen, dim=self.dim)
        alike = {NO_LENGTHS: without_lengths, ONE_LENGTH: with_one_length}
        return {"flashtile": ours} | (alike | PYTORCH if plain else {}) | LIBRARIES


RAGGED, LARGE, MANY = Point(64, 32, 8, 65536, ragged=True), Point(8, 32, 8, 32768), Point(64, 32, 8, 4096)
CHUNK, CHUNKS = Point(1, 32, 8, 8192, seqlen_q=1024), Point(16, 32, 8, 16384, ragged=True, seqlen_q=256)
MULTI_QUERY = [Point(1, 32, 1, 512 << i) for i in range(8)]  # FlashAttention-2, figure 5, of one sequence
POINTS = [
    Point(1, 32, 8, 131072), LARGE, MANY, RAGGED, Point(16, 32, 1, 16384), Point(1, 32, 8, 1024), *MULTI_QUERY,
    Point(16, 32, 8, 1024), Point(64, 32, 8, 1024), Point(128, 32, 8, 1024),
    *(replace(point, page_size=size) for point in (MANY, RAGGED) for size in (16, 256)),
    replace(LARGE, seqlen_q=4), *(replace(point, stored=torch.float8_e4m3fn) for point in (LARGE, RAGGED)),
    *(replace(CHUNK, seqlen_q=n) for n in (16, 64, 256, 4096)), replace(CHUNK, batch=16, seqlen_q=16),
    replace(CHUNK, batch=4, seqlen_q=64), *(Point(16, 32, 8, 8192, skewed=True, seqlen_q=n) for n in (16, 64)),
    replace(RAGGED, ragged=False, skewed=True),
    *(replace(point, page_size=size) for point in (CHUNK, CHUNKS) for size in (0, 16)),
    Point(4, 32, 8, 32768, seqlen_q=512),
]  # fmt: skip


class Step(NamedTuple):
    """What a call is given; settings: keyword arguments of flash_attn_with_kvcache."""

    q: Tensor
    k: Tensor
    v: Tensor
    settings: dict[str, Any]


def make_caches(points: list[Point], device: torch.device, least_bytes: int = 0) -> Caches:
    """Normal K and V of each dtype, as many as the largest point of it needs and least_bytes at least."""
    caches = {}
    for dtype in dict.fromkeys(point.stored for point in points):
        most = max(point.cache_elements for point in points if point.stored == dtype)
        size = max(most, least_bytes // dtype.itemsize)
        caches[dtype] = tuple(torch.randn(size, device=device, dtype=torch.bfloat16).to(dtype) for _ in "kv")
    return caches


def make_steps(point: Point, caches: Caches, count: int) -> list[Step]:
    """Steps over different slices of the caches, one after the other; fewer where no more lie whole in these."""
    device = caches[point.stored][0].device
    q = torch.randn(point.batch, point.seqlen_q, point.heads_q, point.dim, device=device).bfloat16()
    settings: dict[str, Any] = {"cache_seqlens": point.lengths.to(device), "causal": point.seqlen_q > 1}
    rows = (point.batch, point.seqlen)
    if point.page_size:
        rows = (point.batch * point.seqlen // point.page_size, point.page_size)
        settings["block_table"] = torch.randperm(rows[0], device=device).view(point.batch, -1).int()
    if point.stored == torch.float8_e4m3fn:
        settings |= {f"{x}_descale": torch.linspace(0.5, 1, point.heads_k, device=device) for x in "kv"}
    n = point.cache_elements
    slices = zip(*(x[: x.numel() // n * n].split(n)[:count] for x in caches[point.stored]), strict=True)
    return [Step(q, *(x.view(*rows, point.heads_k, point.dim) for x in pair), settings) for pair in slices]


def truth(step: Step, b: int) -> Tensor:
    """(Sq, Hq, D) of sequence b, in float64."""
    q, settings = step.q[b].double(), step.settings
    at = settings["block_table"][b].long() if "block_table" in settings else slice(b, b + 1)
    n = int(settings["cache_seqlens"][b])
    k, v = (x[at].flatten(0, 1)[:n].double() for x in (step.k, step.v))
    if "k_descale" in settings:
        k, v = (x * settings[name][:, None].double() for x, name in ((k, "k_descale"), (v, "v_descale")))
    scores = torch.einsum("qhgd,nhd->hgqn", q.unflatten(1, (k.shape[1], -1)), k) / q.shape[-1] ** 0.5
    if settings["causal"]:
        query, key = torch.arange(len(q), device=q.device)[:, None], torch.arange(n, device=q.device)
        scores = scores.masked_fill(key > query + n - len(q), -torch.inf)
    return torch.einsum("hgqn,nhd->qhgd", scores.softmax(-1), v).flatten(1, 2)


def ours(step: Step) -> Tensor:
    return flash_attn_with_kvcache(step.q, step.k, step.v, **step.settings)


def without_lengths(step: Step) -> Tensor:
    """All keys of the cache are read, as PyTorch's own do."""
    return flash_attn_with_kvcache(step.q, step.k, step.v)


def with_one_length(step: Step) -> Tensor:
    """All keys of the cache are read, as many of each sequence as the call says."""
    return flash_attn_with_kvcache(step.q, step.k, step.v, cache_seqlens=step.k.shape[1])


def not_merged(step: Step) -> Tensor:
    """The kernels before the merge alone: what merging costs is what this leaves out. Its result is none."""
    passes = {decode_launch: decode_launch.CachedPass(), cached_launch: cached_launch.CachedForward()}
    with mock.patch.dict(cached.PREPARED, clear=True), contextlib.ExitStack() as patches:
        for launch, cached_pass in passes.items():
            empty = functools.partial(lambda merge_call, *of: merge_call(*of)._replace(grid=0), launch.merge_call)
            patches.enter_context(mock.patch.multiple(launch, CACHED=cached_pass, merge_call=empty))
        return ours(step)


def sdpa(backend: SDPBackend) -> Provider:
    def call(step: Step) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in step[:3])
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


def naive(step: Step) -> Tensor:
    """Products and a softmax, K and V repeated for each query head."""
    group = step.q.shape[2] // step.k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in step[:3])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)


def flash_attn_4(step: Step) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # on Hopper in one split

    if "k_descale" in step.settings:
        raise ValueError("it has no float8 cache for bfloat16 queries")
    lengths, pages = step.settings["cache_seqlens"], step.settings.get("block_table")
    result = flash_attn_varlen_func(*step[:3], seqused_k=lengths, page_table=pages, causal=step.settings["causal"])
    return result[0] if isinstance(result, tuple) else result


PAGE_SIZE = 16  # of a cache in one piece, for those who want pages


def in_pages(step: Step) -> tuple[Tensor, Tensor]:
    """K and V as (pages, page_size, Hk, D)."""
    if "block_table" in step.settings:
        return step.k, step.v
    return step.k.view(-1, PAGE_SIZE, *step.k.shape[2:]), step.v.view(-1, PAGE_SIZE, *step.v.shape[2:])


def pages_used(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """(B + 1,) where each sequence's pages begin among all that are used; those; (B,) tokens in the last of each."""
    lengths, table = step.settings["cache_seqlens"], step.settings.get("block_table")
    k, _ = in_pages(step)
    if table is None:
        table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(len(lengths), -1)
    counts = -(-lengths // k.shape[1])
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return functional.pad(counts.cumsum(0).int(), (1, 0)), table[used], (lengths - 1) % k.shape[1] + 1


class FlashInfer:
    """Its plan is for the lengths and pages of the steps of one point, which have the same settings."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] | None = None

    def __call__(self, step: Step) -> Tensor:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if step.q.shape[1] > 1 or "k_descale" in step.settings:
            raise ValueError("asked for one query of a bfloat16 cache alone")
        k, v = in_pages(step)
        if self.settings is not step.settings:
            room = torch.zeros(256 << 20, dtype=torch.uint8, device=k.device)
            self.decoding = BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
            heads, dtypes = (step.q.shape[2], k.shape[2]), {"q_data_type": step.q.dtype, "kv_data_type": k.dtype}
            self.decoding.plan(*pages_used(step), *heads, k.shape[3], k.shape[1], **dtypes)
            self.settings = step.settings
        return self.decoding.run(step.q[:, 0], (k, v))[:, None]


class CuDNN:
    """cuDNN by its own frontend, which hands it lengths and pages: a graph for the steps of one point, which have the
    same settings.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] | None = None

    def __call__(self, step: Step) -> Tensor:
        import cudnn

        if "k_descale" in step.settings:
            raise ValueError("it has no float8 cache for bfloat16 queries")
        if self.settings is not step.settings:
            self.plan(step)
        q, k, v = (x.transpose(1, 2) for x in step[:3])
        out = torch.empty_like(step.q)
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        tensors = {"q": q, "k": k, "v": v, "out": out.transpose(1, 2)} | self.inputs
        self.graph.execute({self.named[name]: x for name, x in tensors.items()}, self.room, handle=self.handle)
        return out

    def plan(self, step: Step) -> None:
        """The graph, its tensors by name, and those that all steps have."""
        import cudnn

        q, k, v = (x.transpose(1, 2) for x in step[:3])
        lengths = step.settings["cache_seqlens"].view(-1, 1, 1, 1)
        self.inputs = {"seq_len_q": torch.full_like(lengths, q.shape[2]), "seq_len_kv": lengths}
        options: dict[str, Any] = {"use_causal_mask_bottom_right": step.settings["causal"]}
        if "block_table" in step.settings:
            table = step.settings["block_table"][:, None, :, None]
            self.inputs |= {"paged_attention_k_table": table, "paged_attention_v_table": table}
            options["paged_attention_max_seq_len_kv"] = table.shape[2] * k.shape[2]
        self.handle = cudnn.create_handle()
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT, handle=self.handle,
        )  # fmt: skip
        self.named = {x: self.graph.tensor_like(y) for x, y in {"q": q, "k": k, "v": v, **self.inputs}.items()}
        out, _ = self.graph.sdpa(
            **self.named, **options, attn_scale=q.shape[-1] ** -0.5, use_padding_mask=True, generate_stats=False
        )
        self.named["out"] = out.set_output(True).set_dim(q.shape).set_stride(q.stride())
        self.graph.build([cudnn.heur_mode.A])
        self.room = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
        self.settings = step.settings


PYTORCH: dict[str, Provider] = {
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "naive PyTorch": naive,
}
LIBRARIES: dict[str, Provider] = {
    name: provider
    for name, module, provider in (
        ("flash-attn 4", "flash_attn", flash_attn_4),
        ("flashinfer", "flashinfer", FlashInfer()),
        ("cuDNN, with lengths", "cudnn", CuDNN()),
    )
    if importlib.util.find_spec(module)
}


def relative_error(out: Tensor, step: Step) -> float:
    """The largest of sampled sequences, relative to the sequence's largest |out|; NaN where one has NaN."""
    sample = {b: truth(step, b) for b in {0, len(out) // 2, len(out) - 1}}
    errors = [(out[b] - exact).abs().max() / exact.abs().max() for b, exact in sample.items()]
    return torch.stack(errors).max().item()


def captured(provider: Provider, steps: list[Step]) -> torch.cuda.CUDAGraph:
    """A graph of one call for each step, that has run once."""
    provider(steps[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            provider(step)
    graph.replay()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def checked(provider: Provider, steps: list[Step]) -> tuple[float, torch.cuda.CUDAGraph]:
    """Its error, and the graph to time; ValueError where it is wrong."""
    error = relative_error(provider(steps[0]), steps[0])
    if not error < BUDGET:
        raise ValueError(f"wrong by {error:.2g} of the largest |out|")
    return error, captured(provider, steps)


def reason_of(failure: Exception) -> str:
    """Why a provider has no speed."""
    return f"{type(failure).__name__}: {failure}"[:200]


def steps_past_l2(point: Point, l2_bytes: int) -> int:
    """How many steps together read three times what the L2 cache holds."""
    return -(-3 * l2_bytes // point.bytes_read)


def steps_of_graph(point: Point, caches: Caches, l2_bytes: int) -> list[Step]:
    """So many as together read three times what the L2 cache holds, and CALLS at least, over the same slices again."""
    steps = make_steps(point, caches, steps_past_l2(point, l2_bytes))
    return steps * -(-CALLS // len(steps))


def replays(graph: torch.cuda.CUDAGraph) -> int:
    """How many fill a round."""
    return max(1, int(ROUND_MS / replay_ms(graph, 1)))


def measure(point: Point, caches: Caches, l2_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each provider: one that is wrong or raises has a reason in place of a speed."""
    steps = steps_of_graph(point, caches, l2_bytes)
    rows: dict[str, dict[str, Any]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, provider in point.providers.items():
        rows[name] = {"point": point.name, "bytes_read": point.bytes_read, "provider": name, "us": None}
        try:
            rows[name]["relative_error"], graphs[name] = checked(provider, steps)
        except Exception as failure:  # whatever another library raises is why it has no number
            rows[name]["reason"] = reason_of(failure)
    if "flashtile" in graphs and not point.is_chunk:
        graphs[NOT_MERGED] = captured(not_merged, steps)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    counts = {name: replays(graph) for name, graph in graphs.items()}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            times[name].append(replay_ms(graphs[name], counts[name]) / len(steps) * 1e3)
    for name in graphs.keys() & rows.keys():
        rows[name] |= {"us": (us := statistics.median(times[name])), "rounds_us": times[name]}
        rows[name]["gb_per_s"] = point.bytes_read / us / 1e3
        if point.is_chunk:
            rows[name]["tflops"] = point.operations / us / 1e6
    if NOT_MERGED in graphs:
        rows["flashtile"]["merge_us"] = rows["flashtile"]["us"] - statistics.median(times[NOT_MERGED])
    return list(rows.values())


def compile_for(point: Point) -> None:
    """In a process of its own: fills triton's cache on disk with a point's kernels."""
    ours(make_steps(point, make_caches([point], torch.device("cuda")), 1)[0])


def ratios(rows: list[dict[str, Any]], points: list[Point]) -> dict[str, float]:
    """What float8, and four queries, take of a step's time with bfloat16 and one query."""
    us = {row["point"]: row["us"] for row in rows if row["provider"] == "flashtile" and row["us"]}
    pairs = [(p, replace(p, stored=torch.bfloat16, seqlen_q=1)) for p in points if not p.page_size]
    return {f"{a.name} / {b.name}": us[a.name] / us[b.name] for a, b in pairs if a != b and {a.name, b.name} <= set(us)}


def save_figure(document: dict[str, Any], path: Path) -> None:
    """The multi-query series and, of caches that are big, the bandwidth."""
    from flashtile.bench.plots import save_decoding  # needs matplotlib, which measuring does not

    dim = document.get("head_dim", DIM)
    lengths = {replace(point, dim=dim).name: point.seqlen for point in MULTI_QUERY}
    providers = dict.fromkeys(row["provider"] for row in document["rows"])
    lines: dict[str, dict[int, float]] = {name: {} for name in providers}
    bars: dict[str, dict[str, float]] = {name: {} for name in providers}
    for row in document["rows"]:
        if row["us"] and row["point"] in lengths:
            lines[row["provider"]][lengths[row["point"]]] = row["us"]
        if row["us"] and row["bytes_read"] >= BIG and "tflops" not in row:
            bars[row["provider"]][row["point"]] = row["of_copy"]
    save_decoding(lines, bars, path, f"Decoding on one {document['device']['name']}, bfloat16, head dim {dim}")


def run(rounds: int, dim: int) -> dict[str, Any]:
    """The whole document; prints each row as it comes."""
    device, points = torch.device("cuda"), [replace(point, dim=dim) for point in POINTS]
    with ProcessPoolExecutor(8, get_context("spawn")) as helpers:
        list(helpers.map(compile_for, {replace(point, seqlen=4096, ragged=False) for point in points}))
    copy, l2_bytes = copy_bytes(device), torch.cuda.get_device_properties(device).L2_cache_size
    typer.echo(f"copy: {copy / 1e9:.0f} GB/s")
    caches = make_caches(points, device, 3 * l2_bytes)
    rows = []
    for point in points:
        for row in measure(point, caches, l2_bytes, rounds):
            rows.append(row)
            if row["us"] is None:
                typer.echo(f"{row['point']:34} {row['provider']:14} {row['reason']}")
                continue
            row["of_copy"] = row["gb_per_s"] * 1e9 / copy
            merge = f", merge {row['merge_us'] / row['us']:.1%}" if "merge_us" in row else ""
            speed = f"{row['us']:8.1f} us {row['gb_per_s']:5.0f} GB/s {row['of_copy']:.2f} of the copy"
            if "tflops" in row:
                speed = f"{row['us']:8.1f} us {row['tflops']:5.0f} TFLOP/s"
            typer.echo(f"{row['point']:34} {row['provider']:14} {speed}, error {row['relative_error']:.1e}{merge}")
        torch.cuda.empty_cache()  # of the graphs' memory
    for name, ratio in ratios(rows, points).items():
        typer.echo(f"{name}: {ratio:.2f}")
    typer.echo(f"at most {torch.cuda.max_memory_reserved() / 1e9:.0f} GB reserved")
    return {**describe_machine(device), "head_dim": dim, "copy_gb_per_s": copy / 1e9, "rows": rows}


def main(output: Path, plot: Path | None = None, rounds: int = 5, only_plot: bool = False, head_dim: int = DIM) -> None:
    """Times every point, prints it and writes JSON; with --only-plot draws what the JSON has."""
    document = json.loads(output.read_text()) if only_plot else run(rounds, head_dim)
    if not only_plot:
        atomically(output, lambda temporary: temporary.write_text(json.dumps(document, indent=1)))
    if plot is not None:
        save_figure(document, plot)


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    typer.run(main)
