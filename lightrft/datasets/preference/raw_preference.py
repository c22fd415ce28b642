"""The common form of all layouts of preference rows, and readers of their columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.benchmarks.instructions import alpaca
from lightrft.datasets.row_parser import USUAL, Message, json_messages, message_fields
from lightrft.datasets.row_tables import MalformedRow, Row, named_column

Raw = str | list[Message]
"""Text, or messages with ``role`` and ``content``."""

TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}


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


def raw_text(value: object, what: str, where: str) -> Raw:
    """Return a column as text or messages.

    Args:
        value: text, one message, a list of messages, or such a list as a JSON string.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value has another type.
    """
    if isinstance(value, str):
        inside = json_messages(value)
        if inside is None:
            return value
        value = inside
    if isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value):
        value = [value]
    if isinstance(value, list | tuple):
        place = f"{where}, {what}, message"
        return [message_fields(m, f"{place} {k}") for k, m in enumerate(value, start=1)]
    if value is None:
        raise MalformedRow(f"{where}: {what} is empty")
    kind = type(value).__name__
    problem = f"{where}: {what} must be text or messages, not {kind}"
    way_out = "read pairs of media with a reader of docs/readers.md, which asks a judge"
    raise MalformedRow(f"{problem}; {way_out}")


def as_messages(raw: Raw) -> list[Message]:
    """Return text as a message of the user, and messages unchanged."""
    return [{"role": "user", "content": raw}] if isinstance(raw, str) else raw


def is_transcript(text: str) -> bool:
    r"""Return True if ``text`` is a conversation of ``\n\nHuman:`` and ``\n\nAssistant:``."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def transcript(text: str) -> list[Message]:
    """Return the messages of a text for which ``is_transcript`` holds."""
    # the split gives: empty text, speaker, words, speaker, words ...
    _, *pieces = TURN.split(text.lstrip())
    return [
        {"role": TRANSCRIPT_ROLES[speaker], "content": words.strip()}
        for speaker, words in zip(pieces[::2], pieces[1::2])
    ]


def raw_prompt(value: object, what: str, where: str) -> Raw:
    """Return a prompt as text or messages.

    A transcript that ends with ``Assistant:`` becomes the messages before it.

    Args:
        value: see ``raw_text``.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value has another type.
    """
    prompt = raw_text(value, what, where)
    if not isinstance(prompt, str) or not is_transcript(prompt):
        return prompt
    messages = transcript(prompt)
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return messages


def find_prompt(given: GivenRow) -> Raw | None:
    """Return the prompt of a row, or None if it has none.

    The columns ``system`` and ``history`` of LLaMA-Factory become messages.

    Raises:
        MalformedRow: the prompt is malformed, or the column that ``data.columns.prompt`` names is
            missing.
    """
    row, columns, where = given.row, given.columns, given.where
    prompt: Raw | None = None
    if columns.prompt:
        named = named_column(row, columns.prompt, "prompt", where)
        prompt = raw_prompt(named, columns.prompt, where)
    elif row.get("instruction") is not None:
        # the reader needs the column, and this function does not use it
        prompt = raw_prompt(alpaca({**row, "output": ""})["prompt"], "instruction", where)
    else:
        for name in USUAL["prompt"]:
            if row.get(name) is not None:
                prompt = raw_prompt(row[name], name, where)
                break
    if prompt is None:
        return None
    return _with_history(row, prompt, where)


def _with_history(row: Row, prompt: Raw, where: str) -> Raw:
    """Return ``prompt`` after the messages of the columns ``system`` and ``history``."""
    before: list[Message] = []
    system = row.get("system")
    has_system = not isinstance(prompt, str) and prompt[:1] and prompt[0]["role"] == "system"
    if isinstance(system, str) and system.strip() and not has_system:
        before.append({"role": "system", "content": system})
    # other layouts may have a column of this name with something else
    history = row.get("history") if "instruction" in row else None
    if not isinstance(history or [], list | tuple):
        raise MalformedRow(f"{where}: history must be a list of questions with answers")
    for k, turn in enumerate(history or (), start=1):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise MalformedRow(f"{where}: history, turn {k} is not a question with its answer")
        before.append({"role": "user", "content": turn[0]})
        before.append({"role": "assistant", "content": turn[1]})
    return [*before, *as_messages(prompt)] if before else prompt


def label(value: object, what: str, where: str) -> bool:
    """Return a column as a label of a response.

    Args:
        value: True, False, 1 or 0.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value is not a boolean.
    """
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise MalformedRow(f"{where}: {what} is {value!r}, not a boolean; write true or false")


def mappings(value: object, what: str, where: str) -> list[Row]:
    """Return a column of records.

    Args:
        value: a list of records, or one record of lists, as ``datasets`` writes it.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value has another type.
    """
    if isinstance(value, Mapping):
        lists = [column for column in value.values() if isinstance(column, list | tuple)]
        lengths = {len(column) for column in lists}
        if len(lists) == len(value) and len(lengths) == 1:
            count = lengths.pop()
            value = [{name: column[k] for name, column in value.items()} for k in range(count)]
    if not isinstance(value, list | tuple) or not all(isinstance(v, Mapping) for v in value):
        raise MalformedRow(f"{where}: {what} must be a list of records")
    return list(value)


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
        if own != theirs and _bare(one) == _bare(other):
            problem = f"{name} is equal to {other_name}, but one is better"
            raise MalformedRow(f"{where}: {problem}")


def _bare(response: Raw) -> Raw:
    return response.strip() if isinstance(response, str) else response
