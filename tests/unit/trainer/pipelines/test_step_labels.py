"""Steps of solutions, and their labels, against direct calculations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.config.rollout import StepLabelsConfig
from lightrft.trainer.pipelines.step_labels import (
    Bisection,
    Solution,
    Tally,
    labels_of,
    wanted,
)

SOFT, FIRST = StepLabelsConfig(), StepLabelsConfig(search="first_wrong")


@given(st.lists(st.sampled_from(["a", " b", "\n", "\n\n", "c\n"]), min_size=1, max_size=8))
def test_each_prefix_of_a_text_ends_before_the_first_letter_of_the_next_step(
    pieces: list[str],
) -> None:
    text = "".join(pieces)
    solution = Solution.split(0, 0, text, "\n")
    assert list(solution.steps) == [line.strip() for line in text.split("\n") if line.strip()]
    starts = []
    at = 0
    for step in solution.steps:
        at = text.index(step, at)
        starts.append(at)
        at += len(step)
    for end, start in zip(solution.ends[:-1], starts[1:]):
        assert text[end:start].strip(" ") == "" and text[:end].endswith("\n")
    if solution.steps:
        assert solution.prefix(len(solution.steps)) == text


def test_given_steps_are_joined_by_the_separator_even_if_they_contain_it() -> None:
    solution = Solution.joined(0, 0, ["a\n\nb", "c", "d"], "\n\n")
    assert solution.text == "a\n\nb\n\nc\n\nd"
    assert [solution.prefix(k) for k in (1, 2, 3)] == [
        "a\n\nb\n\n",
        "a\n\nb\n\nc\n\n",
        solution.text,
    ]


def test_a_tally_counts_right_scored_failed_and_truncated_responses() -> None:
    rows = [(1.0, "", "stop"), (0.5, "", "length"), (None, "no score", "stop")]
    group = [{"reward": r, "failed": f, "finish_reason": why} for r, f, why in rows]
    assert Tally.of(group, 1.0) == Tally(1, 2, 1, 1)
    assert Tally.of(group, 0.5) == Tally(2, 2, 1, 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=9))
def test_labels_of_every_step_are_the_share_of_right_ones_and_whether_there_is_one(
    counts: list[tuple[int, int]],
) -> None:
    tallies = {k: Tally(min(r, n), n) for k, (r, n) in enumerate(counts, start=1)}
    found = labels_of(len(counts), tallies, SOFT)
    assert found.soft == [min(r, n) / n for r, n in counts]
    assert found.hard == [1 if min(r, n) else 0 for r, n in counts]


def test_a_step_without_a_scored_response_has_no_label() -> None:
    found = labels_of(2, {1: Tally(0, 0, 8), 2: Tally(1, 1)}, SOFT)
    assert found == ([None, 1.0], [None, 1])


def searched(right: list[bool]) -> tuple[dict[int, Tally], list[int]]:
    """The tallies of a bisection over steps of which ``right[k]`` says what is found after k + 1, and the order of questions."""
    tallies: dict[int, Tally] = {}
    asked: list[int] = []
    while following := wanted(len(right), tallies, FIRST):
        (k,) = following
        assert k not in tallies
        asked.append(k)
        tallies[k] = Tally(int(right[k - 1]), 1)
    return tallies, asked


@given(st.integers(1, 40), st.integers(0, 40))
def test_bisection_finds_the_first_wrong_step_with_few_questions(count: int, wrong: int) -> None:
    """``wrong`` is the first wrong step of ``count``, counted from 1; 0 and larger ones are none."""
    right = [not 0 < wrong <= k for k in range(1, count + 1)]
    tallies, asked = searched(right)
    found = labels_of(count, tallies, FIRST)
    if all(right):
        assert asked == [count] and found.hard == [1] * count
        assert found.soft == [None] * (count - 1) + [1.0]
        return
    assert found.hard == [1] * (wrong - 1) + [0] + [None] * (count - wrong)
    assert found.soft[wrong - 1] == 0 and found.soft[wrong:] == [None] * (count - wrong)
    assert len(asked) <= 1 + count.bit_length()


@pytest.mark.parametrize(
    ("tallies", "expected"),
    [
        ({}, Bisection(0, 0, 4)),
        ({4: Tally(0, 0, 1)}, Bisection(0, 0, 0)),
        ({4: Tally(0, 1), 2: Tally(0, 0, 8)}, Bisection(0, 4, 0)),
        ({4: Tally(0, 1), 2: Tally(1, 8)}, Bisection(2, 4, 3)),
    ],
)
def test_a_bisection_ends_where_nothing_could_be_scored(
    tallies: dict[int, Tally], expected: Bisection
) -> None:
    assert Bisection.of(4, tallies) == expected


def test_a_search_that_could_not_be_scored_labels_only_the_solution_as_wrong() -> None:
    found = labels_of(4, {4: Tally(0, 1), 2: Tally(0, 0, 8)}, FIRST)
    assert found.hard == [None, None, None, 0]
