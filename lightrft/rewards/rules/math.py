"""Reward a final answer that is mathematically equal to the label.

Plain numbers are compared exactly and directly. Everything else is compared by math-verify without
its timers, since the worker enforces the deadline of a call. Nothing that a model writes is
evaluated as Python.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from lightrft.rewards.registry import REWARDS, OverBudget, ungraded_beyond
from lightrft.rewards.rules.answer_extraction import (
    ANSWER_IS,
    after_thinking,
    content_of,
    in_tags,
    last_box,
    reference_answer,
)
from lightrft.rewards.rules.number_parsing import (
    maths_and_words,
    plain,
    quantity,
    same_quantity,
    tidy,
    unit_of,
    units_differ,
    written_out,
)
from lightrft.rewards.sandbox.results import UNGRADED
from lightrft.rewards.sandbox.rollout_view import RolloutView

CPU_SECONDS = 1.2  # of one call; nearly all calls need a hundredth of it
LONGEST = 1000  # characters of an answer that is worth parsing
DEEPEST = 40  # nested brackets: the parser's time and recursion grow fast with them
MOST_TERMS = 50_000  # of an expanded power of a sum
# Of a number that is worth computing: towers of powers would use up the deadline.
MOST_DIGITS = 5000
_MARK = re.compile(r"####[ \t]*(.*)")
# Possessive, so that the time is linear in the text.
_SAID = re.compile(
    r"(?:\banswer\**+\s*+(?:is|are|equals|(?:would|must|should)\s++be|=|:)"
    rf"|{ANSWER_IS})[\s:：*]*+",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"\.(?=[*$]*+(?:\s|\Z))|;\s|\n|[。；！]|，(?!\d)"
    r"|(?:です|である|だ|입니다|이다)(?=[*$.。]*+(?:\s|\Z))"
    r"|\s(?:--|—)\s|,?\s\(?(?:because|since|so|as|which|where|but|thus|hence|therefore|meaning|given\sthat)\b"
    r"|,\s(?:da|denn|weil|porque|ya\sque|car|parce|perché|так\sкак|потому)\b"
    r"|,\s(?:and\s(?:so|thus|hence|therefore)|(?:and\s)?not\s|i\.e\.)|\s(?:rather\sthan|instead\sof)\s",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?|-?\.\d+")
_NAMED = re.compile(r"\A[A-Za-z]{2}[A-Za-z ]*+[=:]\s*+(?=[^=,]+\Z)")  # such as "Area ="
_POINTS = re.compile(r"\\(angle|measuredangle|triangle)\s*\{?\s*([A-Z]{2,})")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(?!10(?!\d))(\d+)")  # ten is the base of other numbers
_DATE = re.compile(r"\d{4}([-/])\d{1,2}\1\d{1,2}|\d{1,2}([-/])\d{1,2}\2\d{4}")
_REVERSED = re.compile(r"\A([^=,A-Za-z]++)=\s*+([A-Za-z])\Z")  # such as "5 = x"
_DOTS = re.compile(r"\\[lcd]?dots[a-z]?(?![A-Za-z])|…|\.{3}")
_STATED = re.compile(
    r"\A(?!.*(?:\b(?:not|never|no)\b|n['’]t))\D*?\b(?:is|are|was|were|equals|has|have|had"
    r"|(?:make|earn|get|need|spend|pay|cost|save|take)s?)\s++(?=[-+.$€£¥\\(]*(?:\d|frac|sqrt))",
    re.IGNORECASE,
)
"""Words before the number of a sentence, such as "Janet has"."""
_VALUE = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=([^=]+)")
_ASSIGNED = r"\(?([A-Za-z])\)?\s*=\s*(?=[^=])"


@REWARDS.register("math", needs={"label"}, kind="outcome")
@ungraded_beyond(CPU_SECONDS)
def math_reward(
    rollout: RolloutView, *, last_number: bool = False, evaluated: bool = False
) -> float | dict[str, float]:
    r"""Return 1 if the final answer equals the prompt's label, else 0.

    Without a label, the prompt's reference is used. The final answer is the last ``\boxed{}`` or
    ``####`` after any thinking, whichever comes later. Without one it is the text after "the answer
    is", ``答案是`` or the like in a few other languages. Else it is the whole response if that is a
    single expression. A response that cannot be compared within ``CPU_SECONDS`` or the worker's
    memory counts as wrong, with the term ``ungraded``.

    A unit next to a number does not change it: ``12 apples`` and ``12个`` are 12. Words such as
    ``dozen``, ``squared``, ``half`` or ``more`` do, and so does a second quantity, as in ``6 hours
    and 30 minutes``. ``about 12`` is 12. ``1010_2`` equals only numbers with the same base.

    Args:
        last_number: As a last resort, take the last number of the response.
        evaluated: The answer to a label that is a number must end in a number. Otherwise ``41 +
            37`` equals the label ``78``, and a model may learn to repeat the question.

    Raises:
        ValueError: If the label is not mathematics, or cannot be read within ``CPU_SECONDS``.
    """
    gold = gold_text(reference_answer(rollout))
    try:
        _check_gold(gold)
    except OverBudget:
        _forget()
        raise ValueError(f"label {gold!r} takes more than {CPU_SECONDS:g} s to read") from None
    try:
        answer = final_answer(rollout.turn, last_number=last_number)
        if answer is None or (evaluated and _is_number(gold) and not _ends_in_number(answer)):
            return 0.0
        return float(equal(gold, answer))
    except OverBudget:
        _forget()
        raise
    except Exception:
        # The label can be read, so the answer cannot. Sympy and its parser raise any exception.
        _forget()
        return {"reward": 0.0, UNGRADED: 1.0}


def _is_number(text: str) -> bool:
    return quantity(plain(tidy(text))) is not None


def _ends_in_number(answer: str) -> bool:
    """Return ``True`` if ``answer``, or its right side if it is an equation, is a number."""
    return _is_number(answer.rpartition("=")[2])


def _forget() -> None:
    """Clear the caches, so that memory of a huge expression is not charged to the next response."""
    from sympy.core.cache import clear_cache

    _parsed.cache_clear()
    clear_cache()


def warm_up() -> None:
    """Load the computer-algebra system, which takes seconds, before the first deadline starts."""
    equal("x+1", "1+x")


def final_answer(text: str, *, last_number: bool = False) -> str | None:
    """Return the final answer in ``text``, if there is one."""
    text = after_thinking(text)
    tagged = in_tags(text)
    text = (text if tagged is None else tagged).strip()
    marks = [(found.start(), found.group(1)) for found in _MARK.finditer(text)]
    box = last_box(text)
    if box is not None:
        marks.append(box)
    if marks:
        # A mark without content is a wrong answer. What comes before it does not count.
        _, answer = max(marks, key=itemgetter(0))
        return content_of(_stated(answer)) if answer else None
    return _unmarked_answer(text, tagged is not None, last_number)


def _unmarked_answer(text: str, tagged: bool, last_number: bool) -> str | None:
    r"""Return the final answer of a text without ``\boxed{}`` and ``####``.

    Args:
        text: The text.
        tagged: The text is the content of an ``<answer>`` tag.
        last_number: As a last resort, take the last number.
    """
    said = _said(text)
    if said is not None:
        return said or None
    is_one_line = bool(text) and "\n" not in text
    if is_one_line and (tagged or _is_expression(text)):
        return text
    numbers = _NUMBER.findall(text) if last_number else []
    return numbers[-1] if numbers else None


def _said(text: str) -> str | None:
    """Return what stands behind "the answer is" up to the end of the clause, if a text says so."""
    said = list(_SAID.finditer(text))
    if not said:
        return None
    start = said[-1].end()
    end = _CLAUSE_END.search(text, start)
    answer = text[start : end.start() if end else None]
    if "**" in said[-1][0]:  # whose other half is behind the number: **12** dollars
        answer = re.sub(r"(?<=\S)\*\*(?=\s)", "", answer)
    return answer.strip(" \t\r*")


def _stated(answer: str) -> str:
    """Return a marked answer without the words before it, such as "The answer is"."""
    said = _said(answer)
    return _STATED.sub("", answer) if said is None else said


def gold_text(gold: object) -> str:
    """Return a label as text; of a worked solution, its final answer.

    Raises:
        ValueError: If the label is not a finite number or text, or marks an empty final answer.
    """
    # A bool is an int: ``True`` would be the label 1.
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise ValueError(
            f"label {gold!r} is {type(gold).__name__}, not a number or text; give one, or a reward of your own"
        )
    if isinstance(gold, float):
        if not math.isfinite(gold):
            raise ValueError(f"label {gold!r} is not a finite number")
        # Beyond 2**53 a float has digits that nobody wrote: 1e23 is 99999999999999991611392.
        return repr(int(gold)) if gold.is_integer() and abs(gold) < 2**53 else repr(gold)
    text = str(gold)
    if any(mark in text for mark in ("####", "\\boxed", "\\fbox")):
        answer = final_answer(text)
        if answer is None:
            raise ValueError(f"label {text!r} marks a final answer but holds none")
        return answer
    return text


def equal(gold: str, answer: str) -> bool:
    """Return whether two expressions are mathematically equal.

    Raises:
        ValueError: If comparing them would take too long.
    """
    gold = tidy(gold)
    answer = tidy(answer)
    gold_plain = plain(gold)
    answer_plain = plain(answer)
    if not answer_plain or len(answer) > LONGEST:
        return False
    # Before anything parses the answer.
    if _depth(answer) > DEEPEST:
        raise ValueError(f"brackets are nested more than {DEEPEST} deep")
    gold_plain, answer_plain = _unassigned(gold_plain, answer_plain)
    gold_number = quantity(gold_plain)
    answer_number = quantity(answer_plain)
    if gold_number and answer_number:
        return same_quantity(gold_number, answer_number)
    if _letters(gold_plain) == _letters(answer_plain):
        return True
    if _other_names(gold, answer) or _DATE.fullmatch(gold_plain) or _DATE.fullmatch(answer_plain):
        return False
    if _is_words(gold_plain) or _is_words(answer_plain):
        return False  # read as a product of variables, a word would equal its anagrams
    wanted, given = _expression(gold), _expression(answer)
    return _same_parts(_as_point(wanted, given), _as_point(given, wanted))


def _other_names(gold: str, answer: str) -> bool:
    """Return whether both sides name points, and not the same ones, or bases of numbers differ.

    math-verify reads points as a product of variables, and drops the base of a number and dots.
    """
    if _DOTS.search(answer) and not _DOTS.search(gold):
        return True
    for pattern in (_POINTS, _BASE):
        wanted, given = (sorted(map(_one_order, pattern.findall(text))) for text in (gold, answer))
        # A figure may be named on one side alone; 1010 is not 1010_2.
        if wanted != given and (pattern is _BASE or (wanted and given)):
            return True
    return False


def _one_order(found: str | tuple[str, str]) -> tuple[str, ...]:
    """Return a base, or a figure with its points: an angle has no direction."""
    if isinstance(found, str):
        return (found,)
    figure, points = found
    return figure, points if figure == "triangle" else min(points, points[::-1])


def _same_parts(gold: str, answer: str) -> bool:
    """Return whether two expressions have equal mathematics and equal words between.

    A name before and a unit after an expression may be on one side alone.
    """
    (wanted, said), (given, told) = maths_and_words(gold), maths_and_words(answer)
    for parts, words in ((wanted, said), (given, told)):
        # A name, as in "Area = 5".
        if words and not parts[0] and re.match("[=:]", parts[1]):
            del parts[0], words[0]
            parts[0] = parts[0][1:].strip()
    if _lower(said) != _lower(told):
        units = []
        for parts, words in ((wanted, said), (given, told)):
            unit = unit_of(words[-1]) if words and not parts[-1] else None
            if unit is not None:
                del parts[-1], words[-1]
                units.append(unit)
        if (len(units) > 1 and units_differ(*units)) or _lower(said) != _lower(told):
            return False
    if not said:
        return _verify(wanted[0], given[0])
    return all(a == b or bool(a and b and equal(a, b)) for a, b in zip(wanted, given, strict=True))


def _lower(words: list[str]) -> list[str]:
    return [word.lower() for word in words]


@lru_cache(maxsize=4096)
def _check_gold(gold: str) -> None:
    """Raise ``ValueError`` if ``gold`` is not mathematics."""
    text = tidy(gold)
    words = plain(text)
    if quantity(words) or _is_words(words) or re.fullmatch(r"[A-Za-z]", words):
        return
    prose = re.search(r"(?<!\\)\b(?:[A-Za-z]{2,}[ ,]+){2,}[A-Za-z]{2,}", words)
    if not words or prose or _parsed(_expression(text)) is None:
        raise ValueError(f"label {gold!r} cannot be read as mathematics; exact_match compares text")


def _unassigned(gold: str, answer: str) -> tuple[str, str]:
    """Remove a leading ``x =`` if only one side has it, or both have the same."""
    gold, answer = (_REVERSED.sub(r"\2=\1", _NAMED.sub("", text)) for text in (gold, answer))
    gold_name = re.match(_ASSIGNED, gold)
    answer_name = re.match(_ASSIGNED, answer)
    if gold_name and answer_name and gold_name.group(1) != answer_name.group(1):
        return gold, answer
    # Not of a list, or of a chain of equations.
    one = re.compile(rf"\A{_ASSIGNED}([^=,]+)\Z")
    return one.sub(r"\2", gold), one.sub(r"\2", answer)


def _letters(text: str) -> str:
    """Normalize text for literal comparison; words lose case and surrounding brackets."""
    return text.casefold().strip("()[]\"' ") if _is_words(text) else re.sub(r"\s+", "", text)


def _is_words(text: str) -> bool:
    text = text.strip("()[]\"' ")
    if not re.fullmatch(r"[A-Za-z][A-Za-z'\- ]*", text):
        return False
    if text.casefold() in ("yes", "no", "odd"):
        return True
    # Capitals are an order or names of points, not a product: ABC is not BCA.
    return bool(re.search(r"[A-Za-z]{4}|[A-Za-z]{2,} +[A-Za-z]{2,}|\A[A-Z]{2,}\Z", text))


def _is_expression(text: str) -> bool:
    """Return whether a line is nothing but mathematics, so that it is the answer without a mark."""
    answer_text = plain(tidy(text))
    if quantity(answer_text) is not None:
        return True
    has_words = re.search(r"(?<!\\)\b[A-Za-z]{2,}", answer_text)
    return not has_words or len(answer_text.split()) == 1


def _expression(text: str) -> str:
    """Rewrite ``tidy`` LaTeX to the forms that math-verify reads."""
    text = written_out(text)
    last = r"(?:,\s*)?(?:\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s)\s*"
    text = re.sub(last, ", ", text)
    if re.fullmatch(r"\{[^{}]*,[^{}]*\}", text):
        text = "\\" + text[:-1] + "\\}"
    text = re.sub(r"√\s*(\d+|[A-Za-z]|\{[^{}]*\})", r"\\sqrt{\1}", text)
    text = text.replace("√", "\\sqrt")
    # Commas of thousands, unless the text is a list of numbers.
    if re.fullmatch(r"[^,]*\d,\d{3}[^,\d]*", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    # A list of values of one variable, "x = 1, x = 2", becomes the list of its values.
    variables = re.findall(r"(?:^|,)\s*([A-Za-z])\s*=", text)
    all_assigned = text.count(",") == len(variables) - 1
    if len(variables) > 1 and len(set(variables)) == 1 and all_assigned:
        text = re.sub(r"(^|,)\s*[A-Za-z]\s*=", r"\1", text)
    return text


def _as_point(text: str, other: str) -> str:
    """Write ``x = 1, y = 2`` as the point ``(1, 2)`` if ``other`` is a point."""
    if "=" in other or not re.fullmatch(r"\(.*,.*\)", other):
        return text
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    found = [_VALUE.fullmatch(part) for part in re.split(r"[,;]|\\\\", inner)]
    values = [(part[1], part[2].strip()) for part in found if part]
    if len({name for name, _ in values}) < max(len(found), 2):
        return text
    letters = sorted(ord(name[0]) for name, _ in values)
    # x, y, z and x_1, x_2 have an order; the point of "m = 2, b = 1" is as it is written.
    if letters[-1] - letters[0] in (0, len(letters) - 1):
        values.sort()
    return f"({', '.join(value for _, value in values)})"


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> Any | None:
    """Parse ``latex`` to a mathematical object; ``None`` if it is none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, MatrixBase

    # It warns that its timers are off; the worker has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its units are variables too, as in 2t, and any text at the end: maths_and_words finds ours.
    forms = NormalizationConfig(malformed_operators=True, nits=True)
    boxes_first = LatexExtractionConfig(boxed_match_priority=0, normalization_config=forms)
    for found in parse("\\boxed{" + latex + "}", [boxes_first], parsing_timeout=0):
        if isinstance(found, Basic | MatrixBase):
            return found
    return None


