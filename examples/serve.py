"""Continuous batching: a transformers model serves ragged requests from one PagedCache.

    python examples/serve.py --check

The model is transformers' own LlamaForCausalLM, with random weights; only its attention is registered here. Requests
arrive and finish at different times. One is admitted when there are pages for its prompt; where a running one finds
no page for its next token, the latest one makes room: it is preempted, and resumed from the tokens it has.

Legend: B sequences, S new tokens of each, L layers, Hq query and Hk key/value heads, D head dim.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from flashtile import flash_attn_with_kvcache
from flashtile.commands import parse_device, parse_dtype, wide_console
from flashtile.kvcache import OutOfPagesError, PagedCache

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Pages:
    """Where the sequences of one call keep their keys and values. All layers share a page table."""

    k: Tensor  # (num_pages, page_size, L, Hk, D)
    v: Tensor  # (num_pages, page_size, L, Hk, D)
    block_table: Tensor  # (B, pages of the longest)
    cache_seqlens: Tensor  # (B,)


def paged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, scaling: float, pages: Pages, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What each attention layer of the model calls, rotary applied: new keys go to their pages, queries see them all.

    Args:
        query: (B, Hq, S, D).
        key, value: (B, Hk, S, D).
        attention_mask: None, as no mask function is registered for this attention: it is causal.
        pages: the keyword argument of the model's call, which transformers hands down to here.

    Returns:
        (B, S, Hq, D), and no attention weights.
    """
    layer = module.layer_idx
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attn_with_kvcache(
        q, pages.k[:, :, layer], pages.v[:, :, layer], k, v,
        cache_seqlens=pages.cache_seqlens, block_table=pages.block_table, softmax_scale=scaling, causal=True,
    )  # fmt: skip
    return out, None


ATTENTION = "paged_tiles"  # no "flash" in the name, which transformers would look up among its own kernels
AttentionInterface.register(ATTENTION, paged_attention)


@dataclass(eq=False)
class Request:
    """A prompt of at least one token, behind the prefix that all share, and what has been generated for it."""

    prompt: list[int]
    max_new_tokens: int
    arrival: int  # the server's step from which on it may be admitted
    generator: torch.Generator  # its own, so that sampled tokens depend on nothing else in the batch
    generated: list[int] = field(default_factory=list)
    sequence: int = -1  # its handle in the cache, while it runs


