"""Every verb that samples stops, and names the cause, where the engine's log-probs are not those of the model."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config import ChatConfig, EvaluateConfig, GenerateConfig
from lightrft.models.decoding import Decoder
from lightrft.strategy.engine.native import NativeEngine
from lightrft.trainer.inference import Chat, run_eval, run_generate
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ModelError
from lightrft.utils.settings import build

SAMPLING = {"max_new_tokens": 12, "temperature": 0.5}


@pytest.fixture
def hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines sample at temperature 1, whatever they are asked."""
    plain = NativeEngine.generate

    def generate(self: NativeEngine, requests: Any, sampling: Any, *rest: Any) -> Any:
        return plain(self, requests, sampling.model_copy(update={"temperature": 1.0}), *rest)

    monkeypatch.setattr(NativeEngine, "generate", generate)


def verb(name: str, rl_config: Any, model_folder: Any, data_folder: Any, tmp_path: Any, **engine: Any) -> Any:
    """Run ``name`` on a few rows."""
    rows = {"sources": [str(data_folder / "train.jsonl")]}
    model, run = {"path": str(model_folder)}, {"dir": str(tmp_path / "runs")}
    if name == "rl":
        return run_rl(rl_config(sampling=SAMPLING, engine=engine, train={"steps": 1}))
    if name == "generate":
        tree = {"model": model, "data": rows, "sampling": SAMPLING, "output": str(tmp_path / "out.jsonl"), "engine": engine}
        return run_generate(build(GenerateConfig, tree))
    if name == "eval":
        held_out, reward = {"data": rows, "sampling": SAMPLING}, {"terms": ["math"]}
        return run_eval(build(EvaluateConfig, {"model": model, "eval": held_out, "reward": reward, "run": run, "engine": engine}))
    return Chat(build(ChatConfig, {"model": model, "sampling": SAMPLING, "engine": engine})).say("1+1=")


@pytest.mark.parametrize("name", ["rl", "generate", "eval", "chat"])
def test_an_engine_at_another_temperature_stops_the_verb(name, hot, rl_config, model_folder, data_folder, tmp_path):
    given = rl_config, model_folder, data_folder, tmp_path
    with pytest.raises(ModelError, match=r"Cause: the engine sampled at temperature 1, and the settings say temperature 0\.5"):
        verb(name, *given)
    verb(name, *given, check_logprobs=False)


def test_an_engine_that_keeps_its_first_weights_stops_the_run(rl_config, monkeypatch):
    plain, loaded = Decoder.load, []

    def load(self: Decoder, weights: Any) -> None:
        if not loaded:
            plain(self, [(name, weight.clone()) for name, weight in weights])
        loaded.append(True)

    monkeypatch.setattr(Decoder, "load", load)
    with pytest.raises(ModelError, match=r"weights of version \d were not transferred: the engine holds another"):
        run_rl(rl_config(rollout={"staleness": 1}, optimizer={"lr": 1e-2}))
