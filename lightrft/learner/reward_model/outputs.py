"""Compute the outputs of a reward model for a batch, and match them with the labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.token_ops import require_column
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.models.reward.reward_model import HeadOutputs, RewardModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch

Outputs = Mapping[str, HeadOutputs]
"""Outputs of each head, by its name."""


def joined(outputs: Outputs) -> Tensor:
    """Return the outputs and scores of all heads as one matrix, ``[B, K]``."""
    columns: list[Tensor] = []
    for head in outputs.values():
        columns += [head.outputs, head.scores[:, None]]
    return torch.cat(columns, dim=1)


def separated(matrix: Tensor, like: Outputs) -> Outputs:
    """Return the outputs and scores that ``joined`` has concatenated.

    Args:
        matrix: ``[B, K]``.
        like: Any outputs of the same model.
    """
    found: dict[str, HeadOutputs] = {}
    start = 0
    for name, head in like.items():
        end = start + head.outputs.shape[1]
        found[name] = HeadOutputs(matrix[:, start:end], matrix[:, end])
        start = end + 1
    return found


@torch.no_grad()
def compute_outputs(
    model: RewardModel, batch: Batch, strategy: Strategy, max_tokens: int
) -> Outputs:
    """Return the outputs of all rows, in float64 on the host. All ranks must call it.

    Args:
        model: The reward model.
        batch: A batch with rows, identical on all ranks. Each rank computes some micro-batches.
        strategy: Gives the ranks and the device.
        max_tokens: Largest number of tokens of a micro-batch.
    """
    data_parallel_group = strategy.data_parallel_group
    found: dict[str, HeadOutputs] = {}
    parts: list[tuple[Tensor, Tensor]] = []
    for part in local_micro_batches(batch, max_tokens, model.layout, data_parallel_group):
        found = model.score(part.of(batch).to(strategy.device))
        parts.append((part.index, joined(found).double().cpu()))
    matrix = torch.zeros(len(batch), parts[0][1].shape[1], dtype=torch.float64)
    for index, values in parts:
        matrix[index] = values
    # Every row is computed by one rank and is 0 on the others, so the sum is a gather.
    return separated(data_parallel_group.sum(matrix), found)


def responses_of(
    batch: Batch, outputs: Outputs, heads: Sequence[str]
) -> dict[str, ScoredResponses]:
    """Return the responses of each labelled head with their labels.

    A response whose score is not finite has no label for that head.

    Args:
        batch: A batch with the labels of heads.
        outputs: The outputs of each head for ``batch``.
        heads: Names of the columns of ``batch.labels``. Rows have margins for the first one.
    """
    labels = require_column(batch.labels)
    found: dict[str, ScoredResponses] = {}
    for column, name in enumerate(heads):
        ratings = labels[:, column].to(batch.prompt_of.device)
        ranks = dense_ranks(ratings, batch.prompt_of)
        margin = None if column else batch.margin
        found[name] = _finite(
            batch.replace(rating=ratings, rank=ranks, margin=margin), outputs[name]
        )
    return found


def _finite(batch: Batch, head: HeadOutputs) -> ScoredResponses:
    """Return the responses of ``batch``. Those whose score is not finite have no labels.

    Args:
        batch: Has the labels for the head.
        head: The outputs of the head.
    """
    kept = torch.isfinite(head.outputs.detach()).all(1) & torch.isfinite(head.scores.detach())
    rank, rating = require_column(batch.rank), require_column(batch.rating)
    # Filled, not multiplied by 0: the gradient of a NaN times 0 is NaN.
    return ScoredResponses(
        outputs=head.outputs.masked_fill(~kept[:, None], 0.0).double(),
        scores=head.scores.masked_fill(~kept, 0.0).double(),
        group_of=torch.unique(batch.prompt_of, return_inverse=True)[1],
        rank=rank.masked_fill(~kept, -1),
        rating=rating.masked_fill(~kept, math.nan),
        margin=batch.margin,
        example_weights=batch.example_weights,
    )


def dense_ranks(ratings: Tensor, group_of: Tensor) -> Tensor:
    """Return the number of distinct higher ratings in the group of each response, ``[B]`` long.

    A response without a rating has rank -1.

    Args:
        ratings: ``[B]``. NaN is no rating.
        group_of: ``[B]``.
    """
    rank = torch.full_like(group_of, -1)
    for group in group_of.unique().tolist():
        members = ((group_of == group) & ~ratings.isnan()).nonzero()[:, 0]
        # sorted from the lowest
        distinct, place = ratings[members].unique(return_inverse=True)
        rank[members] = len(distinct) - 1 - place
    return rank
