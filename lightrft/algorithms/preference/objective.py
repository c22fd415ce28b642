"""The weighted sum of preference losses over a batch, whatever its split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.reference_free_losses import compares_means
from lightrft.config.preference.sections import PreferenceConfig, PreferenceLossConfig
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(frozen=True, slots=True)
class PreferenceTerm:
    """One loss of the sum. Its value is ``weight * losses.sum() / units.sum()``.

    Both sums are over the global batch.

    Attributes:
        name: Name of the loss.
        weight: Its factor in the sum.
        losses: ``[K]``. One per pair, labelled response or group, with gradient.
        units: ``[K]``. What the sum of losses is divided by: 1 each, or a number of tokens.
    """

    name: str
    weight: float
    losses: Tensor
    units: Tensor


def preference_terms(data: Preferences, settings: PreferenceConfig) -> tuple[PreferenceTerm, ...]:
    """Compute every loss of ``settings``.

    Weights of WPO multiply the losses and leave the divisors as they are.
    """
    likely = _wpo(data, settings)
    terms = []
    for part in settings.losses:
        losses = PREFERENCE_LOSSES[part.name](data, settings, **part.options)
        if likely is not None:
            losses = losses * likely
        terms.append(PreferenceTerm(part.name, part.weight, losses, units_of(part, data)))
    return tuple(terms)


def units_of(part: PreferenceLossConfig, data: Preferences) -> Tensor:
    """Return the divisor that each loss of ``part`` adds to, ``[K]``.

    It is 1, unless the loss is a sum over tokens that the batch divides by their number.
    """
    if isinstance(data, Pairs) and part.options.get("per", "token") == "token":
        if part.name == "sft":
            return data.chosen.tokens
        if part.name == "sft_gold" and data.gold is not None:
            return data.gold.tokens
    responses = _responses(data)
    return torch.ones(len(data), dtype=responses.tokens.dtype, device=responses.tokens.device)


def implicit_rewards(responses: Responses, settings: PreferenceConfig) -> Tensor:
    """Return the reward of each response by which the losses order them, ``[K]``.

    It is ``b d``. Losses without a reference take the log-prob for ``d``, as a sum or as a mean
    over tokens.

    Args:
        responses: The responses. Their reference log-probs are zeros if no loss reads them.
        settings: Gives ``beta`` and the losses.
    """
    rewards = settings.beta * responses.log_ratio
    needs = [PREFERENCE_LOSSES.about(part.name).needs for part in settings.losses]
    if any("reference" in names for names in needs):
        return rewards
    if any(compares_means(part) for part in settings.losses):
        return responses.mean(rewards)
    return rewards


def preference_loss(
    terms: Sequence[PreferenceTerm],
    example_weights: Tensor | None = None,
    totals: Sequence[float] | None = None,
) -> Tensor:
    """Return the contribution of ``terms`` to the loss of the global batch, 0-d.

    Args:
        terms: The terms of this part of the batch.
        example_weights: ``[K]``. A response of weight 2 counts as two. ``None`` is 1.
        totals: The sum of ``units`` of each term over the global batch, times the example weights.
            ``None`` takes this part for the whole batch.

    Raises:
        ConfigError: If a loss compares the batch as a whole and the examples have weights.
        DataError: If the batch has nothing to train on.
    """
    loss = terms[0].losses.new_zeros(())
    for i, term in enumerate(terms):
        losses, units = term.losses, term.units
        if example_weights is not None:
            if "whole_batch" in PREFERENCE_LOSSES.about(term.name).needs:
                raise ConfigError(
                    f"preference.losses: {term.name!r} compares the batch as a whole, so the "
                    "column example_weights cannot weigh its losses; leave out the column or the "
                    "loss"
                )
            losses, units = losses * example_weights, units * example_weights
        total = float(units.sum()) if totals is None else totals[i]
        if total == 0:
            raise DataError(
                f"preference loss {term.name}: the batch has nothing to train on; its responses "
                "have no trained tokens, or all example_weights are 0"
            )
        loss = loss + term.weight * losses.sum() / total
    return loss


def _responses(data: Preferences) -> Responses:
    return data.chosen if isinstance(data, Pairs) else data.responses


def _wpo(data: Preferences, settings: PreferenceConfig) -> Tensor | None:
    """Return the weight of WPO of each pair or labelled response; ``None`` is 1."""
    if not settings.wpo:
        return None
    if isinstance(data, Pairs):
        weights = _given(data.chosen) * _given(data.rejected)
    elif isinstance(data, Labelled):
        weights = _given(data.responses)
    else:
        raise ConfigError("preference.wpo weighs pairs or labelled responses, not ranked groups")
    weights = weights.detach()
    return weights if settings.wpo_cap is None else weights.clamp(max=settings.wpo_cap)


def _given(responses: Responses) -> Tensor:
    """Return the weights of WPO of ``responses``.

    Raises:
        ValueError: If they have none.
    """
    if responses.wpo is None:
        raise ValueError("preference.wpo reads weights that the responses do not have")
    return responses.wpo
