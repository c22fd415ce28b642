"""Parsing of a row of any layout into a ``PreferenceRow``: a prompt and its compared responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.media import NOTHING, Item, SupportedMedia
from lightrft.datasets.media.items import marks
from lightrft.datasets.preference.formats import format_of, read_candidates
from lightrft.datasets.preference.head_labels import (
    HeadLabels,
    LabelledHeads,
    first_ranks,
    has_column,
    labels_by_head,
    read_labels,
)
from lightrft.datasets.preference.raw_preference import Given, RawPreference, check_distinct
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import MalformedRow, Row, look_up
from lightrft.datasets.rows.recorded_row import recorded, unrecorded
from lightrft.datasets.rows.row_content import GivenRow, Raw, raw_text
from lightrft.datasets.rows.row_reader import parsed_row, row_weight
from lightrft.types import GOLD


@dataclass(slots=True)
class PreferenceRow:
    """A prompt with its responses.

    Lists have one entry per response.

    Args:
        responses: one record per response. All have the same prompt and the same media.
        names: names of the responses, for messages.
        ranks: 0 for the best responses, 1 for the next best ones, ``GOLD`` for a gold response.
            Empty for labelled responses.
        desirable: the labels. Empty for ranked responses.
        ratings: the ratings. None if the row has none.
        margins: how much better each response is than the next worse one; 0 for the worst. None if
            the row does not say it.
        weight: weight of the row in the loss.
        labels: labels of the heads. Empty unless they are read.
        is_split: True if a prompt is followed by responses. False if each response is a whole
            conversation of the user.
    """

    responses: list[ParsedRow]
    names: list[str]
    ranks: list[int]
    desirable: list[bool]
    ratings: list[float] | None
    margins: list[float] | None
    weight: float
    labels: list[HeadLabels] = field(default_factory=list)
    is_split: bool = True

    @property
    def id(self) -> str:
        """Return the identifier of the row. Empty if it has none."""
        return self.responses[0].id

    @property
    def data_source(self) -> str:
        """Return the name of the data source. Empty if the row does not name one."""
        return self.responses[0].data_source

    @property
    def row(self) -> Row:
        """Return the row, with the record of its columns."""
        return self.responses[0].row

    @property
    def where(self) -> str:
        """Return the location of the row, for messages."""
        return self.responses[0].where


def read_preference(
    row: Row,
    columns: PreferenceColumns,
    where: str,
    reads: SupportedMedia = NOTHING,
    root: Path = Path(),
    *,
    gold: bool = False,
    heads: LabelledHeads | None = None,
    prefill: bool | Literal["auto"] = "auto",
) -> PreferenceRow:
    """Return ``row`` as a ``PreferenceRow``.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.
        gold: if True, the row has a gold response, in the column ``reference``.
        heads: heads of a reward model whose labels are read. The labels of the first head rank the
            responses. None for other models.
        prefill: the setting ``data.prefill``.

    Raises:
        MalformedRow: no layout fits, or several. Also raised if the responses cannot be compared:
            one is empty, all have one rank, responses of different ranks are equal, the prompts
            differ, or the media differ. Also raised if the gold response is missing, or if no head
            has a label.
    """
    given = GivenRow(recorded(row), columns, where, reads, root, prefill)
    # Without a record, since a layout that does not fit reads nothing.
    layout = format_of(unrecorded(row), columns, where, scored=heads is not None)
    if heads is not None and layout.name == "judge":
        return _candidates(given, heads)
    raw = layout.read(given)
    is_begun = given.continues(raw.prompt)
    answers = [_answer(one, name, where) for one, name in zip(raw.responses, raw.names)]
    labels = [] if heads is None else read_labels(given, raw, heads)
    ranks = _ranks(raw, labels, heads)
    if heads is None:
        _check_ranks(answers, ranks, raw, where)
    else:
        _check_labels(answers, labels, raw, heads, where)
    names, ratings = list(raw.names), raw.ratings
    compared = ratings if heads is None else _compared(given, raw, labels, heads)
    margins = _margins(raw, compared, ranks, where)
    if gold:
        if not ranks:
            raise given.malformed("a gold response goes with compared responses, not with labels")
        answers.append(_gold(given))
        names.append("the gold response")
        ranks.append(GOLD)
        labels.append({})
        # never read, since only ranked responses are compared
        ratings = None if ratings is None else [*ratings, 0.0]
        margins = None if margins is None else [*margins, 0.0]
    records = [parsed_row(given, raw.prompt, answer, is_begun=is_begun) for answer in answers]
    _check_media(records, names, where)
    return PreferenceRow(
        responses=records,
        names=names,
        ranks=ranks,
        desirable=list(raw.desirable),
        ratings=None if ratings is None else list(ratings),
        margins=margins,
        weight=row_weight(given.row, columns, where),
        labels=labels,
    )


def _candidates(given: Given, heads: LabelledHeads) -> PreferenceRow:
    """Return a question for a judge as two conversations."""
    raw = read_candidates(given)
    labels = read_labels(given, raw, heads)
    # the media are parts of the messages
    no_media = {"images": None, "videos": None, "audios": None}
    plain = replace(given, columns=given.columns.model_copy(update=no_media))
    # The row's own responses are verdicts.
    records = [parsed_row(plain, messages, None) for messages in raw.responses]
    first, second = (record.media for record in records)
    if all(map(_same_item, first, second)):
        raise given.malformed(f"A and B are the same {first[-1].kind}")
    ranks = _ranks(raw, labels, heads)
    if not heads.rates:
        _check_difference(labels, heads, given.where)
    return PreferenceRow(
        responses=records,
        names=list(raw.names),
        ranks=ranks,
        desirable=[],
        ratings=None,
        margins=None,
        weight=row_weight(given.row, given.columns, given.where),
        labels=labels,
        is_split=False,
    )


def labelled(row: PreferenceRow) -> list[bool]:
    """Return the label of each response. The best responses of a ranked row are good ones.

    Raises ``MalformedRow`` for more than two ranks, which do not say which responses are good.
    """
    if row.desirable:
        return row.desirable
    if max(row.ranks) > 1:
        problem = f"{max(row.ranks) + 1} ranks do not say which responses are good"
        raise MalformedRow(f"{row.where}: {problem}; compare the responses with dpo")
    return [rank == 0 for rank in row.ranks]


def ranked(row: PreferenceRow) -> list[int]:
    """Return the rank of each response.

    A response with the label True ranks before one with False. Raises ``MalformedRow`` if the
    labels do not differ.
    """
    if row.ranks:
        return row.ranks
    if len(set(row.desirable)) == 1:
        problem = "labels of one value compare no responses"
        raise MalformedRow(f"{row.where}: {problem}; learn from labelled responses with kto")
    return [int(not good) for good in row.desirable]


def dense_ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each value: 0 for the lowest values, 1 for the next ones."""
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    return [places[value] for value in values]


