"""Safe RLHF: whole runs with a cost, a multiplier and a second critic."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RMConfig
from lightrft.observability.trackers import read_rows
from lightrft.strategy.checkpoint import CheckpointStore, load_state
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, DataError
from tests.e2e.command import command
from tests.e2e.test_resume import assert_same_end, start


def terms(folder: Path, **cost: Any) -> dict[str, Any]:
    """The share of ones is the reward, and another number of the response its cost."""
    limited = {"function": f"{folder}/rewards.py:varied", "name": "cost", "weight": 0, **cost}
    return {"terms": [f"{folder}/rewards.py:ones", limited]}


@pytest.fixture
def safe_tree(rl_tree: dict[str, Any], data_folder: Path) -> dict[str, Any]:
    limits = {"costs": [{"name": "cost", "threshold": 0.3}], "window": 20, "delay_steps": 1}
    more = {
        "reward": terms(data_folder),
        "algorithm": {"preset": "ppo_lag", "lagrangian": limits},
        "cost_critic": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 1, "keep": 10},
        "train": {"num_mini_batches": 2},
    }
    return deep_merge(rl_tree, more)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_its_multiplier_and_trains_a_second_critic(rl_config, safe_tree, tmp_path):
    run_rl(rl_config(**safe_tree))
    rows = rows_of(tmp_path / "run")
    for row in rows:
        assert row["reward/mean"] == pytest.approx(row["reward/ones"], abs=1e-9)
        assert row["lagrangian/cost"] == pytest.approx(row["reward/cost"], abs=1e-9)
        assert row["cost_critic/loss"] >= 0
        assert row["cost_critic/optimizer_steps"] == 2
    assert rows[0]["lagrangian/lambda"] == 1.0
    for before, row in itertools.pairwise(rows):
        rises = row["lagrangian/cost_window"] > 0.3
        assert (row["lagrangian/lambda"] > before["lagrangian/lambda"]) == rises
    saved = [tmp_path / "run" / "checkpoints" / f"step_00000{k}" for k in (1, 4)]
    first, last = (load_file(s / "cost_critic" / "state.safetensors") for s in saved)
    assert any(not torch.equal(first[k], last[k]) for k in first)
    critic = load_file(saved[1] / "critic" / "state.safetensors")
    assert any(not torch.equal(critic[k], last[k]) for k in last)
    state = load_state(saved[1] / "trainer")["controls"]["lagrangian"]
    assert state["step"] == 4 and len(state["multipliers"][0]["costs"]) == 20


@pytest.mark.slow
def test_a_killed_run_with_costs_ends_bit_for_bit_like_one_that_was_not(safe_tree, tmp_path):
    whole = start(safe_tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(safe_tree, "killed", "update", 14, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(safe_tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 4)


OTHER = {"name": "other", "threshold": 1.0}


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"reward": {"terms": ["math"]}}, "costs.0.name = 'cost': reward.terms has no term"),
        ({"reward": {"weight": 1}}, r"reward.terms.1.weight = 1.0: 'cost' is a cost"),
        ({"algorithm": {"lagrangian": {"costs": ["cost", OTHER]}}}, "has one cost critic"),
        ({"algorithm": {"lagrangian": {"costs": ["cost", "cost"]}}}, "has a name twice"),
        ({"algorithm": {"lagrangian": {"init": 9.0}}}, "init = 9.0 is above lagrangian.max = 5.0"),
        ({"algorithm": {"lagrangian": {"lr": 0.0}}}, "window = 20 changes nothing"),
        ({"algorithm": {"normalize": {"values": True}}}, "must keep the units"),
        ({"algorithm": {"preset": "raft"}}, "advantage 'raft' is for rewards alone"),
        ({"algorithm": {"preset": "remax"}}, "advantage 'remax' is for rewards alone"),
        ({"algorithm": {"filters": ["zero_variance"]}}, "'zero_variance' drops groups"),
        ({"algorithm": {"preset": "grpo_lag"}}, "cost_critic changes nothing"),
        (
            {
                "algorithm": {"lagrangian": {"costs": []}},
                "cost_critic": {"optimizer": {"lr": 9e-6}},
            },
            "window = 20 changes nothing: lagrangian.costs is empty",
        ),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(rl_config, safe_tree, data_folder, over, said):
    if "weight" in over.get("reward", {}):
        over = {"reward": terms(data_folder, **over["reward"])}
    with pytest.raises(ConfigError, match=said):
        run_rl(rl_config(**deep_merge(safe_tree, over)))


@pytest.mark.parametrize(
    ("key", "ratings", "unsafe_from", "said"),
    [
        ("data", [0, 3], 4, "from 0 to 3, .*unsafe_from = 4 of .* no response is unsafe; set"),
        ("data", [2, 3], 2, "from 2 to 3, .*unsafe_from = 2 of .* every response is unsafe"),
        ("validation", [0, 1], 2, "from 0 to 1, .*unsafe_from = 2 of .* no response is unsafe"),
        ("data", [0.5, 0], None, "from 0 to 0.5, .*unsafe_from = None of .* no response is unsafe"),
        ("validation", [0, 2], None, "a rating is 2; .*set options.unsafe_from of the loss"),
    ],
)
def test_ratings_that_are_all_safe_or_all_unsafe_are_refused_before_a_step(
    model_folder, tmp_path, key, ratings, unsafe_from, said
):
    good = [0, 3] if unsafe_from is not None else [0, 1]
    tree = {
        "run": {"dir": str(tmp_path), "name": "cost"},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "batch_size": 2,
        "reward_model": {
            "heads": ["cost"],
            "losses": [{"name": "cost_sign", "options": {"unsafe_from": unsafe_from}}],
        },
        "train": {"steps": 1},
    }
    for name in ("data", "validation"):
        file = tmp_path / f"{name}.jsonl"
        values = ratings if name == key else good
        rows = [{"prompt": "1+1=", "response": f"{i}", "cost": v} for i, v in enumerate(values)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree[name] = {"sources": [str(file)]}
    with pytest.raises(DataError, match=said) as caught:
        run_reward_model(build(RMConfig, tree))
    assert unsafe_from is None or str(caught.value).startswith(f"{key}.sources, ")


@pytest.mark.slow
def test_a_cost_model_learns_order_and_sign_from_rows_of_pku_saferlhf_and_limits_a_run(
    rl_config, rl_tree, model_folder, tmp_path, capsys
):
    """Responses of ``a`` are safe and of ``x`` unsafe; the longer one of two is the less safe one."""
    rows = []
    for i in range(32):
        pair = [("a", "aaa"), ("a", "x"), ("x", "xxx"), ("xxx", "aa")][i % 4]
        safe = ["a" in text for text in pair]
        safer = 0 if safe[0] == safe[1] else safe.index(True)
        row = {"prompt": f"{i}=", "safer_response_id": safer, "better_response_id": 1 - safer}
        row |= {f"response_{k}": text for k, text in enumerate(pair)}
        rows.append(row | {f"is_response_{k}_safe": good for k, good in enumerate(safe)})
    file = tmp_path / "pku.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": [str(file)], "columns": {"layout": "pku_cost"}}
    sign = {"name": "cost_sign", "weight": 2, "options": {"unsafe_from": 2}}
    tree = {
        "run": {"dir": str(tmp_path), "name": "cost", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": data,
        "validation": data,
        "batch_size": 16,
        "reward_model": {"heads": ["cost"], "losses": ["bradley_terry", sign]},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 30},
        "log": {"tensorboard": False},
        "eval": {"every": 10},
        "checkpoint": {"best": "eval/sign_accuracy"},
    }
    run_reward_model(build(RMConfig, tree))
    store = CheckpointStore(tmp_path / "cost" / "checkpoints", 1, "eval/sign_accuracy")
    assert store.best() is not None
    found = [row for row in read_rows(tmp_path / "cost" / "metrics.jsonl") if "eval/loss" in row]
    assert found[-1]["eval/sign_accuracy"] > 0.95 > found[0]["eval/sign_accuracy"]
    assert found[-1]["eval/pair_accuracy"] > 0.9
    words = [
        str(tmp_path / "cost"),
        f"data.sources={file}",
        f"run.dir={tmp_path}",
        "model.dtype=float32",
    ]
    outcome = command(capsys, "eval-rm", *words, "data.columns.layout=pku_cost")
    assert json.loads(outcome.out)["eval/sign_accuracy"] == found[-1]["eval/sign_accuracy"]
    # preferences are no ratings of harm
    words += ["data.columns.layout=pku_safer", "run.name=order"]
    outcome = command(capsys, "eval-rm", *words)
    assert "eval/sign_accuracy" not in json.loads(outcome.out)
    assert "unsafe_from = 2 of the loss cost_sign no response is unsafe" in outcome.err
    folder = tmp_path / "cost" / "model"
    models = [{"path": str(folder), "name": "cost", "weight": 0}]
    reward = {"terms": rl_tree["reward"]["terms"], "models": models}
    run_rl(rl_config(algorithm={"preset": "grpo_lag"}, reward=reward))
    assert all("lagrangian/lambda" in row for row in rows_of(tmp_path / "run"))
