"""The critic's part of a step: on its own in the first ones, and in a unit of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.algorithms.requirements import Requirements
from lightrft.config.base import build, deep_merge
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import final_value_loss
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import Roles, TrainableModel
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.phases import PHASES, run_phases
from lightrft.trainer.rl_step import learn
from lightrft.types import Batch
from lightrft.workers.local import local_roles
from tests.unit.trainer.test_rl_step import Unused, batch_of, context_of


def config_of(**over: Any) -> RLConfig:
    tree = {
        "algorithm": {"preset": "vapo", "value": {"clip": 0.1}},
        "sampling": {"max_new_tokens": 8},
        "train": {"num_mini_batches": 2},
        "reward": {"terms": ["math"]},
        "data": {"sources": ["none.jsonl"]},
    }
    return build(RLConfig, deep_merge(tree, over))


def roles_of() -> Roles:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    actor = Actor(tiny_model("qwen2", seed=3, dtype=torch.float64)).eval()
    critic = Critic(tiny_model("qwen2", seed=4, dtype=torch.float64)).eval()
    policy, value = (
        TrainableModel(m, strategy.prepare(m, OptimizerConfig(lr=1e-2), 10))
        for m in (actor, critic)
    )
    return Roles(strategy, policy, Unused(), Unused(), None, critic=value)  # type: ignore[arg-type]


def step(
    roles: Roles, config: RLConfig, controls: Controllers, batch: Batch, number: int = 0
) -> Batch:
    batch = batch.replace(old_logprobs=batch.behavior_logprobs)
    context = context_of(roles, config, controllers=controls, step=number)
    chosen = [phase for phase in PHASES if phase.name in ("values", "advantages", "update")]
    return run_phases(batch, context, chosen)


def weights(trained: TrainableModel | None) -> torch.Tensor:
    assert trained is not None
    return torch.cat([p.detach().flatten().clone() for p in trained.model.parameters()])


def test_in_the_first_steps_the_critic_learns_alone() -> None:
    config = config_of(critic={"warmup_steps": 2})
    roles, controls = roles_of(), Controllers.of(config.algorithm)
    moved = []
    for number in range(3):
        before = weights(roles.policy), weights(roles.critic)
        step(roles, config, controls, batch_of(seed=number), number)
        moved.append(
            [
                not torch.equal(a, b)
                for a, b in zip(before, (weights(roles.policy), weights(roles.critic)), strict=True)
            ]
        )
    assert moved == [[False, True], [False, True], [True, True]]


def test_the_policys_schedule_begins_when_its_steps_do(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    config = config_of(
        model={"path": str(tmp_path)}, critic={"warmup_steps": 3}, strategy={"device": "cpu"}
    )
    roles = local_roles(config, Requirements.of(config.algorithm), None, 10)
    try:
        assert roles.critic is not None
        assert (roles.policy.state.inner.total, roles.critic.state.inner.total) == (14, 20)
    finally:
        roles.close()


def test_on_a_scale_of_its_own_the_critic_learns_the_same_whatever_the_unit_of_rewards() -> None:
    config = config_of(algorithm={"normalize": {"values": True, "eps": 0.0}})
    learned, told = [], []
    for scale, shift in ((1.0, 0.0), (50.0, 8.0)):
        roles, controls = roles_of(), Controllers.of(config.algorithm)
        for number in range(3):
            batch = batch_of(seed=number)
            rewards = batch.rewards.double() * scale + shift  # type: ignore[union-attr]
            made = step(roles, config, controls, batch.replace(rewards=rewards), number)
        learned.append(weights(roles.critic))
        told.append((made.values[made.mask].double() - shift) / scale)  # type: ignore[index]
    torch.testing.assert_close(learned[0], learned[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(told[0], told[1], rtol=1e-3, atol=1e-3)
    plain = config_of()
    roles = roles_of()
    step(roles, plain, Controllers.of(plain.algorithm), batch_of())
    assert not torch.allclose(weights(roles.critic), learned[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_the_critic_learns_the_value_after_a_cut_response_from_its_reward(scaled: bool) -> None:
    over = {"normalize": {"values": True}} if scaled else {}
    config = config_of(
        algorithm={"advantage": {"bootstrap_truncated": True}, "value": {"clip": None}, **over},
        train={"num_mini_batches": 1},
    )
    roles, controls = roles_of(), Controllers.of(config.algorithm)
    batch = batch_of().replace(truncated=torch.ones(12, dtype=torch.bool))
    batch = batch.replace(rewards=torch.full((12,), 3.0))
    gaps = []
    for number in range(40):
        made = step(roles, config, controls, batch, number)
        assert made.final_values is not None
        gaps.append(float((made.final_values - 3.0).abs().mean()))
    assert gaps[-1] < gaps[0] / 2


def test_the_loss_of_a_value_after_a_response_has_the_weight_of_its_tokens() -> None:
    batch = batch_of().replace(
        truncated=torch.arange(12) % 3 == 0,
        final_values=torch.linspace(-1, 1, 12),
        final_returns=torch.linspace(2, 0, 12),
    )
    weights = torch.where(batch.mask, torch.linspace(0.1, 1, batch.tokens), 0.0)
    values = torch.linspace(0, 3, 12)
    expected, start = 0.0, 0
    for i, length in enumerate(batch.lengths.tolist()):
        if i % 3 == 0:
            weight = float(weights[start : start + length].sum())
            expected += weight * float(values[i] - batch.final_returns[i]) ** 2 / 2
        start += length
    found = final_value_loss(values, batch.replace(loss_weights=weights), None)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_by_default_nothing_computes_or_learns_a_value_after_a_response() -> None:
    config = config_of()
    roles, controls = roles_of(), Controllers.of(config.algorithm)
    made = step(roles, config, controls, batch_of())
    assert made.final_values is None and made.final_returns is None


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_step_without_a_batch_advances_the_schedules_that_it_would_have_trained(
    warmup_steps: int,
) -> None:
    config = config_of(critic={"warmup_steps": warmup_steps}, train={"ppo_epochs": 2})
    roles = roles_of()
    learn(context_of(roles, config), CollectedRollouts())
    assert roles.critic is not None
    assert roles.policy.state.inner.step == (0 if warmup_steps else 4)
    assert roles.critic.state.inner.step == 4
