"""Runs with media on engines that take none are refused before a model is loaded, whoever asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import rows_of_pictures
from lightrft.config.base import build, deep_merge
from lightrft.config.engine import EngineConfig
from lightrft.config.verbs import (
    ChatConfig,
    DistillVerbConfig,
    DPOConfig,
    EvaluateConfig,
    RLConfig,
    SFTConfig,
)
from lightrft.models.actor import Actor
from lightrft.models.tiny import save_tiny_media
from lightrft.trainer.distill.run import run_distill
from lightrft.trainer.inference import Chat, run_eval
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ConfigError, DataError
from lightrft.workers.engine_kinds import kinds_to_check

NOWHERE = {"kind": "sglang", "url": "http://127.0.0.1:9", "deadline": 1.0}
"""A server that takes no media. Nothing listens there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads pictures, and rows with pictures."""
    path = tmp_path_factory.mktemp("pictures")
    save_tiny_media("qwen2_5_vl", path / "model", hidden_size=32)
    rows = [{**row, "response": "1"} for row in rows_of_pictures(path)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rewards.py").write_text("def ones(rollout):\n    return 1.0\n")
    return path


RL = {"rollout": {"prompts_per_step": 2}}
DISTILL = {"distill": {"on_policy": 1.0}, "reward": {"terms": []}, "batch_size": 2}
HALF = deep_merge(DISTILL, {"distill": {"on_policy": 0.5}})
ONLINE = {"online": {"group_size": 2}, "batch_size": 2}
EVALS: dict[str, Any] = {"batch_size": 2, "eval": {"every": 1}}

Runs = list[tuple[Any, Callable[[Any], object], dict[str, Any]]]
RUNS: Runs = [
    (RLConfig, run_rl, RL),
    (DistillVerbConfig, run_distill, DISTILL),
    (DistillVerbConfig, run_distill, HALF),
    (DPOConfig, run_preference, ONLINE),
    (SFTConfig, run_sft, EVALS),
]


@pytest.mark.parametrize(("settings", "run", "over"), RUNS)
def test_each_verb_that_samples_for_media_is_refused_before_a_model_is_loaded(
    settings: Any,
    run: Callable[[Any], object],
    over: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {"sources": [{"path": str(folder / "rows.jsonl")}]}
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(folder / "model")},
        "data": sources,
        "reward": {"terms": [f"{folder / 'rewards.py'}:ones"]},
        "train": {"steps": 1},
        "engine": NOWHERE,
    }
    if "distill" in over:
        tree["teacher"] = {"path": str(folder / "model")}
    if "eval" in over:
        tree["eval"] = {"data": sources}

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Actor, "load", loaded)
    with pytest.raises(ConfigError, match="sglang cannot generate for prompts with media of kind"):
        run(build(settings, deep_merge(tree, over)))


def test_an_evaluation_is_refused_too(folder: Path, tmp_path: Path) -> None:
    tree = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(folder / "model")},
        "eval": {"data": {"sources": [{"path": str(folder / "rows.jsonl")}]}},
        "reward": {"terms": [f"{folder / 'rewards.py'}:ones"]},
        "engine": NOWHERE,
    }
    with pytest.raises(ConfigError, match="sglang cannot generate for prompts with media of kind"):
        run_eval(build(EvaluateConfig, tree))


def test_a_chat_refuses_a_picture_when_it_is_attached(folder: Path) -> None:
    chat = Chat(build(ChatConfig, {"model": {"path": str(folder / "model")}}))
    chat.attach(str(folder / "0.png"))
    assert len(chat.attached) == 1
    chat.config = chat.config.model_copy(update={"engine": build(EngineConfig, NOWHERE)})
    with pytest.raises(DataError, match=r"0\.png: engine\.kind = sglang cannot generate"):
        chat.attach(str(folder / "0.png"))


def test_an_engine_that_takes_every_kind_reads_no_row_for_it() -> None:
    class Rows:
        reads = 0

        @property
        def media_kinds(self) -> set[str]:
            Rows.reads += 1
            return {"image"}

    assert kinds_to_check(EngineConfig(), Rows(), []) == set()
    assert not Rows.reads
    assert kinds_to_check(EngineConfig(kind="vllm"), Rows(), []) == {"image"}
    assert Rows.reads == 1
