"""Answers that go on over changes of weights, in whole runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.observability.metric_table import STEP, SUM, metric_row
from lightrft.observability.trackers import read_rows
from lightrft.strategy.checkpoint import load_state
from lightrft.trainer.rl import run_rl
from tests.e2e.test_resume import assert_same_end, start

KINDS = ("sampled", "trained", "filtered", "failed", "carried_in", "carried_out")


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Answers of up to 24 tokens, 7 of them a step; some cannot be scored."""
    folder = rl_tree["reward"]["terms"][0].partition(":")[0]
    return deep_merge(
        rl_tree,
        {
            "reward": {"terms": [f"{folder}:sometimes_fails"]},
            "algorithm": {"importance_sampling": ["tis"]},
            "rollout": {
                "partial": True,
                "max_tokens_per_step": 7,
                "oversample": 2.0,
                "max_rounds": 3,
            },
            "sampling": {"max_new_tokens": 24, "stop_token_ids": list(range(4, 8))},
            "checkpoint": {"every": 1, "keep": 10},
            "train": {"steps": 7},
        },
    )


def answers(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [
        {**json.loads(line), "step": i}
        for i, file in enumerate(files)
        for line in file.read_text().splitlines()
    ]


def config(tree: dict[str, Any], **over: Any) -> RLConfig:
    return build(RLConfig, deep_merge(tree, over))


@pytest.mark.parametrize("staleness", [0, 1])
def test_answers_grow_over_several_versions_and_no_token_is_lost(tree, tmp_path, staleness):
    summary = run_rl(config(tree, rollout={"staleness": staleness}))
    rows, written = read_rows(tmp_path / "run" / "metrics.jsonl"), answers(tmp_path / "run")
    assert len({(r["seed"]) for r in written}) == len(written)
    for rollout in written:
        assert rollout["versions"] == sorted(rollout["versions"])
        shared = 1 + staleness  # so many batches are drawn by the first weights
        assert all(
            rollout["versions"].count(v) <= 7 * (1 if v else shared)
            for v in set(rollout["versions"])
        )
        assert max(rollout["versions"]) <= max(0, rollout["step"] - staleness)
        assert rollout["finish_reason"] in ("stop", "length")
    assert any(len(set(r["versions"])) > 2 for r in written)
    total = {kind: sum(r.get(f"rollout/tokens_{kind}", 0) for r in rows) for kind in KINDS}
    in_flight = total["carried_out"] - total["carried_in"]
    assert total["sampled"] == total["trained"] + total["filtered"] + total["failed"] + in_flight
    trainer = load_state(tmp_path / "run" / "checkpoints" / "step_000007" / "trainer")
    assert (
        in_flight
        == sum(len(r["token_ids"]) for group in trainer["begun"] for r in group)
        == summary["tokens_in_flight"]
        > 0
    )
    assert max(r.get("staleness/max", 0) for r in rows) > staleness


def test_without_a_pause_what_oversampling_leaves_unfinished_goes_on(tree, tmp_path):
    run_rl(config(tree, rollout={"max_tokens_per_step": None, "oversample": 3.0}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert all(r["rollout/groups"] == 3 and "rollout/dropped/aborted" not in r for r in rows)
    assert any(len(set(r["versions"])) > 1 for r in answers(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth", "staleness"), [("generation", 8, 0), ("update", 2, 0), ("update", 3, 1)]
)
def test_a_killed_run_of_partial_answers_ends_bit_for_bit_like_one_that_was_not(
    tree, tmp_path, where, nth, staleness
):
    tree = deep_merge(tree, {"rollout": {"staleness": staleness}})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", where, nth, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 7)


CARRIED: dict[str, dict[str, Any]] = {
    "carry_over": {"rollout": {"carry_over": True, "oversample": 1.67}},
    "partial": {
        "rollout": {"partial": True, "max_tokens_per_step": 8},
        "sampling": {"max_new_tokens": 24},
    },
}


@pytest.mark.parametrize("kind", CARRIED)
def test_a_step_lacks_only_metrics_that_the_table_says_also_where_it_samples_or_trains_nothing(
    rl_config, tmp_path, kind
):
    algorithm = {"shaping": ["kimi_length"], "importance_sampling": ["tis"]}
    run_rl(rl_config(algorithm=algorithm, **CARRIED[kind]))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "phase"}
    table = {name: metric_row(name) for name in names}
    assert None not in table.values()
    for row in rows:
        for name in names - set(row):
            assert table[name].when or table[name].over not in (SUM, STEP), (row["step"], name)
        waiting = row["rollout/tokens_carried_in"] - row["rollout/tokens_carried_out"]
        kinds = ("trained", "filtered", "failed")
        used = sum(row[f"rollout/tokens_{kind}"] for kind in kinds)
        assert row["rollout/tokens_sampled"] + waiting == used


def test_the_share_of_equal_groups_counts_carried_ones_where_they_are_trained(rl_config, tmp_path):
    algorithm = {"shaping": ["kimi_length"], "importance_sampling": ["tis"]}
    rollout = {"carry_over": True, "oversample": 1.34}
    reward = {"terms": ["exact_match"]}
    sampling = {"max_new_tokens": 24}
    run_rl(rl_config(algorithm=algorithm, rollout=rollout, reward=reward, sampling=sampling))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert any(row["rollout/tokens_carried_in"] for row in rows)
    for row in rows:
        assert row["rollout/frac_reward_zero_std"] == 1.0
        assert 0 < row["rollout/frac_reward_zero_std_trained"] <= 1.0
