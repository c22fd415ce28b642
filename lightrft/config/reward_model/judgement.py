"""Settings of judgements: questions to a judge, and the verdicts that it gives."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings, strings_as

Form = Literal["pair", "best", "ranking", "rating", "rubric"]
"""Kind of a question to a judge."""
VerdictFormat = Literal["answer", "boxed", "brackets", "json", "number", "regex"]
"""Place of the verdict in a judgement."""
COMPARED = ("pair", "best", "ranking")
"""Forms of questions about several responses."""


class CriterionConfig(Settings):
    """One criterion of a rubric."""

    shorthand: ClassVar[str | None] = "text"
    """The setting that a bare string or number stands for."""

    text: str
    """Criterion that a response meets or not."""
    weight: float = Field(1.0, gt=0)
    """Weight of the criterion in the score."""


class QuestionConfig(Settings):
    """A question to a judge, and the form of its verdict."""

    paths: ClassVar[tuple[str, ...]] = ("template",)
    """The settings of this section that are paths."""

    form: Form = "pair"
    """``pair``: which of two responses is better. ``best``: which of several is the best.
    ``ranking``: the order of several. ``rating``: the quality of one response as a number.
    ``rubric``: for each criterion, if one response meets it."""
    ties: bool = False
    """Offer a tie as the verdict of a ``pair``."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest number of a ``rating``."""
    rubric: Annotated[tuple[CriterionConfig, ...], strings_as("text")] = ()
    """Criteria of a ``rubric`` for rows that have none of their own: texts, or tables of text and
    weight."""
    criteria: str = ""
    """Criteria of the comparison or of the rating, in words. Empty: those of the template."""
    template: str | None = None
    """File of a Jinja template for the question; see ``docs/judges.md``. ``null`` takes the
    template of the package."""
    explain: bool = True
    """Ask for reasons before the verdict. Off, the judgement is the verdict alone."""
    verdict: VerdictFormat = "answer"
    r"""Place of the verdict in a judgement. ``answer``: ``<answer>A</answer>``. ``boxed``:
    ``\boxed{A}``. ``brackets``: ``[[A]]``. ``json``: ``{"verdict": "A"}``. ``number``: the last
    number, for a ``rating``. ``regex``: the first group of ``pattern``. The last place counts."""
    pattern: str | None = None
    """Regular expression with one group, for ``verdict: regex``. The template says how the judge
    ends."""

    @model_validator(mode="after")
    def _fits(self) -> QuestionConfig:
        if self.ties and self.form != "pair":
            raise ValueError(f"ties = true is for form: pair, not {self.form!r}; leave it out")
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale = {list(self.scale)}: the second number must be larger")
        if self.verdict == "number" and self.form != "rating":
            raise ValueError(f"verdict = 'number' is for form: rating, not {self.form!r}")
        if (self.verdict == "regex") != (self.pattern is not None):
            raise ValueError("pattern and verdict: regex belong together; give both, or none")
        if self.pattern is not None and _groups(self.pattern) != 1:
            raise ValueError(f"pattern = {self.pattern!r} must have one group, of the verdict")
        if self.rubric and self.form != "rubric":
            raise ValueError(f"rubric is read by form: rubric, not {self.form!r}; leave it out")
        return self


def _groups(pattern: str) -> int:
    """Return the number of groups of a regular expression."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from None


class JudgementConfig(QuestionConfig):
    """Rows of responses, as questions to a judge."""

    order: Literal["hashed", "both", "given"] = "hashed"
    """Order of the responses in a question. ``hashed``: an order that depends on their content
    alone, so that no place is better. ``both``: two questions, in an order and in the reverse.
    ``given``: as in the row. Rows with a judgement or with the column ``shown`` keep their
    order."""
    rate_best: bool = False
    """Ask for a rating of each response: with ``form: rating``, of compared responses without
    ratings, and with ``form: best``, of rows with several best responses, such as those of the
    subset Ties of RewardBench 2. The label of a best response is the highest number of ``scale``,
    and that of any other one the lowest."""
    column: str = "judgement"
    """Column of a judgement to learn. Rows without one learn the verdict alone. Preference learning
    reads ``chosen_`` and ``rejected_`` before this name."""

    @model_validator(mode="after")
    def _has_order(self) -> JudgementConfig:
        if self.order != "hashed" and self.form not in COMPARED:
            raise ValueError(
                f"order = {self.order!r} changes nothing for form: {self.form}, which shows one "
                "response; leave it out"
            )
        if self.rate_best and self.form not in ("best", "rating"):
            raise ValueError(
                f"rate_best = true changes nothing for form: {self.form}; take best or rating"
            )
        return self
