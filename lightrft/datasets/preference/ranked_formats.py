"""Layouts of two or more responses with ranks, ratings or votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.preference.raw_preference import (
    GivenRow,
    RawPreference,
    label,
    mappings,
)
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import MalformedRow, Row, look_up
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import Raw, raw_prompt, raw_text, with_context

PKU = ("response_0", "response_1")
SHP = ("human_ref_A", "human_ref_B")


def is_ranked(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for NeMo's ``{context, completions: [{rank, completion}]}``."""
    return _has(row.get("completions"), "rank", "completion")


def read_ranked(given: GivenRow) -> RawPreference:
    """Read NeMo's ``{context, completions: [{rank, completion}]}``. Lower ranks are better."""
    row, where = given.row, given.where
    records = mappings(row, "completions", where)
    return _of_records(_context(given), records, "completion", where)


def is_nectar(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for Nectar's ``{prompt, answers: [{answer, rank}]}``."""
    return _has(row.get("answers"), "rank", "answer")


def read_nectar(given: GivenRow) -> RawPreference:
    """Read Nectar's ``{prompt, answers: [{answer, rank}]}``. Rank 1 is the best."""
    row, where = given.row, given.where
    records = mappings(row, "answers", where)
    return _of_records(given.prompt(), records, "answer", where)


def is_rated(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for UltraFeedback's and VLFeedback's ``completions: [{response, ...}]``."""
    return _has(row.get("completions"), "annotations", "response")


def read_rated(given: GivenRow) -> RawPreference:
    """Read UltraFeedback and VLFeedback.

    The rating of a response is the mean of the ratings of its ``annotations``. Ratings that are not
    numbers, such as N/A, are left out. The column ``overall_score`` is read if none is left.
    """
    row, where = given.row, given.where
    records = mappings(row, "completions", where)
    responses: list[Raw] = []
    ratings: list[float] = []
    for k, record in enumerate(records, start=1):
        place = f"{where}, completion {k}"
        responses.append(raw_text(record.get("response"), "response", place))
        ratings.append(_mean_rating(record, place))
    names = [f"completion {k}" for k in range(1, len(records) + 1)]
    ranks = [-rating for rating in ratings]
    prompt = given.prompt()
    return RawPreference(prompt, responses, names, ranks=ranks, ratings=ratings, records=records)


def is_shp(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for SHP's ``{history, human_ref_A, human_ref_B, labels}``."""
    return {"history", *SHP, "labels"} <= set(row)


def read_shp(given: GivenRow) -> RawPreference:
    """Read SHP. Its ``history`` is the question, and ``labels`` is 1 if response A is better."""
    row, columns, where = given.row, given.columns, given.where
    best = label(row["labels"], "labels", where)
    responses = [raw_text(row[name], name, where) for name in SHP]
    context = columns.model_copy(update={"history": None})
    prompt = with_context(row, context, raw_prompt(row["history"], where), where)
    return RawPreference(prompt, responses, list(SHP), ranks=(1 - best, int(best)))


def is_helpsteer3(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for HelpSteer3's ``{context, response1, response2, overall_preference}``."""
    return {"response1", "response2", "overall_preference"} <= set(row)


def read_helpsteer3(given: GivenRow) -> RawPreference:
    """Read HelpSteer3. ``overall_preference`` is -3 (the first is better) to 3."""
    row, where = given.row, given.where
    preferred = number(row["overall_preference"], "overall_preference", where)
    return _by_strength(given, _context(given), ("response1", "response2"), preferred)


def is_helpsteer2(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for HelpSteer2's ``{prompt, response_1, response_2, preference_strength}``."""
    # sets that were made of it keep these columns next to their pairs
    is_pair = "chosen" in row and "rejected" in row
    return {"response_1", "response_2", "preference_strength"} <= set(row) and not is_pair


def read_helpsteer2(given: GivenRow) -> RawPreference:
    """Read HelpSteer2's preferences. ``preference_strength`` is -3 (the first is better) to 3."""
    row, where = given.row, given.where
    preferred = number(row["preference_strength"], "preference_strength", where)
    return _by_strength(given, given.prompt(), ("response_1", "response_2"), preferred)


def _by_strength(
    given: GivenRow, prompt: Raw, names: Sequence[str], preferred: float
) -> RawPreference:
    """Return two responses, of which the first is better if ``preferred`` is below 0."""
    responses = [raw_text(given.row[name], name, given.where) for name in names]
    ranks = (preferred, -preferred)
    return RawPreference(prompt, responses, list(names), ranks=ranks, margin=abs(preferred))


def is_pku_better(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for PKU-SafeRLHF's ``{prompt, response_0, response_1, better_response_id}``."""
    return {*PKU, "better_response_id"} <= set(row)


def read_pku_better(given: GivenRow) -> RawPreference:
    """Read PKU-SafeRLHF: the more helpful response is preferred."""
    return _pku(given, "better_response_id")


def is_pku_safer(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for PKU-SafeRLHF's ``{prompt, response_0, response_1, safer_response_id}``."""
    return {*PKU, "safer_response_id"} <= set(row)


def read_pku_safer(given: GivenRow) -> RawPreference:
    """Read PKU-SafeRLHF: the safer response is preferred."""
    return _pku(given, "safer_response_id")


def is_pku_safe(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for PKU-SafeRLHF's ``{..., is_response_0_safe, is_response_1_safe}``."""
    return {*PKU, "is_response_0_safe", "is_response_1_safe"} <= set(row)


def read_pku_safe(given: GivenRow) -> RawPreference:
    """Read PKU-SafeRLHF as labelled responses: a safe response is a good one."""
    row, where = given.row, given.where
    names = [f"is_{name}_safe" for name in PKU]
    labels = [label(row[name], name, where) for name in names]
    responses = [raw_text(row[name], name, where) for name in PKU]
    return RawPreference(given.prompt(), responses, list(PKU), desirable=labels)


def read_pku_cost(given: GivenRow) -> RawPreference:
    """Read PKU-SafeRLHF as harm ratings: 2 for an unsafe response, and 1 for the less safe one.

    Ratings of 2 and 3 are then unsafe, and the more harmful response has the higher rating.

    Raises:
        MalformedRow: the row calls an unsafe response safer than a safe one.
    """
    order, safe = _pku(given, "safer_response_id"), read_pku_safe(given).desirable
    if safe[0] != safe[1] and safe[0] == (order.ranks[0] > order.ranks[1]):
        raise MalformedRow(
            f"{given.where}: safer_response_id is {given.row['safer_response_id']}, and only the "
            "other response is safe"
        )
    ratings = [
        2.0 * (not good) + float(rank > 0) for good, rank in zip(safe, order.ranks, strict=True)
    ]
    return RawPreference(order.prompt, order.responses, order.names, ratings=ratings)


def is_pku_cost(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for PKU-SafeRLHF's rows with ``safer_response_id`` and ``is_response_0_safe``."""
    return is_pku_safer(row, columns) and is_pku_safe(row, columns)


def _pku(given: GivenRow, column: str) -> RawPreference:
    row, where = given.row, given.where
    best = number(row[column], column, where)
    if best not in (0, 1):
        raise MalformedRow(f"{where}: {column} is {row[column]!r}, not 0 or 1")
    responses = [raw_text(row[name], name, where) for name in PKU]
    ranks = (best, 1 - best)
    return RawPreference(given.prompt(), responses, list(PKU), ranks=ranks)


def _of_records(prompt: Raw, records: Sequence[Row], column: str, where: str) -> RawPreference:
    """Return the responses in ``column`` of ``records`` with their ranks."""
    responses: list[Raw] = []
    ranks: list[float] = []
    for k, record in enumerate(records, start=1):
        place = f"{where}, {column} {k}"
        responses.append(raw_text(record.get(column), column, place))
        ranks.append(number(record.get("rank"), "rank", place))
    names = [f"{column} {k}" for k in range(1, len(records) + 1)]
    return RawPreference(prompt, responses, names, ranks=ranks, records=records)


def _context(given: GivenRow) -> Raw:
    """Return the prompt of a row that has it in ``context``."""
    row, columns, where = given.row, given.columns, given.where
    if not columns.prompt and row.get("context") is not None:
        return with_context(row, columns, raw_prompt(row["context"], where), where)
    return given.prompt()


def _has(value: object, *names: str) -> bool:
    """Return True if ``value`` is a list of records with the columns ``names``."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, Mapping) and set(names) <= set(value)


def _mean_rating(record: Row, where: str) -> float:
    found = []
    annotations = unrecorded(record).get("annotations")
    for aspect, one in annotations.items() if isinstance(annotations, Mapping) else ():
        inside = ".Rating" if isinstance(one, Mapping) else ""
        given = look_up(record, f"annotations.{aspect}{inside}")
        # UltraFeedback writes N/A where an aspect does not apply
        if isinstance(given, int | float) or (isinstance(given, str) and _is_number(given)):
            found.append(number(given, "Rating", where))
    if found:
        return sum(found) / len(found)
    return number(record.get("overall_score"), "overall_score", where)


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").replace(".", "", 1).isdigit()
