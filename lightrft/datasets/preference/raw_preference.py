"""The common form of all layouts of preference rows, and readers of their columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.row_tables import MalformedRow, Row
from lightrft.datasets.rows.row_content import GivenRow, Raw

Given: TypeAlias = GivenRow[PreferenceColumns]
LABELS = {
    **dict.fromkeys(("true", "1", "1.0"), True),
    **dict.fromkeys(("false", "0", "0.0"), False),
}
"""Labels of responses as text."""


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


def check_distinct(
    names: Sequence[str], responses: Sequence[Raw], judged: Sequence[object], where: str
) -> None:
    """Raise ``MalformedRow`` if two responses of different ranks or labels are equal.

    Args:
        names: names of the responses, for messages.
        responses: the responses.
        judged: rank or labels of each response. Empty if nothing compares them.
        where: location of the row, for messages.
    """
    bare = [one.strip() if isinstance(one, str) else one for one in responses]
    known = list(zip(names, bare, judged))
    for (name, one, own), (other_name, other, theirs) in itertools.combinations(known, 2):
        if own != theirs and one == other:
            raise MalformedRow(f"{where}: {name} is equal to {other_name}, but one is better")
