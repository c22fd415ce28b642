"""The row of a loss of reward models is what the loss reads."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from lightrft.algorithms.contracts.loss_checks import head_of, number_of_losses
from lightrft.algorithms.contracts.reward_cases import scored_responses
from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.registry import KINDS
from lightrft.config.reward_model.sections import HeadKind

GROUPS = [0, 0, 0, 1, 1]


def data_of(name: str) -> ScoredResponses:
    return scored_responses(GROUPS, head_of(REWARD_LOSSES[name]))


def changes(name: str, other: ScoredResponses) -> bool:
    """Whether the losses of ``other`` differ from those of the plain data."""
    before, after = REWARD_LOSSES[name](data_of(name)), REWARD_LOSSES[name](other)
    return before.shape != after.shape or not torch.equal(before, after)


@pytest.mark.parametrize("name", sorted(REWARD_LOSSES))
def test_a_loss_reads_outputs_or_scores_as_it_says(name: str) -> None:
    data = data_of(name)
    drift = torch.linspace(0.1, 1, len(data), dtype=torch.float64)
    # a change that is the same for all classes would change no probability
    place = torch.arange(data.outputs.shape[1])
    others = dataclasses.replace(data, outputs=data.outputs + drift[:, None] ** (2 + place))
    assert changes(name, others) == ("outputs" in REWARD_LOSSES.about(name).needs)
    others = dataclasses.replace(data, scores=data.scores + drift**2)
    assert changes(name, others) == ("outputs" not in REWARD_LOSSES.about(name).needs)


@pytest.mark.parametrize("name", sorted(REWARD_LOSSES))
def test_a_loss_reads_ranks_or_ratings_as_its_kind_says_and_no_margin(name: str) -> None:
    data = data_of(name)
    assert data.rank is not None and data.rating is not None and data.margin is not None
    is_rating = REWARD_LOSSES.about(name).kind == "rating"
    others = dataclasses.replace(data, rank=data.rank.flip(0))
    assert changes(name, others) != is_rating
    others = dataclasses.replace(data, rating=1 - data.rating.clamp(0, 1))
    assert changes(name, others) == is_rating
    assert not changes(name, dataclasses.replace(data, margin=data.margin + 1))


@pytest.mark.parametrize("name", sorted(REWARD_LOSSES))
def test_only_a_loss_of_ties_has_losses_of_ties(name: str) -> None:
    data = data_of(name)
    losses = REWARD_LOSSES[name](data)
    assert data.ties()[0].numel() == 1
    assert losses.numel() == number_of_losses(REWARD_LOSSES.about(name).kind, data)


def test_every_row_names_its_kind_and_heads_that_exist() -> None:
    about = {name: REWARD_LOSSES.about(name) for name in REWARD_LOSSES}
    assert {row.kind for row in about.values()} == set(KINDS)
    heads = {head for row in about.values() for head in row.heads or ()}
    assert heads <= set(get_args(HeadKind))
    assert about["mse"].heads is None
