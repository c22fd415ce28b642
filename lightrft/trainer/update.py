"""A batch to optimizer steps: mini-batches, micro-batches, the objective of each, one step of the strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config import AlgorithmConfig, RLConfig
from lightrft.models.actor import Scores
from lightrft.strategy.base import StepInfo, Strategy
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.batching import micro_batches, mini_batches
from lightrft.trainer.controls import Controls
from lightrft.trainer.corrections import correction_weights
from lightrft.trainer.distill import target_of
from lightrft.trainer.gates import gated
from lightrft.trainer.kl import KL_ESTIMATORS
from lightrft.trainer.parts import needs_of
from lightrft.trainer.policy_loss import POLICY_LOSSES, value_loss
from lightrft.trainer.roles import Roles, Trained
from lightrft.trainer.rollout import request_seed
from lightrft.trainer.rows import Rows
from lightrft.trainer.scoring import by_parts, sampling_temperature
from lightrft.types import Batch
from lightrft.utils.metrics import Last, Max, Mean, Metrics, Sum


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss in force: ``algorithm`` with the coefficients of this step."""

    algorithm: AlgorithmConfig
    kl_coef: float
    entropy_coef: float

    @staticmethod
    def of(algorithm: AlgorithmConfig, controls: Controls) -> Objective:
        return Objective(algorithm, controls.kl.coef, algorithm.entropy.coef)

    @property
    def wants_entropy(self) -> bool:
        return self.entropy_coef != 0

    def active(self, batch: Batch) -> Tensor:
        """``[K]``: the rows that can get gradient. A row whose advantages are all 0 has none when there is no KL or entropy term."""
        everything = self.wants_entropy or (self.algorithm.kl.where == "loss" and self.kl_coef > 0) or batch.pull is not None
        everything = everything or self.algorithm.distill.whole
        rows = Rows.of(batch)
        useful = rows.count() > 0 if everything else rows.sum((_need(batch.advantages) != 0).long()) > 0
        return useful.nonzero()[:, 0]

    def __call__(self, batch: Batch, scores: Scores) -> tuple[Tensor, Metrics]:
        """The part of the global loss that ``batch`` holds (0-d), and its metrics. ``batch.loss_weights`` carry the denominator."""
        algorithm, rows = self.algorithm, Rows.of(batch)
        logprobs = _counted(scores.logprobs, rows)
        old = logprobs.detach() if batch.old_logprobs is None else _counted(batch.old_logprobs, rows)
        advantages = _counted(_need(batch.advantages), rows)
        settings = algorithm.loss
        losses, stats = POLICY_LOSSES[settings.name](logprobs, old, advantages, rows, settings, **settings.options)
        if algorithm.corrections:
            behavior = _counted(_need(batch.behavior_logprobs), rows)
            factor = correction_weights(algorithm.corrections, logprobs.detach(), old, behavior, advantages, rows)
            losses, stats = losses * factor, {**stats, "correction": factor}
        if batch.gate is not None:
            losses, stats = losses * batch.gate, {**stats, "gate": batch.gate}
        if batch.pull is not None:
            losses = losses + batch.pull * (logprobs - old).abs()
        policy = weighted_sum(losses, batch)
        metrics = Metrics({f"policy/{k}": Mean.of(v, rows.mask) for k, v in stats.items()})
        if batch.behavior_logprobs is not None:
            metrics.add("policy/sampler_gap", Mean.of((old - batch.behavior_logprobs).abs(), rows.mask))
        metrics.add("policy/old_kl", Mean.of(KL_ESTIMATORS["k3"](old, logprobs.detach()), rows.mask))
        loss = policy
        if batch.ref_logprobs is not None:
            ref = _counted(batch.ref_logprobs, rows)
            kl = KL_ESTIMATORS[algorithm.kl.estimator](logprobs, ref)
            metrics.add("policy/kl", Mean.of(KL_ESTIMATORS["k3"](logprobs.detach(), ref), rows.mask))
            if algorithm.kl.where == "loss" and self.kl_coef:
                loss = loss + self.kl_coef * weighted_sum(kl, batch)
        if batch.teacher_logprobs is not None:
            metrics.add("policy/teacher_kl", Mean.of(logprobs.detach() - _counted(batch.teacher_logprobs, rows), rows.mask))
        if scores.divergence is not None:
            metrics.add("policy/divergence", Mean.of(scores.divergence, rows.mask))
            loss = loss + algorithm.distill.coef * weighted_sum(scores.divergence, batch)
        if scores.entropy is not None:
            metrics.add("policy/entropy", Mean.of(scores.entropy, rows.mask))
            if self.wants_entropy:
                loss = loss - self.entropy_coef * weighted_sum(scores.entropy, batch)
        return loss, metrics


