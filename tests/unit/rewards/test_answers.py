"""The answer that a rule compares, in a form that equal answers share."""

from __future__ import annotations

import pytest

from lightrft.config.reward import RewardTerm
from lightrft.rewards.rules.answers import (
    LAST_CHARACTERS,
    READERS,
    AnswerReader,
    answer_finder,
    extracted,
)


def answer(text: str, rule: str = "math", **options: object) -> str | None:
    finder = answer_finder(rule, options)
    assert finder is not None
    return finder(text)


@pytest.mark.parametrize(
    "same",
    [
        ("\\boxed{7}", "#### 7.0", "The answer is $07$."),
        ("\\boxed{1,000}", "\\boxed{1000}", "\\boxed{1{,}000}"),
        ("\\boxed{ x + 1 }", "<answer>x+1</answer>"),
        ("\\boxed{\\dfrac12}", "\\boxed{\\frac12}"),
    ],
)
def test_equal_answers_are_one_text(same: tuple[str, ...]) -> None:
    assert len({answer(text) for text in same}) == 1
    assert answer(same[0]) is not None


def test_different_answers_are_different_texts() -> None:
    texts = ["\\boxed{1,2}", "\\boxed{12}", "\\boxed{-12}", "\\boxed{12x}", "\\boxed{1.2}"]
    assert len({answer(text) for text in texts}) == len(texts)


def test_a_response_without_an_answer_has_none() -> None:
    assert answer("I do not know what to say.") is None
    assert answer("\\boxed{}") is None
    assert answer("<think>\\boxed{3}") is None
    assert answer("It is 3 or 4", last_number=True) == "4"


def test_choices_and_texts_are_found_by_their_own_rules() -> None:
    assert answer("The answer is (B).", "multiple_choice") == "B"
    assert answer("The answer is (F).", "multiple_choice") is None
    assert answer("The answer is (F).", "multiple_choice", choices="ABCDEF") == "F"
    assert answer("<answer> The  Cat</answer>", "exact_match") == "the cat"


def test_a_rule_that_compares_no_answer_has_no_finder() -> None:
    assert answer_finder("format", {}) is None
    assert answer_finder("my.module:reward", {}) is None


@pytest.mark.parametrize("rule", READERS)
def test_only_the_end_of_a_response_is_searched_so_that_no_response_takes_long(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("answer" + " " * 200_000, "<answer>" * 50_000, "\\boxed{" * 50_000)
    searched: list[str] = []
    watched = AnswerReader(lambda text, *_: searched.append(text), str)
    monkeypatch.setitem(READERS, rule, watched)
    assert [answer(text, rule) for text in texts] == [None] * 3
    assert searched == [text[-LAST_CHARACTERS:] for text in texts]


def test_an_answer_before_the_end_of_a_response_is_not_found() -> None:
    assert answer("\\boxed{3}" + "x" * LAST_CHARACTERS) is None


def test_people_see_the_answer_as_it_is_written_under_the_name_of_its_term() -> None:
    terms = [
        RewardTerm(function="math", name="sum", options={"last_number": True}),
        RewardTerm(function="exact_match"),
        RewardTerm(function="format"),
        RewardTerm(function="own.py:reward"),
    ]
    assert extracted(terms, "it is 1/2 or  0.50", {}) == {
        "sum": "0.50",
        "exact_match": "it is 1/2 or  0.50",
    }
    assert extracted(terms[:1], "no idea", {}) == {"sum": None}


def test_the_verdict_of_a_judgement_is_read_by_the_form_of_its_row() -> None:
    terms = [RewardTerm(function="judgement")]
    boxed = {"judgement": {"form": "rating", "verdict": "boxed"}}
    assert extracted(terms, "so \\boxed{7}", boxed) == {"judgement": "7"}
    assert extracted(terms, "<answer>B</answer>", {}) == {"judgement": "B"}
    assert extracted(terms, "so \\boxed{7}", {"judgement": 3}) == {"judgement": None}
    assert answer_finder("judgement", {}) is None
