"""Runs that vLLM cannot sample for are refused before anything is loaded."""

from __future__ import annotations

import pytest

from lightrft.config.model import ModelConfig
from lightrft.utils.errors import ConfigError
from lightrft.workers.local_vllm import check_replica


def test_a_model_that_the_trainer_shards_by_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.tensor_parallel = 2") as found:
        check_replica("vllm", ModelConfig(path="model"), 2)
    assert "engine.kind=native" in str(found.value)


def test_a_quantised_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.load_in_4bit = true"):
        check_replica("vllm", ModelConfig(path="model", load_in_4bit=True))


def test_a_whole_model_with_adapters_is_accepted() -> None:
    check_replica("vllm", ModelConfig(path="model", lora={"rank": 2}))
