"""Which groups are trained on, and why not."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from lightrft.algorithms.group_filters import FILTERS, drop_reason
from lightrft.config.base import ComponentConfig
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError


def group(*rewards: float) -> list[Rollout]:
    return [
        Rollout(Prompt("p", [1]), [2], [True], [-1.0], [0], "stop", seed=i, reward=r)
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1, 1, 1), "zero_variance"), ((0, 1), ""), ((0.1, 0.1), "zero_variance")],
)
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
def test_groups_that_are_too_hard_or_too_easy(
    rewards: tuple[float, ...], bounds: dict[str, float], reason: str
) -> None:
    assert FILTERS["reward_bounds"](group(*rewards), **bounds) == reason


def test_the_first_reason_counts_and_too_few_answers_come_before_all() -> None:
    bounds, equal = (
        ComponentConfig(name="reward_bounds", options={"low": 0.5}),
        ComponentConfig(name="zero_variance"),
    )
    assert drop_reason(group(0, 0), [bounds, equal], 2) == "reward_bounds"
    assert drop_reason(group(0, 0), [equal, bounds], 2) == "zero_variance"
    assert drop_reason(group(1, 0), [equal, bounds], 2) == ""
    assert drop_reason(group(1), [equal], 2) == "too_few_scored"
    assert drop_reason(group(1), [], 1) == ""
    assert drop_reason([], [], 1) == "too_few_scored"


@pytest.mark.parametrize(
    ("rewards", "options", "reason"),
    [
        ((1, 0, 0, 0), {"low": 0.25, "high": 0.75}, ""),
        ((1, 1, 1, 0), {"low": 0.25, "high": 0.75}, ""),
        ((0, 0, 0, 0), {"low": 0.25, "high": 0.75}, "pass_rate"),
        ((1, 1, 1, 1), {"low": 0.25, "high": 0.75}, "pass_rate"),
        ((0.4, 0.6), {"low": 0.5, "high": 0.5, "threshold": 0.5}, ""),
        ((0.4, 0.6), {"low": 0.5, "high": 0.5}, "pass_rate"),
    ],
)
def test_groups_of_which_too_few_or_too_many_answers_pass(
    rewards: Any, options: dict[str, float], reason: str
) -> None:
    assert FILTERS["pass_rate"](group(*rewards), **options) == reason


def with_logprobs(*rows: list[float]) -> list[Rollout]:
    return [
        Rollout(Prompt("p", [1]), [2] * len(r), [x < 0 for x in r], r, [0] * len(r), "stop", i)
        for i, r in enumerate(rows)
    ]


def test_perplexity_is_the_mean_over_answers_of_what_the_sampler_thought_of_their_own_tokens() -> (
    None
):
    # Mean 3; 0.0 was not sampled.
    two_and_four = with_logprobs([-math.log(2)] * 3, [-math.log(4), 0.0, -math.log(4)], [])
    for low, high, reason in (
        (0.0, 3.001, ""),
        (2.999, 5.0, ""),
        (0.0, 2.999, "perplexity"),
        (3.001, 9.0, "perplexity"),
    ):
        assert FILTERS["perplexity"](two_and_four, low=low, high=high) == reason
    assert FILTERS["perplexity"](with_logprobs([], [0.0]), high=1.0) == ""
    assert FILTERS["perplexity"](with_logprobs([-1e9]), high=1e300) == "perplexity"


def said(*rows: str) -> list[Rollout]:
    return [
        Rollout(Prompt("p", [1]), [ord(c) for c in r], [True], [], [], "stop", i, text=r)
        for i, r in enumerate(rows)
    ]


def test_groups_that_say_the_same_again_and_again() -> None:
    rows = said("ab", "ab", "ab ", "cd")
    assert FILTERS["repeated_answers"](rows, limit=0.25) == ""  # 3 of 4 are distinct
    assert FILTERS["repeated_answers"](rows, limit=0.24) == "repeated_answers"
    assert FILTERS["repeated_answers"](rows, limit=0.4, by="text") == "repeated_answers"
    assert FILTERS["repeated_answers"](rows, limit=0.5, by="text") == ""
    assert FILTERS["repeated_answers"]([], limit=0.0) == ""


def test_answers_that_go_round_in_circles() -> None:
    # Bigrams: 2 of 5 and 5 of 5 distinct, so 0.6 and 0.0 are repeated.
    rows = said("ababab", "abcdef")
    assert FILTERS["repeated_ngrams"](rows, limit=0.3, n=2) == ""
    assert FILTERS["repeated_ngrams"](rows, limit=0.29, n=2) == "repeated_ngrams"
    assert FILTERS["repeated_ngrams"](said("aa", ""), limit=0.0, n=4) == ""


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("reward_bounds", {"low": 1.0, "high": 0.0}, "options.low is 1.0, above options.high, 0.0"),
        ("pass_rate", {"low": 0.8, "high": 0.2}, "every group would be dropped"),
        ("pass_rate", {"low": 0.0, "high": 1.0}, "keep all or none"),
        ("pass_rate", {"low": 1.5, "high": 2.0}, "keep all or none"),
        ("perplexity", {"low": 5.0, "high": 2.0}, "every group would be dropped"),
        ("repeated_answers", {"limit": 1.0}, "options.limit is 1.0"),
        ("repeated_answers", {"limit": 0.5, "by": "words"}, "options.by is 'words'"),
        ("repeated_ngrams", {"limit": -0.1}, "options.limit is -0.1"),
        ("repeated_ngrams", {"limit": 0.1, "n": 0}, "options.n is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        FILTERS[name](group(0, 1), **options)


@pytest.mark.parametrize(
    ("returned", "reason"), [("mine", "mine"), ("", ""), (None, ""), (True, 0), (False, 0), (1, 0)]
)
def test_a_filter_returns_a_reason_as_text(
    monkeypatch: pytest.MonkeyPatch, returned: object, reason: object
) -> None:
    monkeypatch.setitem(FILTERS._entries, "own", lambda group: returned)
    own = ComponentConfig(name="own")
    if reason == 0:
        with pytest.raises(ConfigError, match=f"filter own returned {returned}; return the reason"):
            drop_reason(group(0, 1), [own], 1)
    else:
        assert drop_reason(group(0, 1), [own], 1) == reason
