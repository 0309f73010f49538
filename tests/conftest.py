"""What every test gets: markers that decide where it runs, and poisoned fresh memory."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from flashtile import env
from flashtile.backends.hopper import schedule

INTERPRETED = env.triton_interpret()
hypothesis.settings.register_profile("flashtile", deadline=None, max_examples=40)
hypothesis.settings.load_profile("flashtile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """gpu tests need a GPU, hopper tests one of compute capability 9.0.

    interpreter tests need TRITON_INTERPRET=1, and with it nothing else runs.
    """
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    no_hopper = pytest.mark.skip(reason="needs a GPU of compute capability 9.0")
    other_process = pytest.mark.skip(reason="runs with TRITON_INTERPRET=1, in a process of its own")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        elif item.get_closest_marker("hopper") and torch.cuda.get_device_capability() != (9, 0):
            item.add_marker(no_hopper)
        if bool(item.get_closest_marker("interpreter")) != INTERPRETED:
            item.add_marker(other_process)


@pytest.fixture
def shared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the Hopper backend share out the last round of tiles however little that saves."""
    monkeypatch.setattr(schedule, "PIECE_STEPS", 1)
    monkeypatch.setattr(schedule, "PIECES_COST", 0)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh floating-point memory is NaN: an output element that nobody writes shows."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            fresh = allocate(*args, **kwargs)
            if fresh.is_floating_point() and fresh.device.type in ("cpu", "cuda"):
                fresh.detach().fill_(float("nan"))
            return fresh

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided))
