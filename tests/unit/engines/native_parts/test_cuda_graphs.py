"""Captures of CUDA graphs where memory is short or a step cannot be captured, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightrft.engines.native_parts.compiled_steps import CudaGraphs


class Random:
    """A generator whose state is spoilt by a capture that is not ended well."""

    def __init__(self) -> None:
        self.state = "whole"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


class Device:
    """What is called of ``torch.cuda``."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.default_generators = [Random()]
        self.emptied = 0
        self.pools: list[object] = []

    def current_device(self) -> int:
        return 0

    def empty_cache(self) -> None:
        self.emptied += 1

    def synchronize(self) -> None:
        pass

    def graph_pool_handle(self) -> object:
        return object()

    def device(self, _: object) -> Any:
        return nullcontext()

    def stream(self, _: object) -> Any:
        return nullcontext()

    def Stream(self, _: object) -> None:
        pass

    def CUDAGraph(self) -> Graph:
        return Graph(self)


class Graph:
    def __init__(self, device: Device) -> None:
        self._device = device

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._device.pools.append(pool)
        self._device.default_generators[0].state = "capturing"

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch, "cuda", found)
    return found


def test_a_capture_that_finds_no_memory_is_repeated_with_an_empty_cache(device: Device) -> None:
    answers = iter([torch.OutOfMemoryError(), torch.tensor(1.0), torch.tensor(2.0)])

    def step() -> torch.Tensor:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    make = CudaGraphs(torch.device("cuda"))
    assert make(step)() == 1
    assert device.emptied == 1
    assert make(step)() == 2
    assert device.emptied == 1
    # a pool without a graph cannot be captured into; that of the last graph can
    first, second, third = device.pools
    assert first is not second and second is third


def test_lack_of_memory_is_seen_behind_the_error_that_ends_the_capture(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings = iter([RuntimeError("operation failed due to a previous error"), None])

    def capture_end(_: Graph) -> None:
        if error := next(endings):
            raise error

    answers = iter([torch.OutOfMemoryError(), torch.tensor(1.0)])

    def step() -> torch.Tensor:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(Graph, "capture_end", capture_end)
    assert CudaGraphs(torch.device("cuda"))(step)() == 1
    assert device.emptied == 1


def test_a_step_that_cannot_be_captured_leaves_random_numbers_as_they_were(device: Device) -> None:
    def step() -> torch.Tensor:
        raise RuntimeError("a step waits for the host")

    with pytest.raises(RuntimeError, match="waits for the host"):
        CudaGraphs(torch.device("cuda"))(step)
    assert device.default_generators[0].state == "whole"
    assert device.emptied == 0
