"""The responses of a row that a judge compares or rates, with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.config.data import DataConfig, PreferenceColumns
from lightrft.config.reward_model.judgement import COMPARED, JudgementConfig
from lightrft.datasets.judgement.question import LETTERS, Question, rubric_entries
from lightrft.datasets.preference.formats import format_of
from lightrft.datasets.preference.raw_preference import Given, check_distinct
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import Row, look_up
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import USUAL, GivenRow, raw_text

RATINGS = ("rating", "ratings", "score", "scores")
"""Usual columns of the ratings of a response, or of each of ``responses``."""


@dataclass(frozen=True, slots=True)
class Candidates(Question):
    """The responses of a row, with the rest of a question about all of them.

    Attributes:
        ranks: Numbers that are lower for better responses. Empty if the row has none.
        ratings: Numbers that are higher for better responses. Empty if the row has none.
    """

    ranks: Sequence[float] = ()
    ratings: Sequence[float] = ()


def read_candidates(row: Row, data: DataConfig, config: JudgementConfig, where: str) -> Candidates:
    """Return the responses of a row.

    Args:
        row: The row. Its column ``responses`` has several, or its columns are of a layout of
            preference rows. For a rating or a rubric it may also have one response.
        data: Settings of the data, with the names of columns.
        config: Form of the question.
        where: Location of the row, for messages.

    Raises:
        MalformedRow: The row has no prompt, no responses, or malformed labels. Also raised if
            responses of different ranks are equal.
    """
    given = GivenRow(row, preference_columns(data), where)
    ranks: Sequence[float] = ()
    ratings: Sequence[float] = ()
    found = given.find_prompt()
    single = None
    if config.form not in COMPARED and "responses" not in row:
        single = _single(given)
    if isinstance(row.get("responses"), list | tuple) or single is not None:
        several = [single] if single is not None else row["responses"]
        names = [f"response {k}" for k in range(1, len(several) + 1)]
        texts = [raw_text(one, name, where) for one, name in zip(several, names)]
        ratings = _ratings(given, len(texts))
        ranks = [-rating for rating in ratings] or _ranks(given, len(texts))
    else:
        read = format_of(unrecorded(row), given.columns, where).read(given)
        found, texts, ranks, names = read.prompt, read.responses, read.ranks, read.names
        ratings = read.ratings or ()
    if found is None:
        raise given.malformed("no column with a prompt; name it in data.columns.prompt")
    check_distinct(names, texts, ranks, where)
    named = given.columns.reference if single is None else ""
    reference = given.named(named, "reference") if named else row.get("reference")
    rubric: Sequence[tuple[str, float]] = ()
    if config.form == "rubric":
        criteria = row.get("rubric")
        if criteria is None:
            criteria = [criterion.model_dump() for criterion in config.rubric]
        try:
            rubric = rubric_entries(criteria)
        except ValueError as error:
            raise given.malformed(str(error)) from None
    return Candidates(found, texts, str(reference or ""), rubric, ranks, ratings)


def preference_columns(data: DataConfig) -> PreferenceColumns:
    """Return the names of columns of ``data``, as preference rows have them."""
    if isinstance(data.columns, PreferenceColumns):
        return data.columns
    return PreferenceColumns(**data.columns.model_dump())


def _single(given: Given) -> object:
    """Return the one response of a row, or None."""
    if given.columns.response:
        return given.named(given.columns.response, "response")
    values = (given.row.get(name) for name in USUAL["response"])
    return next((value for value in values if value is not None), None)


def _ratings(given: Given, count: int) -> list[float]:
    """Return the ratings of ``count`` responses, or an empty list."""
    for name in RATINGS:
        value = look_up(given.row, name)
        if value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != count:
            raise given.malformed(f"{name} has {len(values)} numbers for {count} responses")
        return [number(one, name, given.where) for one in values]
    return []


def _ranks(given: Given, count: int) -> list[float]:
    """Return the ranks of ``count`` responses from ``ranks`` or ``label``, or an empty list."""
    ranks = given.row.get("ranks")
    if ranks is not None:
        if not isinstance(ranks, list | tuple) or len(ranks) != count:
            raise given.malformed(f"ranks must be {count} numbers, one per response")
        return [number(one, "ranks", given.where) for one in ranks]
    label = given.row.get("label")
    if label is None or count < 2:
        return []
    letters = LETTERS[:count]
    is_letter = isinstance(label, str) and len(label) == 1 and label in letters
    best = letters.index(label) if is_letter else label
    if type(best) is not int or not 0 <= best < count:
        raise given.malformed(f"label is {label!r}, not the best of {count} responses")
    return [float(k != best) for k in range(count)]
