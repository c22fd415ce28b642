"""The engine of a process where others generate the batches."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import _own_engine, local_policy


@pytest.mark.parametrize("compiles", [True, False, None])
@pytest.mark.parametrize("ahead", [{"rollout": {"staleness": 1}}, {}], ids=["ahead", "workers"])
def test_an_engine_that_generates_no_batches_is_not_made_to_compile_for_those_that_do(
    ahead: dict[str, Any], compiles: bool | None
) -> None:
    """With several ranks its weights are shards, and it would be refused."""
    tree = {"model": {"path": "model"}, "engine": {"kind": "vllm", "compile": compiles}, **ahead}
    own = _own_engine(build(RLConfig, tree), {} if ahead else {"engine": object()})
    assert own.kind == "native" and own.compile is (None if compiles else compiles)


@pytest.mark.parametrize("trains", [True, False])
def test_a_server_that_decides_itself_whether_to_compile_refuses_to_be_told_before_any_load(
    trains: bool,
) -> None:
    engine = EngineConfig(kind="http", url="http://127.0.0.1:1", compile=False)
    model = ModelConfig(path="/no/such/model")
    with pytest.raises(ConfigError, match=r"engine\.compile = false .*whose server decides"):
        local_policy(model, StrategyConfig(), engine, tiny_tokenizer(), trains=trains)
