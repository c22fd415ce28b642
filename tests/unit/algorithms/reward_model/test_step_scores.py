"""Scores of steps become one score per response."""

from __future__ import annotations

import math
import random
from typing import Any, get_args

import pytest
import torch

from lightrft.algorithms.reward_model.step_scores import (
    StepAggregation,
    aggregate_steps,
    first_wrong_step,
)
from lightrft.utils.errors import ConfigError, DataError
from tests.unit.algorithms.reward_model.examples import numbers

ORACLES = {
    "min": min,
    "product": math.prod,
    "mean": lambda row: math.fsum(row) / len(row),
    "last": lambda row: row[-1],
}


def flat(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.tensor([len(row) for row in rows], dtype=torch.long)
    return numbers([x for row in rows for x in row]), steps


@pytest.mark.parametrize("how", get_args(StepAggregation))
@pytest.mark.parametrize("seed", range(4))
def test_an_aggregation_of_steps_is_its_loop_in_value_and_gradient(how: Any, seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.random() for _ in range(rng.randint(1, 6))] for _ in range(5)]
    scores, steps = flat(rows)
    scores.requires_grad_()
    found = aggregate_steps(scores, steps, how)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([ORACLES[how](row) for row in rows], rel=1e-15)
    (slope,) = torch.autograd.grad((found * numbers([1, 2, 3, 4, 5])).sum(), scores)
    expected = []
    for weight, row in zip((1, 2, 3, 4, 5), rows, strict=True):
        expected += [weight * partial(how, row, k) for k in range(len(row))]
    assert slope.tolist() == pytest.approx(expected, rel=1e-12)


def partial(how: str, row: list[float], k: int) -> float:
    """The derivative of the aggregation for step ``k``."""
    if how == "min":
        return float(row[k] == min(row))
    if how == "last":
        return float(k == len(row) - 1)
    if how == "mean":
        return 1 / len(row)
    return math.prod(x for i, x in enumerate(row) if i != k)


def test_the_product_has_a_gradient_at_a_step_of_score_0() -> None:
    scores = numbers([0.0, 0.5, 0.25]).requires_grad_()
    (slope,) = torch.autograd.grad(aggregate_steps(scores, torch.tensor([3]), "product"), scores)
    assert slope.tolist() == [0.125, 0.0, 0.0]


def test_float32_scores_are_aggregated_in_float64() -> None:
    scores = torch.full((3,), 0.1, dtype=torch.float32)
    found = aggregate_steps(scores, torch.tensor([3]), "product")
    assert found.item() == pytest.approx(float(scores[0]) ** 3, rel=1e-15)


def test_the_product_refuses_what_is_no_probability() -> None:
    scores, steps = flat([[0.5], [0.5, 1.5]])
    with pytest.raises(DataError, match=r"response 1: the score of a step is 1\.5, and product"):
        aggregate_steps(scores, steps, "product")
    assert aggregate_steps(scores, steps, "min").tolist() == [0.5, 0.5]


@pytest.mark.parametrize("how", get_args(StepAggregation))
def test_a_response_without_a_step_and_a_score_of_nan_are_refused(how: Any) -> None:
    with pytest.raises(DataError, match="response 1 has no step to score"):
        aggregate_steps(*flat([[0.5], [], [0.5]]), how)
    with pytest.raises(DataError, match="response 2: the score of a step is NaN"):
        aggregate_steps(*flat([[0.5], [0.5, 0.5], [0.5, math.nan]]), how)
    assert aggregate_steps(*flat([]), how).tolist() == []


def test_an_unknown_aggregation_and_a_wrong_number_of_steps_are_refused() -> None:
    scores, steps = flat([[0.5]])
    unknown: Any = "median"
    with pytest.raises(ConfigError, match="'median' is none of min, product, mean, last"):
        aggregate_steps(scores, steps, unknown)
    with pytest.raises(ValueError, match="1 scores for 2 steps"):
        aggregate_steps(scores, steps + 1, "min")


def test_the_first_wrong_step_is_the_first_below_the_threshold() -> None:
    scores, steps = flat([[0.9, 0.4, 0.1], [0.5], [0.9, 0.8], [0.1, 0.9]])
    assert first_wrong_step(scores, steps).tolist() == [1, -1, -1, 0]
    assert first_wrong_step(scores, steps, threshold=0.85).tolist() == [1, 0, 1, 0]
    assert first_wrong_step(*flat([])).tolist() == []
    with pytest.raises(DataError, match="response 0 has no step"):
        first_wrong_step(*flat([[]]))


def test_the_product_takes_certain_steps_and_an_error_names_the_response() -> None:
    certain = aggregate_steps(numbers([1.0, 0.5, 0.0, 1.0]), torch.tensor([2, 2]), "product")
    assert certain.tolist() == [0.5, 0.0]
    scores, steps = numbers([0.1, 0.2, math.nan, 0.4]), torch.tensor([2, 2])
    with pytest.raises(DataError, match="response 1: the score of a step is NaN"):
        aggregate_steps(scores, steps, "mean")
    with pytest.raises(DataError, match=r"response 1: .* is 1\.5, and product"):
        aggregate_steps(numbers([0.1, 0.2, 1.5]), torch.tensor([2, 1]), "product")