def update(roles: Roles, batch: Batch, config: RLConfig, controls: Controls, step: int) -> Metrics:
    """Train policy and critic on ``batch``: ``train.updates`` passes of ``train.mini_batches`` optimizer steps each."""
    objective = Objective.of(config.algorithm, controls)
    actor_frozen = roles.critic is not None and step < config.critic.warmup_steps
    batch = controls.for_critic(batch)
    metrics = Metrics()
    for epoch in range(config.train.updates):
        generator = torch.Generator().manual_seed(request_seed(config.run.seed, "mini-batches", step, epoch))
        for index in mini_batches(batch, config.train.mini_batches, generator):
            mini = weighted(batch.select(index), config)
            if config.algorithm.gates:
                mini = gated(with_current(mini, roles, config), config.algorithm.gates, generator)
            if not actor_frozen:
                metrics.merge(policy_step(roles, mini, objective, config))
            if roles.critic is not None:
                metrics.merge(critic_step(roles.strategy, roles.critic, mini, config))
    return metrics


def weighted(batch: Batch, config: RLConfig) -> Batch:
    """``batch``, whole, with the share of each token in its loss. From here on any split gives the same sum."""
    constant = config.algorithm.constant_length or config.sampling.max_new_tokens
    return batch.replace(loss_weights=AGGREGATIONS[config.algorithm.aggregation](Rows.of(batch), constant))


def with_current(mini: Batch, roles: Roles, config: RLConfig) -> Batch:
    """The policy's log-probs before this optimizer step, when a gate reads them."""
    if "current" not in needs_of(config.algorithm):
        return mini

    def score(part: Batch, index: Tensor) -> Tensor:
        return roles.actor.score(part, temperature=sampling_temperature(config)).logprobs

    logprobs = by_parts(mini, score, roles, config)
    return mini.replace(logprobs=logprobs, old_logprobs=logprobs if mini.old_logprobs is None else mini.old_logprobs)


def policy_step(roles: Roles, mini: Batch, objective: Objective, config: RLConfig) -> Metrics:
    """One optimizer step of the policy on the rows of ``mini`` that can get gradient."""
    entropy = objective.wants_entropy or config.log.entropy

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        options = {"temperature": sampling_temperature(config), "entropy": entropy, "target": target_of(part, roles, config)}
        return objective(part, roles.actor.score(part, **options))

    active = mini.select(objective.active(mini))
    loss, metrics = optimizer_step("policy", roles.strategy, roles.policy, active, config.train.micro_batch_tokens, loss_of)
    metrics.add("policy/loss", Mean(loss))
    metrics.add("policy/active_rows", Mean(len(active), max(1, len(mini))))
    return metrics


def critic_step(strategy: Strategy, critic: Trained, mini: Batch, config: RLConfig) -> Metrics:
    """One optimizer step of the critic, on returns and old values in the unit in which it speaks."""

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        values, _ = critic.model.values(part)
        losses = value_loss(values, _need(part.values), _need(part.returns), config.algorithm.value.clip)
        metrics = Metrics(
            {"critic/values": Mean.of(values, part.mask), "critic/returns": Mean.of(_need(part.returns), part.mask)}
        )
        return weighted_sum(losses, part), metrics

    loss, metrics = optimizer_step("critic", strategy, critic, mini, config.train.micro_batch_tokens, loss_of)
    metrics.add("critic/loss", Mean(loss))
    return metrics


def optimizer_step(
    who: str,
    strategy: Strategy,
    trained: Trained,
    batch: Batch,
    budget: int,
    loss_of: Callable[[Batch], tuple[Tensor, Metrics]],
) -> tuple[Tensor, Metrics]:
    """One optimizer step, in micro-batches of at most ``budget`` tokens; none for a batch without rows.

    ``loss_of`` gives the part of the loss (0-d) that a micro-batch holds, and its metrics. Returns the whole loss and all metrics,
    with those of the step under ``who/``.
    """
    total, metrics = torch.zeros((), device=strategy.device), Metrics()
    trained.model.train()
    indices = micro_batches(batch, budget, trained.model.layout)
    for i, index in enumerate(indices):
        loss, found = loss_of(batch.select(index).to(strategy.device))
        strategy.backward(trained.state, loss, last=i == len(indices) - 1)
        total = total + loss.detach()
        metrics.merge(found)
    trained.model.eval()
    if indices:
        metrics.merge(_step_metrics(who, strategy.step(trained.state)))
    return total, metrics


def _step_metrics(who: str, info: StepInfo) -> Metrics:
    return Metrics(
        {
            f"{who}/grad_norm": Max(info.grad_norm),
            f"{who}/lr": Last(info.lr),
            f"{who}/skipped_steps": Sum(1 if info.skipped else 0),
            f"{who}/optimizer_steps": Sum(0 if info.skipped else 1),
        }
    )


def _counted(column: Tensor, rows: Rows) -> Tensor:
    """``column [N]`` with 0 at tokens that do not count: an overflow there would turn their zero gradient into nan."""
    return torch.where(rows.mask, column, torch.zeros_like(column))


def weighted_sum(losses: Tensor, batch: Batch) -> Tensor:
    """The share of ``losses [N]`` in the loss of the global batch (0-d). Tokens of weight 0 are left out, not multiplied: what
    stands there may be anything."""
    weights = _need(batch.loss_weights)
    kept = weights != 0
    return (losses[kept] * weights[kept].to(losses.dtype)).sum()


def _need(column: Tensor | None) -> Tensor:
    if column is None:
        raise ValueError("a column that this phase reads has not been filled in")
    return column
