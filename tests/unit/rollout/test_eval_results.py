"""Metrics of an evaluation: repeated samples, votes, terms, intervals, and the conditions that they hold under."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.prompt_scores import (
    by_prefix,
    error_metrics,
    estimates,
    eval_conditions,
    pass_scores,
    term_metrics,
)
from lightrft.rollout.eval_results.summary import summarize, vote_scores
from lightrft.types import Prompt, Rollout
from lightrft.utils.statistics.intervals import wilson

MATH = build(RewardConfig, {"terms": ["math"]})


def prompt(name: str, source: str = "sums", **fields: Any) -> Prompt:
    return Prompt(name, [1], text=f"{name}?", label="4", data_source=source, **fields)


def group(asked: Prompt, *answers: str, right: str = "4") -> list[Rollout]:
    """Responses with these texts, of which those that say ``right`` have the reward 1; "!" is not scored."""
    return [
        Rollout(
            asked,
            [1, 2],
            [True] * 2,
            [0.0] * 2,
            [0] * 2,
            "stop",
            seed=i,
            sample=i,
            text=f"\\boxed{{{text}}}" if text else "no idea",
            reward=None if text == "!" else float(text == right),
            terms={} if text == "!" else {"math": float(text == right)},
            failed="broken" if text == "!" else "",
        )
        for i, text in enumerate(answers)
    ]


def test_a_failed_response_is_wrong_and_stays_in_the_denominator() -> None:
    scores = pass_scores([group(prompt("a"), "4", "!", "5", "4")], Success(MATH))
    assert scores == {
        "accuracy": [0.5],
        "pass@2": [1 - 1 / 6],
        "pass^2": [1 / 6],
        "pass@4": [1.0],
        "pass^4": [0.0],
    }


def test_one_response_to_each_prompt_gives_an_accuracy_with_wilsons_interval_alone() -> None:
    groups = [group(prompt("a"), "4"), group(prompt("b"), "5"), group(prompt("c"), "4")]
    found = estimates("eval", pass_scores(groups, Success(MATH)))
    assert list(found) == ["eval/accuracy"]
    values = error_metrics(found)
    assert (values["eval/accuracy_low"], values["eval/accuracy_high"]) == wilson(2 / 3, 3)
    assert values["eval/accuracy_stderr"] == pytest.approx(math.sqrt(2 / 9 / 2))
    alone = error_metrics(estimates("eval", pass_scores(groups[:1], Success(MATH))))
    assert "eval/accuracy_stderr" not in alone


def test_equal_answers_vote_together_and_a_response_without_an_answer_does_not_vote() -> None:
    groups = [
        group(prompt("a"), "4", "7", "7.0", ""),
        group(prompt("b"), "4", "4", "7", "8"),
    ]
    scores = vote_scores(groups, Success(MATH))
    # Of "a": 7 and 7.0 are one answer, with two votes against one.
    assert scores["maj@4"] == pytest.approx([0.0, 1.0], abs=1e-12)
    assert scores["no_answer"] == [0.25, 0.0]
    # Of "a", pairs: {4, 7} twice is a tie, {4, none} is right: (1/2 + 1/2 + 1) / 6.
    assert scores["maj@2"][0] == pytest.approx(2 / 6, abs=1e-12)


def test_a_reward_that_compares_no_answer_has_no_vote() -> None:
    groups = [group(prompt("a"), "4", "5")]
    assert vote_scores(groups, Success(build(RewardConfig, {"terms": ["format"]}))) == {}
    per_source = {"terms": ["format"], "per_source": {"sums": ["format", "exact_match"]}}
    assert "maj@2" in vote_scores(groups, Success(build(RewardConfig, per_source)))


def test_each_of_several_sources_has_its_own_intervals() -> None:
    groups = [group(prompt("a", "one"), "4", "4"), group(prompt("b", ""), "5", "4")]
    assert list(by_prefix(groups)) == ["eval", "eval/one", "eval/unnamed"]
    assert list(by_prefix(groups[:1])) == ["eval"]
    assert by_prefix([]) == {}
    found = summarize({"eval/length": 2.0}, groups, 1.0, MATH)
    assert found.metrics["eval/length"] == 2.0
    assert found.metrics["eval/one/maj@2"] == 1.0
    assert found.metrics["eval/unnamed/maj@2"] == 0.5
    assert found.intervals["eval/pass@2"].count == 2
    table = found.table().splitlines()
    assert len(table) == 1 + len(found.intervals)
    assert any(line.split()[:2] == ["eval/accuracy", "75.0%"] for line in table)


def test_terms_are_means_and_ratios_are_ratios_of_sums() -> None:
    rollouts = group(prompt("a"), "4", "5")
    for rollout, followed, asked in zip(rollouts, (1.0, 0.0), (1.0, 3.0), strict=True):
        rollout.terms = {
            "ifeval": float(followed == asked),
            "ifeval/followed_strict": followed,
            "ifeval/followed_loose": followed,
            "ifeval/instructions": asked,
        }
    metrics = term_metrics("eval", [rollouts])
    assert metrics["eval/terms/ifeval"] == 0.5
    assert metrics["eval/terms/ifeval/instruction_strict"] == 0.25
    other = group(prompt("b", "other"), "4")
    other[0].terms = {"math": 1.0, "math/ungraded": 0.0}
    found = by_prefix([rollouts, other])
    assert term_metrics("eval/other", found["eval/other"])["eval/other/terms/math"] == 1.0
    assert "eval/terms/math" not in term_metrics("eval", found["eval"])
    assert term_metrics("eval", [group(prompt("b"), "4")]) == {}


def test_the_conditions_hold_the_generation_the_template_and_a_digest_of_the_prompts() -> None:
    config = build(
        EvalConfig, {"samples": 2, "sampling": {"top_p": 0.9}, "data": {"system": "Add."}}
    )
    groups = [group(prompt("a"), "4", "5"), group(prompt("b"), "4", "4")]
    found = eval_conditions(groups, config, MATH, 3)
    assert (found["samples"], found["sampling"]["top_p"], found["seed"]) == (2, 0.9, 3)
    assert (found["system"], found["prompts"]) == ("Add.", 2)
    assert found["rewards"] == {"": [{"function": "math"}]}

    def digest(*some: Prompt) -> str:
        return eval_conditions([group(p, "4") for p in some], config, MATH, 3)["prompts_digest"]

    a, b = prompt("a"), prompt("b")
    assert found["prompts_digest"] == digest(a, b) == digest(b, a)
    changed = Prompt("b", [1], text="other", label="4", data_source="sums")
    assert len({digest(a, b), digest(a), digest(a, changed), digest(a, prompt("b", "x"))}) == 4
