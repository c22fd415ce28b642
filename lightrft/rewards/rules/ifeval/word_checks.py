"""Checks of IFEval about words, letters, case and length (arXiv 2311.07911, table 1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]
Check = Callable[[str, Options], bool]
"""Return whether a text follows an instruction with these arguments."""

WORD = re.compile(r"\w+")
CAPITALIZED = re.compile(r"\w+(?:(?:(?!\.\.\.|--|\*\*)[-./\\=|+*~^])++\w+)*")
"""A word with its points, hyphens and signs, as the tokens of nltk that IFEval counts: ``A/B``.

An apostrophe ends a word, so that ``NASA's`` has one.
"""


def holds(count: int, relation: str, bound: int) -> bool:
    """Return whether ``count`` has the ``relation`` to ``bound``.

    Args:
        count: The number that was counted.
        relation: ``at least`` or ``less than``.
        bound: The number of the instruction.

    Raises:
        ValueError: If the relation is another one.
    """
    if relation == "at least":
        return count >= bound
    if relation == "less than":
        return count < bound
    raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")


def has_keywords(text: str, options: Options) -> bool:
    """Return whether every keyword occurs, in any case."""
    lower = text.lower()
    return all(str(word).lower() in lower for word in options["keywords"])


def has_keyword_often(text: str, options: Options) -> bool:
    """Return whether a keyword occurs as often as asked."""
    count = text.lower().count(str(options["keyword"]).strip().lower())
    return holds(count, options["relation"], int(options["frequency"]))


def has_no_forbidden_word(text: str, options: Options) -> bool:
    """Return whether no forbidden word occurs as a whole word."""
    found = (
        re.search(rf"\b{re.escape(str(word))}\b", text, re.IGNORECASE)
        for word in options["forbidden_words"]
    )
    return not any(found)


def has_letter_often(text: str, options: Options) -> bool:
    """Return whether a letter occurs as often as asked, in any case."""
    count = text.lower().count(str(options["letter"]).strip().lower())
    return holds(count, options["let_relation"], int(options["let_frequency"]))


def has_number_of_words(text: str, options: Options) -> bool:
    """Return whether the number of words is as asked."""
    return holds(len(WORD.findall(text)), options["relation"], int(options["num_words"]))


def has_capital_words(text: str, options: Options) -> bool:
    """Return whether words in capitals are as frequent as asked."""
    count = sum(word.isupper() for word in CAPITALIZED.findall(text))
    return holds(count, options["capital_relation"], int(options["capital_frequency"]))


WORD_CHECKS: dict[str, Check] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": has_no_forbidden_word,
    "keywords:letter_frequency": has_letter_often,
    "length_constraints:number_words": has_number_of_words,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": lambda text, options: text.isupper(),
    "change_case:english_lowercase": lambda text, options: text.islower(),
    "punctuation:no_comma": lambda text, options: "," not in text,
}
"""Instruction id to its check."""
