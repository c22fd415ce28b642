"""Labels of the responses of a row for each head of a reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightrft.datasets.preference.raw_preference import Given, RawPreference
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import ABSENT, MalformedRow, look_up
from lightrft.datasets.row_warnings import is_missing

LETTERS = ("A", "B")
TIE = "C"
HeadLabels = dict[str, float]
"""Labels of one response by head. Higher is better. A head without a label is absent."""


@dataclass(frozen=True, slots=True)
class LabelledHeads:
    """The heads whose labels are read, and how.

    Args:
        names: names of the heads. Rows without named labels label the first one.
        columns: column of the labels of a head. A head that is absent reads the column of its own
            name.
        ranges: number of ratings of a head. Its labels must be integers from 0 to one less.
        rates: if True, the ratings of a row label the first head. Otherwise its ranks do.
        keep_ties: if True, responses that are equal for every head are kept.
    """

    names: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)
    rates: bool = False
    keep_ties: bool = False


def read_labels(given: Given, raw: RawPreference, heads: LabelledHeads) -> list[HeadLabels]:
    """Return the labels of each response.

    The labels of a head are read from its column, in one of these forms:

    * a column of the record of each response;
    * one column for each response: ``chosen_x``, ``x_chosen`` or ``is_chosen_x`` for ``x``;
    * a list with one label per response, or the label of a single response;
    * the letter of the better of two responses: A, B, or C for a tie. The better one gets 1 and
      the other one 0. In a tie, both get 0.5.

    The first head takes the ratings, the ranks or the good and bad labels of the row if its column
    is absent.

    Args:
        given: the row.
        raw: the row, as its layout reads it.
        heads: the heads.

    Raises:
        MalformedRow: a label is not a number or is out of range, the number of labels is wrong, or
            no head has a label.
    """
    labels: list[HeadLabels] = [{} for _ in raw.responses]
    for head in heads.names:
        column = heads.columns.get(head, head)
        values = _column(given, raw, column)
        if values is None and head == heads.names[0]:
            values = _of_row(raw, heads)
        for name, own, value in zip(raw.names, labels, values or ()):
            if math.isnan(value):
                continue
            size = heads.ranges.get(head)
            if size is not None and not (value == int(value) and 0 <= value < size):
                problem = f"{column} of {name} is {value:g}, not an integer from 0 to {size - 1}"
                way_out = f"mend the row, or set the size of head {head!r}"
                raise given.malformed(f"{problem}; {way_out}")
            own[head] = value
    if not any(labels):
        looked = ", ".join(heads.columns.get(head, head) for head in heads.names)
        problem = f"no response has a label of any head (looked for {looked})"
        have = ", ".join(given.row) or "nothing"
        way_out = "name the columns in data.columns.labels"
        raise given.malformed(f"{problem}; the row has: {have}. {way_out}")
    return labels


def has_column(given: Given, raw: RawPreference, heads: LabelledHeads) -> bool:
    """Return True if a row has a column of labels of the first head.

    Args:
        given: the row.
        raw: the row, as its layout reads it.
        heads: the heads.
    """
    first = heads.names[0]
    return _column(given, raw, heads.columns.get(first, first)) is not None


def win_rates(ranks: Sequence[float]) -> list[float]:
    """Return the fraction of the other responses that each response is better than.

    An equal rank counts half. ``ranks`` are lower for better responses.
    """
    others = len(ranks) - 1
    rates = []
    for rank in ranks:
        worse = sum(other > rank for other in ranks)
        equal = sum(other == rank for other in ranks) - 1
        rates.append((worse + 0.5 * equal) / others)
    return rates


def first_ranks(labels: Sequence[HeadLabels], head: str) -> list[float] | None:
    """Return numbers that are lower for better responses, by the labels of ``head``.

    Returns None if a response has no label.
    """
    if not all(head in own for own in labels):
        return None
    return [-own[head] for own in labels]


def labels_by_head(labels: Sequence[HeadLabels], heads: Sequence[str]) -> dict[str, list[float]]:
    """Return the labels of each head, without responses that have none."""
    return {head: [own[head] for own in labels if head in own] for head in heads}


def _of_row(raw: RawPreference, heads: LabelledHeads) -> Sequence[float] | None:
    """Return the labels that the layout itself has, or None."""
    if heads.rates and raw.ratings is not None:
        return raw.ratings
    if raw.desirable:
        return [float(good) for good in raw.desirable]
    if len(raw.ranks) > 1:
        return win_rates(raw.ranks)
    return raw.ratings


def _column(given: Given, raw: RawPreference, column: str) -> list[float] | None:
    """Return the labels in ``column``, NaN for absent ones, or None if there is no such column."""
    row, where = given.row, given.where
    if raw.records:
        # UltraFeedback keeps the rating of an aspect two levels down
        paths = (column, f"annotations.{column}.Rating", f"annotations.{column}")
        for path in paths:
            found = [look_up(record, path, ABSENT) for record in raw.records]
            if not all(value is ABSENT for value in found):
                return _labels(found, raw.names, column, where)
    for pattern in ("{name}_{column}", "{column}_{name}", "is_{name}_{column}"):
        keys = [pattern.format(name=name, column=column) for name in raw.names]
        found = [look_up(row, key, ABSENT) for key in keys]
        if not all(value is ABSENT for value in found):
            return _labels(found, raw.names, column, where)
    value = look_up(row, column, ABSENT)
    if value is ABSENT:
        return None
    return _of_value(value, raw.names, column, where)


def _of_value(value: object, names: Sequence[str], column: str, where: str) -> list[float]:
    """Return the labels that one column has for all responses."""
    count = len(names)
    if isinstance(value, str) and value in (*LETTERS, TIE):
        if count != 2:
            problem = f"{column} is {value!r}, which compares two responses, not {count}"
            raise MalformedRow(f"{where}: {problem}")
        return [0.5 if value == TIE else float(value == letter) for letter in LETTERS]
    if isinstance(value, list | tuple):
        if len(value) != count:
            problem = f"{column} has {len(value)} labels for {count} responses"
            raise MalformedRow(f"{where}: {problem}")
        return _labels(value, names, column, where)
    if count == 1 or _is_absent(value):
        return _labels([value] * count, names, column, where)
    forms = f"a list, or the columns {names[0]}_{column} and {names[-1]}_{column}"
    problem = f"{column} is {value!r}, one label for {count} responses"
    raise MalformedRow(f"{where}: {problem}; give {forms}")


def _labels(values: Sequence[object], names: Sequence[str], column: str, where: str) -> list[float]:
    """Return each value as a number, NaN for an absent one."""
    labels: list[float] = []
    for name, value in zip(names, values):
        if isinstance(value, bool):
            labels.append(float(value))
        elif _is_absent(value):
            labels.append(math.nan)
        else:
            labels.append(number(value, f"{column} of {name}", where))
    return labels


def _is_absent(value: object) -> bool:
    """Return True for a label that a published set leaves out."""
    return value is ABSENT or value == "N/A" or is_missing(value)
