"""FIRE sampling: the first token of a response has a temperature of its own, in its log-prob and in the comparison too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.engines.vllm import check_sampling
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rollout.logprob_check import batch_of, compare_logprobs, refuse_gap
from lightrft.rollout.weight_probe import WeightProbe
from lightrft.trainer.checks.preflight import greedy_setting
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, ModelError

PROMPT = Prompt("p", list(range(10, 22)))
HOT: dict[str, Any] = {"first_token_temperature": 5.0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # logits far apart, so that the temperature of a token shows in its log-prob
    model = tiny_model("qwen2", vocab_size=100, eos_token_id=None)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def run(model: PreTrainedModel, requests: list[Request], **sampling: Any) -> list[Rollout]:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    found = list(engine.generate(requests, SamplingConfig(**sampling)))
    return sorted(found, key=lambda r: r.seed)


def logits_of(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
    with torch.no_grad():
        return model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_only_the_first_token_is_sampled_at_the_first_temperature(
    model: PreTrainedModel, temperature: float
) -> None:
    rollouts = run(
        model, [Request(PROMPT, seed) for seed in range(6)], temperature=temperature, **HOT
    )
    for rollout in rollouts:
        for t, (logits, token) in enumerate(zip(logits_of(model, rollout), rollout.token_ids)):
            divisor = 5.0 if t == 0 else temperature
            expected = float((logits / divisor).log_softmax(-1)[token])
            assert rollout.logprobs[t] == pytest.approx(expected, abs=1e-4)


def test_the_filters_act_on_the_first_token_at_its_temperature(model: PreTrainedModel) -> None:
    for rollout in run(model, [Request(PROMPT, s) for s in range(20)], top_k=3, **HOT):
        logits = logits_of(model, rollout)[0] / 5.0
        kept = logits.topk(3)
        assert rollout.token_ids[0] in kept.indices.tolist()
        expected = logits[rollout.token_ids[0]] - kept.values.logsumexp(0)
        assert rollout.logprobs[0] == pytest.approx(float(expected), abs=1e-4)


def test_first_tokens_have_the_frequencies_of_the_hot_distribution(model: PreTrainedModel) -> None:
    count = 4000
    rollouts = run(
        model,
        [Request(PROMPT, seed) for seed in range(count)],
        first_token_temperature=12.0,
        max_new_tokens=1,
    )
    expected = count * (logits_of(model, rollouts[0])[0] / 12.0).softmax(-1)
    found = torch.bincount(torch.tensor([r.token_ids[0] for r in rollouts]), minlength=100)
    kept = expected >= 5
    assert int(kept.sum()) > 20
    chi2 = float(((found - expected).square() / expected)[kept].sum())
    freedom = int(kept.sum())
    # five standard deviations of a chi-square variable
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_a_continued_response_has_no_further_hot_token(model: PreTrainedModel) -> None:
    [whole] = run(model, [Request(PROMPT, 3)], **HOT)
    [part] = run(model, [Request(PROMPT, 3, pause_after_tokens=2)], **HOT)
    [done] = run(model, [Request(PROMPT, 3, partial=part)], **HOT)
    assert done.token_ids == whole.token_ids
    assert done.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_a_greedy_request_stays_greedy_among_hot_ones(model: PreTrainedModel) -> None:
    requests = [Request(PROMPT, 0, greedy=True), *(Request(PROMPT, s) for s in range(1, 5))]
    [greedy, *others] = run(model, requests, **HOT)
    assert (
        greedy.token_ids
        == run(model, [Request(PROMPT, 0)], temperature=0, max_new_tokens=8)[0].token_ids
    )
    assert {r.token_ids[0] for r in others} != {greedy.token_ids[0]}


def test_after_a_hot_first_token_a_response_can_be_greedy(model: PreTrainedModel) -> None:
    sampling = SamplingConfig(temperature=0, **HOT)
    assert greedy_setting(sampling) == ""
    rollouts = run(model, [Request(PROMPT, s) for s in range(6)], temperature=0, **HOT)
    assert len({r.token_ids[0] for r in rollouts}) > 1
    for rollout in rollouts:
        assert rollout.token_ids[1:] == logits_of(model, rollout).argmax(-1).tolist()[1:]


def compared(actor: Actor, rollouts: list[Rollout], **sampling: Any) -> None:
    given = SamplingConfig(**sampling)
    refuse_gap(actor, compare_logprobs(actor, batch_of(rollouts), given, None), given, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_comparison_with_the_trainer_knows_the_first_temperature(
    model: PreTrainedModel, temperature: float
) -> None:
    actor = Actor(model, ModelConfig(layout="padded"))
    requests = [Request(PROMPT, seed) for seed in range(4)]
    hot = run(model, requests, temperature=temperature, **HOT)
    compared(actor, hot, temperature=temperature, **HOT)
    wrong = [r for r in hot if abs(r.logprobs[0]) > 0.5]
    for rollout in wrong:
        rollout.logprobs[0] -= 0.5
    with pytest.raises(ModelError):
        compared(actor, hot, temperature=temperature, **HOT)


def test_an_engine_that_ignores_the_first_temperature_is_named(model: PreTrainedModel) -> None:
    actor = Actor(model, ModelConfig(layout="padded"))
    cold = run(model, [Request(PROMPT, seed) for seed in range(4)], max_new_tokens=8)
    with pytest.raises(ModelError, match="first token at the temperature of the others"):
        compared(actor, cold, **HOT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_with_a_first_temperature_of_its_own_is_named(
    model: PreTrainedModel, temperature: float
) -> None:
    actor = Actor(model, ModelConfig(layout="padded"))
    requests = [Request(PROMPT, seed) for seed in range(4)]
    own = {"first_token_temperature": 50.0, "max_new_tokens": 8}
    hot = run(model, requests, temperature=temperature, **own)
    with pytest.raises(ModelError, match=r"only the first token .*first_token_temperature of its"):
        compared(actor, hot, temperature=temperature, max_new_tokens=8)
    if temperature == 0:
        return
    for rollout in hot:
        rollout.logprobs[3] -= 0.5
    with pytest.raises(ModelError, match="in another way than it is trained"):
        compared(actor, hot, temperature=temperature, max_new_tokens=8)


def test_a_probe_of_new_weights_compares_the_first_token_at_its_temperature(
    model: PreTrainedModel,
) -> None:
    actor = Actor(model, ModelConfig(layout="padded"))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig(), version=1)
    sampling = SamplingConfig(**HOT)
    old = run(model, [Request(PROMPT, seed) for seed in range(4)], **HOT)
    probe = WeightProbe.of([old], sampling, 1)
    assert probe is not None
    probe.ask(engine)
    batch = batch_of(probe.responses)
    with torch.no_grad():
        probe.logits = actor.logits(actor(batch, states_alone=True)).float()
    found = probe.compared()
    assert found is not None and found.first is not None
    assert int(found.first.sum()) == 4
    assert found.gap(sampling) < 1e-3 < found.gap(SamplingConfig())


def test_another_engine_refuses_it_with_the_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"set engine\.kind=native, or leave out first_token_temp"
    ):
        check_sampling(SamplingConfig(**HOT))
