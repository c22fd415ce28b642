"""Layouts of a better and a worse response."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.preference.common_prompt import split_prompt
from lightrft.datasets.preference.raw_preference import (
    GivenRow,
    RawPreference,
)
from lightrft.datasets.row_parser import number, optional_number
from lightrft.datasets.row_tables import ABSENT, MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.row_content import Raw, as_messages, find_prompt, raw_text

SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_reward", "rejected_reward"),
)
"""Columns of the ratings of both responses, as published sets name them."""

REJECTED = ("rejected_response", "rejected_messages", "rejected_images")
LETTERS = ("A", "B")


def is_pair(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ``{prompt?, chosen, rejected}``."""
    names = (columns.chosen or "chosen", columns.rejected or "rejected")
    sides = [look_up(row, name, ABSENT) for name in names]
    # a judge's question has its candidates in these columns, as media parts
    if any(side is ABSENT for side in sides) or is_judged(row, columns):
        return False
    if is_choice(row, columns):
        return False
    # one null is an empty response, and two nulls are a row of another layout
    return any(side is not None for side in sides)


def read_pair(given: GivenRow) -> RawPreference:
    """Read ``{prompt?, chosen, rejected}`` of texts, messages or whole conversations."""
    row, columns, where = given.row, given.columns, given.where
    names = {"chosen": columns.chosen or "chosen", "rejected": columns.rejected or "rejected"}
    sides: dict[str, Raw] = {}
    for what, name in names.items():
        sides[name] = raw_text(named_column(row, name, what, where), name, where)
    # Other columns of a prompt may be notes on how the row was made.
    must_match = bool(columns.prompt) or row.get("prompt") is not None
    asked = find_prompt(row, columns, where)
    prompt, responses = split_prompt(sides, asked, where, must_match=must_match)
    return RawPreference(
        prompt,
        responses,
        list(sides),
        ranks=(0, 1),
        ratings=_scores(row, where),
        margin=_margin(row, where),
    )


def _scores(row: Row, where: str) -> list[float] | None:
    """Return the scores of the better and the worse response, or None if the row has none.

    Raises ``MalformedRow`` if the worse response has the higher score.
    """
    for better, worse in SCORES:
        if row.get(better) is None or row.get(worse) is None:
            continue
        scores = [number(row[name], name, where) for name in (better, worse)]
        if scores[0] < scores[1]:
            problem = f"{better} is {scores[0]:g}, less than {worse}, which is {scores[1]:g}"
            way_out = "exchange the two responses, or correct the scores"
            raise MalformedRow(f"{where}: {problem}; {way_out}")
        return scores
    return None


def _margin(row: Row, where: str) -> float | None:
    """Return the margin of a row, or None. Raises ``MalformedRow`` if it is below 0."""
    margin = optional_number(row, "margin", where)
    if margin is not None and margin < 0:
        problem = f"margin is {margin:g}, so that the rejected response would be the better one"
        way_out = "exchange the two responses, or make the margin at least 0"
        raise MalformedRow(f"{where}: {problem}; {way_out}")
    return margin


