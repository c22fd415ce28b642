"""The choice of responses that become training rows."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.config.base import build
from lightrft.config.rollout import ConditionConfig, SelectConfig
from lightrft.trainer.pipelines.selection import (
    SELECTORS,
    Candidate,
    Choice,
    stating,
    usable,
    with_condition,
)
from lightrft.utils.errors import ConfigError


def answers(*rewards: float) -> list[Candidate]:
    return [Candidate(k, f"response {k}", reward) for k, reward in enumerate(rewards)]


def chosen(keep: str, *rewards: float, own: str | None = None, **settings: Any) -> list[Any]:
    """The rows of a selection from responses with these rewards."""
    config = build(SelectConfig, {"keep": keep, **settings})
    rows, why = SELECTORS[keep](Choice(answers(*rewards), config, own))
    assert why
    return rows


def samples(rows: list[Any]) -> list[Any]:
    return [row["sample"] for row in rows]


def line(text: str, **more: Any) -> dict[str, Any]:
    return {"sample": 0, "response": text, "finish_reason": "stop", "reward": 1.0, **more}


def test_the_best_response_is_the_first_of_those_with_the_highest_reward() -> None:
    assert samples(chosen("best", 0.0, 1.0, 0.5, 1.0)) == [1]
    assert samples(chosen("best", 0.0, 1.0, 0.5, 1.0, per_prompt=3)) == [1, 3, 2]


def test_correct_responses_reach_the_threshold_and_the_first_ones_fill_the_cap() -> None:
    assert samples(chosen("correct", 0.0, 1.0, 0.5, 2.0)) == [1, 3]
    assert samples(chosen("correct", 0.0, 1.0, 0.5, 2.0, threshold=0.5, per_prompt=2)) == [1, 2]
    assert chosen("correct", 0.0, 0.5) == []


def test_a_pair_is_the_best_and_the_worst_response() -> None:
    (row,) = chosen("pairs", 0.5, 0.0, 1.0, 0.0, 1.0)
    assert row["sample"] == "2-1"
    assert row["chosen"] == [{"role": "assistant", "content": "response 2"}]
    assert row["rejected"] == [{"role": "assistant", "content": "response 1"}]
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)


def test_responses_of_equal_rewards_make_no_pair_and_no_ranking() -> None:
    assert chosen("pairs", 1.0, 1.0, 1.0) == []
    assert chosen("ranked", 1.0, 1.0, 1.0) == []


def test_the_rewards_of_a_pair_differ_by_more_than_the_margin() -> None:
    assert chosen("pairs", 0.0, 0.5, margin=0.5) == []
    assert samples(chosen("pairs", 0.0, 0.75, margin=0.5)) == ["1-0"]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=6), st.integers(1, 20))
def test_pairs_are_all_pairs_of_different_rewards_by_falling_difference(rewards, count) -> None:
    rows = chosen("pairs", *rewards, per_prompt=count)
    found = [row["score_chosen"] - row["score_rejected"] for row in rows]
    every = [abs(a - b) for a, b in itertools.combinations(rewards, 2) if a != b]
    assert found == sorted(every, reverse=True)[:count]
    assert len({row["sample"] for row in rows}) == len(rows)


def test_pairs_of_equal_differences_take_as_many_responses_as_they_can() -> None:
    rows = chosen("pairs", 1.0, 0.0, 1.0, 0.0, 1.0, per_prompt=4)
    assert samples(rows) == ["0-1", "2-3", "4-1", "0-3"]
    rows = chosen("pairs", 0.0, 2.0, 1.0, 0.0, per_prompt=3)
    assert samples(rows) == ["1-0", "1-3", "2-0"]


def test_labels_say_which_responses_reach_the_threshold() -> None:
    rows = chosen("labelled", 0.0, 1.0, 0.5, threshold=0.5)
    assert [row["label"] for row in rows] == [False, True, True]


def test_a_ranking_has_every_response_with_its_reward_as_rating() -> None:
    (row,) = chosen("ranked", 0.0, 1.0, 0.5)
    ratings = [one["annotations"]["reward"]["Rating"] for one in row["completions"]]
    assert ratings == [0.0, 1.0, 0.5]


def test_the_response_of_the_data_is_preferred_to_the_models_in_self_play() -> None:
    rows = chosen("self_play", 0.0, 0.0, own="response 1 ")
    assert samples(rows) == [0]
    assert rows[0]["chosen"][0]["content"] == "response 1 "
    assert chosen("self_play", 0.0) == []


def test_responses_that_teach_nothing_are_left_out_and_counted() -> None:
    group = [
        line("a"),
        line("a "),
        line(" "),
        line("b", finish_reason="length"),
        line("c", failed="no score today", reward=None),
        line("d"),
    ]
    left_out: Counter[str] = Counter()
    config = build(SelectConfig, {"keep": "correct"})
    assert [answer.text for answer in usable(group, config, left_out)] == ["a", "d"]
    assert left_out == {"equal to another": 1, "empty": 1, "truncated": 1, "not scored": 1}
    all_of_them = build(
        SelectConfig, {"keep": "correct", "distinct": False, "keep_truncated": True}
    )
    kept = usable(group, all_of_them, Counter())
    assert [answer.text for answer in kept] == ["a", "a ", "b", "d"]


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=12),
    st.integers(2, 5),
)
def test_a_label_names_the_quantile_of_a_reward(rewards, count) -> None:
    names = tuple(f"part {k}" for k in range(count))
    state = stating(ConditionConfig(template="{reward}", labels=names), rewards)
    for reward in rewards:
        # the mean rank among the responses of equal reward, counted one by one
        below = sum(other < reward for other in rewards)
        equal = sum(other == reward for other in rewards)
        quantile = Fraction(2 * below + equal, 2 * len(rewards))
        part = sum(quantile >= Fraction(k, count) for k in range(1, count))
        assert state(reward) == names[part]


def test_the_reward_is_stated_before_the_question_or_after_the_system_message() -> None:
    state = stating(ConditionConfig(digits=1), [0.25])
    text = state(0.25)
    assert text == "Reward: 0.2"
    question = [{"role": "user", "content": "1+1="}]
    assert with_condition(question, text, "prompt")[0]["content"] == "Reward: 0.2\n1+1="
    made = with_condition(question, text, "system")
    assert made == [{"role": "system", "content": text}, *question]
    known = [{"role": "system", "content": "Be brief."}, *question]
    assert with_condition(known, text, "system")[0]["content"] == "Be brief.\nReward: 0.2"
    parts = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]
    content = with_condition(parts, text, "prompt")[0]["content"]
    assert content == [{"type": "text", "text": "Reward: 0.2\n"}, *parts[0]["content"]]
    assert question[0]["content"] == "1+1="


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"keep": "best", "threshold": 0.5},
            "needs select.keep correct or labelled, which is best",
        ),
        ({"per_prompt": 2}, "select.per_prompt = 2 needs select.keep best, "),
        (
            {"keep": "pairs", "distinct": False},
            "select.distinct = false needs select.keep correct, ",
        ),
        ({"keep": "conditioned", "condition": {"template": "no field"}}, "has no {reward}"),
        ({"keep": "conditioned", "condition": {"labels": ["one"]}}, "two or more"),
    ],
)
def test_settings_that_change_nothing_are_refused(settings, said) -> None:
    with pytest.raises(ConfigError, match="(?s).*" + said.replace("{", r"\{")):
        build(SelectConfig, settings)