def _verify(gold: str, answer: str) -> bool:
    from math_verify import verify
    from sympy import Expr, FiniteSet, I, Interval, MatrixBase

    wanted = _parsed(gold)
    given = _parsed(answer)
    if wanted is None or given is None:
        return False
    # ``verify`` would compute such numbers. Structural equality does not.
    if _digits(given) > MOST_DIGITS or _digits(wanted) > MOST_DIGITS:
        return wanted == given
    if wanted != given and max(_terms(wanted), _terms(given)) > MOST_TERMS:
        raise ValueError(f"more than {MOST_TERMS} terms once it is expanded")
    for one, other in ((wanted, given), (given, wanted)):
        # (1, 2) is a pair or an interval, never a set of two.
        if isinstance(one, Interval) and isinstance(other, FiniteSet):
            return False
    same = partial(verify, timeout_seconds=None, allow_set_relation_comp=True)
    if same([wanted], [given]):
        return True
    # math-verify reads i as a variable. Inequalities and intervals have no imaginary numbers.
    unit = {name: I for name in wanted.free_symbols | given.free_symbols if str(name) == "i"}
    kinds = (Expr, FiniteSet, MatrixBase)
    if not unit or not isinstance(wanted, kinds) or not isinstance(given, kinds):
        return False
    return same([wanted.subs(unit)], [given.subs(unit)])


