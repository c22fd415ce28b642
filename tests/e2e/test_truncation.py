"""Responses that are cut at the length limit end there: no critic may value them above their reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import deep_merge
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl

REWARD = '''
def finished(rollout):
    """1 for a response that ends by itself, and 0.5 for one that is cut."""
    return 1.0 if rollout.finish_reason == "stop" else 0.5

def cost(rollout):
    return -1.0
'''
LAGRANGIAN = {"algorithm": {"lagrangian": {"costs": ["cost"]}}}


@pytest.fixture
def task(rl_config, tmp_path: Path) -> Any:
    """Return the settings of a task that rewards short responses."""
    file = tmp_path / "ends.py"
    file.write_text(REWARD)

    def make(**over: Any) -> Any:
        cost = {"function": f"{file}:cost", "weight": 0.0}
        terms = [f"{file}:finished", *([cost] if "ppo_lag" in str(over) else [])]
        tree = {
            "rollout": {"prompts_per_step": 8, "group_size": 4},
            "sampling": {"max_new_tokens": 16},
            "reward": {"terms": terms},
            "critic": {"optimizer": {"lr": 3e-3}},
            "train": {"steps": 20},
        }
        return rl_config(**deep_merge(tree, over))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "more"), [("ppo", {}), ("vapo", {}), ("ppo_lag", LAGRANGIAN)])
def test_responses_learn_to_end_and_values_stay_in_the_range_of_rewards(
    task, tmp_path, preset, more
):
    run_rl(task(**deep_merge({"algorithm": {"preset": preset}}, more)))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["reward/mean"] < 0.7
    assert rows[-1]["reward/mean"] >= 0.97
    # A critic that still learns may be off by a tenth of the largest reward.
    assert all(row["critic/values"] <= 1.1 for row in rows)
    assert all(row["critic/returns"] <= 1.1 for row in rows)


@pytest.mark.slow
def test_bootstrapped_values_stay_bounded_by_reward_and_learned_value(task, tmp_path):
    run_rl(task(algorithm={"preset": "ppo", "advantage": {"bootstrap_truncated": True}}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert all(row["critic/values"] <= 1.1 for row in rows)
