"""Runs that vLLM cannot sample for are refused before anything is loaded."""

from __future__ import annotations

import pytest

from lightrft.config.engine import EngineConfig
from lightrft.utils.errors import ConfigError
from lightrft.workers.local_vllm import check_replica, check_shared_copy


def test_a_model_that_the_trainer_shards_by_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.tensor_parallel = 2") as found:
        check_replica("vllm", 2)
    assert "engine.kind=native" in str(found.value)


def test_a_whole_model_is_accepted() -> None:
    check_replica("vllm", 1)


def test_processes_that_no_number_of_copies_fills_are_refused() -> None:
    engine = EngineConfig(kind="vllm", tensor_parallel=2)
    check_shared_copy(engine, 4)
    with pytest.raises(ConfigError, match=r"launch\.processes to a multiple of 2"):
        check_shared_copy(engine, 3)
