"""Process reward models as rewards of ``rl`` and in best-of-n."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.models.tiny.text import tiny_model
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError
from tests.e2e.command import assert_refused, command


@pytest.fixture(scope="module")
def prm(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prm")
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    model = tiny_model("qwen2", seed=3, hidden_size=32, vocab_size=len(tokenizer))
    separator = Separator("#", tuple(tokenizer.encode("#", add_special_tokens=False)))
    ProcessRewardModel(model, None, ProcessModelConfig(), separator=separator, seed=2).save(
        tokenizer, folder
    )
    return folder


def metrics_of(tree: dict[str, Any], tmp_path: Path, name: str, reward: Any) -> list[Any]:
    over = {
        "run": {"name": name},
        "reward": reward,
        "algorithm": {"preset": "reinforce++"},
        "train": {"steps": 2},
    }
    run_rl(build(RLConfig, deep_merge(tree, over)))
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_rl_learns_from_rewards_of_steps_and_reports_their_scores(rl_tree, prm, tmp_path) -> None:
    model = {"path": str(prm), "aggregate": "tokens", "separator": "e", "weight": 5.0}
    plain = metrics_of(rl_tree, tmp_path, "plain", {})
    steps = metrics_of(rl_tree, tmp_path, "steps", {"models": [model]})
    # Both generate the same responses at first. Their rewards are equal, and those of steps are not.
    assert plain[0]["reward/mean"] == steps[0]["reward/mean"]
    assert plain[0].get("policy/grad_norm", 0.0) == 0.0 < steps[0]["policy/grad_norm"]
    assert 0 < steps[0]["reward/steps"] < 1
    assert steps[0]["scorer/scored"] > 0 and "scorer/scored" not in plain[0]


def test_the_best_of_several_responses_has_the_highest_score_of_its_worst_step(
    capsys, model_folder, data_folder, prm, tmp_path
) -> None:
    def generate(name: str, aggregate: str, *words: str):
        reward = f"[{{path: {prm}, aggregate: {aggregate}, separator: e}}]"
        return command(
            capsys,
            "generate",
            f"model={model_folder}",
            f"data.sources={data_folder / 'train.jsonl'}",
            "sampling.max_new_tokens=12",
            "samples=4",
            f"reward.models={reward}",
            f"output={tmp_path / name}",
            *words,
        )

    assert generate("all.jsonl", "min").status == 0
    outcome = generate("best.jsonl", "min", "select=best", "select.keep_truncated=true")
    assert outcome.status == 0, outcome.err
    every = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    best = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert len(best) == 10
    for k, row in enumerate(best):
        group = [line for line in every[4 * k : 4 * k + 4] if not line["failed"]]
        assert row["reward"] == max(line["reward"] for line in group)
    assert_refused(generate("no.jsonl", "tokens"), "aggregate = 'tokens'", "aggregate=min")


def test_a_process_reward_model_without_an_aggregate_is_refused_at_start(rl_tree, prm) -> None:
    tree = deep_merge(rl_tree, {"reward": {"models": [str(prm)]}})
    with pytest.raises(ConfigError, match=r"reward.models.0.aggregate=min"):
        run_rl(build(RLConfig, tree))
