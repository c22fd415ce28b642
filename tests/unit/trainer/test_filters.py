"""Which groups are trained on, and why not."""

from __future__ import annotations

import pytest

from lightrft.config import Part
from lightrft.trainer.filters import FILTERS, drop_reason
from lightrft.types import Prompt, Rollout


def group(*rewards: float) -> list[Rollout]:
    return [Rollout(Prompt("p", [1]), [2], [True], [-1.0], [0], "stop", seed=i, reward=r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(("rewards", "reason"), [((1, 1, 1), "zero_variance"), ((0, 1), ""), ((0.1, 0.1), "zero_variance")])
def test_groups_of_equal_rewards_carry_no_gradient(rewards: tuple[float, ...], reason: str) -> None:
    assert FILTERS["zero_variance"](group(*rewards)) == reason


@pytest.mark.parametrize(
    ("rewards", "bounds", "reason"),
    [
        ((0, 1), {"low": 0.5}, ""),
        ((0, 0, 1), {"low": 0.5}, "reward_bounds"),
        ((1, 1, 0), {"high": 0.5}, "reward_bounds"),
        ((1, 0), {"low": 0.5, "high": 0.5}, ""),
        ((-9, -9), {}, ""),
    ],
)
def test_groups_that_are_too_hard_or_too_easy(rewards: tuple[float, ...], bounds: dict[str, float], reason: str) -> None:
    assert FILTERS["reward_bounds"](group(*rewards), **bounds) == reason


def test_the_first_reason_counts_and_too_few_answers_come_before_all() -> None:
    bounds, equal = Part(name="reward_bounds", options={"low": 0.5}), Part(name="zero_variance")
    assert drop_reason(group(0, 0), [bounds, equal], 2) == "reward_bounds"
    assert drop_reason(group(0, 0), [equal, bounds], 2) == "zero_variance"
    assert drop_reason(group(1, 0), [equal, bounds], 2) == ""
    assert drop_reason(group(1), [equal], 2) == "too_few_scored"
    assert drop_reason(group(1), [], 1) == ""
    assert drop_reason([], [], 1) == "too_few_scored"