def margins_of(ratings: Sequence[float], ranks: Sequence[int]) -> list[float]:
    """Return how much better each response is than the best one of the next rank.

    It is 0 for responses of the last rank.

    Args:
        ratings: rating of each response.
        ranks: rank of each response: 0 for the best ones, 1 for the next ones.
    """
    best: dict[int, float] = {}
    for rank, rating in zip(ranks, ratings):
        best[rank] = max(rating, best.get(rank, rating))
    return [rating - best.get(rank + 1, rating) for rank, rating in zip(ranks, ratings)]


def _answer(response: Raw, name: str, where: str) -> Raw:
    """Return a response, with a single message as text.

    Raises ``MalformedRow`` if it is empty or does not begin with the assistant.
    """
    if isinstance(response, str):
        if not response.strip():
            raise MalformedRow(f"{where}: {name} is empty")
        return response
    if not response:
        raise MalformedRow(f"{where}: {name} is empty")
    first = response[0]
    if first["role"] != "assistant":
        role = first["role"]
        raise MalformedRow(f"{where}: {name} begins with a message of {role!r}, not 'assistant'")
    said = [m for m in response if m["role"] == "assistant"]
    # a message of more than role and content, such as tool calls, is a response without text too
    if not any(_has_content(m["content"]) or len(m) > 2 for m in said):
        raise MalformedRow(f"{where}: {name} is empty")
    if len(response) == 1 and len(first) == 2 and isinstance(first["content"], str):
        return first["content"]
    return response


def _gold(given: Given) -> Raw:
    """Return the gold response of a row. Raises ``MalformedRow`` if the row has none."""
    name = given.columns.reference or "reference"
    value = look_up(given.row, name)
    if value is None:
        problem = "the loss needs a gold response, and the row has none"
        raise given.malformed(f"{problem}; name its column in data.columns.reference")
    return _answer(raw_text(value, name, given.where), name, given.where)


def _has_content(content: object) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        # a part without text is media, or is refused when it is read
        if not isinstance(text, str) or text.strip():
            return True
    return False


