"""The three recipes of RLHF, one after the other, on a tiny model and rows in the form of TL;DR."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from tests.e2e.command import ROOT, command

SMALL = ("model.gradient_checkpointing=false", "log.tensorboard=false", "model.dtype=float32")


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_a_policy_of_the_recipes_learns_from_the_reward_model_of_the_recipes(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(ROOT)
    chance = random.Random(0)
    posts = [f"POST: {chance.randrange(10**6)}\n\nTL;DR:" for _ in range(48)]
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    tiny_model("qwen2", seed=1, vocab_size=len(tokenizer), **sizes).save_pretrained(
        tmp_path / "base"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    said = [{"prompt": post, "completion": f" {chance.choice('ab')}"} for post in posts]
    pairs = [{"prompt": post, "chosen": " a", "rejected": " b"} for post in posts]
    summaries, compared = write(tmp_path / "sft.jsonl", said), write(tmp_path / "rm.jsonl", pairs)

    def run(verb: str, name: str, model: Path, rows: Path, *words: str) -> list[dict[str, float]]:
        held = () if verb == "rl" else (f"validation.sources=[{rows}]",)
        outcome = command(
            capsys,
            *(verb, f"recipes/{name}.yaml", f"model.path={model}", f"data.sources=[{rows}]"),
            *(f"run.dir={tmp_path}", "run.progress=false", *held, *SMALL, *words),
        )
        assert outcome.status == 0, outcome.err
        return read_rows(tmp_path / name / "metrics.jsonl")

    steps = ("batch_size=16", "train.steps=10", "optimizer.lr=1e-2")
    run("sft", "tldr_sft", tmp_path / "base", summaries, *steps)
    tuned = tmp_path / "tldr_sft" / "model"
    judged = run("rm", "tldr_rm", tuned, compared, *steps, "eval.every=5")
    assert judged[-1]["eval/pair_accuracy"] == 1
    rl = (
        f"reward.models={tmp_path / 'tldr_rm' / 'model'}",
        *("rollout.prompts_per_step=32", "sampling.max_new_tokens=2", "train.steps=6"),
        *("train.ppo_epochs=1", "optimizer.lr=1e-2", "critic.optimizer.lr=1e-2"),
    )
    rows = run("rl", "tldr_ppo", tuned, summaries, *rl)
    learned = [row["reward/preference"] for row in rows if "reward/preference" in row]
    assert learned[-1] > learned[0] + 0.2
    # the critic, and the KL term within the reward
    assert all({"critic/loss", "policy/kl"} <= row.keys() for row in rows if row["step"])
