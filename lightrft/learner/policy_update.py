"""Train policy and critic on a batch: mini-batches, micro-batches, loss, optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.constrained.lagrangian import cost_view
from lightrft.algorithms.importance_sampling import (
    compares_whole_batch,
    correction_weights,
    interpolated_proximal,
)
from lightrft.algorithms.kl import KL_ESTIMATORS, capped_k3
from lightrft.algorithms.nonfinite_tokens import readable, unread_tokens, without_tokens
from lightrft.algorithms.policy_losses import POLICY_LOSSES, value_loss
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_masks import with_token_masks
from lightrft.algorithms.token_ops import (
    TokenRows,
    absolute_gap,
    ratio_of,
    require_column,
    weighted_sum,
)
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.train import RLTrainConfig
from lightrft.distributed.collectives import all_reduce_metrics
from lightrft.learner.controllers import Controllers, mean_entropy
from lightrft.learner.distillation.targets import distillation_targets
from lightrft.learner.forward_passes import compute_logprobs
from lightrft.learner.micro_batches import MicroBatch, local_micro_batches, mini_batches
from lightrft.learner.router_loss import router_terms
from lightrft.models.actor import TokenScores
from lightrft.models.sampled_distribution import Distribution
from lightrft.models.training_mode import values_of_evaluation
from lightrft.observability.metrics import Last, Max, Mean, Metrics, Sum
from lightrft.roles import Roles, TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from lightrft.utils.seeding import derive_seed, torch_generator

FLAT_AT_0 = ("k2", "k3", "k3_straight")
"""Estimators whose gradient, and not only its mean, is 0 where the two policies are equal."""

LossOf = Callable[[Batch], tuple[Tensor, Metrics]]
"""Maps a micro-batch to its part of the loss (0-d) and its metrics."""

TokenLosses = Callable[[Tensor, Batch], Tensor]
"""Maps the policy's log-probs ``[N]`` and their batch to the loss of each token ``[N]``."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one step.

    Attributes:
        algorithm: The settings ``algorithm``.
        requirements: What the algorithm reads.
        kl_coef: Coefficient of the KL term in this step.
        entropy_coef: Coefficient of the entropy bonus in this step.
        version: Version of the policy before the update.
        token_losses: Replaces the policy loss of ``algorithm``. ``None`` does not.
    """

    algorithm: AlgorithmConfig
    requirements: Requirements
    kl_coef: float
    entropy_coef: float
    version: int = 0
    token_losses: TokenLosses | None = None

    @staticmethod
    def of(
        algorithm: AlgorithmConfig,
        requirements: Requirements,
        controls: Controllers,
        batch: Batch | None = None,
        version: int = 0,
        token_losses: TokenLosses | None = None,
    ) -> Objective:
        """Build the objective of a step.

        Args:
            algorithm: The settings ``algorithm``.
            requirements: What the algorithm reads.
            controls: Gives the current coefficients.
            batch: Gives the policy's entropy. ``None`` if it is unknown.
            version: Version of the policy before the update.
            token_losses: Replaces the policy loss of ``algorithm``. ``None`` does not.
        """
        entropy = None if batch is None else mean_entropy(batch)
        return Objective(
            algorithm,
            requirements,
            controls.kl.coef,
            controls.entropy.current_coef(entropy),
            version,
            token_losses,
        )

    @property
    def wants_entropy(self) -> bool:
        """Return whether the loss contains an entropy bonus."""
        return self.entropy_coef != 0

    @property
    def wants_kl(self) -> bool:
        """Return whether the loss contains a KL term."""
        return self.algorithm.kl.where == "loss" and self.kl_coef > 0

    def active(self, batch: Batch) -> Tensor:
        """Return the rows that can get a gradient, ``[K]``.

        A row whose policy loss is 0 has none, unless another term of the loss reaches it.
        """
        rows = TokenRows.of(batch)
        others = (
            self.wants_entropy,
            self.wants_kl,
            self._drifts(batch),
            self.algorithm.distill.whole,
            batch.pull is not None,
            self.token_losses is not None,
        )
        if any(others):
            return (rows.count() > 0).nonzero()[:, 0]
        useful = require_column(batch.advantages) != 0
        if batch.token_mask is not None:
            useful = useful & (batch.token_mask != 0)
        if batch.positive_weights is not None:
            useful = useful | (batch.positive_weights != 0)
        return (rows.sum(useful.long()) > 0).nonzero()[:, 0]

    def _drifts(self, batch: Batch) -> bool:
        """Return whether the divergence from the old policy may have a gradient."""
        drift = self.algorithm.policy_drift
        if drift.coef <= 0:
            return False
        # Without old log-probs the policy's own take their place, and the two are equal.
        differs = batch.old_logprobs is not None or self.algorithm.old_logprobs == "interpolated"
        return differs or drift.estimator not in FLAT_AT_0

    def __call__(self, batch: Batch, scores: TokenScores) -> tuple[Tensor, Metrics]:
        """Return the contribution of ``batch`` to the global loss (0-d), and its metrics.

        ``batch.loss_weights`` contain the denominator. A token with an infinite or NaN log-prob
        counts as not sampled; ``policy/nonfinite_tokens`` counts them.
        """
        old = old_logprobs(batch, scores.logprobs, self.algorithm.old_logprobs, self.version)
        lost = self._lost(batch, scores, old)
        batch = without_tokens(batch, lost)
        rows = TokenRows.of(batch)
        logprobs, old = _counted(scores.logprobs, rows), _counted(old, rows)
        loss, metrics = self._policy(batch, rows, logprobs, old)
        metrics.add("policy/nonfinite_tokens", Sum(lost.sum()))
        loss = loss + self._drift(batch, logprobs, old)
        loss = loss + self._kl(batch, rows, logprobs, old, metrics)
        if batch.teacher_logprobs is not None:
            metrics.add(
                "policy/teacher_kl",
                Mean.of(logprobs.detach() - _counted(batch.teacher_logprobs, rows), rows.mask),
            )
        if scores.divergence is not None:
            metrics.add("policy/divergence", Mean.of(scores.divergence, rows.mask))
            loss = loss + self.algorithm.distill.coef * weighted_sum(scores.divergence, batch)
        if scores.entropy is not None:
            metrics.add("policy/entropy", Mean.of(scores.entropy, rows.mask))
            # The entropy may have been computed for the report alone.
            if self.wants_entropy:
                loss = loss - self.entropy_coef * weighted_sum(scores.entropy, batch)
        if batch.positive_weights is not None:
            metrics.add(
                "policy/positive_nll", Mean.of(-logprobs, rows.mask & (batch.positive_weights != 0))
            )
            loss = loss - self.algorithm.positive_nll.coef * weighted_sum(
                logprobs, batch, batch.positive_weights
            )
        return loss, metrics

    def _lost(self, batch: Batch, scores: TokenScores, old: Tensor) -> Tensor:
        """Return a mask ``[N]`` of trained tokens for which a term of the loss is not finite."""
        read: list[Tensor | None] = [scores.logprobs, old, scores.divergence]
        # An entropy that is only reported may be infinite.
        if self.wants_entropy:
            read.append(scores.entropy)
        finite = ~unread_tokens(batch, self.requirements)
        for column in read:
            if column is not None:
                finite = finite & torch.isfinite(column.detach())
        return batch.mask & ~finite

    def _policy(
        self, batch: Batch, rows: TokenRows, logprobs: Tensor, old: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Compute the policy loss with its corrections, token masks and KL pulls."""
        algorithm, settings = self.algorithm, self.algorithm.loss
        stats: dict[str, Tensor] = {}
        if self.token_losses is not None:
            losses = self._own_losses(batch, logprobs, old)
        else:
            advantages = _counted(require_column(batch.advantages), rows)
            losses, stats = POLICY_LOSSES[settings.name](
                logprobs, old, advantages, rows, settings, **settings.options
            )
        if algorithm.importance_sampling:
            factor = batch.correction
            if factor is None:
                behavior = _counted(require_column(batch.behavior_logprobs), rows)
                factor = correction_weights(
                    algorithm.importance_sampling,
                    logprobs.detach(),
                    old,
                    behavior,
                    _counted(require_column(batch.advantages), rows),
                    rows,
                )
            losses = _times(losses, factor)
            stats = {**stats, "correction": factor}
        if batch.token_mask is not None:
            losses = _times(losses, batch.token_mask)
        if batch.pull is not None:
            losses = losses + batch.pull * absolute_gap(logprobs, old)
        metrics = Metrics({f"policy/{k}": Mean.of(v, rows.mask) for k, v in stats.items()})
        if batch.behavior_logprobs is not None:
            metrics.add(
                "policy/rollout_logprob_diff",
                Mean.of((old - batch.behavior_logprobs).abs(), rows.mask),
            )
        metrics.add(
            "policy/old_kl", Mean.of(KL_ESTIMATORS["k3"](old, logprobs.detach()), rows.mask)
        )
        return weighted_sum(losses, batch), metrics

    def _own_losses(self, batch: Batch, logprobs: Tensor, old: Tensor) -> Tensor:
        """Return the losses of ``token_losses``.

        Raises ``ConfigError`` if they are not one number for each token.
        """
        assert self.token_losses is not None
        losses = self.token_losses(logprobs, batch.replace(old_logprobs=old))
        if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
            found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"the loss function returned {found}; return the loss of each token, "
                f"{list(logprobs.shape)}, and leave their mean to algorithm.aggregation"
            )
        if not losses.requires_grad and logprobs.requires_grad:
            raise ConfigError(
                "the loss function returned a loss without gradient; compute it from its first "
                "argument, the log-probs, without detach() and no_grad()"
            )
        return losses

    def _drift(self, batch: Batch, logprobs: Tensor, old: Tensor) -> Tensor | float:
        """Compute the divergence from the old policy, times its coefficient."""
        drift = self.algorithm.policy_drift
        if not drift.coef:
            return 0.0
        rows = TokenRows.of(batch)
        if drift.level == "response":
            old, logprobs = rows.spread(rows.sum(old)), rows.spread(rows.sum(logprobs))
        if drift.cap is None:
            losses = KL_ESTIMATORS[drift.estimator](old, logprobs)
        else:
            losses = capped_k3(old, logprobs, drift.cap)
        if drift.level == "response":
            # Every token has the response's loss, so divide by their number.
            counts = rows.spread(rows.count().clamp(min=1))
            losses = losses / counts.to(losses.dtype)
        return drift.coef * weighted_sum(losses, batch)

    def _kl(
        self, batch: Batch, rows: TokenRows, logprobs: Tensor, old: Tensor, metrics: Metrics
    ) -> Tensor | float:
        """Report the KL to the reference and return its term in the loss."""
        if batch.ref_logprobs is None:
            return 0.0
        ref, kl = _counted(batch.ref_logprobs, rows), self.algorithm.kl
        metrics.add("policy/kl", Mean.of(KL_ESTIMATORS["k3"](logprobs.detach(), ref), rows.mask))
        if not self.wants_kl:
            return 0.0
        losses = KL_ESTIMATORS[kl.estimator](logprobs, ref)
        if kl.weighted:
            # With gradient: the ratio makes the expected gradient that of KL(policy, reference).
            losses = ratio_of(logprobs, old) * losses
        return self.kl_coef * weighted_sum(losses, batch)


