"""The time of every built-in rule is linear in the text: repeated characters do not blow it up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from lightrft.rewards import REWARDS
from lightrft.rewards.rules.answers import answer_finder
from lightrft.rewards.rules.ifeval.rule import CHECKS
from lightrft.rewards.rules.math import final_answer
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from tests.unit.rewards.test_rules import answer

SIZE = 20_000
"""Characters of a text."""
SHORTER = 4
"""A text of a quarter of the size takes a quarter of the time where time is linear, a sixteenth where it is quadratic."""

HEADS = ("", "The answer", "The answer is ", "**", "\\boxed{", "<answer>", "A", "[[", "1")
UNITS = (
    *(" ", "\n", "*", "(", "[", "[[", "]]", "$", "{", "}", ")", "\\", "a", "A", "1", ",", ".", ":"),
    *('"', "'", "\\text{", "\\boxed{", "\\boxed ", "<answer>", "</answer>", "<think>", "</think>"),
    *(
        "answer ",
        "answer is ",
        "answer:",
        "is ",
        "A ",
        "(A) ",
        "A or ",
        "1,",
        "1 ",
        "1/",
        "-",
        "=\n",
    ),
    *('{"a":', "\t", "%", "option ", "\u00a0", "\\,", "\\frac", "####", " because", ". ", "~"),
    *("答案", "答案是", "是", "，", "万", "选", "respuesta es ", "я"),
)


def texts(size: int) -> Iterator[str]:
    for head, unit in itertools.product(HEADS, UNITS):
        yield head + unit * (size // len(unit)) + ("x" if len(head) % 2 else "")


def seconds(rule: Callable[[str], object], text: str) -> float:
    """CPU seconds, which the load of the machine hardly changes."""
    start = time.process_time()
    rule(text)
    return time.process_time() - start


def grows_faster_than_the_text(rule: Callable[[str], object], long: str, short: str) -> bool:
    """Whether the time of ``long`` is twice what ``short`` allows, in each of five measurements."""
    if seconds(rule, long) < 0.02:
        return False
    return all(seconds(rule, long) > 2 * SHORTER * seconds(rule, short) for _ in range(5))


def rule(name: str, label: str = "A", **options: bool) -> Callable[[str], object]:
    return lambda text: REWARDS[name](answer(text, label), **options)


def verdict(place: str) -> Callable[[str], object]:
    return lambda text: read_verdict(text, VerdictForm("rating", place))


def finder(name: str) -> Callable[[str], object]:
    found = answer_finder(name, {})
    assert found is not None
    return found


NORMALIZED = {"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}
RULES: dict[str, Callable[[str], object]] = {
    "math": lambda text: final_answer(text, last_number=True),
    "multiple_choice": rule("multiple_choice"),
    "exact_match": rule("exact_match", **NORMALIZED),
    "format": rule("format"),
    **{f"vote of {name}": finder(name) for name in ("math", "multiple_choice", "exact_match")},
    **{
        f"verdict in {place}": verdict(place)
        for place in ("answer", "boxed", "brackets", "json", "number")
    },
}


@pytest.mark.parametrize("name", RULES)
def test_a_long_text_of_repeated_characters_takes_linear_time(name: str) -> None:
    pairs = list(zip(texts(SIZE), texts(SIZE // SHORTER), strict=True))
    assert len(pairs) > 10 and all(len(long) >= SIZE // 2 for long, _ in pairs)
    slow = [
        long[:40] for long, short in pairs if grows_faster_than_the_text(RULES[name], long, short)
    ]
    assert slow == []


def test_a_rule_of_quadratic_time_is_noticed() -> None:
    def quadratic(text: str) -> int:
        return sum(letter == "a" for _ in range(0, len(text), 50) for letter in text)

    long, short = "," * SIZE, "," * (SIZE // SHORTER)
    assert grows_faster_than_the_text(quadratic, long, short)
    assert not grows_faster_than_the_text(
        lambda text: [ord(letter) for letter in text * 50], long, short
    )


def test_every_rule_of_texts_is_fuzzed() -> None:
    lengths, instructions = {"length", "length_target"}, {"ifeval"}
    fuzzed = {name.rpartition(" ")[2] for name in RULES} | {"judgement"}
    assert set(REWARDS) - lengths - instructions <= fuzzed
    assert CHECKS
