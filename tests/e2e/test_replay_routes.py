"""Runs that train a mixture of experts with the experts that generation picked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.trainer.rl import run_rl
from lightrft.types import ExpertChoices
from lightrft.utils.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    family_model("qwen3_moe", num_experts=16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tree(rl_tree: dict[str, Any], mixture: Path) -> dict[str, Any]:
    more = {
        "model": {"path": str(mixture), "replay_routes": True},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
    }
    return deep_merge(rl_tree, more)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_run_reports_the_difference_with_and_without_the_replay(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = NativeEngine.generate

    def elsewhere(self: NativeEngine, *args: Any) -> Any:
        """Generation as it was, but the first response says that its first token went to other experts."""
        for k, rollout in enumerate(plain(self, *args)):
            if k == 0:
                assert rollout.experts is not None
                moved = (rollout.experts.response + 1) % 16
                rollout.experts = ExpertChoices(rollout.experts.prompt, moved)
            yield rollout

    run_rl(build(RLConfig, tree))
    for step in lines(tmp_path):
        assert step["replay/logprob_diff"] < 1e-5
        assert step["replay/logprob_diff_no_replay"] < 1e-5
    rollouts = (tmp_path / "run" / "rollouts").glob("*.jsonl")
    rows = [json.loads(line) for file in rollouts for line in file.read_text().splitlines()]
    assert all(row["experts"]["response"]["shape"][1:] == [2, 2] for row in rows)
    monkeypatch.setattr(NativeEngine, "generate", elsewhere)
    other = deep_merge(tree, {"run": {"overwrite": True}, "engine": {"check_logprobs": False}})
    run_rl(build(RLConfig, other))
    assert max(step["replay/logprob_diff"] for step in lines(tmp_path)) > 1e-3
    assert all(step["replay/logprob_diff_no_replay"] < 1e-5 for step in lines(tmp_path))


def test_wrongly_recorded_experts_stop_the_run_at_its_first_batch(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = NativeEngine.generate

    def moved(self: NativeEngine, *args: Any) -> Any:
        for rollout in plain(self, *args):
            assert rollout.experts is not None
            found = (rollout.experts.response + 1) % 16
            rollout.experts = ExpertChoices(rollout.experts.prompt, found)
            yield rollout

    monkeypatch.setattr(NativeEngine, "generate", moved)
    with pytest.raises(ModelError, match="the engine's log-probs differ from the trainer's"):
        run_rl(build(RLConfig, tree))


def test_responses_generated_ahead_keep_their_experts_over_a_stop(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    ahead = deep_merge(
        tree,
        {"rollout": {"staleness": 1}, "checkpoint": {"every": 1, "keep": 9}, "train": {"steps": 4}},
    )
    run_rl(build(RLConfig, deep_merge(ahead, {"run": {"name": "whole"}})))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for later in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{later:06}")
    run_rl(build(RLConfig, deep_merge(ahead, {"run": {"resume": "auto"}})))
    names = ("policy/loss", "replay/logprob_diff", "policy/rollout_logprob_diff", "reward/mean")
    whole = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    for one, other in zip(map(json.loads, whole), lines(tmp_path), strict=True):
        for name in names:
            assert one.get(name) == other.get(name), name
        assert one["policy/rollout_logprob_diff"] < 0.5


@pytest.mark.parametrize(
    ("over", "error", "named"),
    [
        ({"engine": {"kind": "vllm"}}, ConfigError, r"model\.replay_routes = true"),
        ({"model": {"path": "{dense}"}}, ModelError, r"'qwen2'.*no mixture of experts"),
    ],
    ids=["engine", "model"],
)
def test_a_replay_that_cannot_be_right_is_refused_at_the_start(
    over: dict[str, Any],
    error: type[Exception],
    named: str,
    tree: dict[str, Any],
    model_folder: Path,
) -> None:
    if "model" in over:
        over = {"model": {"path": str(model_folder)}}
    with pytest.raises(error, match=named) as found:
        run_rl(build(RLConfig, deep_merge(tree, over)))
    assert "leave out" in str(found.value) or "replay_routes=false" in str(found.value)


def test_verbs_without_generation_do_not_know_the_setting(mixture: Path) -> None:
    with pytest.raises(ConfigError, match="replay_routes"):
        build(SFTConfig, {"model": {"path": str(mixture), "replay_routes": True}})
