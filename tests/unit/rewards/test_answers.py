"""The answer that a rule compares, in a form that equal answers share."""

from __future__ import annotations

import pytest

from lightrft.rewards.rules.answers import FINDERS, LAST_CHARACTERS, answer_finder


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


@pytest.mark.parametrize("rule", FINDERS)
def test_only_the_end_of_a_response_is_searched_so_that_no_response_takes_long(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("answer" + " " * 200_000, "<answer>" * 50_000, "\\boxed{" * 50_000)
    searched: list[str] = []
    monkeypatch.setitem(FINDERS, rule, lambda text, options: searched.append(text))
    assert [answer(text, rule) for text in texts] == [None] * 3
    assert searched == [text[-LAST_CHARACTERS:] for text in texts]


def test_an_answer_before_the_end_of_a_response_is_not_found() -> None:
    assert answer("\\boxed{3}" + "x" * LAST_CHARACTERS) is None
