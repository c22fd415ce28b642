"""Layouts of one response with a label: good or bad."""

from __future__ import annotations

from collections.abc import Mapping

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.conversations.messages import known_role
from lightrft.datasets.preference.pair_formats import (
    is_judged,
    is_pair,
    is_rejected_response,
)
from lightrft.datasets.preference.raw_preference import (
    GivenRow,
    RawPreference,
    label,
)
from lightrft.datasets.row_parser import json_messages
from lightrft.datasets.row_tables import MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import (
    Raw,
    column_prompt,
    raw_text,
    usual,
    with_context,
)

RESPONSES = ("completion", "output", "response")


def is_labelled(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for a response or conversation with a boolean ``label`` or ``kto_tag``."""
    if row.get("kto_tag") is not None:
        return True
    given = look_up(row, columns.label or "label")
    if given is None:
        return False
    if not _response_column(row, columns) and not _ends_with_assistant(row, columns):
        return False
    if isinstance(given, bool) or given in (0, 1):
        return True
    # next to compared responses, another label is a reference answer
    compared = (is_pair, is_rejected_response, is_judged)
    return not any(matches(row, columns) for matches in compared)


def read_labelled(given: GivenRow) -> RawPreference:
    """Read ``{prompt, completion, label}``, ``{messages, label}`` or ``{..., kto_tag}``."""
    row, columns, where = given.row, given.columns, given.where
    name = "kto_tag" if row.get("kto_tag") is not None else columns.label or "label"
    good = label(look_up(row, name), name, where)
    column = _response_column(unrecorded(row), columns)
    if column:
        response = raw_text(named_column(row, column, "response", where), column, where)
        return RawPreference(given.prompt(), [response], [column], desirable=[good])
    # Before the context, whose history is no response.
    prompt, response = _split(column_prompt(row, columns, where, has_response=False) or "", where)
    prompt = with_context(row, columns, prompt, where)
    return RawPreference(prompt, [response], ["the response"], desirable=[good])


def _response_column(row: Row, columns: PreferenceColumns) -> str:
    """Return the name of the column of the response. Empty if the row has none."""
    if columns.response:
        return columns.response
    return next((name for name in RESPONSES if row.get(name) is not None), "")


def _ends_with_assistant(row: Row, columns: PreferenceColumns) -> bool:
    """Return True if the row is a conversation whose last message is the assistant's."""
    for name in (columns.prompt,) if columns.prompt else usual(columns, "prompt"):
        messages = look_up(row, name)
        if isinstance(messages, str):
            messages = json_messages(messages)
        last = messages[-1] if isinstance(messages, list | tuple) and messages else None
        if isinstance(last, Mapping):
            role = known_role(last.get("role") or last.get("from"))
            # A prompt of messages may stand next to the whole conversation.
            if role == "assistant":
                return True
    return False


def _split(messages: Raw, where: str) -> tuple[Raw, Raw]:
    """Return the messages before the last assistant turn, and that turn."""
    if not isinstance(messages, str):
        others = [
            k for k, message in enumerate(messages, start=1) if message["role"] != "assistant"
        ]
        start = max(others, default=0)
        if start < len(messages):
            return messages[:start], messages[start:]
    raise MalformedRow(f"{where}: no response; name its column in data.columns.response")