def old_logprobs(batch: Batch, logprobs: Tensor, source: str, version: int) -> Tensor:
    """Return the log-probs in the denominator of the ratio, ``[N]``, without gradient.

    If the batch has none, they are the policy's own. With ``interpolated`` they are interpolated
    between sampler and policy.

    Args:
        batch: The batch.
        logprobs: ``[N]``. Log-probs of the current policy.
        source: The setting ``algorithm.old_logprobs``.
        version: Version of the policy before the update.
    """
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    if source == "interpolated":
        return interpolated_proximal(
            logprobs,
            require_column(batch.behavior_logprobs),
            require_column(batch.versions),
            version,
            version + 1,
        )
    return logprobs.detach()


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The settings of the optimizer steps.

    Attributes:
        algorithm: The settings ``algorithm``.
        requirements: What the algorithm reads.
        train: The settings ``train``.
        temperature: Temperature of log-probs, or the distribution with filters.
        max_new_tokens: The setting ``sampling.max_new_tokens``.
        seed: The setting ``run.seed``.
        warmup_steps: The setting ``critic.warmup_steps``.
        log_entropy: The setting ``log.entropy``.
        token_losses: Replaces the policy loss of ``algorithm``. ``None`` does not.
    """

    algorithm: AlgorithmConfig
    requirements: Requirements
    train: RLTrainConfig
    temperature: Distribution
    max_new_tokens: int
    seed: int
    warmup_steps: int
    log_entropy: bool
    token_losses: TokenLosses | None = None


def update(
    roles: Roles, batch: Batch, settings: UpdateSettings, controls: Controllers, step: int
) -> Metrics:
    """Train policy and critic on ``batch``.

    This takes ``train.ppo_epochs`` passes of ``train.num_mini_batches`` optimizer steps each.

    Args:
        roles: The models and the strategy.
        batch: The batch of the step, with advantages.
        settings: The settings of the optimizer steps.
        controls: Coefficients and statistics of the run.
        step: Number of completed steps; also the version of the policy.
    """
    algorithm, train = settings.algorithm, settings.train
    objective = Objective.of(
        algorithm, settings.requirements, controls, batch, step, settings.token_losses
    )
    frozen = actor_frozen(roles, settings.warmup_steps, step)
    batch = controls.for_critic(batch)
    metrics, taken = Metrics(), 0
    for epoch in range(train.ppo_epochs):
        # From the step, not from one running generator: a resumed run makes the same choices.
        generator = torch_generator(derive_seed(settings.seed, "mini-batches", step, epoch))
        for index in mini_batches(batch, train.num_mini_batches, generator):
            taken += 1
            mini = with_loss_columns(batch.select(index), roles, settings, step, generator)
            if not frozen:
                metrics.merge(policy_step(roles, mini, objective, settings))
            clip, max_tokens = algorithm.value.clip, train.micro_batch_tokens
            if roles.critic is not None:
                metrics.merge(critic_step(roles.strategy, roles.critic, mini, clip, max_tokens))
            if roles.cost_critic is not None:
                seen = cost_view(mini, 0)
                found = critic_step(
                    roles.strategy, roles.cost_critic, seen, clip, max_tokens, "cost_critic"
                )
                metrics.merge(found)
    # A batch of few responses has fewer mini-batches.
    steps = train.ppo_epochs * train.num_mini_batches
    advance_schedules(roles, settings.warmup_steps, step, steps - taken)
    return metrics


def advance_schedules(roles: Roles, warmup_steps: int, step: int, optimizer_steps: int) -> None:
    """Advance the learning-rate schedules of policy and critics by steps that trained nothing.

    Args:
        roles: The models and the strategy.
        warmup_steps: The setting ``critic.warmup_steps``.
        step: Number of completed steps.
        optimizer_steps: Number of optimizer steps that a batch would have given.
    """
    policy = None if actor_frozen(roles, warmup_steps, step) else roles.policy
    for role in (policy, roles.critic, roles.cost_critic):
        if role is not None and optimizer_steps:
            roles.strategy.advance(role.state, optimizer_steps)


def actor_frozen(roles: Roles, warmup_steps: int, step: int) -> bool:
    """Return whether only the critic is trained in this step.

    Args:
        roles: Gives the critic.
        warmup_steps: The setting ``critic.warmup_steps``.
        step: Number of completed steps.
    """
    return roles.critic is not None and step < warmup_steps


def with_loss_columns(
    mini: Batch, roles: Roles, settings: UpdateSettings, step: int, generator: torch.Generator
) -> Batch:
    """Add what the policy loss reads to a mini-batch: weights, log-probs, masks and corrections.

    Args:
        mini: A whole mini-batch.
        roles: Gives the policy.
        settings: The settings of the optimizer steps.
        step: Number of completed steps; also the version of the policy.
        generator: Selects random token masks.
    """
    algorithm = settings.algorithm
    # Weights first: tokens that are dropped below stay in the denominator of the loss.
    mini = with_loss_weights(mini, algorithm, settings.max_new_tokens)
    mini = readable(with_current(mini, roles, settings, step), settings.requirements)
    mini = with_token_masks(mini, algorithm.token_masks, algorithm.loss, generator)
    return with_importance_weights(mini, algorithm)


def with_loss_weights(batch: Batch, algorithm: AlgorithmConfig, max_new_tokens: int) -> Batch:
    """Add the loss weight of each token to ``batch``, which must be a whole mini-batch.

    Afterwards any split of the batch gives the same sum.

    Args:
        batch: A whole mini-batch.
        algorithm: The settings ``algorithm``.
        max_new_tokens: The setting ``sampling.max_new_tokens``.
    """
    rows = TokenRows.of(batch)
    constant = algorithm.constant_length or max_new_tokens
    batch = batch.replace(loss_weights=AGGREGATIONS[algorithm.aggregation](rows, constant))
    if not algorithm.positive_nll.coef:
        return batch
    positive = rows.mask & rows.spread(
        require_column(batch.outcomes) >= algorithm.positive_nll.threshold
    )
    return batch.replace(positive_weights=positive.double() / max(1, int(positive.sum())))


def with_current(mini: Batch, roles: Roles, settings: UpdateSettings, version: int) -> Batch:
    """Add the policy's log-probs before this optimizer step, and the old log-probs.

    Nothing is added unless a token mask or a correction reads them.

    Args:
        mini: A whole mini-batch.
        roles: Gives the policy.
        settings: The settings of the optimizer steps.
        version: Version of the policy before the update.
    """
    if not settings.requirements.current:
        return mini
    logprobs = compute_logprobs(
        roles.actor, mini, roles, settings.train.micro_batch_tokens, settings.temperature
    )
    return mini.replace(
        logprobs=logprobs,
        old_logprobs=old_logprobs(mini, logprobs, settings.algorithm.old_logprobs, version),
    )


def with_importance_weights(mini: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Add correction weights to ``mini``, a whole mini-batch, if they depend on all of it."""
    if not compares_whole_batch(algorithm.importance_sampling):
        return mini
    rows = TokenRows.of(mini)
    columns = (mini.logprobs, mini.old_logprobs, mini.behavior_logprobs, mini.advantages)
    now, old, behavior, advantages = (_counted(require_column(column), rows) for column in columns)
    return mini.replace(
        correction=correction_weights(
            algorithm.importance_sampling, now, old, behavior, advantages, rows
        )
    )