def _check_ranks(
    answers: Sequence[Raw], ranks: Sequence[int], raw: RawPreference, where: str
) -> None:
    """Raise ``MalformedRow`` unless responses can be compared, or all have labels."""
    if not raw.desirable:
        if len(answers) < 2:
            problem = f"{len(answers)} response; there is nothing to compare it with"
            raise MalformedRow(f"{where}: {problem}")
        if len(set(ranks)) == 1:
            raise MalformedRow(f"{where}: all {len(answers)} responses have the same rank")
    check_distinct(raw.names, answers, ranks or raw.desirable, where)


def _ranks(
    raw: RawPreference, labels: Sequence[HeadLabels], heads: LabelledHeads | None
) -> list[int]:
    """Return the rank of each response, by the first head if it labels all of them."""
    values: Sequence[float] | None = None
    if heads is not None and not raw.desirable:
        values = first_ranks(labels, heads.names[0])
    return dense_ranks(raw.ranks if values is None else values)


def _check_labels(
    answers: Sequence[Raw],
    labels: Sequence[HeadLabels],
    raw: RawPreference,
    heads: LabelledHeads,
    where: str,
) -> None:
    """Raise ``MalformedRow`` if responses are equal and a head prefers one of them.

    Unless labels are read as ratings, it is also raised if no head prefers a response.
    """
    check_distinct(raw.names, answers, labels, where)
    if heads.rates:
        return
    if len(answers) < 2 and not raw.desirable:
        problem = f"{len(answers)} response; there is nothing to compare it with"
        raise MalformedRow(f"{where}: {problem}")
    _check_difference(labels, heads, where)


def _check_difference(labels: Sequence[HeadLabels], heads: LabelledHeads, where: str) -> None:
    """Raise ``MalformedRow`` if no head compares two responses, or if a tie is not kept."""
    compared = labels_by_head(labels, heads.names)
    if not any(len(values) > 1 for values in compared.values()):
        problem = f"no head has labels of two of the {len(labels)} responses"
        raise MalformedRow(f"{where}: {problem}; there is nothing to compare")
    if heads.keep_ties or any(len(set(values)) > 1 for values in compared.values()):
        return
    problem = f"every head has one label for all {len(labels)} responses"
    raise MalformedRow(f"{where}: {problem}, and no loss reads ties")


def _check_media(records: Sequence[ParsedRow], names: Sequence[str], where: str) -> None:
    """Raise ``MalformedRow`` unless all responses have the same media."""
    first = records[0]
    for record, name in zip(records, names):
        said = record.messages[record.asked :]
        if len(said) == 1 and marks(said[0]["content"]):
            raise MalformedRow(f"{where}: {name} contains media; only a prompt can have them")
        kinds = [item.kind for item in record.media]
        expected = [item.kind for item in first.media]
        same = kinds == expected and all(map(_same_item, record.media, first.media))
        if not same:
            one = ", ".join(expected) or "no media"
            other = ", ".join(kinds) or "no media"
            problem = f"{names[0]} has {one}, and {name} has {other}"
            if one == other:
                problem = f"the media of {names[0]} and {name} are different"
            raise MalformedRow(f"{where}: {problem}; both responses must be to the same media")


def _same_item(one: Item, other: Item) -> bool:
    if one.value is other.value:
        return True
    if type(one.value) is not type(other.value):
        return False
    if isinstance(one.value, np.ndarray) and isinstance(other.value, np.ndarray):
        return np.array_equal(one.value, other.value)
    try:
        return bool(one.value == other.value)
    # arrays inside mappings have no truth value
    except ValueError:
        return False


def _compared(
    given: Given, raw: RawPreference, labels: Sequence[HeadLabels], heads: LabelledHeads
) -> Sequence[float] | None:
    """Return the ratings whose differences are margins.

    They are the labels of the first head if these rank the responses, else the ratings of the row.
    The labels may prefer another response than the ratings do.
    """
    if raw.ratings is None or not has_column(given, raw, heads):
        return raw.ratings
    values = first_ranks(labels, heads.names[0])
    return raw.ratings if values is None else [-value for value in values]


def _margins(
    raw: RawPreference, ratings: Sequence[float] | None, ranks: Sequence[int], where: str
) -> list[float] | None:
    """Return how much better each response is than the next worse one.

    ``ratings`` have the order of ``ranks``. The margin of the row comes before them.
    """
    if raw.margin is not None:
        if len(ranks) != 2:
            problem = f"one margin for {len(ranks)} responses"
            raise MalformedRow(f"{where}: {problem}; give each response a rating")
        return [raw.margin if rank == 0 else 0.0 for rank in ranks]
    if ratings is None or not ranks:
        return None
    return margins_of(ratings, ranks)