class Server:
    """Runs up to `batch` requests at a time, first come first served, on a pool of pages."""

    def __init__(
        self, model: LlamaForCausalLM, *, batch: int, num_pages: int, page_size: int, temperature: float,
        prefix: list[int],
    ) -> None:  # fmt: skip
        """An idle server that holds the keys and values of `prefix`, with which every request begins.

        ValueError: page_size is no power of two, or num_pages too few for the prefix and a token.
        """
        model.set_attn_implementation(ATTENTION)
        self.model, self.batch, self.temperature = model, batch, temperature
        heads = model.config.num_hidden_layers, model.config.num_key_value_heads  # L, Hk
        self.cache = PagedCache(  # a token has the keys and values of all layers
            num_pages, page_size, heads[0] * heads[1], model.config.head_dim, dtype=model.dtype, device=model.device
        )
        self._k, self._v = (x.unflatten(2, heads) for x in (self.cache.k, self.cache.v))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        self.steps = self.preemptions = 0
        self._prefix_length = len(prefix)
        self._check_room(len(prefix) + 1)
        self._prefix = self.cache.new()
        if prefix:
            self.cache.reserve(self._prefix, len(prefix))
            self._next_logits([self._prefix], [prefix])

    def submit(self, request: Request) -> None:
        """Takes a request, in the order of arrival. ValueError: num_pages is too few even where it runs alone."""
        written = len(request.prompt) + request.max_new_tokens - 1  # the last one generated never is
        self._check_room(self._prefix_length + written)
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """One token more for each running request, and the first one for those admitted; returns those that ended."""
        self._make_room()
        ended = self._extend(self.running, [request.generated[-1:] for request in self.running])
        while (request := self._admit()) is not None:
            ended += self._extend([request], [request.prompt + request.generated])
        self.steps += 1
        return ended

    def _check_room(self, length: int) -> None:
        """Raises unless the prefix and one sequence of `length` tokens, which begins with it, fit the pool."""
        num_pages, page_size = self.cache.k.shape[:2]
        need = -(-self._prefix_length // page_size) + -(-length // page_size) - self._prefix_length // page_size
        if num_pages < need:
            raise ValueError(
                f"num_pages: got {num_pages}; want at least {need} for a sequence of {length} tokens "
                f"behind a prefix of {self._prefix_length}"
            )

    def _make_room(self) -> None:
        """Reserves the place of one token for each running request; while there is none, the latest is preempted."""
        for request in list(self.running):
            while request in self.running:
                try:
                    self.cache.reserve(request.sequence, 1)
                    break
                except OutOfPagesError:
                    latest = self.running.pop()
                    self.cache.free(latest.sequence)
                    self.waiting.appendleft(latest)
                    self.preemptions += 1

    def _admit(self) -> Request | None:
        """The next request, with room for all its tokens behind the shared prefix; None where it must wait."""
        if len(self.running) == self.batch or not self.waiting or self.waiting[0].arrival > self.steps:
            return None
        request = self.waiting[0]
        request.sequence = self.cache.fork(self._prefix)
        try:
            self.cache.reserve(request.sequence, len(request.prompt) + len(request.generated))
        except OutOfPagesError:
            self.cache.free(request.sequence)
            return None
        self.running.append(self.waiting.popleft())
        return request

    def _extend(self, requests: list[Request], tokens: list[list[int]]) -> list[Request]:
        """Computes the B × S tokens of running requests and gives each its next one; frees and returns those ended."""
        if not requests:
            return []
        logits = self._next_logits([request.sequence for request in requests], tokens)
        for request, token in zip(requests, self._choose(logits, requests), strict=True):
            request.generated.append(token)
        end = self.model.generation_config.eos_token_id
        ended = [r for r in requests if r.generated[-1] == end or len(r.generated) == r.max_new_tokens]
        for request in ended:
            self.cache.free(request.sequence)
            self.running.remove(request)
        return ended

    @torch.no_grad()
    def _next_logits(self, sequences: list[int], tokens: list[list[int]]) -> Tensor:
        """Logits behind the last of S new tokens, (B, vocabulary) float32. Their places are reserved."""
        ids = torch.tensor(tokens, device=self.model.device)  # (B, S)
        seqlens = self.cache.cache_seqlens(sequences)
        pages = Pages(self._k, self._v, self.cache.block_table(sequences), seqlens)
        positions = seqlens[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (B, S)
        result = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1, pages=pages)
        for sequence in sequences:
            self.cache.advance(sequence, ids.shape[1])
        return result.logits[:, -1].float()

    def _choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """The largest of each row, or one drawn by each request's own generator."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        rows = torch.softmax(logits / self.temperature, -1)
        each = zip(rows, requests, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=request.generator) for row, request in each]).tolist()


def random_model(device: torch.device, dtype: torch.dtype, seed: int) -> LlamaForCausalLM:
    """A small Llama with four query heads to a key head. Its weights are large enough for attention to matter."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2**17, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def random_requests(
    count: int, prompt_tokens: int, new_tokens: int, vocab_size: int, device: torch.device, seed: int
) -> list[Request]:
    """Requests of 1 to prompt_tokens and 1 to new_tokens, each at most two steps after the one before."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    arrival, requests = 0, []
    for i in range(count):
        prompt = [draw(0, vocab_size - 1) for _ in range(draw(1, prompt_tokens))]
        requests.append(Request(prompt, draw(1, new_tokens), arrival, torch.Generator(device).manual_seed(seed + i)))
        arrival += draw(0, 2)
    return requests


def generate(model: LlamaForCausalLM, prefix: list[int], request: Request, temperature: float) -> list[int]:
    """What the model's own generate() makes of a request alone.

    It draws from PyTorch's own generator, which is seeded here as the request's was, so that drawn tokens compare too.
    """
    ids = torch.tensor([prefix + request.prompt], device=model.device)
    torch.manual_seed(request.generator.initial_seed())
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, pad_token_id=0, **sampling
    )
    return out[0, ids.shape[1] :].tolist()


@app.command()
def main(
    requests: Annotated[int, typer.Option(min=1, help="how many are served")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="the longest prompt")] = 96,
    new_tokens: Annotated[int, typer.Option(min=1, help="the most that are generated for a request")] = 64,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="length of the prefix all prompts share")] = 40,
    batch: Annotated[int, typer.Option(min=1, help="the most requests that run at a time")] = 8,
    page_size: Annotated[int, typer.Option(help="tokens in a page, a power of two")] = 16,
    num_pages: Annotated[int, typer.Option(help="pages in the pool; fewer than the batch needs: requests wait")] = 48,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy; else tokens are drawn")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; the GPU where there is one")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="of weights, prompts and, plus its number, each request")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="exit 1 unless generate() gives the same tokens; fp32, others round")
    ] = False,
) -> None:
    """Serve random requests with continuous batching, from a paged cache."""
    model = random_model(parse_device(device), getattr(torch, parse_dtype(dtype, "--dtype")), seed)
    vocab_size, console = model.config.vocab_size, wide_console()
    prefix = torch.randint(vocab_size, (prefix_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    workload = random_requests(requests, prompt_tokens, new_tokens, vocab_size, model.device, seed)
    try:
        server = Server(
            model, batch=batch, num_pages=num_pages, page_size=page_size, temperature=temperature, prefix=prefix
        )
        for request in workload:
            server.submit(request)
    except ValueError as error:  # its message names the argument
        raise typer.BadParameter(str(error)) from error
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]:.0f} tokens/s")
    start = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=requests, speed=0.0)
        while not progress.finished:
            ended = server.step()
            tokens = sum(len(request.generated) for request in workload)
            speed = tokens / (time.perf_counter() - start)
            progress.update(bar, advance=len(ended), speed=speed)
    console.print(f"{tokens} tokens in {server.steps} steps, {server.preemptions} preemptions: {speed:.0f} tokens/s")
    if check:
        model.set_attn_implementation("sdpa")
        start = time.perf_counter()
        expected = [generate(model, prefix, request, temperature) for request in workload]
        speed = tokens / (time.perf_counter() - start)
        wrong = [i for i, request in enumerate(workload) if request.generated != expected[i]]
        console.print(f"generate(), one request after the other: {speed:.0f} tokens/s")
        console.print(f"other tokens for requests {wrong}" if wrong else f"the same tokens for all {requests} requests")
        raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    app()
