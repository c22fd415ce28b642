"""Scored groups become pairs, rankings or labelled responses."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.preference.sections import OnlineConfig
from lightrft.rollout.accounting import CollectedRollouts, FilterResult, tokens_of
from lightrft.trainer.preference.online import PreferenceJudge, example_of
from lightrft.types import Prompt, Rollout

PROMPT = Prompt("a", [1, 2, 3])


def response(sample: int, reward: float | None, **more: Any) -> Rollout:
    """A response of two tokens, which only a response of the same ``sample`` has too."""
    tokens = more.pop("tokens", [5, 10 + sample])
    failed = "no score" if reward is None else ""
    fields: dict[str, Any] = {
        "finish_reason": "stop",
        "seed": sample,
        "sample": sample,
        "failed": failed,
        **more,
    }
    size = len(tokens)
    return Rollout(PROMPT, tokens, [True] * size, [0.0] * size, [0] * size, reward=reward, **fields)


def group(*rewards: float | None) -> list[Rollout]:
    return [response(i, reward) for i, reward in enumerate(rewards)]


def judged(kind: Any, rollouts: list[Rollout], **online: Any) -> FilterResult:
    return PreferenceJudge(kind, OnlineConfig(group_size=len(rollouts), **online))(rollouts)


def kept(verdict: FilterResult) -> list[int]:
    return [rollout.sample for rollout in verdict.kept]


@pytest.mark.parametrize(
    ("kind", "online", "rewards", "expected"),
    [
        # The first of equal rewards.
        ("pair", {}, (1.0, 0.5, 3.0, 3.0, 0.5), [2, 1]),
        ("pair", {}, (1.0, None, 0.0), [0, 2]),
        ("pair", {"pairs": "all"}, (1.0, 0.5, None, 0.5), [0, 1, 3]),
        ("ranked", {}, (1.0, 0.5, 0.5), [0, 1, 2]),
        ("labelled", {}, (1.0, 0.5), [0, 1]),
        ("labelled", {"threshold": 0.7}, (1.0, 1.0), [0, 1]),
        ("labelled", {"threshold": 0.7}, (0.1,), [0]),
    ],
)
def test_responses_to_compare_are_kept(kind, online, rewards, expected):
    verdict = judged(kind, group(*rewards), **online)
    assert verdict.reason == ""
    assert kept(verdict) == expected


@pytest.mark.parametrize(
    ("kind", "online", "rewards", "reason"),
    [
        ("pair", {}, (1.0, 1.0), "zero_variance"),
        ("ranked", {}, (1.0, 1.0, 1.0), "zero_variance"),
        ("labelled", {}, (1.0, 1.0), "zero_variance"),
        ("pair", {}, (1.0, None), "too_few_scored"),
        ("pair", {}, (1.0, float("nan")), "too_few_scored"),
        ("labelled", {"threshold": 0.5}, (None,), "too_few_scored"),
    ],
)
def test_groups_with_nothing_to_compare_are_dropped_with_the_reason(kind, online, rewards, reason):
    verdict = judged(kind, group(*rewards), **online)
    assert (verdict.reason, list(verdict.kept)) == (reason, [])


def test_a_response_does_not_beat_itself_whatever_a_noisy_judge_says():
    twice = [response(0, 1.0, tokens=[7]), response(1, 0.0, tokens=[7]), response(2, 0.5)]
    assert judged("pair", twice).reason == "equal_responses"
    assert judged("ranked", twice).reason == "equal_responses"
    # Of the pair alone it matters.
    three = [response(0, 1.0, tokens=[7]), response(1, 0.5, tokens=[7]), response(2, 0.0)]
    assert kept(judged("pair", three)) == [0, 2]
    assert judged("pair", three, pairs="all").reason == "equal_responses"


def test_a_cut_response_loses_the_penalty_before_responses_are_compared():
    cut = response(0, 1.0, finish_reason="length")
    whole = response(1, 0.75)
    verdict = judged("pair", [cut, whole, response(2, None)], missing_eos_penalty=0.5)
    assert kept(verdict) == [1, 0]
    assert (cut.reward, whole.reward) == (0.5, 0.75)
    assert cut.terms["missing_eos"] * cut.weights["missing_eos"] == -0.5
    assert whole.terms["missing_eos"] == 0


def test_ranks_ratings_and_margins_come_from_the_rewards():
    example = example_of(group(0.5, 2.0, 0.5, 1.25), "ranked", None)
    assert example.prompt_ids == PROMPT.token_ids
    assert [r.rank for r in example.responses] == [2, 0, 2, 1]
    assert [r.rating for r in example.responses] == [0.5, 2.0, 0.5, 1.25]
    assert [r.margin for r in example.responses] == [0.0, 0.75, 0.0, 0.75]
    assert [r.desirable for r in example.responses] == [None] * 4
    assert [r.token_ids for r in example.responses] == [[5, 10 + i] for i in range(4)]


def test_labels_come_from_the_mean_of_the_group_or_from_the_threshold():
    rewards = (0.0, 0.5, 1.0)
    by_mean = example_of(group(*rewards), "labelled", None)
    assert [r.desirable for r in by_mean.responses] == [False, False, True]
    by_bound = example_of(group(*rewards), "labelled", 0.5)
    assert [r.desirable for r in by_bound.responses] == [False, True, True]
    assert [r.rank for r in by_bound.responses] == [None] * 3


def test_groups_that_are_dropped_after_all_move_from_one_count_to_the_other():
    collected = CollectedRollouts()
    rollouts = group(1.0, 0.0)
    collected.add_group(rollouts, FilterResult(rollouts))
    collected.drop_groups("one_prompt")
    assert collected.groups == []
    assert collected.tokens["trained"] == 0
    assert collected.tokens["filtered"] == collected.filtered["one_prompt"] == tokens_of(rollouts)
    assert collected.dropped["one_prompt"] == 1
