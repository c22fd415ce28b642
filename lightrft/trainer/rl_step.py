"""One step of reinforcement learning, for any algorithm.

A step collects groups of rollouts, and ``PHASES`` learn from their batch. Each phase is a function
of the batch and of what the phases share, so it can be repeated from a saved batch. Only engine,
policy and critic have state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_ops import TokenRows, require_column
from lightrft.config.verbs import RLConfig
from lightrft.engines.native_parts.compiled_steps import compile_metrics
from lightrft.learner.forward_passes import verify_layouts
from lightrft.learner.reference_update import update_reference
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.rollout.accounting import (
    CollectedRollouts,
    filter_and_select,
    mean_repetition,
    rollout_metrics,
)
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import CollectSettings, PromptSource, collect_rollouts
from lightrft.rollout.logprob_check import check_batch
from lightrft.rollout.weight_probe import WeightProbe
from lightrft.trainer.phases import PHASES, StepContext, run_phases
from lightrft.types import Batch
from lightrft.utils.errors import before_update

ROUNDING = 1e-8
"""Advantages up to this size come from rounding of the mean, when all rewards are equal."""


@dataclass(slots=True)
class StepResult:
    """The result of a step: rollouts, batch (None if every group was dropped) and metrics."""

    collected: CollectedRollouts
    batch: Batch | None
    metrics: Metrics


def rl_step(context: StepContext, source: PromptSource) -> StepResult:
    """Collect rollouts and update the policy once.

    Args:
        context: What the phases share.
        source: Provides prompts.
    """
    settings = collect_settings(context.config, context.requirements)
    with before_update(), context.roles.generation_mode():
        collected = collect_rollouts(
            context.roles, settings, context.step, source, context.timers, context.stopped
        )
    return learn(context, collected)


def collect_settings(config: RLConfig, requirements: Requirements) -> CollectSettings:
    """Return the settings that decide which groups a step collects."""
    judge = partial(
        filter_and_select,
        filters=config.algorithm.filters,
        select=config.rollout.select,
        # A group that is compared within itself needs two responses.
        least=2 if requirements.groups else 1,
    )
    return CollectSettings(
        config.rollout,
        config.sampling,
        judge,
        config.run.seed,
        config.engine,
        requirements.greedy,
    )


def learn(
    context: StepContext, collected: CollectedRollouts, probe: WeightProbe | None = None
) -> StepResult:
    """Update the policy once, from scored groups.

    Args:
        context: What the phases share.
        collected: Scored groups of rollouts.
        probe: Fingerprint of the weights that generated the batch, for a check. None skips the
            check.
    """
    context = replace(context, collected=collected)
    batch = checked_batch(context, collected, probe)
    if batch is not None:
        # All passes of the step read the same media.
        with context.roles.keeping_features(batch) as batch:
            batch = run_phases(batch, context, PHASES)
    return step_result(context, collected, batch)


def checked_batch(
    context: StepContext, collected: CollectedRollouts, probe: WeightProbe | None = None
) -> Batch | None:
    """Return the batch of scored groups, or None without a group.

    The first batch shows whether trainer and engine compute the same log-probs. A reference that
    moves takes its step.

    Args:
        context: What the phases share.
        collected: Scored groups of rollouts.
        probe: As in ``learn``.
    """
    roles, config, step = context.roles, context.config, context.step
    if not collected.groups:
        if probe is not None and roles.policy.layout_verified:
            probe.expect(roles)
        # Schedules count steps that learn nothing too.
        update_reference(roles, config.algorithm.kl, step)
        if roles.prm is not None:
            roles.strategy.advance(roles.prm.state, 1)
        return None
    costs = [cost.name for cost in config.algorithm.lagrangian.costs]
    batch = collate(collected.groups, costs=costs)
    with before_update(), context.timers("layout"):
        verify_layouts(roles, batch)
        check_batch(roles, batch, config.sampling, config.engine, step)
        if probe is not None:
            probe.expect(roles)
    # Before anything reads it.
    update_reference(roles, config.algorithm.kl, step)
    return batch


def step_result(
    context: StepContext, collected: CollectedRollouts, batch: Batch | None
) -> StepResult:
    """Return the result of a step, whose schedules also count steps that learn nothing.

    Args:
        context: What the phases share, with their metrics.
        collected: The rollouts of the step.
        batch: The batch after the last phase, or None without a group.
    """
    metrics = context.metrics
    metrics.merge(rollout_metrics(collected))
    for role, name in product(context.roles.trained, ("skipped_steps", "optimizer_steps")):
        metrics.add(f"{role}/{name}", Sum(0))
    metrics.add("policy/nonfinite_tokens", Sum(0))
    if context.config.rollout.carry_over or context.config.rollout.partial:
        for name in ("carried_in", "carried_out"):
            metrics.add(f"rollout/tokens_{name}", Sum(0))
    if batch is None or not collected.groups:
        context.advance_schedules()
        return StepResult(collected, None, metrics)
    metrics.merge(batch_metrics(batch, collected, context.config))
    metrics.merge(compile_metrics(context.roles.engine))
    return StepResult(collected, batch, metrics)


def batch_metrics(batch: Batch, collected: CollectedRollouts, config: RLConfig) -> Metrics:
    """Return the metrics of the rows that were trained.

    Args:
        batch: The batch with its advantages.
        collected: Its rollouts.
        config: Settings of the run.
    """
    metrics = Metrics()
    if config.log.repetition:
        metrics.add("response/repetition", mean_repetition(collected))
    if config.algorithm.advantage.clip is not None:
        metrics.add("policy/advantage_clip_fraction", clipped_share(batch, config))
    has_advantage = rows_with_advantage(batch)
    metrics.add("policy/frac_rows_with_advantage", Mean(int(has_advantage.sum()), len(batch)))
    metrics.add(
        "rollout/frac_reward_zero_std_trained",
        Mean(equal_groups(batch, has_advantage), collected.compared["groups"]),
    )
    return metrics


def clipped_share(batch: Batch, config: RLConfig) -> Mean:
    """Return the share of trained tokens whose advantage is at a bound of ``advantage.clip``.

    Args:
        batch: The batch with its advantages.
        config: Settings of the run.
    """
    advantages = require_column(batch.advantages)
    bound = advantages.new_tensor(config.algorithm.advantage.clip)
    at_bound = (advantages.abs() >= bound) & batch.mask
    return Mean(int(at_bound.sum()), int(batch.mask.sum()))


def rows_with_advantage(batch: Batch) -> Tensor:
    """Return a mask ``[B]`` of rows with a nonzero advantage, beyond rounding, at some token."""
    if batch.advantages is None:
        return torch.zeros(len(batch), dtype=torch.bool)
    beyond_rounding = (batch.advantages.abs() > ROUNDING).long()
    return TokenRows.of(batch).sum(beyond_rounding) > 0


def equal_groups(batch: Batch, has_advantage: Tensor) -> int:
    """Count groups of several responses with equal rewards, of which one has an advantage.

    A shaping of the rewards, or a baseline outside of the group, gives them one.

    Args:
        batch: The batch, with its rewards as they were scored.
        has_advantage: ``[B]``. Rows with an advantage.
    """
    scored, group = require_column(batch.outcomes), batch.prompt_of
    count = torch.bincount(group)
    low, high = (
        scored.new_zeros(len(count)).scatter_reduce(0, group, scored, how, include_self=False)
        for how in ("amin", "amax")
    )
    trained = torch.bincount(group, has_advantage.to(group.device, scored.dtype))
    return int(((low == high) & (count > 1) & (trained > 0)).sum())
