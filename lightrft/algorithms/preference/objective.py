"""The weighted sum of preference losses over a batch, whatever its split, and its modifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.reference_free_losses import compares_means
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.preference.sections import PreferenceConfig, PreferenceLossConfig
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.seeding import torch_generator


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


def token_weights(
    rows: TokenRows, partner: Tensor, settings: PreferenceConfig, seeds: Sequence[int]
) -> Tensor:
    """Return the weight of each token in the sums of its response, float64 ``[N]``.

    Tokens that do not count have a weight of 0. ``responses_of`` takes the weights.

    Args:
        rows: Layout of the tokens. Its mask selects the trained ones.
        partner: ``[B]`` long. The row of the other response of each row's pair.
        settings: Gives ``ld_alpha`` and ``sampo``.
        seeds: One seed per row, from which ``sampo`` samples. It must not depend on the place of
            the row in the batch, so that a resumed run samples the same tokens.
    """
    shorter = torch.minimum(rows.count(), rows.count()[partner])
    past = rows.mask & (_position(rows) >= rows.spread(shorter))
    weights = rows.mask.double().masked_fill(past, settings.ld_alpha)
    if settings.sampo:
        weights = weights * _sampled(rows, partner, seeds)
    return weights


def wpo_weights(rows: TokenRows, logprobs: Tensor, log_collision: Tensor) -> Tensor:
    """Return how likely the policy is to generate each response, ``[B]``, without gradient.

    It is the geometric mean over tokens of ``p(token) / sum_v p(v)^2``: WPO with the alignment by
    samples, arXiv 2406.11827, eq. 2. A response that the policy itself samples has about 1.

    Args:
        rows: Layout of the tokens. Its mask selects the trained ones.
        logprobs: ``[N]``. Log-probs of the policy.
        log_collision: ``[N]``. ``log sum_v p(v)^2`` of the policy at each token.
    """
    aligned = logprobs.detach().double() - log_collision.detach().double()
    return torch.exp(rows.mean(aligned))


def _position(rows: TokenRows) -> Tensor:
    """Return the number of counted tokens before each token of its row, ``[N]``."""
    before = rows.mask.long().cumsum(0) - rows.mask.long()
    count = rows.count()
    start = count.cumsum(0) - count
    return before - rows.spread(start)


def _sampled(rows: TokenRows, partner: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return 1 at as many random counted tokens of each row as its pair has at least, else 0.

    See SamPO, arXiv 2406.10957. Policy and reference share the tokens.

    Args:
        rows: Layout of the tokens.
        partner: ``[B]`` long. The row of the other response of each row's pair.
        seeds: One seed per row.
    """
    counts = rows.count().tolist()
    partners = partner.tolist()
    kept = []
    for row, count in enumerate(counts):
        least = min(count, counts[partners[row]])
        keep = torch.ones(count, dtype=torch.float64)
        order = torch.randperm(count, generator=torch_generator(seeds[row]))
        keep[order[least:]] = 0
        kept.append(keep)
    weights = torch.zeros(rows.mask.numel(), dtype=torch.float64, device=rows.mask.device)
    if kept:
        # counted tokens come row by row, in the order of the rows
        weights[rows.mask] = torch.cat(kept).to(weights.device)
    return weights
