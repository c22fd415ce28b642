"""Real inputs to a run of reinforcement learning: every kind of file, blends, and functions of one's own in every place."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import RewardError

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]
COLUMNS = {"prompt": "question", "label": "answer"}


def as_jsonl(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return file


def as_json(folder: Path) -> Path:
    file = folder / "rows.json"
    file.write_text(json.dumps(ROWS))
    return file


def as_csv(folder: Path) -> Path:
    file = folder / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    return file


def as_parquet(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def as_saved(folder: Path) -> Path:
    import datasets

    parts = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(parts).save_to_disk(folder / "saved")
    return folder / "saved"


def as_folder(folder: Path) -> Path:
    files = folder / "files"
    files.mkdir()
    as_jsonl(files).rename(files / "train-0.jsonl")
    return files


def rollouts(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("write", [as_jsonl, as_json, as_csv, as_parquet, as_saved, as_folder])
def test_every_kind_of_file_gives_the_same_prompts_and_labels(rl_config, tmp_path, capsys, write):
    path = write(tmp_path)
    capsys.readouterr()
    run_rl(
        rl_config(
            data={"sources": [{"path": str(path)}], "columns": COLUMNS},
            rollout={"prompts_per_step": 6},
            train={"steps": 1},
        )
    )
    seen = {
        (r["prompt"]["text"].split("\n")[1].removesuffix("<|im_end|>"), r["prompt"]["label"])
        for r in rollouts(tmp_path / "run")
    }
    assert seen == {(row["question"], row["answer"]) for row in ROWS}
    printed = capsys.readouterr()
    assert printed.out == "" and "it/s" not in printed.err


def test_sources_are_blended_by_their_weights_and_each_has_its_own_reward(
    rl_config, data_folder, tmp_path
):
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(90)]
    for name in ("often", "seldom"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    often = {"path": str(tmp_path / "often.jsonl"), "weight": 0.8}
    seldom = {"path": str(tmp_path / "seldom.jsonl"), "weight": 0.2, "name": "rare"}
    ones = f"{data_folder / 'rewards.py'}:ones"
    run_rl(
        rl_config(
            data={"sources": [often, seldom], "blend": "sample"},
            reward={
                "terms": [{"function": ones, "name": "usual"}],
                "per_source": {"rare": [{"function": ones, "name": "own"}]},
            },
            rollout={"prompts_per_step": 100, "group_size": 2},
            sampling={"max_new_tokens": 2},
            train={"steps": 1},
        )
    )
    found = rollouts(tmp_path / "run")
    share = Counter(r["prompt"]["data_source"] for r in found)["rare"] / len(found)
    assert 0.1 < share < 0.3
    assert all(
        list(r["terms"]) == (["own"] if r["prompt"]["data_source"] == "rare" else ["usual"])
        for r in found
    )


def test_a_source_without_any_reward_is_refused_before_training(rl_config, data_folder, tmp_path):
    other = {"path": str(data_folder / "train.jsonl"), "name": "other"}
    config = rl_config(
        data={"sources": [other]}, reward={"terms": [], "per_source": {"one": ["math"]}}
    )
    with pytest.raises(RewardError, match="no reward for data source 'other'"):
        run_rl(config)
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == []


OWN = '''
import asyncio


def advantage(batch, token_rewards, settings, *, factor):
    """Twice the reward, on every token."""
    flat = batch.rewards.repeat_interleave(batch.lengths) * factor
    return flat, flat


def loss(logprobs, old, advantages, rows, settings):
    """REINFORCE."""
    return -logprobs * advantages, {"own/sum": logprobs.detach()}


def keep_even(group, *, modulus):
    return "" if group[0].prompt.id.endswith(tuple("02468")) and modulus == 2 else "odd"


def minus_one(batch, rewards, *, max_new_tokens, by):
    return rewards - by


async def waits(rollout):
    await asyncio.sleep(0.01)
    return {"reward": 0.25, "waited": 1.0}


def together(rollouts):
    return [float(len(rollouts) > 0) for _ in rollouts]
'''


@pytest.fixture
def own(tmp_path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_an_advantage_a_loss_a_filter_and_a_shaping_of_ones_own_are_what_runs(
    rl_config, own, tmp_path
):
    run_rl(
        rl_config(
            reward={"terms": [f"{own}:together"]},
            algorithm={
                "advantage": {"name": f"{own}:advantage", "options": {"factor": 3.0}},
                "loss": {"name": f"{own}:loss"},
                "filters": [{"name": f"{own}:keep_even", "options": {"modulus": 2}}],
                "shaping": [{"name": f"{own}:minus_one", "options": {"by": 0.5}}],
                "kl": {"coef": 0.0},
            },
            rollout={"prompts_per_step": 4, "max_rounds": 4},
            train={"steps": 2},
        )
    )
    rows, found = read_rows(tmp_path / "run" / "metrics.jsonl"), rollouts(tmp_path / "run")
    trained = [r for r in found if r["advantages"]]
    assert trained and all(
        a == pytest.approx(3.0 * (1.0 - 0.5), abs=1e-6) for r in trained for a in r["advantages"]
    )
    assert all(int(r["prompt"]["id"][-1]) % 2 == 0 for r in trained)
    assert sum(row.get("rollout/dropped/odd", 0) for row in rows) > 0
    assert all(any("own/sum" in key for key in row) for row in rows)


def test_rewards_that_wait_and_rewards_of_many_at_once_are_summed_by_weight(
    rl_config, own, tmp_path
):
    terms = [
        {"function": f"{own}:waits", "weight": 2.0},
        {"function": f"{own}:together", "weight": -1.0},
    ]
    run_rl(rl_config(reward={"terms": terms, "workers": 2}, train={"steps": 1}))
    for rollout in rollouts(tmp_path / "run"):
        assert rollout["reward"] == pytest.approx(2.0 * 0.25 - 1.0, abs=1e-9)
        assert not rollout["failed"]
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert any("waited" in key for key in row)
