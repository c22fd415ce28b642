"""The common form of all layouts of preference rows, and readers of their columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.row_tables import MalformedRow, Row, look_up
from lightrft.datasets.rows.recorded_row import RecordedRow
from lightrft.datasets.rows.row_content import Raw, find_prompt

LABELS = {
    **dict.fromkeys(("true", "1", "1.0"), True),
    **dict.fromkeys(("false", "0", "0.0"), False),
}
"""Labels of responses as text."""


@dataclass(frozen=True, slots=True)
class GivenRow:
    """A row with the settings and the location that its readers need.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
    """

    row: Row
    columns: PreferenceColumns
    where: str

    def prompt(self) -> Raw:
        """Return the prompt of the row. Raises ``MalformedRow`` if it has none."""
        found = find_prompt(self.row, self.columns, self.where)
        if found is None:
            have = ", ".join(self.row)
            raise MalformedRow(f"{self.where}: no column with a prompt; the row has: {have}")
        return found


@dataclass(slots=True)
class RawPreference:
    """A preference row before its text and media are read.

    Either ``ranks`` or ``desirable`` has one entry per response. The other one is empty.

    Args:
        prompt: the prompt of all responses.
        responses: the responses.
        names: names of the responses, for messages.
        ranks: any numbers that are lower for better responses.
        desirable: labels of the responses: True for a good one.
        ratings: numbers that are higher for better responses. None if there are none.
        margin: how much better the best response is than the next one. None if the row has no such
            number.
        records: record of each response, for layouts that have one. Labels of heads are read from
            it.
    """

    prompt: Raw
    responses: list[Raw]
    names: list[str]
    ranks: Sequence[float] = ()
    desirable: Sequence[bool] = ()
    ratings: Sequence[float] | None = None
    margin: float | None = None
    records: Sequence[Row] = ()


def label(value: object, what: str, where: str) -> bool:
    """Return a column as a label of a response.

    Args:
        value: True, False, 1 or 0, or one of them as text, as CSV files have it.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value is not a boolean.
    """
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in LABELS:
        return LABELS[value.strip().lower()]
    raise MalformedRow(f"{where}: {what} is {value!r}, not a boolean; write true or false")


def mappings(row: Row, name: str, where: str) -> Sequence[Row]:
    """Return a column of records. A ``RecordedRow`` records which of their columns are read.

    Args:
        row: the row.
        name: name of the column: a list of records, or one record of lists, as ``datasets`` writes
            it.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the column has another type.
    """
    value = look_up(row, name)
    if isinstance(value, Mapping):
        lists = [column for column in value.values() if isinstance(column, list | tuple)]
        lengths = {len(column) for column in lists}
        if len(lists) == len(value) and len(lengths) == 1:
            count = lengths.pop()
            value = [{name: column[k] for name, column in value.items()} for k in range(count)]
    if not isinstance(value, list | tuple) or not all(isinstance(v, Mapping) for v in value):
        raise MalformedRow(f"{where}: {name} must be a list of records")
    return row.keep_records(name, value) if isinstance(row, RecordedRow) else value


def check_distinct(
    names: Sequence[str], responses: Sequence[Raw], judged: Sequence[object], where: str
) -> None:
    """Check that responses of different ranks or labels differ.

    Args:
        names: names of the responses, for messages.
        responses: the responses.
        judged: rank or labels of each response. Empty if nothing compares them.
        where: location of the row, for messages.

    Raises:
        MalformedRow: two of them are equal.
    """
    known = list(zip(names, responses, judged))
    for (name, one, own), (other_name, other, theirs) in itertools.combinations(known, 2):
        if own != theirs and _stripped(one) == _stripped(other):
            problem = f"{name} is equal to {other_name}, but one is better"
            raise MalformedRow(f"{where}: {problem}")


def _stripped(response: Raw) -> Raw:
    return response.strip() if isinstance(response, str) else response
