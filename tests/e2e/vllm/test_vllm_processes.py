"""vLLM in several processes, during training, and in workers of Ray: the numbers are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.trainer.rl import run_rl
from tests.e2e.vllm.runs import check_equal, lines, train


@pytest.fixture
def during(tree: dict[str, Any]) -> dict[str, Any]:
    """Adapters, and batches that are generated during training."""
    return deep_merge(
        tree,
        {
            "model": {"lora": {"rank": 3, "alpha": 12.0}},
            "rollout": {"staleness": 1},
            "algorithm": {"importance_sampling": ["tis"]},
        },
    )


def test_a_replica_in_each_of_two_processes_gives_the_numbers_of_one_process(
    during: dict[str, Any], tmp_path: Path
) -> None:
    run_rl(build(RLConfig, during))
    alone = lines(tmp_path)
    assert max(line["staleness/max"] for line in alone) == 1
    check_equal(train(during, tmp_path / "two", "launch.processes=2"), alone)


@pytest.mark.parametrize("lora", [None, {"rank": 3, "alpha": 12.0}], ids=["whole", "adapter"])
def test_a_worker_of_ray_gives_the_numbers_of_one_process(
    lora: dict[str, Any] | None, tree: dict[str, Any], tmp_path: Path
) -> None:
    given = deep_merge(tree, {"model": {"lora": lora}})
    run_rl(build(RLConfig, given))
    alone = lines(tmp_path)
    check_equal(train(given, tmp_path / "ray", "launch.kind=ray", "launch.ray.engines=1"), alone)
