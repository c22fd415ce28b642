"""Filters of next-token logits ``[R, V]``, one row per response.

A filter sets the logits that it removes to ``-inf``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits of seen tokens by ``penalty`` (arXiv 1909.05858, section 4.1).

    Args:
        logits: ``[R, V]``. Positive logits are divided by ``penalty``, negative ones multiplied.
        seen: ``[R, V]`` bool, tokens of the prompt and of the response so far.
        penalty: Factor; above 1 makes seen tokens less likely.
    """
    # dividing a negative logit would raise it
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, lowered, logits)


def ban_tokens(logits: Tensor, banned: Tensor, targets: Tensor) -> Tensor:
    """Remove tokens that are never sampled. Change ``logits`` in place, and return them.

    A target is kept: a response may have such a token that was not sampled.

    Args:
        logits: ``[R, V]``.
        banned: ``[K]``. Token ids.
        targets: ``[R]``. The token of each row.
    """
    own = logits.gather(1, targets[:, None])
    return logits.index_fill_(1, banned, -torch.inf).scatter_(1, targets[:, None], own)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the ``k`` largest logits of each row, and tokens that tie with the k-th."""
    if k >= logits.shape[-1]:
        return logits
    kth = torch.topk(logits, k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens of probability ``p`` (arXiv 1904.09751).

    Among tokens of equal probability the lower id is kept.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered, dim=-1, dtype=wide_dtype(logits))
    # of the tokens before each, so that the first is always kept
    before = torch.cumsum(probability, dim=-1) - probability
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before >= p)
    return logits.masked_fill(removed, -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least ``p`` times as likely as the most likely token (arXiv 2407.01082)."""
    # in logits: the ratio of two probabilities is the exponential of their difference
    bound = logits.amax(-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < bound, -torch.inf)


def wide_dtype(logits: Tensor) -> torch.dtype:
    """Return the type of sums over a vocabulary."""
    # Apple's GPUs have no float64
    return torch.float32 if logits.device.type == "mps" else torch.float64
