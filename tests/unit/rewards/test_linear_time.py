"""The time of every built-in rule is linear in the text: repeated characters do not blow it up."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lightrft.rewards import REWARDS
from lightrft.rewards.rules.answers import answer_finder
from lightrft.rewards.rules.ifeval import CHECKS
from lightrft.rewards.rules.math import final_answer
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from tests.unit.rewards.test_rules import answer

SIZE = 20_000
"""Characters of a text. A linear rule needs milliseconds, a quadratic one many seconds."""
CPU_SECONDS = 3.0

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
)


@contextmanager
def budget(text: str) -> Iterator[None]:
    """Raise after ``CPU_SECONDS`` of this process, so that the load of the machine does not count."""

    def stop(*_: object) -> None:
        raise AssertionError(f"more than {CPU_SECONDS:g} s for {text[:40]!r}... of {len(text)}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def texts() -> Iterator[str]:
    for head, unit in itertools.product(HEADS, UNITS):
        yield head + unit * (SIZE // len(unit)) + ("x" if len(head) % 2 else "")


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
    tried = 0
    for text in texts():
        with budget(text):
            RULES[name](text)
        tried += len(text) >= SIZE // 2
    assert tried > 10


def test_every_rule_of_texts_is_fuzzed() -> None:
    lengths, instructions = {"length", "length_target"}, {"ifeval"}
    fuzzed = {name.rpartition(" ")[2] for name in RULES} | {"judgement"}
    assert set(REWARDS) - lengths - instructions <= fuzzed
    assert CHECKS
