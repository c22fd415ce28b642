"""One step of reinforcement learning, whatever the algorithm: settings choose the functions, this file only calls them in order.

Each phase is a function of its arguments, so that any of them can be run again from a saved batch. Engine, policy and critic are
the only things with state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config import RLConfig
from lightrft.trainer.advantages import ADVANTAGES, whiten
from lightrft.trainer.batching import micro_batches
from lightrft.trainer.collate import collate
from lightrft.trainer.kl import KLController
from lightrft.trainer.roles import Roles, settle_layout
from lightrft.trainer.rollout import Collected, collect
from lightrft.trainer.rows import Rows
from lightrft.trainer.shaping import shape, token_rewards
from lightrft.trainer.update import sampling_temperature, update
from lightrft.types import Batch, Prompt, rows_of
from lightrft.utils.metrics import Max, Mean, Metrics, Sum
from lightrft.utils.timers import Timers


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
    kl: KLController,
    draw_prompts: Callable[[int], list[Prompt]],
    timers: Timers,
    stopped: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Prompts in, one updated policy out."""
    collected = collect(roles, config, step, draw_prompts, timers, stopped)
    metrics = rollout_metrics(collected)
    if not collected.groups:
        return StepResult(collected, None, metrics)
    batch = collate(collected.groups)
    with timers("layout"):
        settle_layout(roles.policy, batch)
    with timers("logprobs"):
        batch = with_policy(batch, roles, config)
    with timers("reference"):
        batch = with_reference(batch, roles, config)
    with timers("values"):
        batch = with_values(batch, roles, config)
    with timers("advantages"):
        batch = with_advantages(batch, config, kl.coef)
    with timers("update"):
        metrics.merge(update(roles, batch, config, kl.coef, step))
    metrics.merge(steer_kl(batch, kl))
    with timers("weights"):
        roles.engine.load_weights(roles.strategy.full_parameters(roles.policy.state), step + 1)
    return StepResult(collected, batch, metrics)


def with_policy(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """Old log-probs, when something reads them."""
    if not config.needs_old_logprobs:
        return batch

    def score(part: Batch, index: Tensor) -> Tensor:
        return roles.actor.score(part, temperature=sampling_temperature(config)).logprobs

    return batch.replace(old_logprobs=by_parts(batch, score, roles, config))


def with_reference(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """Reference log-probs, when a KL term reads them."""
    reference = roles.reference
    if reference is None or not config.algorithm.kl.used:
        return batch

    def score(part: Batch, index: Tensor) -> Tensor:
        return reference.score(part, temperature=sampling_temperature(config)).logprobs

    return batch.replace(ref_logprobs=by_parts(batch, score, roles, config))


def with_values(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """Values of the state before each token and after the last one, when there is a critic."""
    critic = roles.value_model
    if critic is None:
        return batch
    final = torch.zeros(len(batch))

    def score(part: Batch, index: Tensor) -> Tensor:
        values, after = critic.values(part, final=True)
        final[index] = after.float().cpu()
        return values

    return batch.replace(values=by_parts(batch, score, roles, config), final_values=final)


def with_advantages(batch: Batch, config: RLConfig, kl_coef: float) -> Batch:
    """Shaped rewards, rewards of tokens, advantages and returns, in float64."""
    algorithm = config.algorithm
    batch = batch.replace(rewards=shape(batch, algorithm.shaping, config.sampling.max_new_tokens).double())
    in_reward = kl_coef if algorithm.kl.where == "reward" else 0.0
    rewards = token_rewards(batch, algorithm.kl.estimator, in_reward)
    advantages, returns = ADVANTAGES[algorithm.advantage.name](batch, rewards, algorithm.advantage)
    if algorithm.advantage.whiten:
        advantages = whiten(advantages, batch.mask, algorithm.advantage.eps)
    return batch.replace(advantages=advantages.float(), returns=returns.float())


def steer_kl(batch: Batch, kl: KLController) -> Metrics:
    """Report the distance to the reference and let the controller move the coefficient."""
    metrics = Metrics({"policy/kl_coef": Mean(kl.coef)}) if kl.config.used else Metrics()
    if batch.old_logprobs is not None and batch.ref_logprobs is not None:
        distance = Rows.of(batch).sum(batch.old_logprobs - batch.ref_logprobs).mean()
        metrics.add("policy/kl_per_answer", Mean(distance))
        kl.update(float(distance), len(batch))
    return metrics


def by_parts(batch: Batch, score: Callable[[Batch, Tensor], Tensor], roles: Roles, config: RLConfig) -> Tensor:
    """A token column ``[N]`` computed without gradient: ``score(part, its rows in the batch)`` for each micro-batch."""
    column = torch.zeros(batch.tokens)
    with torch.no_grad():
        for index in micro_batches(batch, config.train.micro_batch_tokens, roles.actor.layout):
            values = score(batch.select(index).to(roles.device), index)
            column[rows_of(batch.lengths, index)] = values.float().cpu()
    return column


def rollout_metrics(collected: Collected) -> Metrics:
    """Rewards, lengths and the account of tokens."""
    metrics = Metrics()
    scored = [r for r in collected.rollouts if not r.failed]
    rewards = [r.reward or 0.0 for r in scored]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    if rewards:
        metrics.add("reward/mean", Mean(sum(rewards), len(rewards)))
        metrics.add("reward/std", Mean((sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5))
        metrics.add("reward/max", Max(max(rewards)))
    for rollout in scored:
        for name, value in rollout.terms.items():
            metrics.add(f"reward/{name}", Mean(value))
    for rollout in collected.rollouts:
        metrics.add("response/length", Mean(len(rollout)))
        metrics.add("response/max_length", Max(len(rollout)))
        metrics.add("response/truncated", Mean(float(rollout.finish_reason == "length")))
    for name in ("sampled", "trained", "filtered", "failed"):
        metrics.add(f"rollout/{name}", Sum(collected.tokens[name]))
    for reason, count in collected.dropped.items():
        metrics.add(f"rollout/dropped/{reason}", Sum(count))
    metrics.add("rollout/failed_answers", Sum(sum(collected.failures.values())))
    metrics.add("rollout/rounds", Sum(collected.rounds))
    metrics.add("rollout/groups", Sum(len(collected.groups)))
    return metrics
