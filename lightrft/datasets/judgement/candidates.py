"""The responses of a row that a judge compares or rates, with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.config.data import DataConfig, PreferenceColumns
from lightrft.config.reward_model.judgement import COMPARED, JudgementConfig
from lightrft.datasets.judgement.question import LETTERS, Raw, rubric_entries
from lightrft.datasets.preference.formats import format_of
from lightrft.datasets.preference.raw_preference import GivenRow, check_distinct
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import USUAL, find_prompt, raw_text

RATINGS = ("rating", "ratings", "score", "scores")
"""Usual columns of the ratings of a response, or of each of ``responses``."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The responses of a row.

    Attributes:
        prompt: Request that they answer.
        responses: The responses.
        ranks: Numbers that are lower for better responses. Empty if the row has none.
        ratings: Numbers that are higher for better responses. Empty if the row has none.
        reference: Reference answer. Empty if the row has none.
        rubric: Criteria of the row with their weights.
    """

    prompt: Raw
    responses: Sequence[Raw]
    ranks: Sequence[float]
    ratings: Sequence[float]
    reference: str
    rubric: Sequence[tuple[str, float]]


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
    columns = preference_columns(data)
    ranks: Sequence[float] = ()
    ratings: Sequence[float] = ()
    found = find_prompt(row, columns, where)
    single = None
    if config.form not in COMPARED and "responses" not in row:
        single = _single(row, columns, where)
    if isinstance(row.get("responses"), list | tuple) or single is not None:
        given = [single] if single is not None else row["responses"]
        names = [f"response {k}" for k in range(1, len(given) + 1)]
        texts = [raw_text(one, name, where) for one, name in zip(given, names)]
        ratings = _ratings(row, len(texts), where)
        ranks = [-rating for rating in ratings] or _ranks(row, len(texts), where)
    else:
        read = format_of(unrecorded(row), columns, where).read(GivenRow(row, columns, where))
        found, texts, ranks, names = read.prompt, read.responses, read.ranks, read.names
        ratings = read.ratings or ()
    if found is None:
        raise MalformedRow(f"{where}: no column with a prompt; name it in data.columns.prompt")
    check_distinct(names, texts, ranks, where)
    reference = _reference(row, columns, where) if single is None else row.get("reference")
    rubric = _rubric(row, config, where) if config.form == "rubric" else ()
    return Candidates(found, texts, ranks, ratings, str(reference or ""), rubric)


def preference_columns(data: DataConfig) -> PreferenceColumns:
    """Return the names of columns of ``data``, as preference rows have them."""
    if isinstance(data.columns, PreferenceColumns):
        return data.columns
    return PreferenceColumns(**data.columns.model_dump())


def _single(row: Row, columns: PreferenceColumns, where: str) -> object:
    """Return the one response of a row, or None."""
    if columns.response:
        return named_column(row, columns.response, "response", where)
    return next((row[name] for name in USUAL["response"] if row.get(name) is not None), None)


def _reference(row: Row, columns: PreferenceColumns, where: str) -> object:
    if columns.reference:
        return named_column(row, columns.reference, "reference", where)
    return row.get("reference")


def _ratings(row: Row, count: int, where: str) -> list[float]:
    """Return the ratings of ``count`` responses, or an empty list."""
    for name in RATINGS:
        value = look_up(row, name)
        if value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != count:
            raise MalformedRow(f"{where}: {name} has {len(values)} numbers for {count} responses")
        return [number(one, name, where) for one in values]
    return []


def _ranks(row: Row, count: int, where: str) -> list[float]:
    """Return the ranks of ``count`` responses from ``ranks`` or ``label``, or an empty list."""
    ranks = row.get("ranks")
    if ranks is not None:
        if not isinstance(ranks, list | tuple) or len(ranks) != count:
            raise MalformedRow(f"{where}: ranks must be {count} numbers, one per response")
        return [number(one, "ranks", where) for one in ranks]
    label = row.get("label")
    if label is None or count < 2:
        return []
    letters = LETTERS[:count]
    is_letter = isinstance(label, str) and len(label) == 1 and label in letters
    best = letters.index(label) if is_letter else label
    if type(best) is not int or not 0 <= best < count:
        raise MalformedRow(f"{where}: label is {label!r}, not the best of {count} responses")
    return [float(k != best) for k in range(count)]


def _rubric(row: Row, config: JudgementConfig, where: str) -> list[tuple[str, float]]:
    """Return the criteria of the row, or of the settings."""
    given = row.get("rubric")
    if given is None:
        given = [criterion.model_dump() for criterion in config.rubric]
    try:
        return rubric_entries(given)
    except ValueError as error:
        raise MalformedRow(f"{where}: {error}") from None