def policy_loss(roles: Roles, objective: Objective, settings: UpdateSettings) -> LossOf:
    """Return the loss of the policy on a part of a mini-batch, with gradient.

    Args:
        roles: The models and the strategy.
        objective: The loss.
        settings: The settings of the optimizer steps.
    """
    entropy = objective.wants_entropy or settings.log_entropy
    target = distillation_targets(roles, settings.algorithm.distill, settings.temperature)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        compared = target(part)
        score = partial(
            roles.actor.score,
            part,
            temperature=settings.temperature,
            entropy=entropy,
            target=compared,
        )
        return objective(part, values_of_evaluation(roles.actor, score))

    return loss_of


def policy_step(
    roles: Roles, mini: Batch, objective: Objective, settings: UpdateSettings
) -> Metrics:
    """Take one optimizer step of the policy on the rows of ``mini`` that can get a gradient.

    Args:
        roles: The models and the strategy.
        mini: A whole mini-batch.
        objective: The loss.
        settings: The settings of the optimizer steps.
    """
    loss_of = policy_loss(roles, objective, settings)
    # ``loss_weights`` hold the denominator already, so leaving rows out does not change the loss.
    # The load-balancing loss of experts reaches every row.
    reaches_all = roles.actor.router_loss is not None
    active = mini if reaches_all else mini.select(objective.active(mini))
    additional = () if roles.ptx is None else (roles.ptx.term(roles.actor),)
    budget = settings.train.micro_batch_tokens
    loss, metrics = optimizer_step(
        "policy", roles.strategy, roles.policy, active, budget, loss_of, additional
    )
    metrics.add("policy/loss", Mean(loss))
    metrics.add("policy/frac_rows_with_loss", Mean(len(active), max(1, len(mini))))
    # Over all tokens of the step: rows that are not run have no clipped token.
    clipped = "policy/clip_fraction" in set(metrics)
    unclipped = int(mini.mask.sum()) - (int(active.mask.sum()) if clipped else 0)
    metrics.add("policy/clip_fraction", Mean(0.0, unclipped))
    if mini.token_mask is not None:
        metrics.add("policy/token_mask", Mean.of(mini.token_mask, mini.mask))
    return metrics


