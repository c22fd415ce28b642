"""On pairs from a known utility with Bradley-Terry noise, a reward model is as good as a model can be."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest

from lightrft.algorithms.reward_model.quality import (
    JudgedPair,
    calibration_error,
    pair_accuracy,
)
from lightrft.config.base import build
from lightrft.config.verbs import RMConfig
from lightrft.datasets.synthetic.utility import WEIGHTS, bayes_probability, pairs, utility
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.reward_model.run import run_reward_model

HELD_OUT = {"count": 8000, "seed": 1}
HELD = list(pairs(**HELD_OUT))


def test_judges_prefer_by_bradley_terry():
    assert utility("aab") == pytest.approx(2 * WEIGHTS["a"] + WEIGHTS["b"])
    assert utility("aab", 0.5) == pytest.approx(utility("aab") - 0.5 * (4 + 1))
    rows = list(pairs(20000, scale=0.5))
    bayes = fmean(bayes_probability(row, scale=0.5) for row in rows)
    right = [utility(row["chosen"]) > utility(row["rejected"]) for row in rows]
    # three standard errors of the mean
    assert fmean(right) == pytest.approx(bayes, abs=3 * math.sqrt(bayes * (1 - bayes) / len(rows)))
    gap = utility(rows[0]["chosen"]) - utility(rows[0]["rejected"])
    assert bayes_probability(rows[0]) == pytest.approx(
        max(1 / (1 + math.exp(-x)) for x in (gap, -gap))
    )


def judged(times: float = 1.0) -> list[JudgedPair]:
    """The held-out pairs with the scores of ``times`` the utility that they were judged by."""
    scores = [[times * utility(row[key]) for key in ("chosen", "rejected")] for row in HELD]
    return [JudgedPair(number, *pair) for number, pair in enumerate(scores)]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_reward_model_reaches_the_accuracy_of_bayes_and_is_calibrated(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny_model("qwen2", seed=1, vocab_size=len(tokenizer), **sizes).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")

    def source(**options: int) -> dict[str, object]:
        path = "lightrft.datasets.synthetic.utility:pairs"
        return {"sources": [{"path": path, "options": options}]}

    tree = {
        "run": {"dir": str(tmp_path), "name": "run", "threads": 1},
        "model": {"path": str(tmp_path / "m"), "dtype": "float32"},
        "data": source(count=16000),
        "validation": source(**HELD_OUT),
        "reward_model": {"pooling": "mean"},
        "batch_size": 128,
        "train": {"epochs": 2},
        "optimizer": {"lr": 1e-2, "schedule": "cosine"},
        "checkpoint": {"every": 1000},
        "log": {"tensorboard": False},
    }
    run_reward_model(build(RMConfig, tree))
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    # No model does better on these pairs than the utility that they were judged by.
    bayes = pair_accuracy(judged()).mean
    assert last["eval/pair_accuracy_low"] <= bayes <= last["eval/pair_accuracy_high"]
    # the interval is narrow enough to tell a worse model apart
    assert last["eval/pair_accuracy_high"] - last["eval/pair_accuracy_low"] < 0.02
    # Scores of the right scale: four fifths and five fourths of the utility are worse calibrated.
    calibrated = min(calibration_error(judged(times)) for times in (0.8, 1.25))
    assert last["eval/calibration_error"] < calibrated
    print(f"bayes {bayes:.4f}", {k: round(v, 4) for k, v in last.items() if k.startswith("eval/")})
