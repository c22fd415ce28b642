"""The content of a row: its prompt, response, label and other parts, before media are read.

All verbs read the prompt of a row here, so that they read equal prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightrft.config.data import Columns
from lightrft.datasets.conversations.other_messages import TRANSCRIPTS, spread, system_text
from lightrft.datasets.row_parser import (
    CHATS,
    CONVERSATIONS,
    PROMPTS,
    Message,
    json_messages,
    message_fields,
)
from lightrft.datasets.row_tables import MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.recorded_row import RecordedRow, has_content, unrecorded

Raw = str | list[Message]
"""Text, or messages with ``role`` and ``content``."""

USUAL: dict[str, tuple[str, ...]] = {
    "prompt": PROMPTS,
    "system": (
        *("system", "system_prompt", "system_message"),
        *("systemInstruction", "system_instruction"),
    ),
    "history": ("history",),
    "response": (
        "response",
        "output",
        "completion",
        "answer",
        "target",
        "solution",
        "generated_solution",
    ),
    "label": (
        "label",
        "answer",
        "final_answer",
        "expected_answer",
        "reward_model.ground_truth",
        "ground_truth",
        "extra_info.label",
    ),
    "reference": (
        "reference",
        "solution",
        "generated_solution",
        "response",
        "output",
        "reward_model.ground_truth",
        "ground_truth",
    ),
    "data_source": ("data_source", "datasource"),
    "id": ("id",),
}
"""Usual columns of each part of a row, in the order in which they are tried."""
CONTEXT = ("prompt", "system", "history", "tools")
"""Parts of a prompt."""
MEANINGS = {
    **dict.fromkeys(USUAL["system"], "system"),
    **dict.fromkeys(USUAL["history"], "history"),
    **dict.fromkeys(("image", "images"), "images"),
    **dict.fromkeys(("video", "videos"), "videos"),
    **dict.fromkeys(("audio", "audios", "audio_path"), "audios"),
}
"""Columns that belong to a prompt whatever the layout, and the setting of ``data.columns``.