def is_choice(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ``{prompt, chosen: texts, rejected: texts}``, as in RewardBench 2."""
    names = (columns.chosen or "chosen", columns.rejected or "rejected")
    return all(_is_texts(look_up(row, name)) for name in names)


def read_choice(given: GivenRow) -> RawPreference:
    """Read ``{prompt, chosen: texts, rejected: texts}``: each chosen one is better than the others.

    Raises:
        MalformedRow: the row has no prompt.
    """
    row, columns, where = given.row, given.columns, given.where
    prompt = given.prompt()
    responses: list[Raw] = []
    names: list[str] = []
    ranks: list[int] = []
    for rank, column in enumerate((columns.chosen or "chosen", columns.rejected or "rejected")):
        for k, text in enumerate(named_column(row, column, column, where), start=1):
            responses.append(text)
            names.append(f"{column} {k}")
            ranks.append(rank)
    return RawPreference(prompt, responses, names, ranks=ranks)


def _is_texts(value: object) -> bool:
    """Return True for a list of texts that is not empty."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(one, str) for one in value)


def is_rejected_response(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ms-swift's ``{messages, rejected_response | rejected_messages}``.

    Its older rows have a query and a response in place of messages.
    """
    return any(row.get(name) is not None for name in REJECTED)


def read_rejected_response(given: GivenRow) -> RawPreference:
    """Read ms-swift's ``{messages, rejected_response | rejected_messages, rejected_images?}``."""
    row, where = given.row, given.where
    for kind in ("images", "videos", "audios"):
        other = row.get(f"rejected_{kind}")
        if other is not None and other != row.get(kind):
            problem = f"rejected_{kind} is not {kind}"
            raise MalformedRow(f"{where}: {problem}; both responses must be to the same media")
    messages = as_messages(given.prompt())
    if messages[-1:] and messages[-1]["role"] != "assistant":
        better = row.get(given.columns.response or "response")
        if isinstance(better, str):
            messages = [*messages, {"role": "assistant", "content": better}]
    margin = _margin(row, where)
    if row.get("rejected_messages") is not None:
        other = raw_text(row["rejected_messages"], "rejected_messages", where)
        sides: dict[str, Raw] = {"messages": messages, "rejected_messages": other}
        prompt, responses = split_prompt(sides, None, where)
        return RawPreference(prompt, responses, list(sides), ranks=(0, 1), margin=margin)
    if not messages or messages[-1]["role"] != "assistant":
        raise MalformedRow(f"{where}: messages do not end with the response of the assistant")
    worse = row.get("rejected_response")
    if worse is None:
        raise MalformedRow(f"{where}: no column 'rejected_response' or 'rejected_messages'")
    several = isinstance(worse, list | tuple) and all(isinstance(one, str) for one in worse)
    texts = worse if several else [worse]
    rejected = [raw_text(one, "rejected_response", where) for one in texts]
    names = ["messages", *["rejected_response"] * len(rejected)]
    ranks = [0, *[1] * len(rejected)]
    return RawPreference(
        messages[:-1], [messages[-1:], *rejected], names, ranks=ranks, margin=margin
    )


def is_rlhf_v(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for RLHF-V's ``{text: JSON, image, origin_dataset, ...}``."""
    return isinstance(row.get("text"), str | Mapping) and "origin_dataset" in row


def read_rlhf_v(given: GivenRow) -> RawPreference:
    """Read RLHF-V, whose column ``text`` is ``{question, chosen, rejected}`` as JSON."""
    row, where = given.row, given.where
    inside = row["text"]
    if isinstance(inside, str):
        try:
            inside = json.loads(inside)
        except ValueError as error:
            raise MalformedRow(f"{where}: text is not JSON: {error}") from None
    if not isinstance(inside, Mapping) or not is_pair(inside, PreferenceColumns()):
        raise MalformedRow(f"{where}: text has no question, chosen and rejected")
    return read_pair(GivenRow(inside, PreferenceColumns(), where))


def is_judged(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for the questions of the readers of media preferences (docs/readers.md)."""
    return row.get("preference") in (*LETTERS, "C") and row.get("label") in (*LETTERS, "C")


def read_judged(given: GivenRow) -> RawPreference:
    """Read a question for a judge: the right verdict is preferred to each wrong one."""
    row, where = given.row, given.where
    right = row["label"]
    wrong = [letter for letter in LETTERS if letter != right]
    responses: list[Raw] = [f"<answer>{letter}</answer>" for letter in (right, *wrong)]
    prompt = raw_text(row.get("prompt"), "prompt", where)
    names = ["the right verdict", *["a wrong verdict"] * len(wrong)]
    return RawPreference(prompt, responses, names, ranks=[0, *[1] * len(wrong)])