def critic_step(
    strategy: Strategy,
    critic: TrainableModel,
    mini: Batch,
    clip: float | None,
    max_tokens: int,
    who: str = "critic",
) -> Metrics:
    """Take one optimizer step of the critic.

    Args:
        strategy: Runs the backward pass and the step.
        critic: The critic with its optimizer.
        mini: A whole mini-batch, with returns and old values on the critic's scale.
        clip: The setting ``algorithm.value.clip``.
        max_tokens: Largest number of tokens of a micro-batch.
        who: Name of the critic, used as the prefix of its metrics.
    """

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        final = part.final_returns is not None
        given = partial(critic.model.values, part, final=final)
        values, after = values_of_evaluation(critic.model, given)
        losses = value_loss(values, require_column(part.values), require_column(part.returns), clip)
        metrics = Metrics(
            {
                f"{who}/values": Mean.of(values, part.mask),
                f"{who}/returns": Mean.of(require_column(part.returns), part.mask),
            }
        )
        loss = weighted_sum(losses, part)
        if after is not None:
            loss = loss + final_value_loss(after, part, clip)
        return loss, metrics

    loss, metrics = optimizer_step(who, strategy, critic, mini, max_tokens, loss_of)
    metrics.add(f"{who}/loss", Mean(loss))
    return metrics