Tools are left out, because the chat template reads them later.
"""

_SPELLED_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|from|content|value)'\s*:")
"""The start of messages as Python and the CSV files of pandas write them."""
RULE = re.compile(r"\w+_rule")
"""The form of a label that names a rule of LightRFT, such as ``geo3k_rule``."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The values that rewards compare a response with.

    Args:
        label: the label. None if the row has none.
        reference: a worked solution. None if the row has none.
        data_source: name of the data source. Empty if the row does not name one.
        columns: the columns of label and reference.
    """

    label: object
    reference: object
    data_source: str
    columns: tuple[str, ...]


def raw_text(value: object, what: str, where: str) -> Raw:
    """Return a column as text or messages.

    Args:
        value: text, one message, a list of messages, or such a list as a JSON string.
        what: name of the column, for messages. Empty for a prompt.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value has another type.
    """
    if isinstance(value, str):
        inside = json_messages(value)
        if inside is None:
            if _SPELLED_MESSAGES.match(value):
                problem = f"{where}: {what or 'the prompt'} is messages in the spelling of Python"
                raise MalformedRow(f"{problem}; write them as JSON, by json.dumps")
            return value
        value = inside
    if isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value):
        value = [value]
    if isinstance(value, list | tuple):
        place = f"{where}, {what}, message" if what else f"{where}, message"
        return [
            message_fields(message, f"{place} {k}")
            for k, one in enumerate(value, start=1)
            for message in spread(one, f"{place} {k}")
        ]
    if value is None:
        raise MalformedRow(f"{where}: {what or 'the prompt'} is empty")
    kind = type(value).__name__
    if not what:
        raise MalformedRow(f"{where}: a prompt must be text or a list of messages, not {kind}")
    problem = f"{where}: {what} must be text or messages, not {kind}"
    way_out = "read pairs of media with a reader of docs/readers.md, which asks a judge"
    raise MalformedRow(f"{problem}; {way_out}")


def as_messages(raw: Raw) -> list[Message]:
    """Return text as a message of the user, and messages unchanged."""
    return [{"role": "user", "content": raw}] if isinstance(raw, str) else raw


def is_transcript(text: str) -> bool:
    """Return True if ``text`` is a conversation in one of the forms of ``TRANSCRIPTS``."""
    return any(form.begins.search(text) for form in TRANSCRIPTS)


def transcript(text: str) -> list[Message]:
    """Return the messages of a text for which ``is_transcript`` holds."""
    return next(form for form in TRANSCRIPTS if form.begins.search(text)).messages(text)


def raw_prompt(value: object, where: str) -> Raw:
    """Return a prompt as text or messages.

    A transcript that ends with ``Assistant:`` becomes the messages before it.

    Args:
        value: see ``raw_text``.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value has another type.
    """
    prompt = raw_text(value, "", where)
    if not isinstance(prompt, str) or not is_transcript(prompt):
        return prompt
    messages = transcript(prompt)
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return messages


def usual(columns: Columns, what: str) -> tuple[str, ...]:
    """Return the usual columns of a part of a row, without those named for another part.

    Nothing of a prompt has the column of another part. Responses, labels and references may share
    a column.

    Args:
        columns: names of the columns.
        what: a key of ``USUAL``, or ``tools``.
    """
    if not columns.model_fields_set:
        return USUAL.get(what, (what,))
    others = type(columns).model_fields if what in CONTEXT else CONTEXT
    named = [getattr(columns, other) for other in others if other != what]
    return tuple(name for name in USUAL.get(what, (what,)) if name not in named)


def tools_column(columns: Columns) -> str | None:
    """Return ``data.columns.tools``, or None if the column ``tools`` is another part of a row."""
    return columns.tools if columns.tools or usual(columns, "tools") else None


def find_prompt(row: Row, columns: Columns, where: str, *, has_response: bool = True) -> Raw | None:
    """Return the prompt of a row with its system message and history, or None if it has none.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
        has_response: if False, the response is in the messages of the prompt.

    Raises:
        MalformedRow: the prompt is malformed or ambiguous, or a named column is missing.
    """
    prompt = column_prompt(row, columns, where, has_response=has_response)
    return None if prompt is None else with_context(row, columns, prompt, where)


def column_prompt(row: Row, columns: Columns, where: str, *, has_response: bool) -> Raw | None:
    """Return the prompt as its column has it, without system message and history.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
        has_response: if False, the response is in the messages of the prompt.

    Raises:
        MalformedRow: the prompt is malformed or ambiguous, or a named column is missing.
    """
    name = prompt_column(row, columns, where)
    if not name:
        return None
    value = look_up(row, name)
    if not columns.prompt:
        pair = {"instruction", "input"}.intersection(usual(columns, "prompt"))
        if name in pair and isinstance(row.get("instruction"), str) and "instruction" in pair:
            try:
                value = with_input({n: row.get(n) for n in pair})
            except ValueError as error:
                raise MalformedRow(f"{where}: {error}") from None
        elif not has_response and name not in CONVERSATIONS:
            value = _conversation_of(row, columns, name, value, where)
    return raw_prompt(value, where)


def prompt_column(row: Row, columns: Columns, where: str) -> str:
    """Return the name of the column of the prompt. Empty if the row has none.

    A column with text comes before one that is blank.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the column that ``data.columns.prompt`` names is missing or null.
    """
    if columns.prompt:
        if named_column(row, columns.prompt, "prompt", where) is None:
            raise MalformedRow(
                f"{where}: the column {columns.prompt!r} (data.columns.prompt) is empty"
            )
        return columns.prompt
    here = unrecorded(row)
    given = [name for name in usual(columns, "prompt") if here.get(name) is not None]
    given = [name for name in given if name not in CHATS or _is_chat(here[name])]
    return next((name for name in given if has_content(here[name])), (given or [""])[0])


def _is_chat(value: object) -> bool:
    """Return True for messages and transcripts, and False for documents."""
    if isinstance(value, str):
        return is_transcript(value)
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def with_input(row: Row) -> str:
    """Return the prompt of ``{instruction, input}``: both with a blank line between them, or one.

    Raises ``ValueError`` if one of them is no text.
    """
    instruction, given = row["instruction"], row.get("input")
    for name, value in (("instruction", instruction), ("input", given)):
        if not isinstance(value, str | None):
            raise ValueError(f"{name} must be text, not {type(value).__name__}")
    return f"{instruction}\n\n{given}" if given and instruction else given or instruction


def with_context(row: Row, columns: Columns, prompt: Raw, where: str) -> Raw:
    """Return ``prompt`` after the system message and the history of the row.

    Args:
        row: the row.
        columns: names of the columns.
        prompt: the prompt.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the system message or the history is malformed, or the messages begin with
            another system message.
    """
    before = [*_system(row, columns, prompt, where), *_history(row, columns, where)]
    if not before:
        return prompt
    messages = as_messages(prompt)
    own = messages[:1] if is_system(messages) else []
    return [*own, *before, *messages[len(own) :]]


def is_system(messages: list[Message]) -> bool:
    """Return True if ``messages`` begin with a system message."""
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def find_gold(row: Row, columns: Columns, where: str) -> Gold:
    """Return the label, the reference and the data source of a row.

    LightRFT names a rule in ``label`` and has the answer elsewhere. The rule is then the data
    source of a row that names none.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.

    Raises:
        MalformedRow: a named column is missing.
    """
    _, data_source = pick(row, "data_source", columns, where)
    # Without a record: a dataset that uses no label says so by not reading it.
    here = unrecorded(row)
    name, label = pick(here, "label", columns, where)
    reference_name, reference = pick(here, "reference", columns, where)
    if not columns.label and _is_rule(label):
        data_source = label if data_source is None else data_source
        values = {other: look_up(here, other) for other in usual(columns, "label")}
        values[reference_name] = reference
        answers = (n for n, v in values.items() if v is not None and not _is_rule(v))
        name = next(answers, "")
        label = values.get(name)
    names = tuple(dict.fromkeys(filter(None, (name, reference_name))))
    return Gold(label, reference, "" if data_source is None else str(data_source), names)


def response_column(row: Row, columns: Columns, where: str) -> str:
    """Return the name of the column of the response. Empty if the row has none.

    A worked ``solution`` is the response where ``answer`` is its result.

    Args:
        row: the row.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the column that ``data.columns.response`` names is missing.
    """
    name, _ = pick(unrecorded(row), "response", columns, where)
    if name == "answer" and not columns.response and has_content(unrecorded(row).get("solution")):
        return "solution"
    return name


def pick(row: Row, what: str, columns: Columns, where: str) -> tuple[str, object]:
    """Return name and value of the column for ``what``, or ``("", None)`` if there is none.

    Args:
        row: the row.
        what: a key of ``USUAL``.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the column that the setting names is missing.
    """
    if chosen := getattr(columns, what):
        return chosen, named_column(row, chosen, what, where)
    for name in usual(columns, what):
        value = look_up(row, name)
        if value is not None:
            return name, value
    return "", None


def refuse_unread(row: RecordedRow, columns: Columns, used: set[str], where: str) -> None:
    """Refuse a column of a known meaning that no reader of the row's layout has read.

    Args:
        row: the row.
        columns: names of the columns.
        used: settings of ``data.columns`` whose content the messages hold.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the message names the column and the setting that leaves it out.
    """
    unread = row.unread & MEANINGS.keys()
    known = (n for n in row.keys() & MEANINGS.keys() if n not in unread)
    read = {MEANINGS[name] for name in known if has_content(row.peek(name))} | used
    for name in sorted(unread):
        setting = MEANINGS[name]
        # Null leaves a column out, and a named column or another usual one replaces it.
        if getattr(columns, setting) != "" or setting in read:
            continue
        if setting in CONTEXT and name not in usual(columns, setting):
            continue  # another part of the row
        problem = f"the column {name!r} is not read in a row of this layout"
        raise MalformedRow(f"{where}: {problem}; move it into the messages, or {_null(setting)}")


def _is_rule(label: object) -> bool:
    return isinstance(label, str) and RULE.fullmatch(label) is not None


def _conversation_of(row: Row, columns: Columns, name: str, prompt: object, where: str) -> object:
    """Return the messages of a row that begin with ``prompt``, or ``prompt`` without any.

    Raises ``MalformedRow`` for messages that begin with something else.
    """
    for other in CONVERSATIONS:
        value = unrecorded(row).get(other)
        value = json_messages(value) if isinstance(value, str) else value
        if other == name or not has_content(value) or not isinstance(value, list | tuple):
            continue
        if other not in usual(columns, "prompt"):
            continue
        asked = as_messages(raw_text(prompt, "", where))
        if asked[-1:] and asked[-1]["role"] == "assistant":
            return prompt
        messages = as_messages(raw_text(value, "", where))
        first = messages[1:] if is_system(messages) and not is_system(asked) else messages
        if [_words(m) for m in first[: len(asked)]] == [_words(m) for m in asked]:
            return row[other]
        problem = f"the columns {name!r} and {other!r} hold two prompts"
        way_out = f"name one of them in data.columns.prompt, e.g. {other}"
        raise MalformedRow(f"{where}: {problem}; {way_out}")
    return prompt


def _words(message: Message) -> tuple[str, object]:
    """Return role and content of a message, without space around a text."""
    content = message["content"]
    return message["role"], content.strip() if isinstance(content, str) else content


def _system(row: Row, columns: Columns, prompt: Raw, where: str) -> list[Message]:
    """Return the system message of a row's column, or none if the messages have the same one."""
    if columns.system is None:
        return []
    here = unrecorded(row)
    given = (n for n in usual(columns, "system") if not _is_blank(here.get(n)))
    name = columns.system or next(given, "")
    value = system_text(named_column(row, name, "system", where)) if name else None
    if _is_blank(value):
        return []
    if not isinstance(value, str):
        kind = type(value).__name__
        problem = f"the system message in column {name!r} must be text, not {kind}"
        raise MalformedRow(f"{where}: {problem}; {_null('system')}")
    if "chat" in here:  # glaive-function-calling writes the speaker here too
        value = re.sub(r"\ASYSTEM:\s*", "", value)
    if not isinstance(prompt, str) and is_system(prompt):
        own = prompt[0]["content"]
        if isinstance(own, str) and own.strip() == value.strip():
            return []
        problem = f"the messages begin with another system message than column {name!r} holds"
        raise MalformedRow(f"{where}: {problem}; {_null('system')}")
    return [{"role": "system", "content": value}]


def _history(row: Row, columns: Columns, where: str) -> list[Message]:
    """Return the messages of a row's history: pairs of question and answer, or messages."""
    if columns.history is None:
        return []
    name, value = pick(row, "history", columns, where)
    if _is_blank(value):
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    turns = value if isinstance(value, list | tuple) else [value]
    if turns and all(isinstance(turn, Mapping) for turn in turns):
        return as_messages(raw_text(list(turns), name, where))
    messages: list[Message] = []
    for k, turn in enumerate(turns, start=1):
        is_pair = isinstance(turn, list | tuple) and len(turn) == 2
        if not is_pair or not all(isinstance(text, str) for text in turn):
            problem = f"{name}, turn {k} is not a question with its answer, nor a message"
            raise MalformedRow(f"{where}: {problem}; {_null('history')}")
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    return messages


def _is_blank(value: object) -> bool:
    """Return True for null, blank text, and an empty list or table."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _null(setting: str) -> str:
    return f"leave the column out with data.columns.{setting}: null"
