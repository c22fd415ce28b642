"""Runs that vLLM cannot sample for are refused before anything is loaded."""

from __future__ import annotations

import pytest

from lightrft.utils.errors import ConfigError
from lightrft.workers.local_vllm import check_replica


def test_a_model_that_the_trainer_shards_by_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.tensor_parallel = 2") as found:
        check_replica("vllm", 2)
    assert "engine.kind=native" in str(found.value)


def test_a_whole_model_is_accepted() -> None:
    check_replica("vllm", 1)
