"""Every verb that samples stops, and names the cause, where the engine's log-probs are not those of the model."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import ChatConfig, EvaluateConfig, GenerateConfig
from lightrft.engines.fingerprint import checksums
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.rollout import async_generation
from lightrft.trainer.inference import Chat, run_eval
from lightrft.trainer.pipelines.generate import run_generate
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ModelError

SAMPLING = {"max_new_tokens": 12, "temperature": 0.5}


@pytest.fixture
def hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines sample at temperature 1, whatever they are asked."""
    plain = NativeEngine.generate

    def generate(self: NativeEngine, requests: Any, sampling: Any, *rest: Any) -> Any:
        return plain(self, requests, sampling.model_copy(update={"temperature": 1.0}), *rest)

    monkeypatch.setattr(NativeEngine, "generate", generate)


def verb(
    name: str, rl_config: Any, model_folder: Any, data_folder: Any, tmp_path: Any, **engine: Any
) -> Any:
    """Run ``name`` on a few rows."""
    rows = {"sources": [str(data_folder / "train.jsonl")]}
    model, run = {"path": str(model_folder)}, {"dir": str(tmp_path / "runs")}
    if name == "rl":
        return run_rl(rl_config(sampling=SAMPLING, engine=engine, train={"steps": 1}))
    if name == "generate":
        tree = {
            "model": model,
            "data": rows,
            "sampling": SAMPLING,
            "output": str(tmp_path / "out.jsonl"),
            "engine": engine,
        }
        return run_generate(build(GenerateConfig, tree))
    if name == "eval":
        held_out, reward = {"data": rows, "sampling": SAMPLING}, {"terms": ["math"]}
        return run_eval(
            build(
                EvaluateConfig,
                {"model": model, "eval": held_out, "reward": reward, "run": run, "engine": engine},
            )
        )
    return Chat(build(ChatConfig, {"model": model, "sampling": SAMPLING, "engine": engine})).say(
        "1+1="
    )


@pytest.mark.parametrize("name", ["rl", "generate", "eval", "chat"])
def test_an_engine_at_another_temperature_stops_the_verb(
    name, hot, rl_config, model_folder, data_folder, tmp_path
):
    given = rl_config, model_folder, data_folder, tmp_path
    with pytest.raises(
        ModelError,
        match=r"Cause: the engine sampled at temperature 1, and the settings say temperature 0\.5",
    ):
        verb(name, *given)
    verb(name, *given, check_logprobs=False)


def test_an_engine_that_keeps_its_first_weights_stops_the_run(rl_config, monkeypatch):
    plain, loaded = KVDecoder.load, []

    def load(self: KVDecoder, weights: Any) -> None:
        if not loaded:
            plain(self, [(name, weight.clone()) for name, weight in weights])
        loaded.append(True)

    monkeypatch.setattr(KVDecoder, "load", load)
    with pytest.raises(
        ModelError, match=r"weights of version \d were not transferred: the engine holds another"
    ):
        run_rl(rl_config(rollout={"staleness": 1}, optimizer={"lr": 1e-2}))


def goes_wrong(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Have engines with weights of their own go wrong at version 2, with the fingerprint of what they were given."""
    load, step, faulty = NativeEngine.load_weights, PlanDecodeSession.step, []

    def loading(self: NativeEngine, weights: Any, version: int) -> Any:
        given = dict(weights)
        dropped = {"keeps": set(given), "drops a tensor": {"lm_head.weight"}}.get(fault, set())
        if version == 2 and not self.shares_weights:
            faulty.append(version)
        load(
            self,
            [(name, w) for name, w in given.items() if not faulty or name not in dropped],
            version,
        )
        return checksums(given.items())

    def stepping(self: PlanDecodeSession, tokens: Any) -> Any:
        return step(self, tokens) * (1.3 if faulty and fault == "decodes" else 1)

    monkeypatch.setattr(NativeEngine, "load_weights", loading)
    monkeypatch.setattr(PlanDecodeSession, "step", stepping)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("keeps", "weights were not transferred, the engine gives the log-probs of older ones"),
        (
            "drops a tensor",
            "computes with weights that differ from its fingerprint, or decodes model type 'qwen2'",
        ),
        (
            "decodes",
            "computes with weights that differ from its fingerprint, or decodes model type 'qwen2'",
        ),
    ],
)
def test_an_engine_that_goes_wrong_at_its_second_update_and_hides_it_stops_the_run(
    fault, cause, rl_config, monkeypatch
):
    goes_wrong(monkeypatch, fault)
    with pytest.raises(ModelError, match=rf"after the update to version 2 .*Cause: .*{cause}"):
        run_rl(rl_config(rollout={"staleness": 1}))
    if fault == "decodes":
        run_rl(
            rl_config(
                rollout={"staleness": 1},
                engine={"check_logprobs": False},
                run={"name": "unchecked"},
            )
        )


def test_an_update_is_compared_although_all_groups_of_the_batch_beside_it_were_dropped(
    rl_config, monkeypatch
):
    goes_wrong(monkeypatch, "decodes")
    collect = async_generation.collect_rollouts

    def emptied(roles: Any, config: Any, step: int, *rest: Any) -> Any:
        found = collect(roles, config, step, *rest)
        found.groups = [] if step == 2 else found.groups
        return found

    monkeypatch.setattr(async_generation, "collect_rollouts", emptied)
    with pytest.raises(ModelError, match="after the update to version 2 "):
        run_rl(rl_config(rollout={"staleness": 1}))


def test_no_checkpoint_holds_a_batch_that_an_engine_with_other_weights_sampled(
    rl_config, monkeypatch, tmp_path
):
    goes_wrong(monkeypatch, "decodes")
    with pytest.raises(ModelError, match="after the update to version 2 "):
        run_rl(rl_config(rollout={"staleness": 1}, checkpoint={"every": 1, "keep": 9}))
    saved = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").glob("step_*"))
    # The third would hold batch 3, which version 2 sampled.
    assert saved == [
        "step_000001",
        "step_000002",
    ]
