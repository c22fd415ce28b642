"""Reward a response that picks the correct one of several lettered choices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import (
    ANSWER_IS,
    UNSPACED,
    after_thinking,
    in_tags,
    last_box,
    reference_answer,
)
from lightrft.rewards.sandbox.rollout_view import RolloutView

# Quantifiers are possessive or bounded, so that the time is linear in the text.
_OPENING = r"(?:\*\*|__|[`“（\ufeff\u200b]|\$|\\(?:text|textbf|textrm|textit|mathrm|mathbf|boldsymbol)\s*+\{|[(\[\"'\s{])*+"
_CLOSING = r"(?:\*\*|__|[`”）$)\]\"'}]){0,8}+"
_BEFORE = 80  # characters before a conclusion that may deny it
_SUBJECT = (
    r"(?:(?:the|my|correct|right|best|final|option|choice|answer|statement)\s+){0,4}[(\[\"'*_`$]*\Z"
)
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|(?<!no )(?<!out )doubt|neither|nor)|n['’]t)\s+(?:(?:think|believe|say|claim|mean|sure"
    r"|certain|clear|true|agree|see)\s+)?(?:(?:that|if|whether|how|why)\s+)?" + _SUBJECT + "|"
    r"\b(?:if|whether|unless|suppose|supposing|assume|assuming|either|both"
    r"|(?:false|wrong|untrue|unlikely|impossible)\s+that)\s+(?:that\s+)?" + _SUBJECT + "|"
    r"\b(?:wrong|incorrect|false|worst|previous|other)[\s_-]*\Z",
    re.IGNORECASE,
)
"""The end of a text after which a statement is no conclusion."""
_BEGINS = re.compile(
    r"(?:\A|[.!?:;,()\n—-]|\b(?:option|choice|answer|letter|that|think|believe|so|then|thus|hence"
    r"|therefore|and|but|because|since|only|why|wait|no|actually|while))\s*[(\[\"'*_`$]*\Z",
    re.IGNORECASE,
)
"""The end of a text after which a letter is no part of a name, as in "Vitamin B"."""
_CORRECTS = re.compile(
    r"\b(?:no|wait|actually|instead|so|thus|hence|therefore)\b[,:]?\s*(?:the\s+)?"
    r"(?:(?:option|choice|answer)\s+)?[(\[\"'*_`$]*\Z",
    re.IGNORECASE,
)
_REASON = (
    "because|since|as|so|for|and|but|or|not|by|due|given|which|where|when|with|thus|hence|therefore"
    "|rather than|instead|based|according|meaning|over|from|in|at|on|to|while|i|we|it|they|you|then"
    "|though|again|here|after|however|indeed|only|also|too"
)
"""Words after a chosen letter. No article stands before them."""
_ARTICLE = re.compile(
    rf"\s++(?!(?:{_REASON}|is|was|are|would|could|should|must|can|has|if|unless)\b)[a-z]"
)
"""What follows a letter that is an article or a pronoun, as in "A good thing"."""
_SUBJECT_OF_MORE = re.compile(rf"\s++(?!(?:{_REASON})\b)[a-z]")
"""What follows a letter of which more is said, as in "Option B is too large"."""
_ENDS = re.compile(_CLOSING + r"(?:[ \t]*+(?:\Z|\n)|[.;](?!\S)|,?\s(?:because|since|not)\b)")
"""What follows a letter in lower case that is no variable and no article."""


_ADVERB = (
    r"(?:(?:definitely|clearly|certainly|surely|obviously|undoubtedly|probably|indeed|simply|actually|therefore|thus"
    r"|hence|then|finally|(?:most\s++)?likely)\s++)?+"
)
_COPULA = r"is|['’]s|(?:would|must|should|will)\s++be|(?:has|seems|appears)\s++to\s++be|=>|→|[:=]|(?<=\s)[-–—]++>?+(?=\s)"
_SO = (
    r"\b(?:(?:so|hence|thus|therefore|consequently|accordingly|ultimately|definitely|in\s++conclusion)[,:]?+\s"
    r"|(?:conclusion|solution|response|result|verdict|final|correct|selected|selection|letter)[*_]*+\s*+:)\s*+"
)
"""What stands before a letter that is a sentence or a line by itself."""


@REWARDS.register("multiple_choice", needs={"label"}, kind="outcome")
def multiple_choice(rollout: RolloutView, *, choices: str = "ABCD") -> float:
    """Return 1 if the response picks the label's letter, else 0.

    The last explicit conclusion counts, such as "the answer is B", "B is the correct answer", "I
    choose B" and "hence, B". Without one, a letter in the last line or alone in the first one
    counts, then "B is correct" or "it is B".

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
    text = after_thinking(text)
    tagged = in_tags(text)
    text = text if tagged is None else tagged
    box = last_box(text)
    if box is not None:
        _, content = box
        return _marked_letter(content or "", choices)
    whole = _only_letter(text, choices) if tagged is None else _marked_letter(text, choices)
    if whole:
        return whole
    sure, unsure = [], []
    for place, letter, is_sure in _conclusions(text, choices):
        (sure if is_sure else unsure).append((place, letter))
    if sure:
        return max(sure)[1]
    # "B is correct" may be about one of several statements.
    only = {letter for _, letter in unsure}
    return _letter_line(text, choices) or (only.pop() if len(only) == 1 else None)


