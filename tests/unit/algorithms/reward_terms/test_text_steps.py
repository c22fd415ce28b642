"""Steps of a text and the tokens that end them, by hand and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.reward_terms.text_steps import last_tokens, split_steps


@pytest.mark.parametrize(
    ("text", "steps", "ends"),
    [
        ("a\nb", ["a", "b"], [2, 3]),
        ("a\nb\n", ["a", "b"], [2, 4]),
        ("  a \n\n\nb", ["a", "b"], [7, 8]),  # blank lines belong to the step before
        ("\n\na", ["a"], [3]),  # and before the first step to that one
        ("a\n\n", ["a"], [3]),
        ("a", ["a"], [1]),
        ("", [], []),
        (" \n ", [], []),
    ],
)
def test_steps_end_after_their_separator(text, steps, ends):
    assert split_steps(text, "\n") == (steps, ends)


def test_a_separator_may_have_several_characters():
    assert split_steps("one<s>two <s><s>three", "<s>") == (["one", "two", "three"], [6, 16, 21])


@given(st.text("ab \n", max_size=30), st.sampled_from(["\n", "\n\n", "a", "ab"]))
def test_ends_cover_the_text_and_each_step_is_inside_its_part(text, separator):
    steps, ends = split_steps(text, separator)
    assert len(steps) == len(ends)
    if not steps:
        return
    assert ends[-1] == len(text)
    assert ends == sorted(set(ends))
    for step, start, end in zip(steps, [0, *ends], ends):
        assert step in text[start:end]
        assert step == step.strip() != ""


@pytest.mark.parametrize(
    ("lengths", "ends", "tokens"),
    [
        ([1, 2, 3], [2, 3], [1, 2]),
        ([2, 4, 6], [1, 3, 6], [0, 1, 2]),  # an end inside a token is of this token
        ([2, 4, 6], [2, 4], [0, 1]),
        ([2, 2, 2, 4], [2, 4], [0, 3]),  # bytes of one character: the first that completes it
        ([2, 4], [4, 9], [1, 1]),  # the last token, whatever the end
        ([3, 6], [1, 2, 3], [0, 0, 0]),
        ([5], [], []),
    ],
)
def test_the_last_token_of_a_step_holds_the_character_before_its_end(lengths, ends, tokens):
    assert last_tokens(lengths, ends) == tokens
