"""The weighted sum of losses of reward models over a batch, whatever its split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.requirements import (
    called_loss,
    head_kind,
    losses_of_heads,
)
from lightrft.algorithms.token_ops import group_sum
from lightrft.config.reward_model.sections import RewardLossConfig, RewardModelConfig
from lightrft.utils.errors import DataError
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(frozen=True, slots=True)
class RewardModelTerm:
    """One loss of one head. Its value is ``weight * losses.sum() / units.sum()``.

    Both sums are over the global batch.

    Attributes:
        name: Name of the loss.
        head: Name of the head.
        weight: Its factor in the sum.
        losses: ``[U]``. One per pair, tie, group or response, times its unit, with gradient.
        units: ``[U]``. The share of each loss in the mean.
    """

    name: str
    head: str
    weight: float
    losses: Tensor
    units: Tensor


def reward_terms(
    data_of_head: Mapping[str, ScoredResponses], settings: RewardModelConfig
) -> tuple[RewardModelTerm, ...]:
    """Compute every loss of ``settings`` for every head that it reads.

    Args:
        data_of_head: The labelled responses of each head that a loss reads, by name. A head
            without labels has no responses. Groups must be whole.
        settings: The heads and the losses.
    """
    terms = []
    for part, head in losses_of_heads(settings):
        data = data_of_head[head]
        units = units_of(part, data)
        losses = losses_of(part, data, head_kind(settings, head)) * units
        terms.append(RewardModelTerm(part.name, head, part.weight, losses, units))
    return tuple(terms)


def losses_of(part: RewardLossConfig, data: ScoredResponses, kind: str) -> Tensor:
    """Return the losses of ``part`` for one head, ``[U]``.

    Each member of an ensemble has its own losses. Their mean over the members is returned.

    Args:
        part: The loss and its options.
        data: The labelled responses of the head.
        kind: Kind of the head.
    """
    loss = REWARD_LOSSES[part.name]
    options = called_loss(part).options
    if kind != "ensemble":
        return loss(data, **options)
    losses = [loss(member, **options) for member in data.members()]
    return torch.stack(losses).mean(0)


def units_of(part: RewardLossConfig, data: ScoredResponses) -> Tensor:
    """Return the share of each loss of ``part`` in the mean over the batch, ``[U]``.

    A group of several pairs counts once (InstructGPT, arXiv 2203.02155, eq. 1), unless the option
    ``per`` of the loss is ``pair``. A group without a pair does not count. Scores are not read.

    Args:
        part: The loss and its options.
        data: The labelled responses of one head.
    """
    kind = REWARD_LOSSES.about(part.name).kind
    better, _ = data.pairs()
    if kind == "rating":
        first = data.rated()
        units = _ones(data, first)
    elif kind == "group":
        index, _ = data.padded()
        first = index[:, 0] if index.shape[1] else data.group_of
        count = group_sum(_ones(data, better), data.group_of[better], data.groups)
        units = count.clamp(max=1)
    else:
        first = torch.cat([better, data.ties()[0]]) if kind == "tie" else better
        units = _ones(data, first)
        if part.options.get("per", "group") == "group":
            group = data.group_of[first]
            units = units / group_sum(units, group, data.groups)[group]
    if data.example_weights is not None:
        units = units * data.example_weights[first].to(units.dtype)
    return units


def totals_of(
    data_of_head: Mapping[str, ScoredResponses], settings: RewardModelConfig
) -> tuple[float, ...]:
    """Return the sum of the units of each term, in the order of ``reward_terms``.

    It reads labels alone, so that each micro-batch can be divided by the total of the global batch
    before any score is known.

    Args:
        data_of_head: The labelled responses of each head. Their scores may be anything.
        settings: The heads and the losses.
    """
    pairs = losses_of_heads(settings)
    return tuple(float(units_of(part, data_of_head[head]).sum()) for part, head in pairs)


def reward_loss(terms: Sequence[RewardModelTerm], totals: Sequence[float] | None = None) -> Tensor:
    """Return the contribution of ``terms`` to the loss of the global batch, 0-d.

    A term without units in the global batch is left out: a head may have no label in a batch.

    Args:
        terms: The terms of this part of the batch.
        totals: The sum of ``units`` of each term over the global batch, as ``totals_of`` returns
            it. ``None`` takes this part for the whole batch.

    Raises:
        DataError: If no term has units in the global batch.
    """
    if totals is None:
        totals = [float(term.units.sum()) for term in terms]
    if not any(totals):
        names = ", ".join(dict.fromkeys(f"{term.name} of head {term.head}" for term in terms))
        raise DataError(
            f"the batch has no label for any loss ({names}); give its rows ranks or ratings for "
            "these heads, or raise example_weights above 0"
        )
    loss = terms[0].losses.new_zeros(())
    for term, total in zip(terms, totals, strict=True):
        # the losses of a term without units are 0, and keep the loss a function of the scores
        loss = loss + term.weight * term.losses.sum() / (total or 1.0)
    return loss


def _ones(data: ScoredResponses, index: Tensor) -> Tensor:
    """Return a 1 for each entry of ``index``, in the dtype of the scores."""
    return torch.ones(index.numel(), dtype=data.scores.dtype, device=index.device)
