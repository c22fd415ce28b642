"""One step of reinforcement learning, whatever the algorithm: settings choose the functions, this file only calls them in order.

Each phase is a function of its arguments, so that any of them can be run again from a saved batch. Engine, policy and critic are
the only things with state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.algorithms.nonfinite_tokens import readable, rewarded
from lightrft.algorithms.requirements import needs_of, needs_old_logprobs, needs_reference
from lightrft.algorithms.reward_shaping import token_rewards, with_rewards
from lightrft.algorithms.token_ops import Rows
from lightrft.config.verbs import RLConfig
from lightrft.engines.base import never
from lightrft.learner.controllers import Controls
from lightrft.learner.distillation import distilled, with_teacher
from lightrft.learner.forward_passes import Parts, by_parts, logprobs_by_parts, sampling_temperature, settle_layouts
from lightrft.learner.policy_update import actor_frozen, update
from lightrft.learner.process_reward import with_process_rewards
from lightrft.learner.reference_update import refresh
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.observability.timers import Timers
from lightrft.roles import Roles
from lightrft.rollout.accounting import Collected, rollout_metrics
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import Source, collect
from lightrft.rollout.logprob_check import check_batch
from lightrft.rollout.weight_probe import WeightProbe
from lightrft.types import Batch, rows_of

ROUNDING = 1e-8
"""Advantage up to which equal rewards may seem to differ: their mean is rounded."""


@dataclass(slots=True)
class StepResult:
    """What a step leaves behind: its account, its batch (``None`` when every group was dropped) and its metrics."""

    collected: Collected
    batch: Batch | None
    metrics: Metrics


def rl_step(
    roles: Roles,
    config: RLConfig,
    step: int,
    controls: Controls,
    source: Source,
    timers: Timers,
    stopped: Callable[[], bool] = never,
) -> StepResult:
    """Prompts in, one updated policy out."""
    with roles.drawing():
        collected = collect(roles, config, step, source, timers, stopped)
    return learn(roles, config, step, controls, collected, timers)


def learn(
    roles: Roles,
    config: RLConfig,
    step: int,
    controls: Controls,
    collected: Collected,
    timers: Timers,
    probe: WeightProbe | None = None,
) -> StepResult:
    """Scored groups in, one updated policy out. ``probe`` is of the policy as it comes in."""
    refresh(roles, config.algorithm.kl, step)
    if not collected.groups:
        if probe is not None and roles.policy.layout_settled:
            probe.expect(roles)
        return _nothing_learned(roles, step, collected, timers)
    metrics = Metrics()
    batch = collate(collected.groups)
    with timers("layout"):
        settle_layouts(roles, batch)
        check_batch(roles, batch, config.sampling, config.engine, step)
        if probe is not None:
            probe.expect(roles)
    with timers("logprobs"):
        batch = with_policy(batch, roles, config)
    with timers("reference"):
        batch = with_teacher(with_reference(batch, roles, config), roles, config)
    with timers("values"):
        batch = with_values(batch, roles, config, controls)
    readable_tokens = readable(batch, config.algorithm)
    metrics.add("policy/nonfinite_tokens", Sum(int(batch.mask.sum()) - int(readable_tokens.mask.sum())))
    with timers("process"):
        batch = with_process_rewards(readable_tokens, roles, config, metrics)
    with timers("advantages"):
        batch, kept = with_shaped_rewards(batch, config, controls)
        collected.keep(kept.tolist())
        if not collected.groups:
            return _nothing_learned(roles, step, collected, timers)
        batch = advantages_from(batch, config, controls)
    metrics.merge(rollout_metrics(collected))
    metrics.add("policy/frac_rows_with_advantage", Mean(rows_with_advantage(batch), len(batch)))
    with timers("update"):
        metrics.merge(update(roles, batch, config, controls, step))
    metrics.merge(controls.steer(batch, frozen=actor_frozen(roles, config, step)))
    publish(roles, step + 1, timers)
    return StepResult(collected, batch, metrics)


def _nothing_learned(roles: Roles, step: int, collected: Collected, timers: Timers) -> StepResult:
    """The step of a batch without a response to train on: the same weights under the next version, since a version counts steps."""
    publish(roles, step + 1, timers)
    return StepResult(collected, None, rollout_metrics(collected))


def rows_with_advantage(batch: Batch) -> int:
    """Count the rows of ``batch`` that have an advantage at some token, beyond rounding."""
    if batch.advantages is None:
        return 0
    return int((Rows.of(batch).sum((batch.advantages.abs() > ROUNDING).long()) > 0).sum())


def publish(roles: Roles, version: int, timers: Timers) -> None:
    """Hand the policy's weights to the engine."""
    with timers("weights"):
        roles.publish(version)


