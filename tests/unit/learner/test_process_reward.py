"""The process reward model inside a step, and what a teacher is asked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.learner.distillation.targets import distillation_targets, gathered_head
from lightrft.learner.process_reward import outcome_losses, with_process_rewards
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model
from lightrft.observability.metrics import Metrics
from lightrft.roles import Roles, TrainableModel
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.phases import with_reference
from lightrft.types import Batch
from tests.unit.trainer.test_rl_step import batch_of, config_of, context_of, roles_of


def prime(**over: Any) -> tuple[Any, Roles, Batch]:
    """A run of ``prime`` whose process model is not its reference."""
    config = config_of(
        **{"algorithm": {"preset": "prime"}, "prm": {"beta": 0.3, "threshold": 0.0}, **over}
    )
    roles = roles_of(config)
    actor = Actor(tiny_model("qwen2", seed=8)).eval()
    roles.prm = TrainableModel(actor, roles.strategy.prepare(actor, OptimizerConfig(lr=1e-2), 10))
    return config, roles, with_reference(batch_of(), context_of(roles, config))


@pytest.mark.parametrize("budget", [8, 10_000])
@pytest.mark.parametrize("forward", ["single", "double"])
def test_process_rewards_are_the_scaled_log_ratio_of_the_model_before_or_after_its_step(
    forward: str, budget: int
) -> None:
    process = {"beta": 0.3, "threshold": 0.0, "forward": forward}
    config, roles, batch = prime(prm=process, train={"max_tokens_per_micro_batch": budget})
    assert roles.prm is not None
    actor = roles.prm.model
    with torch.no_grad():
        before = actor.score(batch).logprobs
    found = with_process_rewards(
        batch,
        roles,
        config.prm,
        config.train.micro_batch_tokens,
        config.sampling.temperature,
        Metrics(),
    ).process_rewards
    with torch.no_grad():
        after = actor.score(batch).logprobs
    expected = 0.3 * ((before if forward == "single" else after) - batch.ref_logprobs)
    assert (before - after).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_the_role_the_batch_is_left_as_it_is() -> None:
    config = config_of()
    batch = batch_of()
    assert (
        with_process_rewards(
            batch,
            roles_of(config),
            config.prm,
            config.train.micro_batch_tokens,
            config.sampling.temperature,
            Metrics(),
        )
        is batch
    )


def test_a_reward_at_the_threshold_is_a_right_outcome() -> None:
    batch = batch_of().replace(rewards=torch.full((12,), 0.5), sampled=None)
    logprobs = torch.zeros(batch.tokens)
    # Every log-ratio is positive: right is foretold.
    batch = batch.replace(ref_logprobs=torch.full_like(logprobs, -1.0))
    assert outcome_losses(logprobs, batch, 0.1, 0.5)[1].all()
    assert not outcome_losses(logprobs, batch, 0.1, 0.5001)[1].any()


def test_a_teacher_is_asked_at_the_temperature_and_mixture_that_are_set_and_else_at_that_of_sampling() -> (
    None
):
    def target(**distill: Any) -> tuple[float, float]:
        over = {
            "algorithm": {"preset": "opd", "distill": {"kind": "jsd", **distill}},
            "sampling": {"temperature": 0.6},
        }
        config = config_of(**over)
        found = distillation_targets(
            roles_of(config), config.algorithm.distill, config.sampling.temperature
        )(batch_of())
        assert found is not None
        return found.temperature, found.beta

    assert target() == (0.6, 0.5)
    assert target(temperature=2.0, beta=0.2) == (2.0, 0.2)
    config = config_of(algorithm={"preset": "opd"})
    assert (
        distillation_targets(
            roles_of(config), config.algorithm.distill, config.sampling.temperature
        )(batch_of())
        is None
    )


def test_a_head_that_is_put_together_is_on_the_device_that_computes_and_not_where_its_shards_lie() -> (
    None
):
    """For that device stands the meta device."""
    strategy: Any = SingleStrategy(StrategyConfig(device="cpu"))
    strategy.ranks, strategy.device = SimpleNamespace(size=2), torch.device("meta")
    actor = Actor(tiny_model("qwen2"))
    assert all(parameter.is_meta for parameter in gathered_head(actor, strategy).parameters())
    assert not actor.base.get_output_embeddings().weight.is_meta
