"""Reward a response that picks the correct one of several lettered choices."""

from __future__ import annotations

import re
from functools import lru_cache

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import (
    ANSWER_IS,
    UNSPACED,
    answer_part,
    last_box,
    reference_answer,
)
from lightrft.rewards.sandbox.rollout_view import RolloutView


@REWARDS.register("multiple_choice", needs={"label"}, kind="outcome")
def multiple_choice(rollout: RolloutView, *, choices: str = "ABCD") -> float:
    """Return 1 if the response picks the label's letter, else 0.

    Args:
        choices: The letters in order. A label may also be an index into them, from 0.

    Raises:
        ValueError: If the label is not one of the choices.
    """
    gold = reference_answer(rollout)
    # Not isinstance: True is an int, too.
    if type(gold) is int:
        if not 0 <= gold < len(choices):
            raise ValueError(f"label {gold} is not a position among the choices {choices!r}")
        right: str | None = choices[gold]
    else:
        right = _only_letter(str(gold), choices)
    if right is None:
        raise ValueError(f"label {gold!r} is not one of the choices {choices!r}")
    return float(picked(rollout.turn, choices) == right)


def picked(text: str, choices: str = "ABCD") -> str | None:
    """Return the letter of ``choices`` that ``text`` finally picks; ``None`` unless exactly one."""
    text = answer_part(text)
    box = last_box(text)
    if box is not None:
        _, content = box
        return _only_letter(content or "", choices)
    whole = _only_letter(text, choices)
    if whole:
        return whole
    found = [match.group(1) for match in _said(choices).finditer(text)]
    # The pattern ignores case, so it also finds the article in "the answer is a number".
    found = [letter for letter in found if letter in choices]
    if found:
        return found[-1]
    lines = [_only_letter(line, choices) for line in text.strip().splitlines()]
    return lines[-1] if len(set(lines) - {None}) == 1 else None


_OPENING = r"(?:\*\*|__|[`“（\ufeff\u200b]|\$|\\(?:text|textbf|textrm|textit|mathrm|mathbf|boldsymbol)\s*+\{|[(\[\"'\s{])*+"
"""Marks before a letter. Quantifiers are possessive, so that the time is linear in the text."""


@lru_cache(maxsize=64)
def _said(choices: str) -> re.Pattern[str]:
    """Return the pattern of "the answer is (B)" and ``故选B``, but not of "the answer is A or B"."""
    letters = re.escape(choices)
    return re.compile(
        r"(?:(?:answer|choice|option)\b(?:\s++(?:choice|option)\b)?+\**+\s*+"
        r"(?:is|(?:would|must|should)\s++be|[:=])?+\s*+[:=]?+\s*+(?:(?:option|choice)\s++)?+"
        rf"|{ANSWER_IS}[\s:：]*+|选[择项]?+[\s:：]*+)"
        rf"{_OPENING}([{letters}])(?!(?!__)(?:(?![{UNSPACED}])\w|'))"
        rf"(?!\W*+(?<=\s)(?:or|and)\s++[(\[]?[{letters}]\b)"
        rf"(?![)\]\s]*+[或和与、]\s*+[(\[（]?(?-i:[{letters}]))"
        # "B, C", "B/C" and "B & C", but not "B, A is wrong".
        rf"(?![)\]\s]*+[,/&]\s*+[(\[]?(?-i:[{letters}])[)\]]?+\s*+(?:\Z|[.,/&;]|(?:or|and)\b))",
        re.IGNORECASE,
    )


@lru_cache(maxsize=64)
def _alone(choices: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a letter alone, of a letter with its choice, and of a second one."""
    letters = re.escape(choices)
    closing = r"(?:\*\*|__|[`”）\ufeff\u200b]|\$|[)\]\"'\s}.:])*+"
    space = r"(?:\s|\\[ ,;:!]|\\q?quad(?![A-Za-z])|~)"
    return (
        re.compile(rf"{_OPENING}([{letters}]){closing}"),
        re.compile(
            rf"{_OPENING}([{letters}])\s*+[)\].:]++(?:(?:\}}|\*\*|\$|\s)*+(?<=[}}\s])|(?={space}))"
            rf"{space}*+(\S.*)\Z",
            re.DOTALL,
        ),
        re.compile(rf"(?:^|[\s{{])[(\[]?[{letters}](?:[)\].:]\s|[)\]]\}}|\}})"),
    )


def _only_letter(text: str, choices: str) -> str | None:
    r"""Return the letter if ``text`` is one, e.g. ``B``, ``(B)``, ``B.``, ``**B**``, ``\text{B}``.

    ``B) text`` and ``\textbf{(B)}\ text`` count too.
    """
    alone, titled, further = _alone(choices)
    text = text.strip()
    if found := alone.fullmatch(text):
        return found.group(1)
    found = titled.match(text)
    # A second letter with a bracket or point: the text lists the choices.
    return found.group(1) if found and not further.search(found.group(2)) else None
