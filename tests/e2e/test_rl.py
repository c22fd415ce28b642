"""Whole runs of reinforcement learning on a tiny real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_rows(path / "metrics.jsonl")


@pytest.mark.parametrize("preset", ["grpo", "reinforce++", "ppo"])
def test_every_preset_runs_and_leaves_a_whole_run_folder(rl_config, tmp_path, preset):
    summary = run_rl(rl_config(algorithm={"preset": preset}))
    folder = tmp_path / "run"
    assert summary["finished"] and summary["steps"] == 4
    assert {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "log.txt",
        "rollouts",
        "checkpoints",
        "model",
    } <= {p.name for p in folder.iterdir()}
    rows = rows_of(folder)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all(torch.tensor(r["policy/loss"]).isfinite() for r in rows)
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_the_weights_move_and_the_export_holds_them(rl_config, model_folder, tmp_path):
    run_rl(rl_config())
    before, after = (
        load_file(model_folder / "model.safetensors"),
        load_file(tmp_path / "run" / "model" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[k], after[k]) for k in before)


def test_a_run_with_adapters_trains_only_them(rl_config, tmp_path):
    run_rl(rl_config(model={"lora": {"rank": 4, "alpha": 8}}))
    state = load_file(
        next((tmp_path / "run" / "checkpoints").glob("step_*")) / "policy" / "state.safetensors"
    )
    weights = [k for k in state if k.startswith("weights/")]
    assert weights and all("lora" in k for k in weights)


def test_every_sampled_token_is_trained_filtered_or_failed(rl_config, data_folder, tmp_path):
    config = rl_config(
        reward={"terms": [f"{data_folder / 'rewards.py'}:sometimes_fails"]},
        algorithm={"filters": ["zero_variance"]},
        rollout={"group_size": 3, "max_rounds": 4},
    )
    run_rl(config)
    for row in rows_of(tmp_path / "run"):
        written = [
            json.loads(line)
            for line in (tmp_path / "run" / "rollouts" / f"step_{row['step']:06d}.jsonl")
            .read_text()
            .splitlines()
        ]
        sampled = sum(len(r["token_ids"]) for r in written)
        assert row["rollout/tokens_sampled"] == sampled
        assert (
            sampled
            == row["rollout/tokens_trained"]
            + row["rollout/tokens_filtered"]
            + row["rollout/tokens_failed"]
        )
        assert row["rollout/tokens_failed"] == sum(
            len(r["token_ids"]) for r in written if r["failed"]
        )
        assert row["rollout/tokens_trained"] == sum(len(r["advantages"]) for r in written)
    assert sum(r["rollout/tokens_failed"] for r in rows_of(tmp_path / "run")) > 0
    assert sum(r["rollout/tokens_filtered"] for r in rows_of(tmp_path / "run")) > 0


def test_filtered_groups_are_replaced_up_to_the_exact_batch(rl_config, data_folder, tmp_path):
    config = rl_config(
        reward={"terms": [f"{data_folder / 'rewards.py'}:sometimes_fails"]},
        algorithm={"filters": ["zero_variance"]},
        rollout={"group_size": 3, "max_rounds": 50},
    )
    run_rl(config)
    rows = rows_of(tmp_path / "run")
    assert all(r["rollout/groups"] == 3 for r in rows)
    assert any(r["rollout/rounds"] > 1 for r in rows)


def test_a_step_whose_groups_were_all_dropped_changes_no_weight_and_is_counted(
    rl_config, model_folder, data_folder, tmp_path
):
    config = rl_config(
        reward={"terms": [f"{data_folder / 'rewards.py'}:ones"]},
        algorithm={"filters": [{"name": "reward_bounds", "options": {"low": 2.0}}]},
        rollout={"max_rounds": 2},
        train={"steps": 1},
    )
    run_rl(config)
    (row,) = rows_of(tmp_path / "run")
    assert (
        row["rollout/groups"] == 0
        and row["rollout/dropped/reward_bounds"] == 6
        and row["rollout/rounds"] == 2
    )
    before, after = (
        load_file(model_folder / "model.safetensors"),
        load_file(tmp_path / "run" / "model" / "model.safetensors"),
    )
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_bfloat16_run_keeps_float32_master_weights_in_its_checkpoint(rl_config, tmp_path):
    run_rl(rl_config(model={"dtype": "bfloat16"}, optimizer={"lr": 1e-6}))
    state = load_file(
        tmp_path / "run" / "checkpoints" / "step_000004" / "policy" / "state.safetensors"
    )
    assert all(t.dtype == torch.float32 for k, t in state.items() if k.startswith("weights/"))
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in exported.values())


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_gradient_checkpointing_and_small_micro_batches_change_no_weight_beyond_rounding(
    rl_config, tmp_path, preset
):
    # Or Adam would make rounding as large as a gradient.
    steady: dict[str, Any] = {
        "lr": 1e-2,
        "eps": 1e-4,
    }
    own = {"optimizer": steady, **({"critic": {"optimizer": steady}} if preset == "ppo" else {})}
    thrift = {
        "model": {"gradient_checkpointing": True},
        "train": {"max_tokens_per_micro_batch": 24},
    }
    run_rl(rl_config(run={"name": "plain"}, algorithm={"preset": preset}, **own))
    run_rl(rl_config(run={"name": "thrifty"}, algorithm={"preset": preset}, **own, **thrift))
    plain, thrifty = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "thrifty")
    )
    for name, weight in plain.items():
        torch.testing.assert_close(thrifty[name], weight, rtol=0, atol=2e-5)
    steps = [[r["reward/mean"] for r in rows_of(tmp_path / name)] for name in ("plain", "thrifty")]
    assert steps[0] == steps[1]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "reinforce++", "ppo"])
def test_reward_rises_and_a_wrong_sign_makes_it_fall(rl_config, data_folder, tmp_path, preset):
    def last_share(function: str, name: str) -> float:
        run_rl(
            rl_config(
                run={"name": name},
                algorithm={"preset": preset, "kl": {"coef": 0.0}},
                reward={"terms": [f"{data_folder / 'rewards.py'}:{function}"]},
                rollout={"prompts_per_step": 8, "group_size": 8},
                sampling={"min_new_tokens": 6},
                train={"steps": 25},
                **({"critic": {"optimizer": {"lr": 1e-2}}} if preset == "ppo" else {}),
            )
        )
        return abs(sum(r["reward/mean"] for r in rows_of(tmp_path / name)[-3:]) / 3)

    assert last_share("ones", "right") > 0.5
    assert last_share("wrong_sign", "wrong") < 0.05


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"reward": {"terms": []}}, "reward.terms is empty"),
        ({"data": {"sources": []}}, "data.sources is empty"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size = 1"),
        ({"model": {"path": ""}}, "model.path is empty"),
        ({"algorithm": {"advantage": {"name": "grppo"}}}, "grpo"),
        (
            {"algorithm": {"filters": [{"name": "reward_bounds", "options": {"lo": 1}}]}},
            "reward_bounds",
        ),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_the_way_out(rl_config, over, said):
    with pytest.raises(ConfigError, match=said):
        run_rl(rl_config(**over))


def test_a_run_with_every_part_of_drawing_accounts_for_every_token(
    rl_config, data_folder, tmp_path
):
    """Greedy baselines, filters, selection, early stop and a curriculum at once."""
    drawing = {
        "oversample": 2.0,
        "max_rounds": 2,
        "select": {"name": "balanced", "options": {"keep": 2}},
        "curriculum": {"name": "priority"},
    }
    algorithm = {
        "preset": None,
        "advantage": {"name": "remax"},
        "filters": [{"name": "repeated_answers", "options": {"limit": 0.6}}],
    }
    run_rl(rl_config(rollout=drawing, algorithm=algorithm, sampling={"max_new_tokens": 12}))
    rows = rows_of(tmp_path / "run")
    for row in rows:
        filtered = sum(
            value for name, value in row.items() if name.startswith("rollout/tokens_filtered/")
        )
        assert row["rollout/tokens_filtered"] == filtered
        assert (
            row["rollout/tokens_sampled"]
            == row["rollout/tokens_trained"] + filtered + row["rollout/tokens_failed"]
        )
        assert row["rollout/tokens_filtered/baseline"] > 0
        assert row["rollout/tokens_filtered/not_selected"] > 0
        assert 0 <= row["rollout/frac_dropped"] < 1
    assert [row["curriculum/epoch"] > 0 for row in rows] == [True] * 4
    written = [
        json.loads(line)
        for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    greedy = {
        r["prompt"]["id"]: r["reward"]
        for r in written
        if r["sample"] == -1 and r["finish_reason"] != "abort"
    }
    trained = [r for r in written if r["advantages"]]
    assert trained
    assert all(r["baseline"] == greedy[r["prompt"]["id"]] for r in trained)
