"""Repetition and reflection of a text, against slow counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.reward_terms.text_measures import reflections, repetition


def common_prefixes(text: str) -> int:
    """The sum of the longest common prefixes of neighbours in the sorted suffixes."""
    suffixes = sorted(text[k:] for k in range(len(text)))
    total = 0
    for one, other in itertools.pairwise(suffixes):
        length = 0
        while length < min(len(one), len(other)) and one[length] == other[length]:
            length += 1
        total += length
    return total


@given(st.text(alphabet="abc", max_size=40) | st.text(max_size=20))
def test_repetition_is_the_share_of_common_prefixes_that_lightrft_measures(text: str) -> None:
    count = len(text)
    expected = 0.0 if count < 2 else 2 * common_prefixes(text) / (count * (count + 1))
    assert repetition(text) == pytest.approx(expected, abs=1e-12)
    distinct = {text[a:b] for a in range(count) for b in range(a + 1, count + 1)}
    if count > 1:
        assert repetition(text) == pytest.approx(1 - 2 * len(distinct) / (count * (count + 1)))


def test_a_text_of_one_letter_repeats_and_one_without_repeats_does_not() -> None:
    assert repetition("abcdefgh") == 0.0
    assert repetition("a" * 100) == pytest.approx(1 - 2 / 101)
    assert repetition("") == repetition("a") == 0.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Wait, that is wrong. Let me  reconsider: actually 4.", 4),
        ("await the wrongdoing, corrections and mistakes", 0),
        ("LET ME THINK. A mistake; rethink this correction", 4),
        ("", 0),
    ],
)
def test_words_of_reflection_are_whole_words_of_any_case(text: str, count: int) -> None:
    assert reflections(text) == count
