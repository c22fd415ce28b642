"""Measure the losses of held-out preference rows and the order of their implicit rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences
from lightrft.algorithms.preference.objective import implicit_rewards
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.sampler import in_order
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_examples import preference_to_batch
from lightrft.learner.preference_step import (
    ROUNDING,
    PreferenceSettings,
    ordered,
    preference_losses,
    weights_of_units,
)
from lightrft.learner.reference_cache import ReferenceLogprobs
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import Roles


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
