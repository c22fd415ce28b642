"""Take a step of preference learning on pairs, labelled or ranked responses, and measure it.

A loss is a function of the log-probs of all responses. If it compares the responses of an example
alone and each example fits in a micro-batch, one pass computes loss and gradient. Otherwise a first
pass computes the log-probs without gradient. The derivative of the loss in each log-prob then
weights the tokens of a second pass. Loss and gradient are the same in both forms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences
from lightrft.algorithms.preference.objective import (
    PreferenceTerm,
    implicit_rewards,
    preference_loss,
    preference_terms,
    units_of,
)
from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.algorithms.token_ops import TokenRows, require_column, weighted_sum
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.sampler import in_order
from lightrft.learner.distillation.targets import target_of
from lightrft.learner.forward_passes import MicroBatches, compute_logprobs, verify_layouts
from lightrft.learner.micro_batches import largest_group, local_micro_batches
from lightrft.learner.policy_update import LossOf, optimizer_step
from lightrft.learner.preference_batch import (
    PreferenceStats,
    TokenColumns,
    mismatched,
    pair_rows,
    preference_to_batch,
    preferences_of,
    with_token_weights,
)
from lightrft.learner.reference_cache import ReferenceLogprobs
from lightrft.models.actor import TokenScores
from lightrft.models.divergence.token_divergence import Target
from lightrft.models.training_mode import values_of_evaluation
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import Roles
from lightrft.types import Batch, rows_of

ROUNDING = 1e-4
"""Differences of log-ratios, in nats, that rounding in float32 makes of equal models."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """The settings of a step.

    Attributes:
        preference: The settings ``preference``.
        requirements: What the losses read.
        max_tokens: The setting ``train.max_tokens_per_micro_batch``.
        seed: The setting ``run.seed``.
        sources: Names of the data sources, for metrics.
    """

    preference: PreferenceConfig
    requirements: PreferenceRequirements
    max_tokens: int
    seed: int
    sources: Sequence[str] = ()


def preference_step(
    roles: Roles, batch: Batch, settings: PreferenceSettings, stats: PreferenceStats, step: int
) -> Metrics:
    """Take one optimizer step on the losses of the global batch.

    Args:
        roles: The policy, the reference and the strategy.
        batch: The global batch, identical on all ranks.
        settings: The settings of the step.
        stats: Numbers that carry over between steps.
        step: Number of completed steps.
    """
    # The reference and the policy read the same media.
    with roles.keeping_features(batch) as batch:
        return _preference_step(roles, batch, settings, stats, step)


def _preference_step(
    roles: Roles, batch: Batch, settings: PreferenceSettings, stats: PreferenceStats, step: int
) -> Metrics:
    batch, objective = _prepared(roles, batch, settings, stats, step)
    metrics = Metrics(
        {
            "preference/tokens": Sum(int(batch.mask.sum())),
            "preference/responses": Sum(len(batch)),
        }
    )
    if objective.kl is not None:
        metrics.add("preference/mismatched_kl", Mean(objective.kl))
    if coupled(batch, settings, roles.actor.layout):
        batch, loss, found = objective.linearised(batch)
        _, more = _step(roles, batch, settings, objective.linear_loss, cut=True)
        metrics.merge(found)
    else:
        # The rows of an example meet in one micro-batch. Labelled responses need no partner.
        alone = settings.requirements.kind == "labelled"
        loss, more = _step(roles, batch, settings, objective.loss, cut=alone)
    metrics.merge(more)
    metrics.add("loss", Mean(loss))
    return metrics


@torch.no_grad()
def preference_losses(
    roles: Roles, batch: Batch, settings: PreferenceSettings, stats: PreferenceStats
) -> tuple[Preferences, tuple[PreferenceTerm, ...]]:
    """Return the argument of the losses for a batch, and the losses, without training.

    Args:
        roles: The policy, the reference and the strategy.
        batch: A batch, identical on all ranks.
        settings: The settings of the run.
        stats: Numbers that carry over between steps. They do not change.
    """
    with roles.keeping_features(batch) as batch:
        batch, objective = _prepared(roles, batch, settings, stats, 0)
        columns = objective.columns(batch)
    data = objective.data(without_tokens(batch, nonfinite(batch, columns)), columns)
    return data, preference_terms(data, settings.preference)


def _prepared(
    roles: Roles, batch: Batch, settings: PreferenceSettings, stats: PreferenceStats, step: int
) -> tuple[Batch, _Objective]:
    """Add the columns that the losses read to ``batch``, and return it with the objective.

    Args:
        roles: The policy, the reference and the strategy.
        batch: The global batch, identical on all ranks.
        settings: The settings of the step.
        stats: Numbers that carry over between steps.
        step: Number of completed steps.
    """
    requirements = settings.requirements
    verify_layouts(roles, batch)
    batch = with_reference(batch, roles, settings)
    if requirements.partner:
        batch = with_token_weights(batch, settings.preference, settings.seed, step)
    kl = mismatched_kl(batch, roles, settings) if requirements.kl else None
    target = target_of(roles.reference if requirements.sequence_kl else None, roles, "forward_kl")
    return batch, _Objective(roles, settings, kl, stats, _totals(batch, settings), target)


def _step(
    roles: Roles, batch: Batch, settings: PreferenceSettings, loss_of: LossOf, *, cut: bool
) -> tuple[Tensor, Metrics]:
    return optimizer_step(
        "policy", roles.strategy, roles.policy, batch, settings.max_tokens, loss_of, cut=cut
    )


def coupled(batch: Batch, settings: PreferenceSettings, layout: str) -> bool:
    """Return whether the loss of a micro-batch depends on other micro-batches.

    Args:
        batch: The global batch.
        settings: The settings of the step.
        layout: Layout of the model's inputs.
    """
    requirements = settings.requirements
    # The running numbers include the batch that they are read for.
    if requirements.whole_batch or requirements.shift or requirements.margin_stats:
        return True
    if requirements.kind == "labelled":
        return False
    # A corrupted prompt is another prompt, so that its response may come to another micro-batch.
    return requirements.corrupted or largest_group(batch, layout) > settings.max_tokens


def with_reference(batch: Batch, roles: Roles, settings: PreferenceSettings) -> Batch:
    """Add the reference's log-probs, unless the batch has them or no loss reads them.

    Args:
        batch: The global batch.
        roles: The reference and the strategy.
        settings: The settings of the step.
    """
    if not settings.requirements.reference or batch.ref_logprobs is not None:
        return batch
    if roles.reference is None:
        raise ValueError("a loss reads the reference's log-probs, and the run has no reference")
    return batch.replace(
        ref_logprobs=compute_logprobs(roles.reference, batch, roles, settings.max_tokens, 1.0)
    )


def mismatched_kl(batch: Batch, roles: Roles, settings: PreferenceSettings) -> float:
    """Return the mean log-ratio of policy to reference over mismatched prompts and responses.

    It is 0 if all prompts of the batch are equal.

    Args:
        batch: The global batch.
        roles: The policy, the reference and the strategy.
        settings: The settings of the step.
    """
    other = mismatched(batch).replace(ref_logprobs=None)
    if not len(other):
        log.warning(
            "all prompts of a step are equal, so the KL of its mismatched pairs counts as 0"
        )
        return 0.0
    other = with_reference(other, roles, settings)
    logprobs = compute_logprobs(roles.actor, other, roles, settings.max_tokens, 1.0)
    gap = logprobs.double() - require_column(other.ref_logprobs).double()
    rows = TokenRows.of(other.replace(sampled=other.mask & torch.isfinite(gap)))
    return float(rows.sum(gap).mean())


def _totals(batch: Batch, settings: PreferenceSettings) -> list[float]:
    """Return the divisor of each term, over the global batch."""
    nothing = torch.zeros(batch.tokens)
    columns = TokenColumns(nothing, nothing, torch.ones_like(nothing))
    plain = batch.replace(ref_logprobs=nothing)
    data = preferences_of(plain, columns, settings.requirements, 0.0)
    weights = weights_of_units(plain, data)
    totals = []
    for part in settings.preference.losses:
        units = units_of(part, data)
        totals.append(float((units if weights is None else units * weights).sum()))
    return totals


def weights_of_units(batch: Batch, data: Preferences) -> Tensor | None:
    """Return the weight of each pair, labelled response or group; ``None`` is 1."""
    if batch.example_weights is None:
        return None
    return _by_unit(batch, data, batch.example_weights.double())


def _by_unit(batch: Batch, data: Preferences, values: Tensor) -> Tensor:
    """Return the value of each pair, labelled response or group, ``[K]``.

    Args:
        batch: A batch.
        data: The argument of the losses of ``batch``.
        values: ``[B]``. All responses of an example have the same one.
    """
    if isinstance(data, Labelled):
        return values
    if isinstance(data, Pairs):
        return values[pair_rows(batch)[0]]
    ranked = (require_column(batch.rank) >= 0).nonzero()[:, 0]
    first = torch.unique(data.group_of, return_inverse=True)[1]
    return values.new_zeros(len(data)).index_copy(0, first, values[ranked])


@dataclass(frozen=True, slots=True)
class _Objective:
    """The loss of one step.

    Attributes:
        roles: The policy, the reference and the strategy.
        settings: The settings of the step.
        kl: Mean log-ratio of mismatched pairs.
        stats: Numbers that carry over between steps.
        totals: The divisor of each term.
        target: Returns the reference's distributions at the tokens of a micro-batch, if a loss
            reads them.
    """

    roles: Roles
    settings: PreferenceSettings
    kl: float | None
    stats: PreferenceStats
    totals: list[float]
    target: Callable[[Batch], Target | None]

    def loss(self, part: Batch) -> tuple[Tensor, Metrics]:
        """Return the contribution of ``part`` to the loss, and its metrics."""
        scores = self._scores(part)
        return self._loss_of(part, TokenColumns(scores.logprobs, scores.divergence, scores.energy))

    def linear_loss(self, part: Batch) -> tuple[Tensor, Metrics]:
        """Return a sum with the gradient of the loss. ``part`` has the weights of its tokens."""
        scores = self._scores(part, energy=False)
        loss = weighted_sum(scores.logprobs, part)
        if scores.divergence is not None:
            loss = loss + weighted_sum(scores.divergence, part, part.kl_weights)
        return loss, Metrics()

    def linearised(self, batch: Batch) -> tuple[Batch, Tensor, Metrics]:
        """Compute the loss of the global batch, and its derivative in each token's numbers.

        Returns:
            ``batch`` with the derivatives as weights, the loss, and its metrics.
        """
        columns = self.columns(batch)
        columns.logprobs.requires_grad_()
        if columns.kl is not None:
            columns.kl.requires_grad_()
        requirements, preference = self.settings.requirements, self.settings.preference
        if requirements.shift or requirements.margin_stats:
            finite = without_tokens(batch, nonfinite(batch, columns))
            unit = margin_unit(preference)
            self.stats.include(self.data(finite, columns), unit, preference.beta)
        loss, metrics = self._loss_of(batch, columns)
        loss.backward()
        kl = None if columns.kl is None else columns.kl.grad
        return batch.replace(loss_weights=columns.logprobs.grad, kl_weights=kl), loss, metrics

    @torch.no_grad()
    def columns(self, batch: Batch) -> TokenColumns:
        """Compute the numbers of all tokens, in micro-batches over all ranks."""
        roles, data_parallel_group = self.roles, self.roles.strategy.data_parallel_group
        found = {name: MicroBatches() for name in ("logprobs", "divergence", "energy")}
        for part in local_micro_batches(
            batch, self.settings.max_tokens, roles.actor.layout, data_parallel_group
        ):
            scores = self._scores(part.of(batch).to(roles.device))
            places = rows_of(batch.lengths, part.index)
            for name, column in found.items():
                values = getattr(scores, name)
                if values is not None:
                    column.put(places, values)
        requirements = self.settings.requirements
        wanted = {"divergence": requirements.sequence_kl, "energy": requirements.collision}
        columns = {
            name: data_parallel_group.sum(column.column(batch.tokens))
            for name, column in found.items()
            if wanted.get(name, True)
        }
        return TokenColumns(columns["logprobs"], columns.get("divergence"), columns.get("energy"))

    def _scores(self, part: Batch, *, energy: bool = True) -> TokenScores:
        wanted = energy and self.settings.requirements.collision
        actor, target = self.roles.actor, self.target(part)
        score = partial(actor.score, part, temperature=1.0, energy=wanted, target=target)
        return values_of_evaluation(actor, score)

    def data(self, part: Batch, columns: TokenColumns) -> Preferences:
        """Build the argument of the losses. ``part`` must not train on nonfinite log-probs."""
        return preferences_of(part, columns, self.settings.requirements, self.kl, self.stats)

    def _loss_of(self, part: Batch, columns: TokenColumns) -> tuple[Tensor, Metrics]:
        preference = self.settings.preference
        lost = nonfinite(part, columns)
        part = without_tokens(part, lost)
        data = self.data(part, columns)
        if not len(data):
            # An empty micro-batch of a rank without work: the backward pass is collective.
            return columns.logprobs.sum() * 0, Metrics()
        terms = preference_terms(data, preference)
        loss = preference_loss(terms, weights_of_units(part, data), self.totals)
        metrics = preference_metrics(data, terms, preference)
        metrics.add("preference/nonfinite_tokens", Sum(lost.sum()))
        metrics.merge(source_metrics(part, data, terms, self.settings))
        return loss, metrics


def nonfinite(part: Batch, columns: TokenColumns) -> Tensor:
    """Return the trained tokens whose log-prob is not finite, ``[N]`` of bool."""
    lost = part.mask & ~torch.isfinite(columns.logprobs.detach())
    if part.ref_logprobs is None:
        return lost
    return lost | (part.mask & ~torch.isfinite(part.ref_logprobs))


def margin_unit(preference: PreferenceConfig) -> float:
    """Return the unit of the margins that ``beta_dpo`` reads, in log-ratios."""
    for part in preference.losses:
        if part.name == "beta_dpo" and part.options.get("margin", "reward") == "log_ratio":
            return 1.0
    return preference.beta


def ordered(margins: Tensor, beta: float) -> Tensor:
    """Return 1 where a margin is positive, 0 where it is negative, and 1/2 within rounding.

    While the policy is the reference, every margin is rounding alone, and its sign is chance.

    Args:
        margins: ``[P]``. Differences of implicit rewards.
        beta: Scale of the implicit reward.
    """
    return torch.where(margins.abs() <= beta * ROUNDING, 0.5, (margins > 0).double())


def source_metrics(
    batch: Batch,
    data: Preferences,
    terms: Sequence[PreferenceTerm],
    settings: PreferenceSettings,
) -> Metrics:
    """Return the mean of each loss, and the accuracy of the order of pairs, by data source.

    Args:
        batch: A batch. Without ``data_source`` there are no metrics.
        data: The argument of the losses of ``batch``.
        terms: The losses.
        settings: Gives the names of the data sources.
    """
    metrics = Metrics()
    if batch.data_source is None:
        return metrics
    source_of = _by_unit(batch, data, batch.data_source)
    for number, name in enumerate(settings.sources):
        own = source_of == number
        for term in terms:
            mean = Mean(term.losses.detach()[own].sum(), term.units[own].sum())
            metrics.add(f"preference/{name}/loss/{term.name}", mean)
        if isinstance(data, Pairs):
            chosen = implicit_rewards(data.chosen, settings.preference)
            margins = chosen - implicit_rewards(data.rejected, settings.preference)
            right = ordered(margins, settings.preference.beta)
            metrics.add(f"preference/{name}/accuracy", Mean.of(right, own))
    return metrics


def preference_metrics(
    data: Preferences, terms: tuple[PreferenceTerm, ...], settings: PreferenceConfig
) -> Metrics:
    """Return the implicit rewards, the accuracy of their order, and the mean of each loss.

    Args:
        data: The argument of the losses.
        terms: The losses.
        settings: The settings ``preference``.
    """
    metrics = Metrics()
    for term in terms:
        mean = Mean(term.losses.detach().sum(), term.units.sum())
        metrics.add(f"preference/loss/{term.name}", mean)
    if isinstance(data, Pairs):
        chosen = implicit_rewards(data.chosen, settings)
        rejected = implicit_rewards(data.rejected, settings)
        metrics.add("preference/reward_chosen", Mean.of(chosen))
        metrics.add("preference/reward_rejected", Mean.of(rejected))
        metrics.add("preference/margin", Mean.of(chosen - rejected))
        metrics.add("preference/accuracy", Mean.of(ordered(chosen - rejected, settings.beta)))
        metrics.add("preference/logprobs_chosen", Mean.of(data.chosen.logprobs))
        metrics.add("preference/logprobs_rejected", Mean.of(data.rejected.logprobs))
    elif isinstance(data, Labelled):
        rewards = implicit_rewards(data.responses, settings)
        metrics.add("preference/reward_desirable", Mean.of(rewards, data.desirable))
        metrics.add("preference/reward_undesirable", Mean.of(rewards, ~data.desirable))
    return metrics


def evaluate_preferences(
    roles: Roles,
    dataset: PreferenceDataset,
    settings: PreferenceSettings,
    stats: PreferenceStats,
    batch_size: int,
    cached: ReferenceLogprobs | None,
) -> Metrics:
    """Return the loss of ``dataset`` and the accuracy of its order. All ranks must call it.

    ``eval/loss`` weights the examples as the loss of training does. ``eval/pair_accuracy`` is the
    share of pairs of a better and a worse response whose implicit rewards have this order. A loss
    that compares a whole batch sees ``batch_size`` examples.

    Args:
        roles: The policy, the reference and the strategy.
        dataset: The held-out examples.
        settings: The settings of the run.
        stats: Numbers that carry over between steps. They do not change.
        batch_size: Number of examples that are computed together.
        cached: The reference's log-probs of ``dataset``, if they are kept.
    """
    metrics, rewards = Metrics(), _Rewards(settings.preference)
    for examples in in_order(dataset, batch_size, roles.strategy.ranks):
        # A mismatched pair needs two prompts.
        if not examples or (settings.requirements.kl and len(examples) < 2):
            continue
        batch = preference_to_batch(examples)
        if cached is not None:
            batch = batch.replace(ref_logprobs=cached.column(examples))
        data, terms = preference_losses(roles, batch, settings, stats)
        shares = weights_of_units(batch, data)
        for i, term in enumerate(terms):
            losses, units = term.losses, term.units
            if shares is not None:
                losses, units = losses * shares, units * shares
            metrics.add(f"{i}", Mean(losses.sum(), units.sum()))
        rewards.add(data)
    means = metrics.compute()
    weights = [part.weight for part in settings.preference.losses]
    found = Metrics()
    if means:
        loss = sum(weight * means[f"{i}"] for i, weight in enumerate(weights))
        found.add("eval/loss", Mean(loss))
        found.merge(rewards.metrics())
    return found


class _Rewards:
    """The implicit rewards of better and worse responses.

    Args:
        settings: The settings ``preference``.
    """

    def __init__(self, settings: PreferenceConfig) -> None:
        self.settings = settings
        self.better: list[Tensor] = []
        self.worse: list[Tensor] = []
        self.paired = True

    def add(self, data: Preferences) -> None:
        """Add the responses of a batch."""
        if isinstance(data, Pairs):
            better = implicit_rewards(data.chosen, self.settings)
            worse = implicit_rewards(data.rejected, self.settings)
        elif isinstance(data, Labelled):
            rewards = implicit_rewards(data.responses, self.settings)
            better, worse = rewards[data.desirable], rewards[~data.desirable]
            self.paired = False
        else:
            rewards = implicit_rewards(data.responses, self.settings)
            better, worse = _ranked(rewards, data.group_of, data.rank)
        self.better.append(better)
        self.worse.append(worse)

    def metrics(self) -> Metrics:
        """Return the mean rewards, their difference and the accuracy of their order."""
        better, worse = _joined(self.better), _joined(self.worse)
        metrics = Metrics()
        metrics.add("eval/reward_chosen", Mean.of(better))
        metrics.add("eval/reward_rejected", Mean.of(worse))
        if not len(better) or not len(worse):
            return metrics
        beta = self.settings.beta
        metrics.add("eval/margin", Mean(better.mean() - worse.mean()))
        right = ordered(better - worse, beta) if self.paired else _above(better, worse, beta)
        metrics.add("eval/pair_accuracy", Mean.of(right))
        return metrics


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.double().cpu() for part in parts])


def _above(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """Return the share of ``worse [W]`` below each of ``better [B]``, ``[B]``. Ties count half."""
    order, rounding = worse.sort().values, beta * ROUNDING
    below = torch.searchsorted(order, better - rounding)
    not_above = torch.searchsorted(order, better + rounding, right=True)
    return (below + not_above).double() / (2 * len(worse))


def _ranked(values: Tensor, group_of: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of the better and of the worse response of every pair of a group.

    Args:
        values: ``[K]``.
        group_of: ``[K]``. Group of each response.
        ranks: ``[K]``. Rank of each response; lower is better.
    """
    same_group = group_of[:, None] == group_of[None, :]
    better, worse = (same_group & (ranks[:, None] < ranks[None, :])).nonzero(as_tuple=True)
    return values[better], values[worse]
