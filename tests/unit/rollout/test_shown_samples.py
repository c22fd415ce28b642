"""Responses as lines for people who watch a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.observability.run_health import Health
from lightrft.rewards.success import Success
from lightrft.rollout.shown_samples import (
    by_prompt,
    equal_outcomes,
    evidence,
    examples,
    sample_rows,
    table,
)
from lightrft.types import Prompt, Rollout


def rollout(prompt: Prompt, text: str, reward: float | None, ended: str = "stop") -> Rollout:
    found = Rollout(prompt, [5], [True], [0.0], [0], ended, seed=0, text=text)
    found.reward = reward
    found.terms = {} if reward is None else {"math": reward, "words": float(len(text.split()))}
    return found


SUM = Prompt("a", [1], text="1+2=", label="3")
OTHER = Prompt("b", [2], text="2+2=", label=None)


def test_the_best_and_the_worst_response_of_a_prompt_are_shown_with_label_and_terms():
    rollouts = [rollout(SUM, "it is 4", 0.0), rollout(SUM, "3", 1.0), rollout(SUM, "", 0.5)]
    assert table(7, rollouts, 1, width=120).splitlines() == [
        "step 7: '1+2=' (label '3')",
        "  best       1 (math 1, words 1)  '3'",
        "  worst      0 (math 0, words 3)  'it is 4'",
    ]


def test_trackers_get_the_same_responses_as_rows_with_the_same_columns():
    rollouts = [rollout(SUM, "it is 4", 0.0), rollout(SUM, "3", 1.0), rollout(OTHER, "", None)]
    best = {"prompt": "1+2=", "label": "3", "which": "best", "reward": 1.0}
    worst = {**best, "which": "worst", "reward": 0.0, "terms": "math 0, words 3"}
    assert sample_rows(rollouts, 2) == [
        {**best, "terms": "math 1, words 1", "response": "3"},
        {**worst, "response": "it is 4"},
    ]
    assert sample_rows([rollout(OTHER, "4", 1.0)], 1)[0]["label"] == ""


def test_as_many_prompts_as_asked_are_shown_and_responses_without_a_reward_are_not():
    rollouts = [rollout(SUM, "3", None), rollout(OTHER, "4", 1.0), rollout(SUM, "2", 0.0)]
    assert (
        table(1, rollouts, 1, width=99)
        == "step 1: '2+2='\n" + " " * 13 + "1 (math 1, words 1)  '4'"
    )
    assert table(1, rollouts, 2, width=99).count("step 1:") == 2


def test_responses_that_nothing_scores_are_shown_without_a_reward():
    nothing = rollout(SUM, "3", None)
    assert table(1, [nothing], 2, width=99).splitlines()[1].split() == ["'3'"]
    assert sample_rows([nothing], 1)[0]["reward"] == ""
    nothing.failed = "no score today"
    assert table(1, [nothing], 2, width=99).splitlines()[1].split() == ["none", "'3'"]


def test_a_prompt_of_messages_is_shown_by_its_question_and_not_by_its_template():
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    prompt = Prompt("a", [1], text="<system>Be brief.<user>1+2?", request=said)
    assert table(1, [rollout(prompt, "3", 1.0)], 1, width=99).startswith("step 1: '1+2?'\n")
    assert "'1+2?'" in evidence(rollout(prompt, "3", 1.0), RewardConfig(), 80)[0]


@given(text=st.text(max_size=300), width=st.integers(40, 200), step=st.integers(1, 10**6))
def test_no_line_is_wider_than_the_terminal_or_broken(text, width, step):
    lines = table(step, [rollout(SUM, text, 1.0), rollout(SUM, "no", 0.0)], 3, width).split("\n")
    assert len(lines) == 3 and all(len(line) <= width for line in lines)


def test_warnings_bring_a_response_that_shows_what_they_say():
    health = Health(frozenset({"groups"}))
    reward = RewardConfig(terms=(RewardTerm(function="math"), RewardTerm(function="my.py:words")))
    equal = [rollout(OTHER, "x", 1.0), rollout(OTHER, "y", 0.0)]
    equal += [rollout(SUM, "46 + 64", 0.0), rollout(SUM, "so many words " * 20, 0.0, "length")]
    health.examples = examples(equal, reward)
    values = {"rollout/frac_reward_zero_std": 1.0, "response/clip_ratio": 0.5, "reward/mean": 0.0}
    flat, cut = health.warnings(values)
    assert flat.splitlines()[1:] == [
        "  prompt    '1+2='",
        "  response  '46 + 64'",
        "  result    label '3', math reads '46 + 64', reward 0 (math 0, words",
        "            3)",
    ]
    assert "  response  ...'" in cut and "words '" in cut and "math reads nothing" in cut
    assert all(len(line) <= 80 for line in cut.splitlines()[1:])


def test_warnings_of_an_evaluation_bring_a_response_of_it():
    found = [rollout(SUM, "so 3", 1.0, "length"), rollout(OTHER, "x", None)]
    found[1].failed = "no score today"
    shown = examples(found, RewardConfig(), evaluated=True)
    assert "'so 3'" in shown["eval/truncated"] and "reward none" in shown["eval/failed"]
    assert len(shown) == 2


def test_a_step_without_scored_responses_has_no_example():
    assert examples([rollout(SUM, "3", None)], RewardConfig()) == {}
    assert [len(group) for group in by_prompt([rollout(SUM, "3", 1.0)] * 3)] == [3]


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (1.0, "1"), (0.25, "0.25")])
def test_a_reward_with_one_value_for_all_responses_is_named_with_a_response(value, shown):
    reward = RewardConfig(terms=(RewardTerm(function="math"), RewardTerm(function="format")))
    found = [rollout(SUM, "so 3", value), rollout(SUM, "so many words", value)]
    (warning,) = equal_outcomes([*found, rollout(SUM, "", None)], Success(reward))
    assert warning.startswith(f"reward 'math' is {shown} for all 2 responses. ")
    assert "  response  'so 3'" in warning and "label '3', math reads nothing" in warning
    other = rollout(SUM, "3", value + 1)
    assert not list(equal_outcomes([*found, other], Success(reward)))
    assert not list(equal_outcomes(found[:1], Success(reward)))
    assert not list(equal_outcomes(found, Success(RewardConfig(terms=reward.terms[1:]))))


def test_each_data_source_with_one_outcome_is_named():
    reward = RewardConfig(terms=(RewardTerm(function="math"),))
    sources = {name: Prompt(name, [1], data_source=name) for name in ("aime", "gsm8k")}
    scores = {"aime": (0.0, 0.0), "gsm8k": (0.0, 1.0)}
    found = [rollout(sources[name], "4", value) for name in sources for value in scores[name]]
    (warning,) = equal_outcomes(found, Success(reward))
    assert warning.startswith("reward 'math' is 0 for all 2 responses to prompts of 'aime'. ")
