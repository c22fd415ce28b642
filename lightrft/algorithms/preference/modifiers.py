"""Weights of tokens and of responses that apply to any preference loss."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.seeding import torch_generator


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
