"""A kept batch goes through any phase again, and gives what the run got."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.diagnostics.replay import NAMES, replay
from lightrft.observability.trackers import read_rows
from lightrft.rollout.serialization import load_batch
from lightrft.trainer import phases
from lightrft.trainer.rl import run_rl
from lightrft.types import Batch
from lightrft.utils.errors import CheckpointError, ConfigError

KEPT = {"log": {"batches_every": 1}, "checkpoint": {"every": 1, "keep": 10}}


def assert_equal(one: Batch, other: Batch) -> None:
    for axis in ("token", "sample"):
        left, right = one.columns(axis), other.columns(axis)
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].equal(right[name]), name


def without_rewards(batch: Batch) -> Batch:
    """The phase advantages replaces scored by shaped rewards."""
    return batch.replace(rewards=None)


@pytest.mark.parametrize("preset", ["grpo", "ppo", "prime"])
@pytest.mark.parametrize("step", [1, 3])
def test_every_phase_again_gives_the_batch_and_the_metrics_of_the_run(
    rl_config, tmp_path, preset, step
):
    over = {
        "algorithm": {"preset": preset, "filters": []},
        "train": {"ppo_epochs": 2, "num_mini_batches": 2},
        "optimizer": {"schedule": "cosine"},
    }
    run_rl(rl_config(**over, **KEPT))
    kept = load_batch(tmp_path / "run" / "batches" / f"step_{step:06d}")
    again = replay(tmp_path / "run", step)
    assert_equal(without_rewards(kept), without_rewards(again.batch))
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[step - 1]
    found = again.metrics.compute()
    assert found and {k: v for k, v in row.items() if k in found} == found


@pytest.mark.parametrize("names", [NAMES, NAMES[NAMES.index("prm") :]])
def test_a_process_model_learns_again_from_the_tokens_that_are_finite(
    rl_config, tmp_path, monkeypatch, names
):
    compute, infinite = phases.compute_logprobs, []

    def compute_with_infinite_ones(*args: Any) -> Tensor:
        found = compute(*args)
        found[1::3] = -torch.inf
        infinite.append(int(found.isinf().sum()))
        return found

    monkeypatch.setattr(phases, "compute_logprobs", compute_with_infinite_ones)
    run_rl(rl_config(algorithm={"preset": "prime", "filters": []}, train={"steps": 2}, **KEPT))
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[1]
    assert row["policy/nonfinite_tokens"] == infinite[1] > 0
    kept = load_batch(tmp_path / "run" / "batches" / "step_000002")
    again = replay(tmp_path / "run", 2, names)
    assert kept.process_rewards is not None
    assert_equal(without_rewards(kept), without_rewards(again.batch))
    found = again.metrics.compute()
    # The saved batch is without them already.
    assert found.pop("policy/nonfinite_tokens") == 0
    assert "prm/loss" in found
    assert {k: v for k, v in row.items() if k in found} == found


@pytest.mark.parametrize("phase", NAMES)
def test_a_phase_alone_takes_the_other_columns_from_the_run(rl_config, tmp_path, phase):
    run_rl(rl_config(algorithm={"preset": "ppo"}, train={"steps": 2}, **KEPT))
    kept = load_batch(tmp_path / "run" / "batches" / "step_000002")
    again = replay(tmp_path / "run", 2, [phase])
    assert_equal(without_rewards(kept), without_rewards(again.batch))
    assert (len(again.metrics) > 0) is (phase in ("prm", "update"))


def test_other_settings_make_something_else_of_the_same_answers(rl_config, data_folder, tmp_path):
    reward = {"terms": [f"{data_folder / 'rewards.py'}:sometimes_fails"]}
    run_rl(rl_config(train={"steps": 1}, reward=reward, **KEPT))
    kept = load_batch(tmp_path / "run" / "batches" / "step_000001")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    again = replay(tmp_path / "run", 1, ["advantages"], ["algorithm.advantage.name=rloo"]).batch
    assert again.responses.tokens.equal(kept.responses.tokens)
    assert (
        again.advantages is not None
        and kept.advantages is not None
        and not again.advantages.equal(kept.advantages)
    )
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_run_with_generation_ahead_is_replayed_too(rl_config, tmp_path):
    run_rl(rl_config(rollout={"staleness": 1}, algorithm={"importance_sampling": ["tis"]}, **KEPT))
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[2]
    found = replay(tmp_path / "run", 3).metrics.compute()
    assert {k: v for k, v in row.items() if k in found} == found


def test_a_reference_that_moved_and_data_beside_the_rollouts_are_replayed_too(
    rl_config, data_folder, tmp_path
):
    ptx = {
        "coef": 0.5,
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 4,
    }
    kl = {"where": "loss", "coef": 0.1, "refresh_every": 2}
    run_rl(rl_config(ptx=ptx, algorithm={"kl": kl}, train={"steps": 3}, **KEPT))
    again = replay(tmp_path / "run", 3)
    assert_equal(
        without_rewards(load_batch(tmp_path / "run" / "batches" / "step_000003")),
        without_rewards(again.batch),
    )
    row, found = read_rows(tmp_path / "run" / "metrics.jsonl")[2], again.metrics.compute()
    assert "ptx/nll" in found
    assert {k: v for k, v in row.items() if k in found} == found


def test_what_was_not_kept_is_refused_with_the_way_out(rl_config, tmp_path):
    run_rl(rl_config(train={"steps": 3}, log={"batches_every": 3}))
    with pytest.raises(CheckpointError, match=r"no batch of step 2, but of \[3\]"):
        replay(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2.*checkpoint\.every=1"):
        replay(tmp_path / "run", 3)
    with pytest.raises(ConfigError, match="no phase 'loss'"):
        replay(tmp_path / "run", 3, ["loss"])


def test_batches_of_steps_that_a_resume_takes_back_are_removed(rl_config, tmp_path):
    run_rl(rl_config(**KEPT))
    assert len(list((tmp_path / "run" / "batches").iterdir())) == 4
    run_rl(
        rl_config(
            run={"resume": str(tmp_path / "run" / "checkpoints" / "step_000002")},
            log={"batches_every": 0},
        )
    )
    assert {p.stem for p in (tmp_path / "run" / "batches").iterdir()} == {
        "step_000001",
        "step_000002",
    }


def test_columns_of_the_run_are_what_is_kept(rl_config, tmp_path):
    run_rl(rl_config(train={"steps": 1}, **KEPT))
    batch = load_batch(tmp_path / "run" / "batches" / "step_000001")
    lines = [
        json.loads(x)
        for x in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    ]
    assert batch.responses.tokens.tolist() == [t for r in lines for t in r["token_ids"]]
    assert batch.rewards is not None and batch.rewards.tolist() == [r["reward"] for r in lines]
    assert batch.advantages is not None and batch.advantages.tolist() == [
        a for r in lines for a in r["advantages"]
    ]


def test_a_step_with_others_beside_the_policy_is_replayed_as_it_was(
    rl_config, data_folder, tmp_path
):
    """The third step: the reference has just moved, and process model and supervised data are where two steps left them."""
    ptx = {
        "coef": 0.5,
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 3,
    }
    kl = {"where": "loss", "coef": 0.1, "refresh_every": 2}
    process = {"threshold": 0.02, "optimizer": {"lr": 1e-2}}
    run_rl(
        rl_config(
            algorithm={"preset": "prime", "filters": [], "kl": kl}, prm=process, ptx=ptx, **KEPT
        )
    )
    kept = load_batch(tmp_path / "run" / "batches" / "step_000003")
    again = replay(tmp_path / "run", 3)
    assert kept.process_rewards is not None
    assert_equal(without_rewards(kept), without_rewards(again.batch))
    row, found = read_rows(tmp_path / "run" / "metrics.jsonl")[2], again.metrics.compute()
    assert {"prm/loss", "ptx/nll", "policy/kl"} <= found.keys()
    assert {k: v for k, v in row.items() if k in found} == found
