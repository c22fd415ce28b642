"""One function of each kind, as a user writes it, and the setting that names it.

    lightrft check examples/custom_parts.py:soft_clip width=0.3
    lightrft rl my_run.yaml \
        "algorithm.loss={name: examples/custom_parts.py:soft_clip, options: {width: 0.3}}"

``docs/extending.md`` gives the arguments and the result of each kind. In shapes, B is the number of
responses, and N the number of tokens of all responses, concatenated. ``rows`` gives the response of
each token, and the tokens that the policy sampled (``rows.mask``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.token_masks import TokenMask
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AdvantageConfig, LossConfig
from lightrft.types import Batch, Rollout


def above_median(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Advantage: subtract the median of the group from the reward of each response."""
    rows = TokenRows.of(batch)
    rewards = rows.sum(token_rewards)
    advantage = torch.zeros_like(rewards)
    for prompt in batch.prompt_of.unique():
        group = batch.prompt_of == prompt
        advantage[group] = rewards[group] - rewards[group].quantile(0.5)
    tokens = rows.spread(advantage) * rows.mask
    return tokens, tokens


above_median.needs = ("groups",)  # a run with one response per prompt is refused at start


def soft_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    width: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss: a parabola in place of the clip, with its optimum at a ratio of ``1 ± width``.

    See SPO, arXiv 2401.16025.
    """
    ratio = torch.exp(logprobs - old)
    losses = -ratio * advantages + advantages.abs() * (ratio - 1).square() / (2 * width)
    return losses, {"ratio": ratio.detach()}


def too_short(group: Sequence[Rollout], *, tokens: int) -> str:
    """Filter: drop groups whose responses have fewer than ``tokens`` tokens on average."""
    mean = sum(len(response) for response in group) / max(1, len(group))
    return "too_short" if mean < tokens else ""


def per_token_cost(
    batch: Batch, rewards: Tensor, *, max_new_tokens: int, cost: float = 0.1
) -> Tensor:
    """Shaping: subtract ``cost`` times the length of a response, as a share of the limit."""
    return rewards - cost * batch.lengths / max_new_tokens


def fading(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    width: float = 1.0,
) -> Tensor:
    """Correction: weight a token by its distance between trainer and sampler.

    The weight falls from 1 to ``1/e`` at ``width`` nats.
    """
    return torch.exp(-(old - behavior).abs() / width)


def undecided(
    batch: Batch, settings: LossConfig, generator: torch.Generator, *, nats: float = 0.1
) -> TokenMask:
    """Token mask: train tokens at which the policy had at least ``nats`` of entropy."""
    if batch.entropy is None:
        raise ValueError("undecided reads batch.entropy")
    return TokenMask(weight=(batch.entropy >= nats) & batch.mask)


undecided.needs = ("entropy",)  # the column exists only if a function asks for it
