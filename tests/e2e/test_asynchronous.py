"""Answers drawn while the policy is trained: by the versions that are due, whatever the clock says, and over a kill."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.observability.trackers import read_rows
from lightrft.rollout import async_generation
from lightrft.strategy.checkpoint import load_state
from lightrft.trainer import rl, rl_step
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import RewardError
from lightrft.utils.stop_signal import StopFlag
from tests.e2e.test_resume import assert_same_end, start


def answers(folder: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of each step, in order."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def slowed(function: Any, seconds: float) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return wrapped


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_batch_n_is_drawn_by_the_version_that_is_due_whoever_is_faster(
    rl_config, tmp_path, monkeypatch, staleness
):
    run_rl(rl_config(run={"name": "plain"}, rollout={"staleness": staleness}))
    monkeypatch.setattr(
        async_generation, "collect_rollouts", slowed(async_generation.collect_rollouts, 0.2)
    )
    run_rl(rl_config(run={"name": "slow generation"}, rollout={"staleness": staleness}))
    monkeypatch.undo()
    monkeypatch.setattr(rl, "learn", slowed(rl.learn, 0.2))
    run_rl(rl_config(run={"name": "slow training"}, rollout={"staleness": staleness}))
    for name in ("plain", "slow generation", "slow training"):
        for step, rollouts in enumerate(answers(tmp_path / name)):
            assert {v for r in rollouts for v in r["versions"]} == {max(0, step - staleness)}
        for key, weight in weights(tmp_path / "plain").items():
            assert weight.equal(weights(tmp_path / name)[key]), key
    rows = read_rows(tmp_path / "plain" / "metrics.jsonl")
    assert [r["staleness/max"] for r in rows] == [min(step, staleness) for step in range(4)]
    assert [r["staleness/mean"] for r in rows] == [r["staleness/max"] for r in rows]
    assert all(
        r["time/wait"] >= 0 and r["time/ahead/generate"] > 0 and r["time/ahead/idle"] >= 0
        for r in rows
    )


def test_with_adapters_only_they_are_copied_and_the_schedule_holds(rl_config, tmp_path):
    run_rl(rl_config(model={"lora": {"rank": 4, "alpha": 8}}, rollout={"staleness": 1}))
    assert [{v for r in step for v in r["versions"]} for step in answers(tmp_path / "run")] == [
        {0},
        {0},
        {1},
        {2},
    ]


def test_staleness_larger_than_the_run_draws_everything_by_the_first_weights(rl_config, tmp_path):
    run_rl(rl_config(rollout={"staleness": 9}))
    assert {v for step in answers(tmp_path / "run") for r in step for v in r["versions"]} == {0}


def test_the_first_two_batches_equal_those_of_a_synchronous_run_as_far_as_their_versions_do(
    rl_config, tmp_path
):
    run_rl(rl_config(run={"name": "now"}))
    run_rl(rl_config(run={"name": "ahead"}, rollout={"staleness": 1}))
    now, ahead = answers(tmp_path / "now"), answers(tmp_path / "ahead")
    assert now[0] == ahead[0]
    assert [[r["prompt"]["id"] for r in step] for step in now] == [
        [r["prompt"]["id"] for r in step] for step in ahead
    ]
    assert now[1] != ahead[1]


def test_generation_runs_while_the_policy_is_trained(rl_config, monkeypatch):
    """Batch 1 can only be drawn before training on batch 0 ends if the two overlap."""
    drawn, began = threading.Event(), []
    collect, learn = async_generation.collect_rollouts, rl_step.learn

    def collecting(roles: Any, config: Any, step: int, *rest: Any) -> Any:
        found = collect(roles, config, step, *rest)
        if step == 1:
            drawn.set()
        return found

    def learning(context: Any, *rest: Any) -> Any:
        if context.step == 0:
            began.append(drawn.wait(timeout=300))
        return learn(context, *rest)

    monkeypatch.setattr(async_generation, "collect_rollouts", collecting)
    monkeypatch.setattr(rl, "learn", learning)
    run_rl(rl_config(rollout={"staleness": 1}, train={"steps": 2}))
    assert began == [True]


def test_an_error_of_the_thread_ends_the_run_with_the_thread_s_traceback(rl_config, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("from the thread")

    monkeypatch.setattr(async_generation, "collect_rollouts", broken)
    with pytest.raises(ZeroDivisionError, match="from the thread") as caught:
        run_rl(rl_config(rollout={"staleness": 1}))
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not [t for t in threading.enumerate() if t.name.startswith("generation")]


def test_a_batch_that_could_not_be_scored_keeps_the_steps_before_it_and_is_drawn_again(
    rl_tree, tmp_path, monkeypatch
):
    whole = start(deep_merge(rl_tree, {"rollout": {"staleness": 1}}), "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    config = build(
        RLConfig, deep_merge(rl_tree, {"run": {"name": "broken"}, "rollout": {"staleness": 1}})
    )
    collect = async_generation.collect_rollouts

    def unscored(roles: Any, config: Any, step: int, *rest: Any) -> Any:
        found = collect(roles, config, step, *rest)
        if step == 2:
            raise RewardError("no answer was scored")
        return found

    monkeypatch.setattr(async_generation, "collect_rollouts", unscored)
    with pytest.raises(RewardError, match="resumes from step 2"):
        run_rl(config)
    monkeypatch.undo()
    run_rl(config)
    assert_same_end(tmp_path / "whole", tmp_path / "broken", 4)


def test_staleness_without_a_correction_warns_and_says_what_to_set(rl_config, caplog):
    with caplog.at_level(logging.WARNING):
        rl.check(rl_config(rollout={"staleness": 1}))
        assert (
            "algorithm.importance_sampling" in caplog.text
            and "algorithm.old_logprobs" in caplog.text
        )
        caplog.clear()
        rl.check(rl_config(rollout={"staleness": 1}, algorithm={"importance_sampling": ["tis"]}))
        rl.check(rl_config(rollout={"staleness": 1}, algorithm={"old_logprobs": "rollout"}))
        rl.check(rl_config())
        assert "importance_sampling" not in caplog.text


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_checkpoint_in_the_middle_holds_the_batches_that_wait(rl_config, tmp_path, staleness):
    run_rl(rl_config(rollout={"staleness": staleness}, checkpoint={"every": 1, "keep": 10}))
    for step in range(1, 5):
        drawn = load_state(tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "trainer")[
            "drawn"
        ]
        assert len(drawn["finished"]) == min(staleness, 4 - step) and not drawn["weights"]
        for batch, collected in enumerate(drawn["finished"], start=step):
            written = [
                json.loads(x)
                for x in (tmp_path / "run/rollouts" / f"step_{batch + 1:06d}.jsonl")
                .read_text()
                .splitlines()
            ]
            assert [r["token_ids"] for r in collected["rollouts"]] == [
                r["token_ids"] for r in written
            ]


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Refills over an epoch's end, two optimizer steps a batch, and a reward that fails on some answers."""
    folder = rl_tree["reward"]["terms"][0].partition(":")[0]
    return deep_merge(
        rl_tree,
        {
            "reward": {"terms": [f"{folder}:sometimes_fails"]},
            "checkpoint": {"every": 1, "keep": 10},
            "algorithm": {"filters": ["zero_variance"], "importance_sampling": ["tis"]},
            "rollout": {"staleness": 1, "max_rounds": 3},
            "train": {"num_mini_batches": 2, "steps": 5},
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth", "staleness"),
    [
        pytest.param("generation", 7, 1, marks=pytest.mark.thorough),
        ("generation", 14, 1),
        pytest.param("generation", 14, 2, marks=pytest.mark.thorough),
        pytest.param("update", 3, 1, marks=pytest.mark.thorough),
        ("update", 6, 3),
        pytest.param("checkpoint files", 3, 1, marks=pytest.mark.thorough),
        pytest.param("after checkpoint", 3, 1, marks=pytest.mark.thorough),
        ("after checkpoint", 3, 2),
    ],
)
def test_a_killed_asynchronous_run_ends_bit_for_bit_like_one_that_was_not(
    tree, tmp_path, where, nth, staleness
):
    tree = deep_merge(tree, {"rollout": {"staleness": staleness}})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", where, nth, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 5)


@pytest.mark.parametrize("staleness", [1, 2])
def test_sigterm_gives_up_the_batch_under_way_saves_and_the_run_goes_on_bit_for_bit(
    tree, tmp_path, monkeypatch, staleness
):
    tree = deep_merge(tree, {"rollout": {"staleness": staleness}, "checkpoint": {"every": 0}})
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    config = build(RLConfig, deep_merge(tree, {"run": {"name": "stopped"}}))
    collect = async_generation.collect_rollouts
    request, heard = StopFlag.request, threading.Event()

    def hearing(flag: StopFlag, reason: str) -> None:
        request(flag, reason)
        heard.set()

    def interrupted(roles: Any, config: Any, step: int, *rest: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.wait(300)  # the main thread may come to look when all is drawn
        return collect(roles, config, step, *rest)

    monkeypatch.setattr(async_generation, "collect_rollouts", interrupted)
    monkeypatch.setattr(StopFlag, "request", hearing)
    summary = run_rl(config)
    monkeypatch.undo()
    assert not summary["finished"] and summary["steps"] < 4
    state = load_state(
        tmp_path / "stopped" / "checkpoints" / f"step_{summary['steps']:06d}" / "trainer"
    )
    assert min(state["drawn"]["weights"]) == 3 - staleness
    run_rl(config)
    assert_same_end(tmp_path / "whole", tmp_path / "stopped", 5)
