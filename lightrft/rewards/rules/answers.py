"""Find the answer that a rule reads from a response: for people, and in one form for votes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from lightrft.config.reward import RewardTerm
from lightrft.rewards.rules.answer_extraction import after_thinking, visible_answer
from lightrft.rewards.rules.math import LONGEST, final_answer
from lightrft.rewards.rules.multiple_choice import picked
from lightrft.rewards.rules.number_parsing import plain, tidy
from lightrft.rewards.rules.verdicts import VerdictForm, verdict_place

LAST_CHARACTERS = 2000
"""Part of a response that is searched, from its end.

It is searched outside the workers of rewards, so nothing limits the time of a search.
"""
DECIMAL = re.compile(r"[+-]?\d{1,50}(?:\.\d{0,50})?")


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """A reader of the answers that a rule compares.

    Attributes:
        extract: Returns the answer as it is written, or None. Its arguments are the end of a
            response, the options of the rule, and the columns of the row.
        alike: Returns the form that equal answers share. None for a rule without votes.
    """

    extract: Callable[[str, Mapping[str, Any], Mapping[str, Any]], str | None]
    alike: Callable[[str], str | None] | None = None

    def read(self, text: str, options: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
        """Return the answer in the end of a response, or None.

        Args:
            text: The response.
            options: Options of the rule.
            columns: Columns of the row.
        """
        return self.extract(after_thinking(text)[-LAST_CHARACTERS:], options, columns)


def extracted(
    terms: Iterable[RewardTerm], text: str, columns: Mapping[str, Any]
) -> dict[str, str | None]:
    """Return what each reward term reads from a response; None for no answer.

    A term is left out if its function is no rule of ``READERS``.

    Args:
        terms: The terms of the response.
        text: The response, with its beginning in the prompt.
        columns: Columns of the row.
    """
    return {
        term.label: READERS[term.function].read(text, term.options, columns)
        for term in terms
        if term.function in READERS
    }


def answer_finder(
    function: str, options: Mapping[str, object]
) -> Callable[[str], str | None] | None:
    """Return a function from a response to its answer; None if the rule has no votes.

    Args:
        function: Name of the reward function.
        options: Its keyword arguments.
    """
    reader = READERS.get(function)
    if reader is None or reader.alike is None:
        return None
    return partial(_voted, reader, reader.alike, options)


def _voted(
    reader: AnswerReader,
    alike: Callable[[str], str | None],
    options: Mapping[str, Any],
    text: str,
) -> str | None:
    answer = reader.read(text, options, {})
    return None if answer is None else alike(answer)


def _mathematics(text: str, options: Mapping[str, Any], _: object) -> str | None:
    return final_answer(text, last_number=bool(options.get("last_number", False)))


def _equal_mathematics(answer: str) -> str | None:
    # The reward never accepts a longer answer.
    if len(answer) > LONGEST:
        return None
    written = re.sub(r"\s+", "", plain(tidy(answer))).casefold()
    # Commas between thousands only: 1,2 is a list.
    number = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", written)
    return str(Fraction(number)) if DECIMAL.fullmatch(number) else written


def _choice(text: str, options: Mapping[str, Any], _: object) -> str | None:
    return picked(text, str(options.get("choices", "ABCD")))


def _verdict(text: str, _: object, columns: Mapping[str, Any]) -> str | None:
    try:
        form = VerdictForm.of(columns)
    except (TypeError, ValueError):  # not a column that ``data.judgement`` writes
        return None
    # Nothing limits the time that a pattern of the user takes.
    return None if form.pattern else verdict_place(text, form)


READERS: dict[str, AnswerReader] = {
    "math": AnswerReader(_mathematics, _equal_mathematics),
    "multiple_choice": AnswerReader(_choice, str),
    "exact_match": AnswerReader(
        lambda text, *_: visible_answer(text), lambda answer: " ".join(answer.casefold().split())
    ),
    "judgement": AnswerReader(_verdict),
}
"""Rule to what it reads from a response."""
