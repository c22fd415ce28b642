"""A run that is killed, in any place, ends as if it had not been: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from lightrft.config.base import build, deep_merge, to_yaml
from lightrft.config.verbs import RLConfig
from lightrft.strategy.checkpoint import load_state
from tests import warm
from tests.e2e.finished import steady

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]


def start(
    tree: dict[str, Any], name: str, where: str, nth: int, tmp_path: Path, how: str = "kill"
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / f"{name}.yaml"
    file.write_text(to_yaml(build(RLConfig, deep_merge(tree, {"run": {"name": name}}))))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return warm.run([KILLING, file, where, str(nth), "0", how], env=env)


def assert_same_end(one: Path, other: Path, step: int) -> None:
    a, b = (p / "checkpoints" / f"step_{step:06d}" for p in (one, other))
    for file in sorted(a.glob("*/state.safetensors")):
        left, right = load_file(file), load_file(b / file.relative_to(a))
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].equal(right[key]), key
    left, right = (load_state(p / "trainer") for p in (a, b))
    assert left.keys() == right.keys()
    assert left["rng"]["torch"].equal(right["rng"]["torch"])
    for state in (left, right):
        state["row"] = steady(state["row"])
    assert plain({k: v for k, v in left.items() if k not in ("rng", "seconds")}) == plain(
        {k: v for k, v in right.items() if k not in ("rng", "seconds")}
    )
    for file in sorted((one / "rollouts").glob("step_*.jsonl")):
        assert file.read_text() == (other / "rollouts" / file.name).read_text()
    metrics = [
        [json.loads(x) for x in (p / "metrics.jsonl").read_text().splitlines()]
        for p in (one, other)
    ]
    assert [steady(r) for r in metrics[0]] == [steady(r) for r in metrics[1]]


def plain(state: Any) -> Any:
    """``state`` with lists in place of tensors."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints at every step; 3 prompts of 10 a step, so that step 4 crosses an epoch's end; KL moved by its controller, rewards
    and values on scales of all that was seen."""
    kl = {
        "where": "reward",
        "estimator": "k1",
        "coef": 0.1,
        "controller": "adaptive",
        "target": 0.5,
        "horizon": 50,
    }
    return deep_merge(
        rl_tree,
        {
            "checkpoint": {"every": 1, "keep": 10},
            "algorithm": {
                "preset": "ppo",
                "kl": kl,
                "normalize": {"rewards": "standard", "values": True},
            },
            "train": {"num_mini_batches": 2, "ppo_epochs": 2},
            "optimizer": {"schedule": "cosine", "warmup_steps": 2},
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth"),
    [
        pytest.param("generation", 7, marks=pytest.mark.thorough),
        ("generation", 11),  # while an epoch ends
        ("update", 10),
        pytest.param("checkpoint files", 5, marks=pytest.mark.thorough),
        ("checkpoint manifest", 3),
        ("checkpoint published", 3),  # and its step's numbers not written yet
        pytest.param("after checkpoint", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path, where, nth):
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", where, nth, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "opt"])
def test_a_killed_run_with_a_random_forward_ends_bit_for_bit_like_one_that_was_not(
    tree, tmp_path, random_folder, family
):
    model = {"path": str(random_folder(family)), "dropout": True}
    tree = deep_merge(tree, {"model": model, "train": {"steps": 2}})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", "update", 10, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 2)


@pytest.mark.slow
def test_pass_rates_scales_of_terms_and_carried_over_groups_survive_a_kill(tree, tmp_path):
    rollout = {"oversample": 1.5, "carry_over": True, "curriculum": {"name": "priority"}}
    together = {"min_new_tokens": 6}  # so that groups are left over
    scales = {"rewards": "none", "terms": "running"}
    algorithm = {"old_logprobs": "rollout", "normalize": scales}
    tree = deep_merge(tree, {"rollout": rollout, "algorithm": algorithm, "sampling": together})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", "update", 18, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    state = load_state(tmp_path / "killed" / "checkpoints" / "step_000002" / "trainer")
    assert len(state["sampler"]["rates"]) > 3
    assert state["carried"]
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 4)


@pytest.mark.slow
def test_sigterm_saves_leaves_cleanly_and_the_run_goes_on_bit_for_bit(tree, tmp_path):
    tree = deep_merge(tree, {"checkpoint": {"every": 0}, "train": {"steps": 5}})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    stopped = start(tree, "stopped", "update", 20, tmp_path, "terminate")
    assert stopped.returncode == 143, stopped.stderr
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert not summary["finished"] and 2 <= summary["steps"] < 5
    assert (
        summary["stopped_by"] == "SIGTERM"
        and summary["saved_step"] == summary["steps"] == summary["most_unsaved_steps"]
    )
    again = start(tree, "stopped", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "stopped", 5)
