"""Layouts of responses with ratings, or of media that are compared, for reward models."""

from __future__ import annotations

from collections.abc import Mapping

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.media.parts import kind_of
from lightrft.datasets.preference.labelled_formats import RESPONSES
from lightrft.datasets.preference.raw_preference import (
    GivenRow,
    RawPreference,
)
from lightrft.datasets.row_parser import Message, number
from lightrft.datasets.row_tables import MalformedRow, Row, named_column
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import Raw, raw_text

RATINGS = ("rating", "score")
"""Columns of the rating of one response, or of a list of ratings."""


def is_scored(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for a response, or a list of ``responses``. Its labels are read later."""
    return bool(_response_column(row, columns))


def read_scored(given: GivenRow) -> RawPreference:
    """Read ``{prompt, response, helpfulness, ...}`` or ``{prompt, responses, ...}``.

    HelpSteer2 has one response with five ratings in a row. The columns of the ratings are those of
    the heads; see ``read_labels``. ``rating`` or ``score`` is the rating of a row without heads.
    """
    row, where = given.row, given.where
    prompt = given.prompt()
    column = _response_column(unrecorded(row), given.columns)
    value = named_column(row, column, "response", where)
    if column == "responses":
        if not isinstance(value, list | tuple) or not value:
            raise MalformedRow(f"{where}: responses must be a list of responses")
        names = [f"response {k}" for k in range(1, len(value) + 1)]
        responses = [raw_text(one, name, where) for one, name in zip(value, names)]
    else:
        names, responses = [column], [raw_text(value, column, where)]
    return RawPreference(prompt, responses, names, ratings=_ratings(row, len(responses), where))


def read_candidates(given: GivenRow) -> RawPreference:
    """Read a question for a judge as two candidates, each in a conversation of its own.

    The candidates are the last two media of the question, which are called A and B. Each
    conversation is a message of the user: the request, the criteria, the media that both start
    from, and the candidate. The prompt is empty.

    Raises:
        MalformedRow: the question has no two media, or no request.
    """
    row, where = given.row, given.where
    parts = [part for message in _messages(row, where) for part in _media(message)]
    if len(parts) < 2:
        problem = f"the question has {len(parts)} images, videos or sounds, not two candidates"
        raise MalformedRow(f"{where}: {problem}")
    *common, first, second = parts
    texts = [row.get("request"), row.get("criteria")]
    asked = "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())
    if not asked:
        raise MalformedRow(f"{where}: no column 'request' for which both candidates were made")
    responses: list[Raw] = []
    for part in (first, second):
        content = [{"type": "text", "text": f"{asked}\n\n"}, *common, part]
        responses.append([{"role": "user", "content": content}])
    order = {"A": (0, 1), "B": (1, 0), "C": (0, 0)}
    return RawPreference("", responses, ["A", "B"], ranks=order[row["label"]])


def _response_column(row: Row, columns: PreferenceColumns) -> str:
    """Return the name of the column of the responses. Empty if the row has none."""
    if columns.response:
        return columns.response
    known = ("responses", *RESPONSES)
    return next((name for name in known if row.get(name) is not None), "")


def _ratings(row: Row, count: int, where: str) -> list[float] | None:
    """Return the ratings of ``count`` responses, or None if the row has none."""
    for name in RATINGS:
        value = row.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != count:
            problem = f"{name} has {len(values)} ratings for {count} responses"
            raise MalformedRow(f"{where}: {problem}")
        return [number(one, name, where) for one in values]
    return None


def _messages(row: Row, where: str) -> list[Message]:
    prompt = raw_text(row.get("prompt"), "prompt", where)
    return [] if isinstance(prompt, str) else prompt


def _media(message: Message) -> list[Mapping[str, object]]:
    """Return the content parts of ``message`` that are media."""
    content = message["content"]
    parts = content if isinstance(content, list | tuple) else ()
    return [part for part in parts if isinstance(part, Mapping) and kind_of(part) is not None]
