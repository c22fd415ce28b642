"""What a plan of layers cannot be carried out with."""

from __future__ import annotations

import pytest
import torch

from lightrft.models.tiny.text import tiny_model
from lightrft.strategy import tensor_parallel
from lightrft.utils.errors import ConfigError


def test_a_torch_that_cannot_put_experts_together_is_named_with_the_one_that_can(monkeypatch):
    model = tiny_model("qwen3_moe")
    name = "model.layers.0.mlp.experts"
    given = name, model.get_submodule(name), tensor_parallel.plan_of(model), 2
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert tensor_parallel._cuts(*given)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(
        ConfigError,
        match=r"strategy\.tensor_parallel = 2: torch 2\.11.* install torch 2\.12 or newer; or set strategy\.tensor_parallel=1",
    ):
        tensor_parallel._cuts(*given)
