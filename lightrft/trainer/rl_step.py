"""One step of reinforcement learning, for any algorithm.

Settings choose the functions, and this file calls them in order. Each phase is a function of its
arguments, so it can be repeated from a saved batch. Only engine, policy and critic have state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.algorithms.constrained.lagrangian import constrained_advantages, cost_view
from lightrft.algorithms.nonfinite_tokens import readable, rewarded
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.reward_shaping import token_rewards, with_rewards
from lightrft.algorithms.token_ops import TokenRows, require_column
from lightrft.config.verbs import RLConfig
from lightrft.engines.base import never_stop
from lightrft.engines.native_parts.compiled_steps import compile_metrics
from lightrft.learner.controllers import Controllers
from lightrft.learner.distillation import add_distillation_reward, with_teacher
from lightrft.learner.forward_passes import (
    MicroBatches,
    compute_logprobs,
    map_micro_batches,
    sampled_distribution,
    verify_layouts,
)
from lightrft.learner.policy_update import (
    UpdateSettings,
    actor_frozen,
    advance_schedules,
    update,
)
from lightrft.learner.process_reward import with_process_rewards
from lightrft.learner.reference_update import update_reference
from lightrft.models.critic import Critic
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.observability.timers import Timers
from lightrft.roles import Roles
from lightrft.rollout.accounting import (
    CollectedRollouts,
    filter_and_select,
    mean_repetition,
    rollout_metrics,
)
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import CollectSettings, PromptSource, collect_rollouts
from lightrft.rollout.logprob_check import check_batch, replay_metrics
from lightrft.rollout.weight_probe import WeightProbe
from lightrft.types import Batch, rows_of
from lightrft.utils.errors import before_update

ROUNDING = 1e-8
"""Advantages up to this size come from rounding of the mean, when all rewards are equal."""


@dataclass(slots=True)
class StepResult:
    """The result of a step: rollouts, batch (None if every group was dropped) and metrics."""

    collected: CollectedRollouts
    batch: Batch | None
    metrics: Metrics


def rl_step(
    roles: Roles,
    config: RLConfig,
    requirements: Requirements,
    step: int,
    controls: Controllers,
    source: PromptSource,
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
) -> StepResult:
    """Collect rollouts and update the policy once.

    Args:
        roles: models, engine and scorer of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
        step: number of completed steps.
        controls: coefficients that change during the run.
        source: provides prompts.
        timers: measures the phases.
        stopped: returns True once the run is asked to stop.
    """
    with before_update(), roles.generation_mode():
        collected = collect_rollouts(
            roles, collect_settings(config, requirements), step, source, timers, stopped
        )
    return learn(roles, config, requirements, step, controls, collected, timers)


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


def update_settings(roles: Roles, config: RLConfig, requirements: Requirements) -> UpdateSettings:
    """Return the settings of the optimizer steps.

    Args:
        roles: models of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
    """
    return UpdateSettings(
        algorithm=config.algorithm,
        requirements=requirements,
        train=config.train,
        temperature=sampled_distribution(roles, config.sampling),
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.run.seed,
        warmup_steps=config.critic.warmup_steps,
        log_entropy=config.log.entropy,
    )


def learn(
    roles: Roles,
    config: RLConfig,
    requirements: Requirements,
    step: int,
    controls: Controllers,
    collected: CollectedRollouts,
    timers: Timers,
    probe: WeightProbe | None = None,
) -> StepResult:
    """Update the policy once, from scored groups.

    Args:
        roles: models, engine and scorer of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
        step: number of completed steps.
        controls: coefficients that change during the run.
        collected: scored groups of rollouts.
        timers: measures the phases.
        probe: fingerprint of the weights that generated the batch, for a check. None skips the
            check.
    """
    if not collected.groups:
        if probe is not None and roles.policy.layout_verified:
            probe.expect(roles)
        # Schedules count steps that learn nothing too.
        update_reference(roles, config.algorithm.kl, step)
        if roles.prm is not None:
            roles.strategy.advance(roles.prm.state, 1)
        advance_all(roles, config, step)
        return StepResult(collected, None, rollout_metrics(collected))
    costs = [cost.name for cost in config.algorithm.lagrangian.costs]
    batch = collate(collected.groups, costs=costs)
    with before_update(), timers("layout"):
        verify_layouts(roles, batch)
        check_batch(roles, batch, config.sampling, config.engine, step)
        if probe is not None:
            probe.expect(roles)
    # Before anything reads it.
    update_reference(roles, config.algorithm.kl, step)
    # All passes of the step read the same media.
    with roles.keeping_features(batch) as batch:
        return _learn_from(batch, roles, config, requirements, step, controls, collected, timers)


def _learn_from(
    batch: Batch,
    roles: Roles,
    config: RLConfig,
    requirements: Requirements,
    step: int,
    controls: Controllers,
    collected: CollectedRollouts,
    timers: Timers,
) -> StepResult:
    """Compute the columns of ``batch`` and update the policy. See ``learn`` for the arguments."""
    metrics = Metrics()
    max_tokens = config.train.micro_batch_tokens
    temperature = sampled_distribution(roles, config.sampling)
    with timers("logprobs"):
        metrics.merge(replay_metrics(roles, batch, temperature))
        batch = with_policy(batch, roles, config, requirements)
    with timers("reference"):
        batch = with_reference(batch, roles, config, requirements)
        batch = with_teacher(batch, roles, config.algorithm.distill, max_tokens, temperature)
    with timers("values"):
        batch = with_values(batch, roles, config, controls)
    readable_tokens = readable(batch, requirements)
    unreadable = int(batch.mask.sum()) - int(readable_tokens.mask.sum())
    metrics.add("policy/nonfinite_tokens", Sum(unreadable))
    with timers("prm"):
        batch = with_process_rewards(
            readable_tokens, roles, config.prm, max_tokens, temperature, metrics
        )
    with timers("advantages"):
        batch, kept = with_shaped_rewards(batch, config, controls, requirements)
        collected.keep(kept.tolist())
        if not collected.groups:
            advance_all(roles, config, step)
            return StepResult(collected, None, rollout_metrics(collected))
        batch = advantages_from(batch, config, controls)
    metrics.merge(rollout_metrics(collected))
    if config.log.repetition:
        metrics.add("response/repetition", mean_repetition(collected))
    if config.algorithm.advantage.clip is not None:
        metrics.add("policy/advantage_clip_fraction", clipped_share(batch, config))
    metrics.merge(compile_metrics(roles.engine))
    has_advantage = rows_with_advantage(batch)
    metrics.add("policy/frac_rows_with_advantage", Mean(int(has_advantage.sum()), len(batch)))
    metrics.add(
        "rollout/frac_reward_zero_std_trained",
        Mean(equal_groups(batch, has_advantage), collected.compared["groups"]),
    )
    with timers("update"):
        metrics.merge(
            update(roles, batch, update_settings(roles, config, requirements), controls, step)
        )
    # After the update, which must see the coefficients that the rewards were shaped with.
    frozen = actor_frozen(roles, config.critic.warmup_steps, step)
    metrics.merge(controls.update_from_batch(batch, frozen=frozen))
    return StepResult(collected, batch, metrics)


def advance_all(roles: Roles, config: RLConfig, step: int) -> None:
    """Advance the learning-rate schedules of policy and critics by a step without a batch.

    Args:
        roles: the models and the strategy.
        config: settings of the run.
        step: number of completed steps.
    """
    optimizer_steps = config.train.ppo_epochs * config.train.num_mini_batches
    advance_schedules(roles, config.critic.warmup_steps, step, optimizer_steps)


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


def with_policy(batch: Batch, roles: Roles, config: RLConfig, requirements: Requirements) -> Batch:
    """Add the old log-probs, and the policy's entropy or energy, if something reads them.

    Args:
        batch: the batch of the step.
        roles: models of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
    """
    if config.algorithm.old_logprobs == "rollout":
        batch = batch.replace(old_logprobs=batch.behavior_logprobs)
    wanted = {name: MicroBatches() for name in ("entropy", "energy") if name in requirements.needs}
    train, temperature = config.train, sampled_distribution(roles, config.sampling)
    if not wanted and not requirements.old_logprobs(train.ppo_epochs * train.num_mini_batches):
        return batch

    def score(part: Batch, index: Tensor) -> Tensor:
        scores = roles.actor.score(
            part,
            temperature=temperature,
            entropy="entropy" in wanted,
            energy="energy" in wanted,
        )
        for name, column in wanted.items():
            column.put(rows_of(batch.lengths, index), getattr(scores, name))
        return scores.logprobs

    logprobs = map_micro_batches(batch, score, roles, train.micro_batch_tokens)
    old = logprobs if config.algorithm.old_logprobs == "policy" else batch.old_logprobs
    # Each rank fills in the rows of its micro-batches and leaves 0 elsewhere: the sum gathers them.
    group = roles.strategy.data_parallel_group
    columns = {name: group.sum(parts.column(batch.tokens)) for name, parts in wanted.items()}
    return batch.replace(old_logprobs=old, **columns)


def with_reference(
    batch: Batch, roles: Roles, config: RLConfig, requirements: Requirements
) -> Batch:
    """Add reference log-probs ``[N]``, if something reads them.

    Args:
        batch: the batch of the step.
        roles: models of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
    """
    reference = roles.reference
    if reference is None or not requirements.reference:
        return batch
    max_tokens = config.train.micro_batch_tokens
    # As sampled, so that the KL compares the distributions of both models.
    temperature = sampled_distribution(roles, config.sampling)
    logprobs = compute_logprobs(reference, batch, roles, max_tokens, temperature)
    return batch.replace(ref_logprobs=logprobs)


def with_values(batch: Batch, roles: Roles, config: RLConfig, controls: Controllers) -> Batch:
    """Add the critics' values before each token, in units of the reward.

    With ``bootstrap_truncated``, also add the values after the last token. Without a critic,
    ``batch`` is returned unchanged. A second critic gives the values of a cost.

    Args:
        batch: the batch of the step.
        roles: models of the run.
        config: settings of the run.
        controls: scale of the values.
    """
    max_tokens = config.train.micro_batch_tokens
    final = config.algorithm.advantage.bootstrap_truncated
    if roles.critic is not None:
        critic = roles.critic.model
        values, after = critic_values(critic, batch, roles, max_tokens, final, controls.values)
        batch = batch.replace(values=values, final_values=after)
    if roles.cost_critic is not None:
        # Returns are never normalised next to costs, so its outputs have the unit of the cost.
        values, after = critic_values(roles.cost_critic.model, batch, roles, max_tokens, final)
        batch = batch.replace(cost_values=values, cost_final_values=after)
    return batch


def critic_values(
    critic: Critic,
    batch: Batch,
    roles: Roles,
    max_tokens: int,
    final: bool,
    unit: Callable[[Tensor], Tensor] = Tensor.detach,
) -> tuple[Tensor, Tensor | None]:
    """Return a critic's values before each token ``[N]`` and after the last ones ``[B]``.

    Args:
        critic: the critic.
        batch: the batch of the step.
        roles: gives the strategy.
        max_tokens: largest number of tokens of a micro-batch.
        final: compute the values after the last tokens, which are None otherwise.
        unit: converts the outputs to the unit of rewards.
    """
    parts = MicroBatches()

    def score(part: Batch, index: Tensor) -> Tensor:
        values, after = critic.values(part, final=final)
        if after is not None:
            parts.put(index, unit(after))
        return unit(values)

    values = map_micro_batches(batch, score, roles, max_tokens)
    if not final:
        return values, None
    return values, roles.strategy.data_parallel_group.sum(parts.column(len(batch)))


def with_advantages(
    batch: Batch, config: RLConfig, controls: Controllers, requirements: Requirements
) -> Batch:
    """Add shaped rewards, token rewards, advantages and returns. They are computed in float64.

    Responses whose reward is not finite are dropped.

    Args:
        batch: the batch of the step.
        config: settings of the run.
        controls: KL coefficient and reward scale.
        requirements: what the algorithm reads.
    """
    shaped, _ = with_shaped_rewards(batch, config, controls, requirements)
    return advantages_from(shaped, config, controls)


def with_shaped_rewards(
    batch: Batch, config: RLConfig, controls: Controllers, requirements: Requirements
) -> tuple[Batch, Tensor]:
    """Shape the rewards, and drop responses whose reward is not finite before or after that.

    A NaN reward would make every advantage of its group NaN. Tokens with a log-prob that is not
    finite count as not sampled.

    Args:
        batch: the batch of the step.
        config: settings of the run.
        controls: reward scale.
        requirements: what the algorithm reads.

    Returns:
        The remaining responses and their indices ``[K]`` in ``batch``.
    """
    scored = rewarded(batch)
    if len(scored) < len(batch):
        batch = batch.select(scored)
    batch = readable(batch, requirements)
    batch = with_rewards(
        batch,
        config.algorithm,
        config.sampling.max_new_tokens,
        controls.rewards,
        controls.terms,
    )
    # Again: shaping can make a finite reward infinite.
    shaped = rewarded(batch)
    if len(shaped) < len(batch):
        batch = batch.select(shaped)
    return batch, scored[shaped]


def advantages_from(batch: Batch, config: RLConfig, controls: Controllers) -> Batch:
    """Compute token rewards, advantages and returns from shaped rewards.

    Args:
        batch: the batch with shaped rewards.
        config: settings of the run.
        controls: KL coefficient and multipliers.
    """
    algorithm, settings = config.algorithm, config.algorithm.advantage
    in_reward = controls.kl.coef if algorithm.kl.where == "reward" else 0.0

    def estimate(given: Batch, kl_coef: float) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(given, algorithm.kl.estimator, kl_coef)
        return ADVANTAGES[settings.name](given, rewards, settings, **settings.options)

    advantages, returns = estimate(batch, in_reward)
    if settings.bootstrap_truncated:
        # The critic would otherwise never learn this value, and values would drift.
        batch = batch.replace(final_returns=batch.rewards)
    if algorithm.lagrangian.costs:
        multipliers = controls.lagrangian.moved(require_column(batch.costs))
        views = [cost_view(batch, i) for i in range(len(multipliers))]
        # A KL added to costs and taken off rewards keeps its coefficient in their combination.
        by_cost = [estimate(view, -in_reward) for view in views]
        advantages = constrained_advantages(
            advantages, [cost for cost, _ in by_cost], [m.value for m in multipliers]
        )
        batch = batch.replace(cost_returns=by_cost[0][1].float())
    # After whitening, which would change the weight of the teacher against the reward.
    whitened = WHITENINGS[settings.normalize](advantages, batch, settings.eps)
    advantages = add_distillation_reward(whitened, batch, algorithm.distill)
    if settings.clip is not None:
        advantages = advantages.clamp(-settings.clip, settings.clip)
    return batch.replace(advantages=advantages.float(), returns=returns.float())