def _depth(text: str) -> int:
    """Return the depth of nested brackets, counting brackets that never close."""
    deepest = depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _terms(expression: Any) -> float:
    """Return an upper bound of the terms of an expanded power of a sum in ``expression``."""
    from sympy import Add, Integer, Pow

    parts = [_terms(part) for part in getattr(expression, "args", ())]
    if not parts:
        return 1
    is_power_of_sum = isinstance(expression, Pow) and isinstance(expression.base, Add)
    if not is_power_of_sum or not isinstance(expression.exp, Integer):
        return max(parts)
    power = abs(int(expression.exp))
    if power >= MOST_DIGITS:
        return math.inf
    summands = len(expression.base.args)
    return math.comb(summands + power - 1, power)


def _digits(expression: Any) -> float:
    """Return an upper bound of the digits of the largest number in ``expression``.

    The number itself is not computed. Symbols have no digits.
    """
    from sympy import Add, Mul, Pow, Rational, factorial

    if isinstance(expression, Rational):
        largest = max(abs(int(expression.p)), abs(int(expression.q)))
        return largest.bit_length() * math.log10(2)
    parts = [_digits(part) for part in getattr(expression, "args", ())]
    if not parts:
        return 0.0
    if isinstance(expression, Pow | factorial):
        power = expression.args[-1]
        if power.free_symbols:
            return max(parts)
        if parts[-1] > 6:
            return math.inf
        size = abs(complex(power.evalf()))
        if isinstance(expression, factorial):
            return size * math.log10(max(size, 1.0))
        return size * max(parts[0], 1.0)
    if isinstance(expression, Add):
        return max(parts) + 1
    return sum(parts) if isinstance(expression, Mul) else max(parts)
