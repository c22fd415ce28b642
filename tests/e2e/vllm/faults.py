"""Weight updates of vLLM that go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.engines.vllm_parts import weights as vllm_weights

Weights = Iterator[tuple[str, Tensor]]
Load = Callable[[Any, Weights], None]
Fault = Callable[[Load, Any, Weights], None]


def skipped(load: Load, worker: Any, weights: Weights) -> None:
    list(weights)


def half_done(load: Load, worker: Any, weights: Weights) -> None:
    everything = list(weights)
    load(worker, iter(everything[: len(everything) // 2]))


def of_the_wrong_layer(load: Load, worker: Any, weights: Weights) -> None:
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    renamed = []
    for name, tensor in list(weights):
        layer = next((part for part in swap if part in name), "")
        renamed.append((name.replace(layer, swap[layer]) if layer else name, tensor))
    load(worker, iter(renamed))


def with_swapped_shards(load: Load, worker: Any, weights: Weights) -> None:
    def swapped(name: str, tensor: Tensor) -> Tensor:
        if "down_proj" not in name:
            return tensor
        return torch.cat(tensor.chunk(2)[::-1])

    load(worker, iter([(name, swapped(name, tensor)) for name, tensor in list(weights)]))


FAULTS = [skipped, half_done, of_the_wrong_layer, with_swapped_shards]


def break_updates(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each update go wrong by ``fault``, but for the first, which loads the weights that the run starts with."""
    load, calls = vllm_weights.reload, []

    def reload(worker: Any, weights: Weights) -> None:
        calls.append(worker)
        if len(calls) == 1:
            load(worker, weights)
        else:
            fault(load, worker, weights)

    monkeypatch.setattr(vllm_weights, "reload", reload)
