"""Small scored responses, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.objective import reward_loss, reward_terms
from lightrft.config.reward_model.sections import RewardModelConfig


def numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def scored(
    scores: Sequence[float],
    rank: Sequence[int] | None = None,
    group_of: Sequence[int] | None = None,
    rating: Sequence[float] | None = None,
    margin: Sequence[float] | None = None,
    outputs: Sequence[Sequence[float]] | None = None,
    weights: Sequence[float] | None = None,
) -> ScoredResponses:
    """One group, unless ``group_of`` says otherwise. The outputs are the scores by default."""
    of_scores = numbers(scores)
    columns = of_scores[:, None] if outputs is None else torch.stack([*map(numbers, outputs)])
    return ScoredResponses(
        columns,
        of_scores,
        torch.tensor(group_of or [0] * len(scores), dtype=torch.long),
        None if rank is None else torch.tensor(rank, dtype=torch.long),
        None if rating is None else numbers(rating),
        None if margin is None else numbers(margin),
        None if weights is None else numbers(weights),
    )


def loss_of(name: str, data: ScoredResponses, **options: Any) -> list[float]:
    return REWARD_LOSSES[name](data, **options).tolist()


def settings(*losses: Any, **tree: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate({"losses": list(losses or ["bradley_terry"]), **tree})


def value(data: Any, chosen: RewardModelConfig) -> float:
    """The loss of a batch. ``data`` is for the head ``preference``, or by head."""
    by_head = data if isinstance(data, dict) else {"preference": data}
    return float(reward_loss(reward_terms(by_head, chosen)))
