"""Rows of responses as rows of questions to a judge.

A question has the columns ``prompt`` and ``label``. ``response`` is the judgement to learn. The
column ``judgement`` describes the question for rewards and metrics:

* ``form``, ``verdict`` and ``pattern``: form of the question, and the place of its verdict.
* ``choices``: letters of the verdict. With ``ties`` the last one is a tie.
* ``low``, ``high`` and ``weights``: scale of a rating, and the weights of a rubric.
* ``shown``: position in the row of each response, in the order of the question.
* ``key``: digest of request and responses, equal for both orders.
* ``right``: for each response in the order of the question, if it is one of the best of its row.
* ``row`` and ``id``: digest of request and all responses of the row, and its id.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightrft.config.data import DataConfig, PreferenceColumns, PreferenceDataConfig
from lightrft.config.reward_model.judgement import COMPARED, JudgementConfig
from lightrft.datasets.judgement.question import (
    LETTERS,
    Question,
    ask,
    flat,
    rubric_entries,
    verdict_text,
)
from lightrft.datasets.preference.formats import format_of
from lightrft.datasets.preference.raw_preference import Given, check_distinct
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import MalformedRow, Row, Rows, look_up
from lightrft.datasets.rows.recorded_row import RecordedRow, recorded, unrecorded
from lightrft.datasets.rows.row_content import USUAL, GivenRow, raw_text

Members: TypeAlias = tuple[int, ...]
"""Positions of the responses of a question, in the order that the judge sees."""

TAKEN = {name for names in USUAL.values() for name in names} - {"id", "data_source", "datasource"}
"""Columns of a row that a question replaces."""
OWN = {"responses", "ranks", "chosen", "rejected", "rubric", "preference", "completions", "answers"}
"""Further columns that a question replaces."""


class JudgementRows:
    """The questions that the rows of a table give.

    Every row is read once on construction, since a row may give several questions.

    Args:
        rows: the table.
        data: settings of the data, with ``judgement``.
    """

    def __init__(self, rows: Rows, data: DataConfig) -> None:
        assert data.judgement is not None
        self.rows = rows
        self.data = data
        self.config: JudgementConfig = data.judgement
        self._rated = self.config.model_copy(update={"form": "rating"})
        self.malformed = rows.malformed
        self.first_problem = rows.first_problem
        counts = (self._count(i) for i in range(len(rows)))
        self._starts = list(itertools.accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Row:
        k, j = self._find(i)
        where = self.rows.where(k)
        row = recorded(self.rows[k])
        found = read_candidates(row, self.data, self.config, where)
        try:
            members = self._members(row, found, where)
            if j >= len(members):
                raise MalformedRow(f"{where}: the row has changed since the run began")
            question = RecordedRow(self._question(row, found, members[j], where))
        except ValueError as error:
            raise MalformedRow(f"{where}: {error}") from None
        # A question replaces columns that it did not read, which stay unread.
        question.unread = row.unread_columns()
        return question

    def where(self, i: int) -> str:
        k, j = self._find(i)
        return f"{self.rows.where(k)}, question {j + 1}"

    def _find(self, i: int) -> tuple[int, int]:
        """Return the row of question ``i``, and its number among the questions of the row."""
        k = bisect_right(self._starts, i) - 1
        return k, i - self._starts[k]

    def _count(self, i: int) -> int:
        """Return the number of questions of row ``i``: 1 for a malformed row, which is read
        again."""
        where = self.rows.where(i)
        try:
            row = self.rows[i]
            found = read_candidates(row, self.data, self.config, where)
            return max(1, len(self._members(row, found, where)))
        except (MalformedRow, ValueError):
            return 1

    def _members(self, row: Row, found: Candidates, where: str) -> list[Members]:
        """Return the responses of each question of a row."""
        count = len(found.responses)
        everyone = tuple(range(count))
        if self._config_of(row, found).form not in COMPARED:
            return [(k,) for k in everyone]
        shown = row.get("shown")
        if shown is not None:
            if not isinstance(shown, list | tuple) or sorted(shown) != list(everyone):
                raise MalformedRow(
                    f"{where}: shown is {shown!r}, not the order of {count} responses"
                )
            return [tuple(shown)]
        groups = [everyone]
        if self.config.form == "pair":
            groups = self._pairs(found, where)
        if self.config.order == "given" or self._given(row) is not None:
            return groups
        hashed = [self._hashed(found, group) for group in groups]
        if self.config.order == "both":
            return [order for group in hashed for order in (group, group[::-1])]
        return hashed

    def _config_of(self, row: Row, found: Candidates) -> JudgementConfig:
        """Return the settings of the questions of a row, which ask for ratings in its place.

        They do so if several responses are the best, and if the column ``rate_each`` is true.
        """
        if self.config.form != "best" or not self.config.rate_best:
            return self.config
        several = sum(_best(found.ranks)) > 1
        return self._rated if several or row.get("rate_each") is True else self.config

    def _pairs(self, found: Candidates, where: str) -> list[Members]:
        """Return the pairs of responses that differ, or all pairs with ties or without labels."""
        pairs: list[Members] = list(itertools.combinations(range(len(found.responses)), 2))
        if found.ranks and not self.config.ties:
            pairs = [(a, b) for a, b in pairs if found.ranks[a] != found.ranks[b]]
        if not pairs:
            way_out = "leave the row out, or set data.judgement.ties"
            raise MalformedRow(f"{where}: no two responses of different rank; {way_out}")
        return pairs

    def _hashed(self, found: Candidates, members: Members) -> Members:
        """Return ``members`` in an order that depends on their content, not on their position."""
        request = flat(found.prompt, [])
        marks = {k: _digest(request, _text(found.responses[k])) for k in members}
        return tuple(sorted(members, key=lambda k: marks[k]))

    def _given(self, row: Row) -> object:
        """Return the judgement that a row gives to learn, or None."""
        column = self.config.column
        names = (column, f"chosen_{column}")
        return next((row[name] for name in names if row.get(name) is not None), None)

    def _question(self, row: Row, found: Candidates, members: Members, where: str) -> Row:
        """Return one question as a row. Raises ``ValueError``."""
        config = self._config_of(row, found)
        question = replace(found, responses=[found.responses[k] for k in members])
        columns = preference_columns(self.data)
        label = self._label(config.form, row, found, members, where)
        best = _best(found.ranks)
        taken = (
            TAKEN | OWN | {config.column, f"chosen_{config.column}", f"rejected_{config.column}"}
        )
        kept = {name: value for name, value in row.items() if name not in taken}
        made: Row = {
            **kept,
            columns.prompt or "prompt": ask(question, config),
            columns.label or "label": label,
            "judgement": {
                "form": config.form,
                "verdict": config.verdict,
                "pattern": config.pattern,
                "ties": config.ties,
                "choices": self._letters(members),
                "low": config.scale[0],
                "high": config.scale[1],
                "weights": [weight for _, weight in found.rubric],
                "shown": list(members),
                "key": self._key(found, members),
                "right": [best[k] for k in members] if best else [],
                "row": self._key(found, range(len(found.responses))),
                "id": str(row.get("id", "")),
            },
        }
        if isinstance(self.data, PreferenceDataConfig):
            made[columns.chosen or "chosen"], made[columns.rejected or "rejected"] = (
                self._critiques(row, label, where)
            )
        else:
            given = row.get(config.column)
            if given is None and label is not None:
                given = verdict_text(config, _shown(label))
            made[columns.response or "response"] = given
        return made

    def _letters(self, members: Members) -> str:
        return LETTERS[: len(members) + self.config.ties] if len(members) > 1 else ""

    def _critiques(self, row: Row, label: object, where: str) -> tuple[object, object]:
        """Return the better and the worse judgement of a question.

        They are given, or the right and a wrong verdict of a comparison.
        """
        config = self.config
        given = [row.get(f"{side}_{config.column}") for side in ("chosen", "rejected")]
        if None not in given:
            return given[0], given[1]
        if label is None or config.form not in ("pair", "best"):
            names = " and ".join(f"{side}_{config.column}" for side in ("chosen", "rejected"))
            raise MalformedRow(f"{where}: no judgements to prefer; add the columns {names}")
        wrong = next(letter for letter in LETTERS if letter != label)
        return verdict_text(config, str(label)), verdict_text(config, wrong)

    def _label(
        self, form: str, row: Row, found: Candidates, members: Members, where: str
    ) -> object:
        """Return the right verdict of a question of ``form``, or None if the row has no labels."""
        if form == "rubric":
            return row.get("label")
        if form == "rating":
            return self._rating(found, members[0], where)
        if not found.ranks:
            return None
        ranks = [found.ranks[k] for k in members]
        if form == "ranking":
            if len(set(ranks)) < len(ranks):
                raise MalformedRow(
                    f"{where}: two responses have one rank; a ranking needs an order"
                )
            order = sorted(range(len(ranks)), key=lambda k: ranks[k])
            return " > ".join(LETTERS[k] for k in order)
        best = [k for k, is_best in enumerate(_best(ranks)) if is_best]
        if len(best) == 1:
            return LETTERS[best[0]]
        if form == "pair":
            return LETTERS[2]
        raise MalformedRow(f"{where}: {len(best)} responses are the best; leave the row out")

    def _rating(self, found: Candidates, member: int, where: str) -> float | None:
        """Return the rating of a response. Raises ``MalformedRow`` if it is not on the scale."""
        if not found.ratings:
            is_labelled = self.config.rate_best and len(found.ranks) > 0
            return self.config.scale[_best(found.ranks)[member]] if is_labelled else None
        rating, (low, high) = found.ratings[member], self.config.scale
        if not low <= rating <= high:
            problem = f"rating {rating:g} is not within data.judgement.scale = [{low:g}, {high:g}]"
            raise MalformedRow(f"{where}: {problem}")
        return rating

    def _key(self, found: Candidates, members: Sequence[int]) -> str:
        texts = sorted(_text(found.responses[k]) for k in members)
        return _digest(flat(found.prompt, []), *texts)


def _best(ranks: Sequence[float]) -> list[bool]:
    """Return which of ``ranks`` are the lowest."""
    return [rank == min(ranks) for rank in ranks]


def _shown(label: object) -> str:
    """Return a right verdict as a judge writes it."""
    if isinstance(label, float):
        return f"{label:g}"
    if isinstance(label, list | tuple):
        return ", ".join("yes" if one else "no" for one in label)
    return str(label)


def _text(said: object) -> str:
    """Return a text that identifies a response."""
    return said if isinstance(said, str) else json.dumps(said, sort_keys=True, default=repr)


def _digest(*texts: Sequence[str] | str) -> str:
    # JSON separates the texts without doubt.
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:24]


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
