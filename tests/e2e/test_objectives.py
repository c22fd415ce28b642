"""Whole runs of objectives whose parts read something of their own: token masks, corrections, controllers and further terms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.verbs import RLConfig
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl

KL = {"where": "loss", "coef": 0.2}
OBJECTIVES: dict[str, tuple[dict[str, Any], str]] = {
    "m2po": ({"preset": "m2po"}, "policy/token_mask"),
    "clip_cov": (
        {
            "preset": "clip_cov",
            "token_masks": [{"name": "clip_cov", "options": {"share": 0.2, "low": 0.0}}],
        },
        "policy/token_mask",
    ),
    "kl_cov": ({"preset": "kl_cov"}, "policy/token_mask"),
    "high_entropy": ({"preset": "high_entropy"}, "policy/token_mask"),
    "decoupled": ({"preset": "gspo", "importance_sampling": ["importance"]}, "policy/correction"),
    "interpolated": (
        {"preset": "dapo", "old_logprobs": "interpolated", "importance_sampling": ["importance"]},
        "policy/correction",
    ),
    "sequence mask": (
        {
            "preset": "cispo",
            "importance_sampling": [
                {"name": "sequence_mask", "options": {"low": 0.5, "high": 2.0}}
            ],
        },
        "policy/correction",
    ),
    "weighted and scheduled KL": (
        {"preset": "gmpo", "kl": {**KL, "weighted": True, "controller": "cosine", "steps": 3}},
        "policy/kl_coef",
    ),
    "entropy target": ({"preset": "sapo", "entropy": {"target": 9.0}}, "policy/entropy_coef"),
    "positive answers": (
        {"preset": "cpgd", "positive_nll": {"coef": 0.1, "threshold": 0.0}},
        "policy/positive_nll",
    ),
}


@pytest.fixture
def varied(rl_config: Callable[..., RLConfig], tmp_path: Path) -> Callable[..., RLConfig]:
    """Configs whose rewards differ inside every group, whatever the model says."""
    file = tmp_path / "varied.py"
    file.write_text(
        "def varied(rollout):\n    return (sum(rollout.token_ids) % 7) / 6\n", encoding="utf-8"
    )
    return lambda **over: rl_config(**over, reward={"terms": [f"{file}:varied"]})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_several_parts_trains_and_logs_what_they_did(varied, tmp_path, name):
    algorithm, metric = OBJECTIVES[name]
    summary = run_rl(varied(algorithm=algorithm, train={"steps": 2, "num_mini_batches": 2}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert summary["finished"]
    assert all(metric in row for row in rows), rows[0].keys()
    assert any(row["policy/grad_norm"] > 0 for row in rows)


def test_controllers_move_from_step_to_step(varied, tmp_path):
    algorithm = {
        "preset": "grpo",
        "kl": {**KL, "controller": "linear", "steps": 2},
        "entropy": {"target": 9.0, "rate": 0.01},
    }
    run_rl(varied(algorithm=algorithm, train={"steps": 3}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["policy/kl_coef"] for row in rows] == pytest.approx([0.2, 0.1, 0.0])
    assert [row["policy/entropy_coef"] for row in rows] == pytest.approx([0.0, 0.01, 0.02])


def test_a_run_resumed_in_the_middle_of_a_schedule_is_the_run_that_was_never_stopped(
    varied, tmp_path
):
    algorithm = {
        "preset": "clip_cov",
        "kl": {**KL, "controller": "linear", "steps": 4},
        "entropy": {"target": 9.0},
    }
    over = {
        "algorithm": algorithm,
        "train": {"num_mini_batches": 2},
        "checkpoint": {"every": 2, "keep": 9},
    }
    run_rl(varied(**over, run={"name": "whole"}))
    whole = read_rows(tmp_path / "whole" / "metrics.jsonl")
    halfway = tmp_path / "whole" / "checkpoints" / "step_000002"
    run_rl(varied(**over, run={"name": "again", "resume": str(halfway)}))
    again = read_rows(tmp_path / "again" / "metrics.jsonl")
    names = (
        "policy/kl_coef",
        "policy/entropy_coef",
        "policy/loss",
        "policy/grad_norm",
        "policy/token_mask",
    )
    assert [[row[n] for n in names] for row in again[-2:]] == [
        [row[n] for n in names] for row in whole[-2:]
    ]
