"""The time of every built-in rule is linear in the text: repeated characters do not blow it up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from lightrft.rewards import REWARDS
from lightrft.rewards.rules.answers import answer_finder
from lightrft.rewards.rules.ifeval.checks import LANGUAGE_CHECKS
from lightrft.rewards.rules.ifeval.rule import CHECKS
from lightrft.rewards.rules.math import final_answer
from lightrft.rewards.rules.number_parsing import plain, quantity, tidy
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from tests.unit.rewards.test_ifeval import TABLE, graded
from tests.unit.rewards.test_rules import answer

SIZE = 20_000
"""Characters of a text."""
SHORTER = 4
"""A text of a quarter of the size takes a quarter of the time where time is linear, a sixteenth where it is quadratic."""

HEADS = (
    "",
    "The answer",
    "The answer is ",
    "**",
    "\\boxed{",
    "<answer>",
    "A",
    "[[",
    "1",
    "I ",
    "0.",
)
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
    *("<", "<<", ">", "***", "\n\n", "* ", "- ", "P.", "Section ", "!", "- a\n", "[a]", "A-"),
    *("答案", "答案是", "是", "，", "万", "选", "respuesta es ", "я"),
    *(
        "is correct. ",
        "A is correct ",
        "I choose ",
        "so, ",
        "answer - ",
        "likely ",
        "not A but ",
        "it is ",
        "it's A",
        "A is the ",
    ),
    *("0.3", "0.3\\overline{3}", "1,234", "...", ".33...", "≈", "about ", "no solution", "12_2"),
    *("P. ", "A/", "A-.", "- \n", "*\n"),
    *("\\color{a}{", "\\color", "\\color[", "\\fcolorbox{", "\\bm ", "^ ", "12th", "she has "),
)


def texts(size: int, heads: Sequence[str] = HEADS) -> Iterator[str]:
    for head, unit in itertools.product(heads, UNITS):
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


OPTIONS = {name: rows[0][0] for name, rows in TABLE.items()} | {
    name: {"language": "en", "num_sentences": 3, "relation": "at least"} for name in LANGUAGE_CHECKS
}
"""The arguments of every instruction of IFEval."""


def instruction(name: str) -> Callable[[str], object]:
    return lambda text: CHECKS[name](text, OPTIONS[name])


def verdict(place: str) -> Callable[[str], object]:
    return lambda text: read_verdict(text, VerdictForm("rating", place))


def finder(name: str) -> Callable[[str], object]:
    found = answer_finder(name, {})
    assert found is not None
    return found


NORMALIZED = {"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}
RULES: dict[str, Callable[[str], object]] = {
    "math": lambda text: final_answer(text, last_number=True),
    "form of math": lambda text: quantity(plain(tidy(text))),
    "multiple_choice": rule("multiple_choice"),
    "exact_match": rule("exact_match", **NORMALIZED),
    "format": rule("format"),
    "ifeval": lambda text: graded(text, list(TABLE), [OPTIONS[name] for name in TABLE]),
    **{name: instruction(name) for name in CHECKS},
    **{f"vote of {name}": finder(name) for name in ("math", "multiple_choice", "exact_match")},
    **{
        f"verdict in {place}": verdict(place)
        for place in ("answer", "boxed", "brackets", "json", "number")
    },
}


@pytest.mark.parametrize("name", RULES)
def test_a_long_text_of_repeated_characters_takes_linear_time(
    name: str, sentence_model: None
) -> None:
    # These take 10 ms and more for a text, and begin in the same way behind every head.
    heads = HEADS[1:2] if name in {*LANGUAGE_CHECKS, "ifeval", "form of math"} else HEADS
    pairs = list(zip(texts(SIZE, heads), texts(SIZE // SHORTER, heads), strict=True))
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


def test_every_rule_and_every_instruction_is_fuzzed() -> None:
    lengths = {"length", "length_target"}
    fuzzed = {name.rpartition(" ")[2] for name in RULES} | {"judgement"}
    assert set(REWARDS) - lengths <= fuzzed
    assert set(CHECKS) <= set(RULES)
