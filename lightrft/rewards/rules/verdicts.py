"""Read the verdict of a judgement. A text without a verdict gives ``None``, never a guess."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightrft.rewards.rules.answer_extraction import after_thinking, content_of, in_tags, last_box

Verdict = str | float | tuple[str, ...] | tuple[bool, ...]
"""A letter, a rating, letters from the best to the worst, or yes or no for each criterion."""

# Innermost brackets, so that many that never close take linear time.
_BRACKETS = re.compile(r"\[\[((?:(?!\[\[).)*?)\]\]", re.DOTALL)
_MOST_OBJECTS = 100  # tried as the JSON of a verdict, from the last one
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.]*\d)")
_KEYS = ("verdict", "winner", "answer", "score", "rating", "ranking")
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class VerdictForm:
    """The form of the verdicts of a question.

    Attributes:
        form: Kind of the question: ``pair``, ``best``, ``ranking``, ``rating`` or ``rubric``.
        verdict: Place of the verdict in a judgement.
        choices: Letters of a comparison. With ``ties``, the last one is a tie.
        low: Lowest rating.
        high: Highest rating.
        weights: Weights of the criteria of a rubric.
        shown: Position of each response in the row, in the order of the question.
        key: Digest of request and responses, equal for both orders.
        ties: The last letter is a tie.
        pattern: Regular expression with one group.
        right: For each response in the order of the question, if it is one of the best of its row.
            Empty if that is unknown.
        row: Digest of request and of all responses of the row.
        id: Id of the row. Empty if it has none.
    """

    form: str
    verdict: str = "answer"
    choices: str = ""
    low: float = 1.0
    high: float = 10.0
    weights: Sequence[float] = ()
    shown: Sequence[int] = ()
    key: str = ""
    ties: bool = False
    pattern: str | None = None
    right: Sequence[bool] = ()
    row: str = ""
    id: str = ""

    @classmethod
    def of(cls, columns: Mapping[str, object]) -> VerdictForm:
        """Return the form in the column ``judgement`` of a row.

        Without the column, the verdict is a letter between answer tags, or in a box.

        Raises:
            ValueError: The column is not one that ``data.judgement`` writes.
        """
        given = columns.get("judgement")
        if given is None:
            return cls("best", "answer", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        if not isinstance(given, Mapping) or "form" not in given:
            raise ValueError(f"the column judgement is {given!r}; set data.judgement")
        return cls(**{str(name): value for name, value in given.items()})


def read_verdict(text: str, form: VerdictForm) -> Verdict | None:
    """Return the last verdict of a judgement, or ``None`` if it has none of this form.

    The thinking of a reasoning model is not searched.

    Args:
        text: The judgement.
        form: Form of the verdict.
    """
    said = verdict_place(after_thinking(text), form)
    return None if said is None else parse_verdict(said, form)


def verdict_place(text: str, form: VerdictForm) -> str | None:
    """Return the text in the place of the verdict, or ``None`` if the place is missing.

    Args:
        text: The judgement without its thinking.
        form: Form of the verdict.
    """
    if form.verdict == "boxed":
        box = last_box(text)
        return content_of(box[1]) if box else None
    if form.verdict == "brackets":
        return _last(_BRACKETS, text)
    if form.verdict == "json":
        return _json(text)
    if form.verdict == "number":
        return _last(_NUMBER, text)
    if form.verdict == "regex":
        return _last(re.compile(form.pattern or ""), text)
    return content_of(in_tags(text))


def parse_verdict(said: str, form: VerdictForm) -> Verdict | None:
    """Return the verdict that ``said`` is, or ``None``.

    Args:
        said: The text in the place of the verdict.
        form: Form of the verdict.
    """
    said = said.strip().strip(".").strip()
    if form.form == "rating":
        try:
            value = float(said.split("/")[0])
        except ValueError:
            return None
        return value if math.isfinite(value) and form.low <= value <= form.high else None
    if form.form == "rubric":
        marks = [_YES.get(one.strip().lower()) for one in re.split(r"[,;\n]", said)]
        complete = [mark for mark in marks if mark is not None]
        return tuple(complete) if len(complete) == len(marks) == len(form.weights) else None
    if form.form == "ranking":
        letters = tuple(re.split(r"\s*[>,]\s*", said))
        return letters if sorted(letters) == sorted(form.choices) else None
    return said if len(said) == 1 and said in form.choices else None


def agreement(verdict: Verdict | None, label: object, form: VerdictForm) -> float:
    """Return the agreement of a verdict with the label, from 0 to 1; 0 for no verdict.

    It is equality of letters, 1 - |v - y| / (high - low) of ratings, and the fraction of pairs in
    the right order of rankings, (tau + 1) / 2 of Kendall's tau. A rubric's label is a list, whose
    weighted fraction of equal entries counts, or a score, as for ratings.

    Args:
        verdict: The verdict.
        label: The right verdict.
        form: Form of both.

    Raises:
        ValueError: The label is not a verdict of this form.
    """
    right: Verdict | None
    if form.form == "rubric":
        return _rubric_agreement(verdict, label, form)
    right = parse_verdict(str(label), form)
    if right is None:
        raise ValueError(f"label {label!r} is no verdict of form {form.form!r}")
    if verdict is None:
        return 0.0
    if isinstance(verdict, float) and isinstance(right, float):
        return 1 - abs(verdict - right) / (form.high - form.low)
    if isinstance(verdict, tuple) and isinstance(right, tuple):
        pairs = list(combinations(right, 2))
        agreed = sum(verdict.index(a) < verdict.index(b) for a, b in pairs)
        return agreed / len(pairs)
    return float(verdict == right)


def _rubric_agreement(verdict: Verdict | None, label: object, form: VerdictForm) -> float:
    if isinstance(label, list | tuple):
        if len(label) != len(form.weights):
            raise ValueError(
                f"label {label!r} has no mark for each of {len(form.weights)} criteria"
            )
        if verdict is None:
            return 0.0
        assert isinstance(verdict, tuple)
        same = [w for w, a, b in zip(form.weights, verdict, label) if a == bool(b)]
        return math.fsum(same) / math.fsum(form.weights)
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise ValueError(f"label {label!r} is neither a list of marks nor a score from 0 to 1")
    return 0.0 if verdict is None else 1 - abs(score(verdict, form) - label)


def score(verdict: Verdict, form: VerdictForm) -> float:
    """Return the score from 0 to 1 that a verdict gives to the first response.

    A rating is scaled to 0 and 1, and a rubric gives the weighted fraction of its criteria. A
    comparison gives 1 to the best response, 1/2 in a tie, and a ranking (K - rank) / (K - 1).
    """
    if isinstance(verdict, float):
        return (verdict - form.low) / (form.high - form.low)
    if isinstance(verdict, tuple) and form.form == "rubric":
        met = [w for w, mark in zip(form.weights, verdict) if mark]
        return math.fsum(met) / math.fsum(form.weights)
    if isinstance(verdict, tuple):
        return 1 - verdict.index("A") / (len(verdict) - 1)
    if form.ties and verdict == form.choices[-1]:
        return 0.5
    return float(verdict == "A")


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return content_of(found[-1]) if found else None


def _json(text: str) -> str | None:
    """Return the verdict of the last JSON object in ``text``, or ``None``."""
    decoder = json.JSONDecoder()
    start = text.rfind("{")
    for _ in range(_MOST_OBJECTS):
        if start < 0:
            break
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.rfind("{", 0, start)
            continue
        key = next((name for name in _KEYS if name in value), None)
        if key is None:
            return None
        found = value[key]
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
    return None