def _conclusions(text: str, choices: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the place and the letter of every conclusion, and whether it is about the question."""
    cued, correct, emphasized = _said(choices)
    for pattern in (cued, correct):
        for found in pattern.finditer(text):
            before = text[max(found.start() - _BEFORE, 0) : found.start()]
            is_cued = pattern is cued
            if _DENIED.search(before) or not (
                is_cued or (_BEGINS.search(before) and not _joined(before, choices))
            ):
                continue
            letter = _cased(found, choices) if is_cued else found["letter"]
            is_sure = found["it"] is None if is_cued else found["answer"] is not None
            if letter:
                place = found.start("letter")
                yield place, letter, is_sure or _CORRECTS.search(before) is not None
    if found := emphasized.search(text.rstrip()[-_BEFORE:]):
        yield len(text), found[1], True


def _cased(found: re.Match[str], choices: str) -> str | None:
    """Return the letter of a match, in the case of the choices; ``None`` for another word.

    The match ignores case, so it also finds the article in "the answer is a number".
    """
    letter, text = found["letter"], found.string
    start, end = found.span("letter")
    if found["so"] and not _ENDS.match(text, end):
        return None
    if letter in choices:
        if found["foreign"]:
            return letter
        more = _SUBJECT_OF_MORE if not found["copula"] else _ARTICLE if letter in "AI" else None
        return None if more and more.match(text, end) else letter
    letter = letter.swapcase()
    if letter not in choices or not found["copula"]:
        return None
    is_marked = text[start - 1] in "([\"'*`“" and text[end : end + 1] in tuple(")]\"'*`”")
    return letter if is_marked or _ENDS.match(text, end) else None


def _joined(before: str, choices: str) -> bool:
    """Return whether a text ends with another choice and a conjunction, as in "A or"."""
    pattern = rf"\b[{re.escape(choices)}]\W{{0,4}}(?:(?:or|and|nor)\s|[/&])\W*\Z"
    return re.search(pattern, before) is not None


@lru_cache(maxsize=64)
def _said(choices: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of "the answer is (B)" and ``故选B``, of "B is correct", and of a final
    ``**B**``. None finds "the answer is A or B".
    """
    letters = re.escape(choices)
    modal = r"(?:(?:would|will|shall|must|should|have\s++to|am|are)\s++)?+"
    cued = re.compile(
        r"(?:(?:\bans\b\.?+|(?:answer|choice|option|(?:correct|right)\s++(?:one|letter))\b(?:\s++(?:choice|option)\b)?+)"
        rf"[*\"'”]*+\s*+(?P<copula>{_COPULA})?+\s*+[:=]?+\s*+{_ADVERB}(?:(?:option|choice)\s++)?+"
        rf"|(?P<foreign>{ANSWER_IS}[\s:：]*+|(?<!不)选[择项]?+[\s:：]*+)"
        rf"|(?P<so>{_SO}(?:(?:option|choice)\s++)?+)"
        rf"|\b(?:I|we)(?:['’](?:d|ll|m|re))?+\s++{modal}{_ADVERB}(?:choose|chose|pick|select|say|go(?:ing)?+\s++(?:with|for)"
        r"|(?:opt|vote)(?:\s++for)?+|settle\s++on)\s++(?:(?:answer|option|choice)\s++)?+"
        rf"|\bnot\s++[(*\[]{{0,3}}(?-i:[{letters}])[)*\]]{{0,3}},?+\s++but\s++(?:(?:rather|instead)\s++)?+"
        rf"|(?P<it>\bit(?:['’]s|\s++is|\s++must\s++be)\s++{_ADVERB}(?:(?:option|choice)\s++)?+))"
        rf"{_OPENING}(?P<letter>[{letters}])(?!(?!__)(?:(?![{UNSPACED}])\w|'\w))(?!{_CLOSING}\s*+(?:[?？错]|不[对是正符]))"
        rf"(?!\W*+(?<=\s)(?:or|and)\s++[(\[]?[{letters}]\b)"
        rf"(?![)\]\s]*+[或和与、]\s*+[(\[（]?(?-i:[{letters}]))"
        # "B, C", "B/C" and "B & C", but not "B, A is wrong".
        rf"(?![)\]\s\"']*+[,/&]\s*+[(\[\"']?(?-i:[{letters}])[)\]\"']?+\s*+(?:\Z|[.,/&;\]]|(?:or|and)\b))",
        re.IGNORECASE,
    )
    right = r"(?:correct|right|best|only|most\s+(?:accurate|appropriate|likely))"
    answer = r"(?:answer|choice|option|one|response|solution|alternative)"
    correct = re.compile(
        rf"(?<![\w'’-])(?P<letter>[{letters}]){_CLOSING}[ \t]{{1,4}}(?:is|must\s+be|should\s+be)\s+"
        rf"(?:(?P<answer>(?:the|my)\s+(?:{right}\s+){{0,2}}{answer})\b"
        r"|(?:(?:clearly|therefore|thus|indeed|definitely)\s+)?(?:correct|right))"
        r"(?=[*_\"')]{0,4}\s*(?:[.,;:!)]|\Z|\n|(?:because|since|as|for|here)\b))"
        r"(?!,?\s*(?:but|only|if|unless|except)\b)"
    )
    emphasized = re.compile(rf"(?:\A|[.!?:;\n])\s*\*\*\(?([{letters}])[).]*\*\*[.\s]*\Z")
    return cued, correct, emphasized


def _letter_line(text: str, choices: str) -> str | None:
    """Return the letter of the last line, unless it is one of several lines that list choices.

    The letter of the first line counts if no other line is a letter.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    letters = [_only_letter(line, choices) for line in lines]
    alone, _, _ = _alone(choices)
    is_alone = [alone.fullmatch(line) is not None for line in lines]
    if not lines or letters[-1] is None:
        is_first = is_alone[:1] == [True] and not any(letters[1:])
        return letters[0] if is_first else None
    same = [
        letter
        for letter, form in zip(letters, is_alone, strict=True)
        if letter and form == is_alone[-1]
    ]
    if len(set(same)) == 1:
        return same[-1]
    # "B) Paris" after a list of all choices repeats its choice.
    is_repeated = len(same) == len(set(same)) + 1 and same.count(same[-1]) == 2
    return same[-1] if is_repeated and not is_alone[-1] else None


def _marked_letter(text: str, choices: str) -> str | None:
    """Return the letter if ``text`` is one, in any case. ``text`` is marked as the answer."""
    found = _only_letter(text, choices)
    if found is None and (found := _only_letter(text, choices.swapcase())):
        found = found.swapcase()
    return found


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
