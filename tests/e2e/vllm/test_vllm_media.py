"""Whole runs on pictures and audio that sample with vLLM: the log-probs are the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.engines.served.vllm_media import START_OPTION
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.vllm.faults import break_updates, skipped
from tests.e2e.vllm.runs import lines
from tests.media_helpers import save_tiny_media
from tests.vllm_server import TRAINS, vllm_server


def test_a_run_on_pictures_trains_on_the_log_probs_that_vllm_sampled_from(
    picture_tree: dict[str, Any], tmp_path: Path
) -> None:
    run_rl(build(RLConfig, picture_tree))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-4


def test_a_run_on_pictures_trains_on_the_log_probs_of_a_vllm_server(
    picture_tree: dict[str, Any], tmp_path: Path
) -> None:
    with vllm_server(Path(picture_tree["model"]["path"]), *TRAINS, START_OPTION) as server:
        over = {"engine": {"kind": "http", "url": server.url, "deadline": 400.0}}
        run_rl(build(RLConfig, deep_merge(picture_tree, over)))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-4


def test_a_run_on_audio_trains_on_the_log_probs_that_vllm_sampled_from(
    audio_tree: dict[str, Any], tmp_path: Path
) -> None:
    run_rl(build(RLConfig, audio_tree))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5


def test_an_audio_tower_that_vllm_did_not_get_stops_the_run_at_its_first_batch(
    audio_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_updates(skipped, monkeypatch)
    with pytest.raises(ModelError, match="Cause: "):
        run_rl(build(RLConfig, audio_tree))
    assert len(lines(tmp_path)) <= 1


def test_a_run_whose_media_vllm_cannot_serve_is_refused_before_a_model_is_loaded(
    picture_tree: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_media("gemma3", tmp_path / "other")
    other = deep_merge(picture_tree, {"model": {"path": str(tmp_path / "other")}})
    with pytest.raises(ConfigError, match="kind image for the model type gemma3") as found:
        run_rl(build(RLConfig, other))
    assert "engine.kind=native" in str(found.value)
    assert not list(tmp_path.rglob("metrics.jsonl")) or not lines(tmp_path)
