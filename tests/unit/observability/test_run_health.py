"""Warnings of a run that learns nothing, or less."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from lightrft.observability.run_health import RULES, Health, is_not_trained

GROUPS = frozenset({"groups"})


def said(health: Health, **values: float) -> list[str]:
    return health.warnings({name.replace("__", "/"): value for name, value in values.items()})


def test_a_share_is_warned_of_once_and_again_each_time_that_it_has_doubled() -> None:
    health = Health()
    shares = [0.0, 0.1, 0.15, 0.19, 0.2, 0.3, 0.1, 0.4, 0.79, 0.8, 1.0]
    warned = [share for share in shares if said(health, rollout__frac_reward_failed=share)]
    assert warned == [0.1, 0.2, 0.4, 0.8]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.metric)
def test_each_rule_is_silent_at_its_bound_and_names_its_metric_above(rule) -> None:
    assert Health(GROUPS).warnings({rule.metric: rule.above}) == []
    (message,) = Health(GROUPS).warnings({rule.metric: rule.above + 1})
    assert rule.metric in message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.metric)
def test_a_metric_that_is_not_a_number_is_warned_of_once(rule) -> None:
    health = Health(GROUPS)
    assert len(health.warnings({rule.metric: math.nan})) == 1
    assert health.warnings({rule.metric: math.nan}) == []


def test_equal_rewards_matter_only_to_algorithms_that_compare_the_responses_of_a_group() -> None:
    assert said(Health(GROUPS), rollout__frac_reward_zero_std=1.0, reward__mean=0.25) != []
    assert said(Health(), rollout__frac_reward_zero_std=1.0) == []


def test_the_most_common_cause_of_a_failure_is_told() -> None:
    health = Health()
    health.blame(
        "rollout/frac_reward_failed", Counter({"raised KeyError: 'x'": 3, "deadline 10 s": 1})
    )
    assert "raised KeyError: 'x'" in said(health, rollout__frac_reward_failed=0.25)[0]


def test_steps_in_a_row_with_reward_0_are_counted_and_one_other_reward_ends_the_row() -> None:
    health = Health()
    zero, some = {"reward/min": 0.0, "reward/max": 0.0}, {"reward/min": 0.0, "reward/max": 1.0}
    counts = [
        health.count(row)["rollout/steps_reward_zero"]
        for row in (zero, zero, some, zero, zero, zero)
    ]
    assert counts == [1, 2, 0, 1, 2, 3]
    assert health.count({"eval/accuracy": 0.5}) == {}


def test_a_resumed_run_goes_on_counting() -> None:
    health = Health()
    health.resume({"rollout/steps_reward_zero": 4.0})
    assert health.count({"reward/min": 0.0, "reward/max": 0.0})["rollout/steps_reward_zero"] == 5


TRAINED = {
    "rollout/tokens_sampled": 10.0,
    "policy/optimizer_steps": 1.0,
    "policy/grad_norm": 0.5,
    "policy/frac_rows_with_advantage": 0.5,
}


@pytest.mark.parametrize(
    ("over", "untrained"),
    [
        ({}, False),
        ({"policy/optimizer_steps": 0.0}, True),
        ({"policy/grad_norm": 0.0}, True),
        ({"policy/frac_rows_with_advantage": 0.0}, True),
        ({"policy/frac_rows_with_advantage": 0.0, "policy/divergence": 0.3}, False),
        ({"policy/frac_rows_with_advantage": 0.0, "ptx/nll": 3.0}, False),
        ({"policy/optimizer_steps": 0.0, "critic/optimizer_steps": 2.0}, False),
    ],
)
def test_a_step_is_trained_when_a_gradient_came_from_a_response_or_from_other_data(
    over, untrained
) -> None:
    assert is_not_trained({**TRAINED, **over}) is untrained


def test_an_evaluation_before_the_first_step_is_neither_trained_nor_not() -> None:
    assert is_not_trained({"eval/accuracy": 0.1}) is None


def test_supervised_steps_are_told_by_their_gradient() -> None:
    row = {"sft/tokens": 5.0, "policy/optimizer_steps": 1.0, "policy/grad_norm": 0.1}
    assert is_not_trained(row) is False
    assert is_not_trained({**row, "policy/grad_norm": 0.0}) is True


def test_groups_with_equal_rewards_that_a_shaping_trains_are_no_problem() -> None:
    shares = {"rollout__frac_reward_zero_std": 1.0, "reward__mean": 0.25}
    assert said(Health(GROUPS), **shares, rollout__frac_reward_zero_std_trained=1.0) == []
    assert said(Health(GROUPS), **shares, rollout__frac_reward_zero_std_trained=0.5) == []
    (message,) = said(Health(GROUPS), **shares, rollout__frac_reward_zero_std_trained=0.25)
    assert message.startswith("75% of groups have equal rewards")