def final_value_loss(values: Tensor, part: Batch, clip: float | None) -> Tensor:
    """Return the loss of the values after truncated responses, 0-d.

    Each has the weight of all tokens of its response. These learn the reward plus this value, so
    with less weight a critic that cannot tell the states from each other would drift upwards.

    Args:
        values: ``[B]``. The critic's values after the last tokens, with gradient.
        part: A micro-batch, with old values and targets on the critic's scale.
        clip: The setting ``algorithm.value.clip``.
    """
    old, returns = require_column(part.final_values), require_column(part.final_returns)
    losses = value_loss(values, old, returns.to(values.dtype), clip)
    weights = TokenRows.of(part).sum(require_column(part.loss_weights))
    weights = weights * require_column(part.truncated)
    return weighted_sum(losses, part, weights)


def optimizer_step(
    who: str,
    strategy: Strategy,
    trained: TrainableModel,
    batch: Batch,
    budget: int,
    loss_of: LossOf,
    additional: Sequence[tuple[Batch, LossOf]] = (),
    *,
    cut: bool = True,
) -> tuple[Tensor, Metrics]:
    """Take one optimizer step on ``batch`` and any additional batches; none if there are no rows.

    Args:
        who: Name of the model, used as the prefix of the step metrics.
        strategy: Runs the backward pass and the step.
        trained: The model with its optimizer.
        batch: A whole mini-batch, identical on all ranks.
        budget: Largest number of tokens of a micro-batch.
        loss_of: The loss of a micro-batch of ``batch``.
        additional: Additional batches with their losses, added to the same step.
        cut: If False, no group is cut to balance the ranks.

    Returns:
        The loss summed over all ranks, without the load-balancing loss of experts, and all metrics.
    """
    total, metrics = torch.zeros((), device=strategy.device), Metrics()
    # Gradient checkpointing and dropout act in training mode only.
    trained.model.train()
    layout, data_parallel_group = trained.model.layout, strategy.data_parallel_group
    parts: list[tuple[Batch, LossOf, MicroBatch]] = []
    for each, loss_of_each in ((batch, loss_of), *additional):
        own = local_micro_batches(each, budget, layout, data_parallel_group, cut=cut)
        parts += [(each, loss_of_each, part) for part in own]
    batches = [partial(_on_device, part, whole, strategy) for whole, _, part in parts]
    with router_terms(trained.model, batches, strategy) as routers:
        for i, (batch_of_part, (_, loss_of_part, _)) in enumerate(zip(batches, parts)):
            loss, found = loss_of_part(batch_of_part())
            strategy.backward(trained.state, routers.added(loss), last=i == len(parts) - 1)
            total = total + loss.detach()
            metrics.merge(found)
    # Old log-probs and rollouts are computed between steps, without dropout.
    trained.model.eval()
    metrics = all_reduce_metrics(metrics, data_parallel_group)
    metrics.merge(routers.metrics(who, strategy))
    # Every rank has the same number of parts, so all take the step or none does.
    skipped = False
    if parts:
        info = strategy.step(trained.state)
        metrics.add(f"{who}/grad_norm", Max(info.grad_norm))
        metrics.add(f"{who}/lr", Last(info.lr))
        # the reason of a skipped step; empty for others
        skipped = bool(info.skipped)
        metrics.add(f"{who}/skipped_steps", Sum(int(skipped)))
        metrics.add(f"{who}/optimizer_steps", Sum(int(not skipped)))
    if not parts or skipped:
        # The schedule of a run ends with its last step, whichever steps trained nothing.
        strategy.advance(trained.state, 1)
    return data_parallel_group.sum(total), metrics


def _on_device(part: MicroBatch, whole: Batch, strategy: Strategy) -> Batch:
    return part.of(whole).to(strategy.device)


def _times(losses: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``losses`` by ``factor``, ``[N]``.

    Loss and gradient are exactly 0 where the factor is 0, also if the loss is infinite or NaN.
    """
    kept = torch.where(factor != 0, losses, torch.zeros_like(losses))
    return kept * factor


def _counted(column: Tensor, rows: TokenRows) -> Tensor:
    """Return ``column [N]`` with 0 at uncounted tokens.

    An overflow there would turn their zero gradient into NaN.
    """
    return torch.where(rows.mask, column, torch.zeros_like(column))
