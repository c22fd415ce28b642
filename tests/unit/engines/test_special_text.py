"""The text that rewards read: special tokens that were sampled, without the one that ended the response."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.engines.requests import rollout_of
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.rewards import REWARDS
from lightrft.rewards.sandbox.rollout_view import view_of
from lightrft.types import FinishReason, Prompt, Request, Rollout

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
    assert rollout.text == r"\boxed{5}6"
    seen = view_of(rollout)
    assert seen.text == r"<think>\boxed{5}</think><answer>6</answer>"
    assert REWARDS["math"](seen) == REWARDS["format"](seen) == 1
    assert REWARDS["exact_match"](seen) == 1


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
