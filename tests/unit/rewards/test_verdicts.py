"""Verdicts of judgements, and their agreement with labels."""

from __future__ import annotations

import itertools
import random

import pytest

from lightrft.rewards.rules.judgement import judgement
from lightrft.rewards.rules.verdicts import VerdictForm, agreement, read_verdict, score
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView

PAIR = VerdictForm("pair", choices="AB")
RATING = VerdictForm("rating", low=1, high=5)
RUBRIC = VerdictForm("rubric", weights=(1.0, 3.0))
RANKING = VerdictForm("ranking", choices="ABC")


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        ("A is worse. <answer>B</answer>", PAIR, "B"),
        ("<answer>A</answer> no, <answer> B. </answer>", PAIR, "B"),
        ("<think><answer>A</answer></think>none", PAIR, None),
        ("<answer>C</answer>", PAIR, None),
        ("<answer>AB</answer>", PAIR, None),
        ("<answer></answer>", PAIR, None),
        ("B", PAIR, None),
        ("<answer>C</answer>", VerdictForm("pair", choices="ABC", ties=True), "C"),
        (r"so \boxed{A}", VerdictForm("pair", "boxed", "AB"), "A"),
        (r"so \boxed{A", VerdictForm("pair", "boxed", "AB"), None),
        ("[[A]] or [[B]]", VerdictForm("pair", "brackets", "AB"), "B"),
        ('{"verdict": "A"} {"winner": "B"}', VerdictForm("pair", "json", "AB"), "B"),
        ('{"why": {"verdict": 1}', VerdictForm("pair", "json", "AB"), None),
        (
            '{"verdict": [true, false]}',
            VerdictForm("rubric", "json", weights=(1, 1)),
            (True, False),
        ),
        ("I rate it 2 of 5: 4.5", VerdictForm("rating", "number", low=1, high=5), 4.5),
        ("v2", VerdictForm("rating", "number", low=1, high=5), None),
        ("it is 7", VerdictForm("rating", "number", low=1, high=5), None),
        ("<answer>4/5</answer>", RATING, 4.0),
        ("<answer>nan</answer>", RATING, None),
        ("<answer>yes, No</answer>", RUBRIC, (True, False)),
        ("<answer>yes</answer>", RUBRIC, None),
        ("<answer>C > A > B</answer>", RANKING, ("C", "A", "B")),
        ("<answer>C > A</answer>", RANKING, None),
        ("pick=B", VerdictForm("pair", "regex", "AB", pattern="pick=(.)"), "B"),
    ],
)
def test_a_verdict_is_read_from_its_place_and_never_guessed(text, form, found):
    assert read_verdict(text, form) == found


def test_agreement_of_rankings_is_the_fraction_of_pairs_in_the_right_order():
    draw = random.Random(0)
    for _ in range(20):
        said, right = (tuple(draw.sample("ABC", 3)) for _ in range(2))
        agreed = 0
        for a, b in itertools.combinations("ABC", 2):
            agreed += (said.index(a) < said.index(b)) == (right.index(a) < right.index(b))
        assert agreement(said, " > ".join(right), RANKING) == pytest.approx(agreed / 3)


def test_ratings_and_rubrics_agree_by_their_distance():
    assert agreement(2.0, 5, RATING) == pytest.approx(1 - 3 / 4)
    assert agreement((True, False), [True, True], RUBRIC) == pytest.approx(1 / 4)
    assert agreement((True, False), 1.0, RUBRIC) == pytest.approx(1 / 4)
    assert agreement(None, 5, RATING) == 0
    assert score((False, True), RUBRIC) == pytest.approx(3 / 4)
    assert score(("B", "C", "A"), RANKING) == 0
    assert score("C", VerdictForm("pair", choices="ABC", ties=True)) == 0.5


@pytest.mark.parametrize(
    ("form", "label"), [(PAIR, "C"), (RATING, 9), (RUBRIC, [True]), (RUBRIC, 2)]
)
def test_a_label_that_is_no_verdict_is_an_error_even_without_a_verdict(form, label):
    with pytest.raises(ValueError, match="label"):
        agreement(None, label, form)


def view(text: str, label: object, columns: dict[str, object]) -> RolloutView:
    prompt = PromptView("0", [1], "", label, None, "", columns)
    return RolloutView(prompt, [1], [True], [0.0], [0], "stop", 0, 0, text)


def test_the_reward_counts_judgements_without_a_verdict():
    columns = {"judgement": {"form": "pair", "choices": "AB"}}
    right = judgement(view("<answer>A</answer>", "A", columns))
    assert right == {"reward": 1.0, "parsed": 1.0, "first": 1.0}
    missing = judgement(view("who knows", "A", columns), unparsed=-1.0)
    assert missing == {"reward": -1.0, "parsed": 0.0, "first": 0.0}
    rated = {"judgement": {"form": "rating", "low": 1.0, "high": 5.0}}
    assert judgement(view("<answer>4</answer>", 5, rated))["reward"] == 0.75
    assert judgement(view("<answer>4</answer>", 5, rated), exact=True)["reward"] == 0
