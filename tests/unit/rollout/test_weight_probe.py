"""A probe of weights: which tokens it asks for, which of them it compares, and what it finds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.rollout.accounting import GREEDY
from lightrft.rollout.weight_probe import PROMPTS, RESPONSES, TOKENS, WeightProbe
from lightrft.types import Request, Rollout
from lightrft.utils.errors import ModelError
from tests.unit.rollout.test_logprob_check import SAMPLINGS, actor_of, engine_of, requests_of


def own_engine(actor: Actor) -> NativeEngine:
    shared = engine_of(actor)
    return NativeEngine(
        shared.decoder.with_own_weights(), shared.tokenizer, EngineConfig(), shared=False
    )


def groups_of(
    engine: NativeEngine, sampling: SamplingConfig, samples: int = RESPONSES + 1
) -> list[list[Rollout]]:
    """Responses to ``PROMPTS + 1`` prompts."""
    asked = [
        Request(r.prompt, seed=9 * i + s, sample=s)
        for i, r in enumerate(requests_of(PROMPTS + 1))
        for s in range(samples)
    ]
    drawn = {r.seed: r for r in engine.generate(asked, sampling)}
    return [[drawn[9 * i + s] for s in range(samples)] for i in range(PROMPTS + 1)]


def roles_of(actor: Actor) -> Any:
    return SimpleNamespace(
        actor=actor, strategy=SimpleNamespace(gathered=lambda model: nullcontext())
    )


def updated(actor: Actor, engine: NativeEngine, by: float = 0.02) -> None:
    """Train ``actor`` a little and hand its weights to ``engine``, as version 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in actor.model.parameters():
            p.mul_(1 + by * torch.randn(p.shape, generator=generator))
    engine.load_weights([(name, p.clone()) for name, p in actor.model.named_parameters()], 1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_with_the_new_weights_is_accepted_under_every_kind_of_sampling(
    sampling: SamplingConfig, dtype: torch.dtype
):
    actor = actor_of(dtype=dtype)
    engine = own_engine(actor)
    groups = groups_of(engine, sampling)
    updated(actor, engine)
    probe = WeightProbe.of(groups, sampling, 1)
    assert probe is not None and len(probe.responses) == PROMPTS * RESPONSES
    probe.ask(engine)
    probe.expect(roles_of(actor))
    found = probe.compared()
    assert found is not None and len(found.tokens) > len(probe.responses)
    # Two ways to compute the same.
    assert (found.gap(probe.sampling) > 0) == (sampling.temperature > 0)
    probe.refuse(roles_of(actor))


def test_an_engine_that_still_has_the_old_weights_is_named_and_one_with_others_too():
    actor, sampling = actor_of(), SAMPLINGS[0]
    engine, stuck = own_engine(actor), own_engine(actor_of())
    groups = groups_of(engine, sampling)
    updated(actor, engine)
    probe = WeightProbe.of(groups, sampling, 1)
    assert probe is not None
    probe.expect(roles_of(actor))
    probe.ask(stuck)
    with pytest.raises(
        ModelError,
        match=r"after the update to version 1 .* the engine gives the log-probs of older ones",
    ):
        probe.refuse(roles_of(actor))
    weight = actor.model.get_parameter("model.norm.weight")
    engine.load_weights(
        [("model.norm.weight", weight.detach() * torch.linspace(0.5, 2, len(weight)))], 1
    )
    probe.ask(engine)
    with pytest.raises(
        ModelError, match="computes with weights that differ from its fingerprint, or decodes"
    ):
        probe.refuse(roles_of(actor))


def test_the_probe_takes_a_few_first_tokens_and_none_that_a_tool_or_a_greedy_request_gave():
    actor, sampling = actor_of(), SAMPLINGS[0]
    groups = groups_of(engine_of(actor), sampling)
    groups[0][0] = replace(groups[0][0], sampled=[True] * 3 + [False] * 17)
    groups[0][1] = replace(groups[0][1], sample=GREEDY)
    groups[0][2] = replace(groups[0][2], sampled=[False] * 20)
    probe = WeightProbe.of(groups, sampling.model_copy(update={"min_new_tokens": 9}), 1)
    assert probe is not None and probe.sampling.min_new_tokens == 0
    assert [len(r) for r in probe.responses] == [3, TOKENS, *[TOKENS] * RESPONSES]
    assert [r.seed for r in probe.responses] == [0, 3, 9, 10, 11, 12]
    assert WeightProbe.of(groups, sampling, 0) is None  # what the trainer compares itself
    assert WeightProbe.of([], sampling, 1) is None


def test_what_follows_the_first_token_that_differs_is_left_out():
    actor, sampling = actor_of(), SAMPLINGS[0]
    engine = engine_of(actor)
    probe = WeightProbe.of(groups_of(engine, sampling), sampling, 1)
    assert probe is not None
    probe.ask(engine)
    probe.expect(roles_of(actor))
    whole = probe.compared()
    assert whole is not None and len(whole.tokens) == len(probe.responses) * TOKENS
    first = next(a for a in probe.answers if a.seed == probe.responses[0].seed)
    probe.responses[0].token_ids[2] = first.token_ids[2] + 1
    cut = probe.compared()
    assert cut is not None and len(cut.tokens) == len(whole.tokens) - (TOKENS - 3)
    assert cut.before is not None and cut.before.isnan().nonzero().tolist() == [[2]]


def test_an_engine_that_answered_nothing_has_nothing_to_compare():
    probe = WeightProbe.of(groups_of(engine_of(actor_of()), SAMPLINGS[0]), SAMPLINGS[0], 1)
    assert probe is not None and probe.compared() is None
    probe.expect(roles_of(actor_of()))
    assert probe.compared() is None