def with_policy(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """Old log-probs, and the policy's entropy or energy, when something reads them."""
    if config.algorithm.proximal == "behavior":
        batch = batch.replace(old_logprobs=batch.behavior_logprobs)
    wanted = {name: Parts() for name in ("entropy", "energy") if name in needs_of(config.algorithm)}
    if not wanted and not needs_old_logprobs(config):
        return batch

    asked: dict[str, Any] = dict.fromkeys(wanted, True)

    def score(part: Batch, index: Tensor) -> Tensor:
        scores = roles.actor.score(part, temperature=sampling_temperature(config), **asked)
        for name, column in wanted.items():
            column.put(rows_of(batch.lengths, index), getattr(scores, name))
        return scores.logprobs

    logprobs = by_parts(batch, score, roles, config)
    old = logprobs if config.algorithm.proximal == "policy" else batch.old_logprobs
    columns = {name: roles.strategy.teams.sum(column.column(batch.tokens)) for name, column in wanted.items()}
    return batch.replace(old_logprobs=old, **columns)


def with_reference(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """Reference log-probs, when something reads them."""
    reference = roles.reference
    if reference is None or not needs_reference(config.algorithm):
        return batch
    return batch.replace(ref_logprobs=logprobs_by_parts(reference, batch, roles, config))


def with_values(batch: Batch, roles: Roles, config: RLConfig, controls: Controls) -> Batch:
    """Values of the state before each token and after the last one, in the unit of rewards, when there is a critic."""
    critic = roles.value_model
    if critic is None:
        return batch
    final = Parts()

    def score(part: Batch, index: Tensor) -> Tensor:
        values, after = critic.values(part, final=True)
        final.put(index, controls.values(after))
        return controls.values(values)

    values = by_parts(batch, score, roles, config, critic)
    return batch.replace(values=values, final_values=roles.strategy.teams.sum(final.column(len(batch))))


def with_advantages(batch: Batch, config: RLConfig, controls: Controls) -> Batch:
    """Shaped rewards, rewards of tokens, advantages and returns, in float64. A response whose reward is not finite is left out."""
    return advantages_from(with_shaped_rewards(batch, config, controls)[0], config, controls)


def with_shaped_rewards(batch: Batch, config: RLConfig, controls: Controls) -> tuple[Batch, Tensor]:
    """The responses whose reward is finite before and after shaping, with shaped rewards, and their places ``[K]`` in ``batch``.

    A NaN reward would make every advantage of its group NaN. Tokens with a log-prob that is not finite count as not sampled.
    """
    scored = rewarded(batch)
    batch = readable(batch.select(scored) if len(scored) < len(batch) else batch, config.algorithm)
    batch = with_rewards(batch, config.algorithm, config.sampling.max_new_tokens, controls.rewards)
    shaped = rewarded(batch)
    return (batch.select(shaped) if len(shaped) < len(batch) else batch), scored[shaped]


def advantages_from(batch: Batch, config: RLConfig, controls: Controls) -> Batch:
    """Rewards of tokens, advantages and returns from shaped rewards."""
    algorithm = config.algorithm
    in_reward = controls.kl.coef if algorithm.kl.where == "reward" else 0.0
    rewards = token_rewards(batch, algorithm.kl.estimator, in_reward)
    settings = algorithm.advantage
    advantages, returns = ADVANTAGES[settings.name](batch, rewards, settings, **settings.options)
    advantages = distilled(WHITENINGS[settings.whiten](advantages, batch, settings.eps), batch, algorithm.distill)
    return batch.replace(advantages=advantages.float(), returns=returns.float())
