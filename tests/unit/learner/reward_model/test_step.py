"""The loss of a step of a reward model."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightrft.config.base import build
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.learner.reward_model.step import (
    RewardModelSettings,
    RewardObjective,
    count_unlabelled,
    divisors,
)
from lightrft.models.reward.heads import HeadOutputs
from lightrft.types import Batch, Segments


class GivenScores:
    """Scores every batch alike."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def score(self, batch: Batch) -> dict[str, HeadOutputs]:
        return {"preference": HeadOutputs(self.scores[:, None], self.scores)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_leaves_loss_and_gradient_of_the_others_alone(
    value: float,
) -> None:
    labels = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    batch = Batch(
        Segments.of([[5], [6]]),
        Segments.of([[1]] * 4),
        torch.tensor([0, 0, 1, 1]),
        labels=labels,
        margin=torch.full((4,), math.nan, dtype=torch.float64),
    )
    config = build(RewardModelConfig, {})
    settings = RewardModelSettings(config, 100, ("preference",))
    raw = torch.tensor([0.5, 0.25, value, 0.75], requires_grad=True)
    model = cast(Any, GivenScores(raw))
    objective = RewardObjective(model, settings, divisors(batch, settings))
    loss, metrics = objective.loss(batch)
    (gradient,) = torch.autograd.grad(loss, raw)
    # two pairs divide the sum, of which one is left
    chance = 1 / (1 + math.exp(-0.25))
    assert loss.item() == pytest.approx(-math.log(chance) / 2)
    assert gradient.tolist() == pytest.approx([(chance - 1) / 2, (1 - chance) / 2, 0.0, 0.0])
    assert metrics.compute()["reward_model/nonfinite_scores"] == 1


def test_responses_without_a_label_are_counted_for_each_of_several_heads() -> None:
    nan = math.nan
    labels = torch.tensor([[1.0, nan], [0.0, nan], [nan, nan]], dtype=torch.float64)
    batch = Batch(
        Segments.of([[5]]), Segments.of([[1]] * 3), torch.zeros(3, dtype=torch.long), labels=labels
    )
    found = count_unlabelled(batch, ("preference", "safety")).compute()
    assert found == {"reward_model/preference/unlabelled": 1, "reward_model/safety/unlabelled": 3}
    assert not count_unlabelled(batch, ("preference",)).compute()
