"""Which answers of a group are kept, and that it depends on nothing but them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.sample_selection import SELECTIONS, selected
from lightrft.config.base import ComponentConfig
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError


def group(*rewards: float) -> list[Rollout]:
    return [
        Rollout(Prompt("p", [1]), [2], [True], [-1.0], [0], "stop", 7 * i, i, reward=r)
        for i, r in enumerate(rewards)
    ]


def kept(name: str, rewards: tuple[float, ...], **options: object) -> list[float]:
    found = SELECTIONS[name](group(*rewards), **options)
    assert len(set(found)) == len(found)
    return sorted(rewards[i] for i in found)


def test_top_k_keeps_the_best_and_of_equals_the_earlier() -> None:
    assert kept("top_k", (3, 1, 4, 1, 5), keep=2) == [4, 5]
    assert kept("top_k", (3, 1), keep=4) == [1, 3]
    assert SELECTIONS["top_k"](group(1, 0, 1, 1), keep=2) == [0, 2]


def test_balanced_keeps_the_best_and_the_worst_half() -> None:
    sixteen = tuple(float(i) for i in range(16))
    assert kept("balanced", sixteen, keep=4) == [0, 1, 14, 15]
    assert kept("balanced", sixteen, keep=5) == [0, 1, 13, 14, 15]
    assert kept("balanced", (2, 1, 3), keep=4) == [1, 2, 3]


def test_balanced_by_a_threshold_keeps_as_many_right_as_wrong_answers() -> None:
    assert kept("balanced", (1, 1, 0, 1, 0, 0, 0), keep=4, threshold=1.0) == [0, 0, 1, 1]
    assert kept("balanced", (0, 0, 0, 1, 0, 0), keep=4, threshold=1.0) == [0, 0, 0, 1]
    assert kept("balanced", (1, 1, 1, 0, 1), keep=4, threshold=1.0) == [0, 1, 1, 1]
    assert kept("balanced", (1, 1, 1, 0, 0), keep=3, threshold=1.0) == [0, 1, 1]
    assert kept("balanced", (1, 1, 1), keep=2, threshold=1.0) == [1, 1]
    assert kept("balanced", (1, 0), keep=4, threshold=1.0) == [0, 1]
    assert SELECTIONS["balanced"](group(5, 1, 3, 0, -2), keep=2, threshold=1.0) == [0, 3]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=7), st.integers(2, 6))
def test_max_variance_is_the_best_of_all_subsets(rewards: list[float], keep: int) -> None:
    size = min(keep, len(rewards))
    best = max(statistics.pvariance(s) for s in itertools.combinations(rewards, size))
    assert statistics.pvariance(kept("max_variance", tuple(rewards), keep=keep)) == pytest.approx(
        best
    )


def test_max_variance_of_right_and_wrong_answers_is_even() -> None:
    assert kept("max_variance", (1, 0, 0, 0, 1, 1, 0, 0), keep=4) == [0, 0, 1, 1]
    assert kept("max_variance", (0, 0, 0, 0), keep=2) == [0, 0]


def test_random_keeps_each_answer_equally_often() -> None:
    counts: Counter[int] = Counter()
    for trial in range(2000):
        rollouts = group(0, 1, 2, 3, 4)
        for rollout in rollouts:
            rollout.seed += 1000 * trial
        counts.update(SELECTIONS["random"](rollouts, keep=2))
    assert all(abs(counts[i] - 800) < 100 for i in range(5))


@pytest.mark.parametrize("name", list(SELECTIONS))
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, 0.25, -2.0]), max_size=8), keep=st.integers(2, 9)
)
@settings(max_examples=50, deadline=None)
def test_a_selection_keeps_so_many_answers_whatever_their_order(
    name: str, rewards: list[float], keep: int
) -> None:
    rollouts = group(*rewards)
    found = SELECTIONS[name](rollouts, keep=keep)
    assert len(set(found)) == len(found) == min(keep, len(rewards))
    back = rollouts[::-1]
    assert {rollouts[i].seed for i in found} == {
        back[i].seed for i in SELECTIONS[name](back, keep=keep)
    }
    assert rollouts == group(*rewards)


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_a_selection_says_what_it_is_and_refuses_what_means_nothing(name: str) -> None:
    about = SELECTIONS.about(name)
    assert about.formula
    assert about.latex
    for keep in (0, 1.5, "2"):
        with pytest.raises((ConfigError, TypeError), match=r"keep|<"):
            SELECTIONS[name](group(1, 2), keep=keep)


def backwards(members: list[Rollout]) -> list[int]:
    """Keeps the last, then the first."""
    return [len(members) - 1, 0]


def beyond(members: list[Rollout]) -> list[int]:
    """An answer that is not there."""
    return [len(members)]


def test_what_is_kept_is_in_the_order_of_the_group() -> None:
    rollouts = group(1, 2, 3)
    assert selected(rollouts, None) == rollouts
    assert selected(rollouts, ComponentConfig(name=f"{__file__}:backwards")) == [
        rollouts[0],
        rollouts[2],
    ]
    with pytest.raises(ConfigError, match=r"gave \[3\] for a group of 3 responses"):
        selected(rollouts, ComponentConfig(name=f"{__file__}:beyond"))
