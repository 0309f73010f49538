"""The examples: a transformers model served from pages gives the tokens of its own generate()."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PREFIX = list(range(100, 110))
SMALL = [
    "--requests", "6", "--prompt-tokens", "20", "--new-tokens", "12", "--prefix-tokens", "10", "--batch", "3",
    "--page-size", "4", "--num-pages", "20", "--check",
]  # fmt: skip


@pytest.fixture(scope="module")
def serve():
    """The example, on one thread: with more, each of its many small steps waits where another test has the cores."""
    pytest.importorskip("transformers")
    import serve

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield serve
    torch.set_num_threads(threads)


@pytest.fixture
def model(serve):
    return serve.random_model(torch.device("cpu"), torch.float32, 0)


def call(serve, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(serve.app, arguments)
    assert result.exit_code == status, result.output
    return result.output


def requests(serve, *shapes):
    """Requests of (prompt tokens, new tokens, arrival), told apart by their tokens."""
    return [
        serve.Request([7 * i + j for j in range(prompt)], new, arrival, torch.Generator().manual_seed(i))
        for i, (prompt, new, arrival) in enumerate(shapes)
    ]


def served(serve, model, workload, *, prefix=PREFIX, **options):
    """The server that served the workload, first come first served, and how many requests ran after each step."""
    server = serve.Server(model, **{"batch": 4, "page_size": 4, "temperature": 0.0, **options}, prefix=prefix)
    for request in workload:
        server.submit(request)
    ended, running = [], []
    while len(ended) < len(workload):
        assert server.steps < 200
        ended += server.step()
        running.append(len(server.running))
        assert [*server.running, *server.waiting] == [request for request in workload if request not in ended]
    num_pages, page_size = server.cache.k.shape[:2]
    assert server.cache.free_pages == num_pages - -(-len(prefix) // page_size)  # all but the prefix's
    return server, running


def check(serve, model, workload, prefix=PREFIX, temperature=0.0):
    model.set_attn_implementation("sdpa")
    for request in workload:
        assert request.generated == serve.generate(model, prefix, request, temperature)


@DEVICES
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_serve_gives_the_tokens_of_generate(serve, device, temperature):
    text = call(serve, *SMALL, "--device", device, "--temperature", temperature)
    assert "6/6" in text
    assert "the same tokens for all 6 requests" in text


def test_serve_shows_other_tokens_and_fails(serve, monkeypatch):
    right = serve.flash_attn_with_kvcache

    def wrong(*arguments, softmax_scale, **options):
        return right(*arguments, softmax_scale=1.1 * softmax_scale, **options)

    monkeypatch.setattr(serve, "flash_attn_with_kvcache", wrong)
    assert "other tokens for requests [" in call(serve, *SMALL, status=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "3"], "page_size: got 3; want a power of two"),
        (["--num-pages", "3", "--page-size", "4", "--prefix-tokens", "10"], "num_pages: got 3; want at least 4"),
        (["--num-pages", "6", "--page-size", "4", "--prefix-tokens", "10"], "num_pages: got 6; want at least"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_serve_names_what_is_wrong(serve, arguments, message):
    words = call(serve, *arguments, status=2).replace("│", " ").split()
    assert message in " ".join(words)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_are_preempted_and_resumed_where_pages_are_few(serve, model, temperature):
    workload = requests(serve, (5, 20, 0), (9, 14, 0), (1, 17, 1), (13, 9, 2), (3, 1, 2))
    server, running = served(serve, model, workload, num_pages=14, temperature=temperature)
    assert server.preemptions > 0
    assert 1 < max(running) < 4  # there were places in the batch, but no pages
    check(serve, model, workload, temperature=temperature)


def test_a_request_arrives_while_others_run(serve, model):
    workload = requests(serve, (6, 10, 0), (4, 3, 4), (2, 2, 20))
    server, running = served(serve, model, workload, num_pages=32)
    assert running[:4] == [1, 1, 1, 1]
    assert running[4] == 2
    assert running[10:20] == [0] * 10
    assert (server.steps, server.preemptions) == (22, 0)
    check(serve, model, workload)


@pytest.mark.parametrize("length", [0, 32, 33])
def test_all_requests_read_the_prefix_from_the_same_pages(serve, model, length):
    prefix = list(range(length))
    workload = requests(serve, *[(3, 4, 0)] * 4)
    tail = -(-(length + 6) // 4) - length // 4  # pages of one request behind the full ones of the prefix
    server, running = served(serve, model, workload, prefix=prefix, num_pages=-(-length // 4) + 4 * tail)
    assert running[0] == 4
    assert server.preemptions == 0
    check(serve, model, workload, prefix)


def test_a_request_ends_at_the_models_end_token(serve, model):
    (first,) = requests(serve, (5, 12, 0))
    served(serve, model, [first], num_pages=8)
    model.generation_config.eos_token_id = first.generated[3]
    (request,) = requests(serve, (5, 12, 0))
    served(serve, model, [request], num_pages=8)
    assert request.generated == first.generated[: first.generated.index(first.generated[3]) + 1]
    check(serve, model, [request])


def test_a_request_too_long_for_the_pool_is_refused(serve, model):
    server = serve.Server(model, batch=1, num_pages=8, page_size=4, temperature=0.0, prefix=PREFIX)
    longest, longer = requests(serve, (5, 12, 0), (5, 16, 0))
    server.submit(longest)  # 26 are written: on 2 full pages of the prefix and 5 others, and its third stays
    with pytest.raises(ValueError, match="num_pages: got 8; want at least 9 for a sequence of 30 tokens behind"):
        server.submit(longer)
