"""The comparison of the engine's log-probs with the trainer's: silent where they agree, and with the cause where they do not."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.rollout.logprob_check import (
    CheckedEngine,
    batch_of,
    check_batch,
    compare_logprobs,
    gap_bound,
    refuse_gap,
    refuse_weights,
    unequal_weight,
)
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ModelError

SAMPLINGS = [
    SamplingConfig(max_new_tokens=20),
    SamplingConfig(max_new_tokens=20, temperature=0.0, repetition_penalty=1.3),
    SamplingConfig(
        max_new_tokens=20,
        temperature=1.4,
        top_p=0.8,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.2,
        min_new_tokens=3,
    ),
]


def actor_of(
    family: str = "qwen2", dtype: torch.dtype = torch.float32, layout: Any = "prefix_shared"
) -> Actor:
    model = family_model(family, dtype=dtype, eos_token_id=None)
    return Actor(model, ModelConfig(layout=layout, attention=model.config._attn_implementation))


def engine_of(actor: Actor, by_plan: bool | None = None, **options: Any) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    decoder = KVDecoder(actor.model)
    decoder.by_plan = decoder.by_plan if by_plan is None else by_plan
    return NativeEngine(decoder, tokenizer, EngineConfig(), **options)


def requests_of(count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (3 + 4 * i,), generator=generator).tolist())
        for i in range(count)
    ]
    return [Request(prompt, seed=i) for i, prompt in enumerate(prompts)]


def sampled(actor: Actor, sampling: SamplingConfig, **options: Any) -> list[Rollout]:
    return list(engine_of(actor, **options).generate(requests_of(), sampling))


def refuse(
    actor: Actor, rollouts: list[Rollout], sampling: SamplingConfig, unequal: str = ""
) -> None:
    refuse_gap(
        actor,
        compare_logprobs(actor, batch_of(rollouts), sampling, None),
        sampling,
        lambda: unequal,
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_explains_is_accepted_under_every_kind_of_sampling(
    sampling: SamplingConfig, dtype: torch.dtype
) -> None:
    actor = actor_of(dtype=dtype)
    rollouts = sampled(actor, sampling)
    refuse(actor, rollouts, sampling)
    found = compare_logprobs(actor, batch_of(rollouts), sampling, None)
    assert found is not None and len(found.tokens) >= 40


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1]])
@pytest.mark.parametrize("family", ["gptj", "gpt_oss", "lfm2"])
def test_a_family_whose_decoding_is_wrong_is_named(family: str, sampling: SamplingConfig) -> None:
    actor = actor_of(family, layout="padded")
    refuse(actor, sampled(actor, sampling), sampling)
    with pytest.raises(ModelError, match=rf"decodes model type '{family}' in another way"):
        refuse(actor, sampled(actor, sampling, by_plan=True), sampling)


@pytest.mark.parametrize(
    ("sampled_by", "said", "cause"),
    [
        (
            SamplingConfig(max_new_tokens=20),
            SamplingConfig(temperature=0.7),
            "sampled at temperature 1, and",
        ),
        (
            SamplingConfig(max_new_tokens=20),
            SamplingConfig(top_k=3),
            "sampled without the filters, and",
        ),
        (
            SamplingConfig(max_new_tokens=20),
            SamplingConfig(top_p=0.5, temperature=0.6),
            "temperature 1 without the filters",
        ),
        (
            SamplingConfig(max_new_tokens=20, temperature=1.0),
            SamplingConfig(temperature=2.0),
            "sampled at temperature 1, and",
        ),
    ],
)
def test_another_temperature_and_other_filters_are_named(
    sampled_by: SamplingConfig, said: SamplingConfig, cause: str
) -> None:
    actor = actor_of()
    with pytest.raises(ModelError, match=cause):
        refuse(actor, sampled(actor, sampled_by), said)


def test_quantization_is_named_where_it_may_be_the_cause() -> None:
    actor, sampling = actor_of(), SAMPLINGS[0]
    found = compare_logprobs(actor, batch_of(sampled(actor, sampling)), sampling, None)
    assert found is not None
    found = replace(found, dtype=torch.int8, reported=found.reported - 3.0)
    with pytest.raises(ModelError, match=r"in 8 bits.*leave out engine\.quantization"):
        refuse_gap(actor, found, sampling, lambda: "")


def test_weights_that_were_not_transferred_are_named() -> None:
    actor = actor_of()
    engine = engine_of(actor)
    apart = NativeEngine(
        engine.decoder.with_own_weights(), engine.tokenizer, EngineConfig(), shared=False
    )
    held = apart.load_weights([], 0)
    assert unequal_weight(held, actor.model.named_parameters()) == ""
    with torch.no_grad():
        before = {name: p.clone() for name, p in actor.model.named_parameters()}
        apart.decoder.load(before.items())
        actor.model.get_parameter("model.norm.weight").mul_(1.5)
    assert unequal_weight(held, actor.model.named_parameters()) == "model.norm.weight"
    with pytest.raises(
        ModelError,
        match=r"version 3 were not transferred: the engine holds another 'model\.norm\.weight'",
    ):
        refuse_weights(held, dict(actor.model.named_parameters()), 3)
    sampling = SAMPLINGS[0]
    with pytest.raises(
        ModelError, match=r"Cause: weights were not transferred, the engine holds another 'x'"
    ):
        refuse(actor, list(apart.generate(requests_of(), sampling)), sampling, "x")


def test_a_fingerprint_in_another_type_is_compared_in_that_type() -> None:
    weight = torch.randn(4, 5)
    held = engine_of(actor_of(dtype=torch.bfloat16)).load_weights([], 0)
    name = "model.norm.weight"
    own = actor_of().model.get_parameter(name)
    assert held[name].startswith("torch.bfloat16")
    assert unequal_weight(held, [("unknown", weight), (name, own)]) == ""


def roles_of(actor: Actor, engine: NativeEngine) -> Any:
    strategy = SimpleNamespace(gathered=lambda model: nullcontext())
    return SimpleNamespace(
        actor=actor,
        engine=engine,
        strategy=strategy,
        engine_fingerprint={},
        logprobs_checked=False,
        weights=actor.model.named_parameters,
    )


def test_a_shared_engine_is_compared_once_and_one_with_its_own_weights_on_every_batch() -> None:
    actor, sampling = actor_of(), SAMPLINGS[0]
    batch = batch_of(sampled(actor, sampling))
    wrong = batch.replace(behavior_logprobs=batch.behavior_logprobs - 0.5)
    shared, own = (roles_of(actor, engine_of(actor, shared=kind)) for kind in (True, False))
    for roles in (shared, own):
        check_batch(roles, batch, sampling, EngineConfig(), 0)
        assert roles.logprobs_checked
        check_batch(roles, wrong, sampling, EngineConfig(check_logprobs=False), 0)
    check_batch(shared, wrong, sampling, EngineConfig(), 0)
    with pytest.raises(ModelError, match="differ from the trainer's by"):
        check_batch(own, wrong, sampling, EngineConfig(), 0)


def test_tokens_of_another_policy_version_are_left_out_and_no_token_leaves_the_check_due() -> None:
    actor, sampling = actor_of(), SAMPLINGS[0]
    rollouts = sampled(actor, sampling)
    stale = [
        replace(
            r,
            logprobs=[x - 1 for x in r.logprobs[:9]] + r.logprobs[9:],
            versions=[0] * 9 + [1] * 11,
        )
        for r in rollouts
    ]
    roles = roles_of(actor, engine_of(actor))
    check_batch(roles, batch_of(stale), sampling, EngineConfig(), 2)
    assert not roles.logprobs_checked
    check_batch(roles, batch_of(stale), sampling, EngineConfig(), 1)
    assert roles.logprobs_checked
    with pytest.raises(ModelError):
        check_batch(roles_of(actor, engine_of(actor)), batch_of(stale), sampling, EngineConfig(), 0)


def test_the_first_responses_of_a_checked_engine_are_compared_before_any_comes_out() -> None:
    actor, sampling = actor_of("gptj", layout="padded"), SAMPLINGS[0]
    right = CheckedEngine(engine_of(actor), actor, EngineConfig())
    assert sorted(r.seed for r in right.generate(requests_of(), sampling)) == list(range(6))
    assert right.checked
    wrong = engine_of(actor, by_plan=True)
    with pytest.raises(ModelError, match="another way"):
        next(iter(CheckedEngine(wrong, actor, EngineConfig()).generate(requests_of(1), sampling)))
    off = CheckedEngine(wrong, actor, EngineConfig(check_logprobs=False))
    assert len(list(off.generate(requests_of(), sampling))) == 6


def test_the_comparison_leaves_model_and_random_generator_as_they_were() -> None:
    actor, sampling = actor_of(), SAMPLINGS[0]
    batch = batch_of(sampled(actor, sampling))
    actor.train()
    before, weights = torch.get_rng_state(), [p.clone() for p in actor.parameters()]
    compare_logprobs(actor, batch, sampling, None)
    assert actor.training and torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(actor.parameters(), weights))


def test_the_type_of_a_call_counts_where_sharded_weights_are_float32_outside_of_it() -> None:
    actor, sampling = actor_of(dtype=torch.bfloat16), SAMPLINGS[0]
    found = compare_logprobs(actor, batch_of(sampled(actor, sampling)), sampling, None)
    assert found is not None and found.dtype == torch.bfloat16
    actor.float()
    found.reported -= 0.01  # rounding of bfloat16, not of float32
    refuse_gap(actor, found, sampling, lambda: "")
    found.dtype = torch.float32
    with pytest.raises(ModelError, match="rounding in float32"):
        refuse_gap(actor, found, sampling, lambda: "")


def test_the_bound_grows_with_the_root_of_the_depth_and_with_the_roundoff() -> None:
    assert gap_bound(torch.bfloat16, 4) == pytest.approx(2 * 2**-8 * 3)
    assert gap_bound(torch.float32, 12) == pytest.approx(2 * 2**-11 * 5)


def test_the_bound_grows_with_the_spread_of_logits_and_falls_with_the_temperature() -> None:
    usual = gap_bound(torch.bfloat16, 4)
    assert gap_bound(torch.bfloat16, 4, temperature=0.2) == pytest.approx(5 * usual)
    assert gap_bound(torch.bfloat16, 4, spread=3.0, temperature=2.0) == pytest.approx(1.5 * usual)
    assert gap_bound(torch.bfloat16, 4, spread=0.1) == usual


FAMILIES = ("llama", "mistral", "gpt2", "phi3", "qwen2", "olmo2")
DIVISORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)


def random_actor(seed: int) -> tuple[Actor, SamplingConfig]:
    """Return a model of a random family, depth, type and size of logits, and a random temperature."""
    rng = random.Random(seed)
    family, dtype = rng.choice(FAMILIES), rng.choice([torch.bfloat16, torch.float16, torch.float32])
    layers = rng.choice([1, 2, 3, 4])
    model = family_model(family, seed=seed, num_hidden_layers=layers, eos_token_id=None)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(rng.choice([0.5, 1, 2, 4]))
    config = ModelConfig(attention=model.config._attn_implementation)
    sampling = SamplingConfig(max_new_tokens=12, temperature=rng.choice(DIVISORS))
    return Actor(model.to(dtype), config), sampling


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 200, 10))]
)
def test_rounding_of_random_models_is_within_the_bound(start: int) -> None:
    for seed in range(start, start + 10):
        actor, sampling = random_actor(seed)
        refuse(actor, rollouts := sampled(actor, sampling), sampling)
        assert rollouts


@pytest.mark.parametrize("seed", range(10))
def test_mutants_of_random_models_are_refused(seed: int) -> None:
    """At low temperatures in half precision, rounding may hide a filter or another temperature."""
    actor, sampling = random_actor(seed)
    rollouts = sampled(actor, sampling)
    other = sampling.model_copy(update={"temperature": 2.5 * sampling.temperature})
    narrow = sampling.model_copy(update={"top_k": 2})
    for said in (other, narrow):
        with pytest.raises(ModelError, match="Cause:"):
            refuse(actor, rollouts, said)
    found = compare_logprobs(actor, batch_of(rollouts), sampling, None)
    assert found is not None
    # Log-probs of the tokens before, as of an engine that counts from another place.
    shifted = replace(found, reported=found.reported.roll(1))
    with pytest.raises(ModelError, match="Cause:"):
        refuse_gap(actor, shifted, sampling, lambda: "")
    for weight in (
        actor.model.get_output_embeddings().weight,
        actor.model.get_input_embeddings().weight,
    ):
        with torch.no_grad():
            kept = weight.clone()
            weight.copy_(weight.roll(1, 0))
        with pytest.raises(ModelError, match="Cause:"):
            refuse(actor, rollouts, sampling)
        with torch.no_grad():
            weight.copy_(kept)
