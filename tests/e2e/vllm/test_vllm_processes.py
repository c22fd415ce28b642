"""vLLM in several processes, during training, and in workers of Ray: the numbers are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.engines.vllm_parts.row_formats import ROW_FORMATS
from lightrft.trainer.rl import run_rl
from tests.e2e.vllm.runs import check_equal, lines, train
from tests.model_helpers import vllm_model


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


def check_shared(tree: dict[str, Any], folder: Path) -> None:
    """Compare a run whose copy in vLLM is shared by two processes with a run of one process."""
    alone = train(tree, folder / "alone")
    check_equal(
        train(tree, folder / "shared", "launch.processes=2", "engine.tensor_parallel=2"), alone
    )


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"model": {"lora": {"rank": 3, "alpha": 12.0}}},
        {"model": {"lora": {"rank": 3, "dora": True}}},
    ],
    ids=["whole", "adapter", "merged"],
)
def test_a_copy_that_two_processes_share_gives_the_numbers_of_one_process(
    over: dict[str, Any], tree: dict[str, Any], tmp_path: Path
) -> None:
    check_shared(deep_merge(tree, over), tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_two_processes_share_give_the_numbers_of_one_process(
    kind: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    vllm_model(tmp_path / "experts", kind=kind)
    check_shared(deep_merge(tree, {"model": {"path": str(tmp_path / "experts")}}), tmp_path)


@pytest.mark.parametrize("kind", ["picture_tree", "audio_tree"])
def test_media_that_two_processes_share_give_the_numbers_of_one_process(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tree = deep_merge(request.getfixturevalue(kind), {"train": {"steps": 3}})
    check_shared(tree, tmp_path)


def test_four_processes_hold_two_copies(tree: dict[str, Any], tmp_path: Path) -> None:
    alone = train(tree, tmp_path / "alone")
    more = ("launch.processes=4", "engine.tensor_parallel=2")
    check_equal(train(tree, tmp_path / "shared", *more), alone)


@pytest.mark.slow
@pytest.mark.parametrize("form", ROW_FORMATS)
def test_processes_that_share_a_copy_compare_their_8_bit_values(
    form: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    vllm_model(tmp_path / "model", spread=0.1)
    over = {
        "engine": {"quantization": form},
        "model": {"dtype": "bfloat16"},
        "algorithm": {"importance_sampling": ["tis"]},
        "optimizer": {"lr": 1e-4},
    }
    more = ("launch.processes=2", "engine.tensor_parallel=2")
    steps = train(deep_merge(tree, over), tmp_path / "shared", *more)
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 0.4


def test_a_share_of_the_memory_gives_the_numbers_of_a_bounded_cache(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    bounded = train(tree, tmp_path / "bounded")
    check_equal(train(tree, tmp_path / "share", "engine.gpu_memory_utilization=0.1"), bounded)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("engine.gpu_memory_utilization=0.00001", "engine.gpu_memory_utilization = 1e-05; lower it if"),
        ("engine.tensor_parallel=2", "which does not divide the 1 of this run"),
        ("engine.tensor_parallel=2 launch.processes=3", "which does not divide the 3 of this run"),
        ("engine.tensor_parallel=3 launch.processes=3", "set engine.kind=native"),
        ("engine.tensor_parallel=2 launch.processes=2 rollout.staleness=1", "leave out rollout.staleness"),
    ],
)  # fmt: skip
def test_a_share_or_a_number_of_processes_that_vllm_cannot_keep_is_refused(
    more: str, said: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as found:
        train(tree, tmp_path / "refused", *more.split())
    assert said in " ".join(str(found.value).split())
