"""One part of each kind, as a user writes it: a function in a file of your own, and one line of YAML that names it.

    lightrft check examples/custom_parts.py:soft_clip width=0.3
    lightrft rl my_run.yaml "algorithm.loss={name: examples/custom_parts.py:soft_clip, options: {width: 0.3}}"

``docs/extending.md`` says what each kind is given and must give back. Letters in shapes: B answers, N tokens of all answers laid end to
end. ``rows`` knows which answer a token belongs to and which tokens the policy sampled (``rows.mask``).
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
    """Advantage: the reward of an answer less the median of its group, on each of its sampled tokens."""
    rows = TokenRows.of(batch)
    rewards = rows.sum(token_rewards)
    advantage = torch.zeros_like(rewards)
    for prompt in batch.prompt_of.unique():
        group = batch.prompt_of == prompt
        advantage[group] = rewards[group] - rewards[group].quantile(0.5)
    tokens = rows.spread(advantage) * rows.mask
    return tokens, tokens


above_median.needs = ("groups",)  # a run with one answer per prompt is then refused at the start


def soft_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    width: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss: instead of a clip, a parabola with its best ratio at ``1 ± width`` (SPO, arXiv 2401.16025)."""
    ratio = torch.exp(logprobs - old)
    losses = -ratio * advantages + advantages.abs() * (ratio - 1).square() / (2 * width)
    return losses, {"ratio": ratio.detach()}


def too_short(group: Sequence[Rollout], *, tokens: int) -> str:
    """Filter: drop the groups whose answers have fewer than ``tokens`` tokens on average."""
    mean = sum(len(answer) for answer in group) / max(1, len(group))
    return "too_short" if mean < tokens else ""


def per_token_cost(
    batch: Batch, rewards: Tensor, *, max_new_tokens: int, cost: float = 0.1
) -> Tensor:
    """Shaping: an answer as long as the limit loses ``cost``, shorter ones their share of it."""
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
    """Correction: a token counts the less the further trainer and sampler are apart, to ``1/e`` at ``width`` nats."""
    return torch.exp(-(old - behavior).abs() / width)


def undecided(
    batch: Batch, settings: LossConfig, generator: torch.Generator, *, nats: float = 0.1
) -> TokenMask:
    """Gate: only tokens at which the policy had at least ``nats`` of entropy get gradient."""
    if batch.entropy is None:
        raise ValueError("undecided reads batch.entropy")
    return TokenMask(weight=(batch.entropy >= nats) & batch.mask)


undecided.needs = ("entropy",)  # a column that is filled in only where a part asks for it
