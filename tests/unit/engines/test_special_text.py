"""The text of a response: special tokens that were sampled, without the one that ended it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.group_filters import FILTERS
from lightrft.algorithms.reward_terms.text_steps import split_steps
from lightrft.config.reward import JudgeConfig, RewardConfig
from lightrft.engines.requests import rollout_of
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.rewards import REWARDS
from lightrft.rewards.sandbox.rollout_view import view_of
from lightrft.rollout.shown_samples import evidence
from lightrft.serving.chat.tool_calls import read_answer
from lightrft.trainer.pipelines.generate import line_of
from lightrft.types import FinishReason, Prompt, Request, Rollout
from lightrft.workers.scoring.judge_scorer import comparisons
from lightrft.workers.scoring.process_scorer import StepScoringModel

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TOKENIZER = tiny_tokenizer(extra_chars="\\{}", special=TAGS)
END = "<|im_end|>"


def sampled(text: str, reason: FinishReason = "stop", cut: str | None = None) -> Rollout:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    zeros = [0.0] * len(ids)
    request = Request(Prompt("p", [1], label="6"), seed=0)
    return rollout_of(request, ids, zeros, [0] * len(ids), reason, cut, TOKENIZER)


def test_tags_that_are_special_tokens_are_seen_by_rewards() -> None:
    rollout = sampled(r"<think>\boxed{5}</think><answer>6</answer>" + END)
    assert rollout.plain_text == r"\boxed{5}6"
    seen = view_of(rollout)
    assert seen.text == r"<think>\boxed{5}</think><answer>6</answer>"
    assert REWARDS["math"](seen) == REWARDS["format"](seen) == 1
    assert REWARDS["exact_match"](seen) == 1


TAGGED = "<think>a</think><answer>6</answer>"


def test_rows_for_training_judges_and_filters_see_what_was_sampled() -> None:
    rollout = sampled(TAGGED + END)
    assert line_of(rollout)["response"] == TAGGED
    (asked,) = comparisons([rollout], [0], JudgeConfig(path="judge", form="rating"))
    assert TAGGED in str(asked.question)
    two = [rollout, sampled("a6" + END)]
    assert FILTERS["repeated_answers"](two, limit=0.0, by="text") == ""
    assert "<answer>6</answer>" in "".join(evidence(rollout, RewardConfig(), 99))


def test_rewards_of_steps_are_at_the_last_tokens_of_steps_with_special_tokens() -> None:
    text = "<think>a\nb</think>\nc"
    rollout = sampled(text + END)
    _, ends = split_steps(rollout.text, "\n")
    scoring: Any = SimpleNamespace(tokenizer=TOKENIZER, term=SimpleNamespace(weight=2.0))
    found = StepScoringModel._token_rewards(scoring, rollout, ends, [0.1, 0.2, 0.3])
    ends = [len(TOKENIZER.decode(rollout.token_ids[: place + 1])) for place, _ in found]
    assert ends == [len("<think>a\n"), len("<think>a\nb</think>\n"), len(text)]
    assert [reward for _, reward in found] == [0.2, 0.4, 0.6]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_a_server_finds_calls_whose_tags_are_special_tokens_and_sends_plain_text() -> None:
    tokenizer = tiny_tokenizer(extra_chars="{}", special=("<tool_call>", "</tool_call>"))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer.encode(call + END, add_special_tokens=False)
    zeros = [0.0] * len(ids)
    request = Request(Prompt("p", [1]), seed=0)
    rollout = rollout_of(request, ids, zeros, [0] * len(ids), "stop", None, tokenizer)
    text, (found,) = read_answer(rollout, [TOOL])
    assert (text, found.name, found.arguments) == ("", "add", {"a": 1})
    assert read_answer(sampled(TAGGED + END), [TOOL]) == ("a6", [])
    assert read_answer(sampled(TAGGED + END), []) == ("a6", [])


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (f"a{END}", "stop", "a"),
        ("a<think>", "length", "a<think>"),
        (f"<think>a</answer>{END}", "stop", "<think>a</answer>"),
        ("abc", "length", "abc"),
        (END, "stop", ""),
        ("", "length", ""),
    ],
)
def test_only_the_token_that_ended_the_response_is_left_out(
    text: str, reason: FinishReason, expected: str
) -> None:
    assert view_of(sampled(text, reason)).text == expected


PARTS = st.lists(st.sampled_from([*TAGS, "a", "b", "1", " ", "<", ">"]), max_size=12)


@given(PARTS, PARTS)
def test_a_stop_string_cuts_both_texts_at_the_same_place(
    before: list[str], after: list[str]
) -> None:
    visible = "".join(part for part in before if part not in TAGS)
    found = view_of(sampled("".join([*before, "STOP", *after]), "stop", visible)).text
    whole = "".join(before)
    # special tokens right before the stop string may be on either side of the cut
    assert whole.startswith(found) and re.fullmatch(
        "(<think>|</think>|<answer>|</answer>)*", whole[len(found) :]
    )
    assert "STOP" not in found


@given(PARTS)
def test_a_whole_response_is_what_was_sampled(parts: list[str]) -> None:
    assert view_of(sampled("".join([*parts, END]))).text == "".join(parts)
    assert view_of(sampled("".join(parts), "length")).text == "".join(parts)
