"""The content of a row: its prompt, response, label and other parts, before media are read.

All verbs read the prompt of a row here, so that they read equal prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from lightrft.config.data import Columns
from lightrft.datasets.conversations.other_messages import TRANSCRIPTS, spread, system_text
from lightrft.datasets.media import NOTHING, MediaFinder, SupportedMedia
from lightrft.datasets.row_parser import (
    CHATS,
    CONVERSATIONS,
    PROMPTS,
    Message,
    ends_with_assistant,
    json_messages,
    message_fields,
)
from lightrft.datasets.row_tables import MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.recorded_row import RecordedRow, has_content, unrecorded

C = TypeVar("C", bound=Columns, covariant=True)
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


def is_texts(value: object) -> bool:
    """Return True for a list of texts that is not empty."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(one, str) for one in value)


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
    """Return a prompt as text or messages: see ``raw_text``.

    A transcript that ends with ``Assistant:`` becomes the messages before it.
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

    ``what`` is a key of ``USUAL``, or ``tools``. Nothing of a prompt has the column of another
    part. Responses, labels and references may share a column.
    """
    if not columns.model_fields_set:
        return USUAL.get(what, (what,))
    others = type(columns).model_fields if what in CONTEXT else CONTEXT
    named = [getattr(columns, other) for other in others if other != what]
    return tuple(name for name in USUAL.get(what, (what,)) if name not in named)


def tools_column(columns: Columns) -> str | None:
    """Return ``data.columns.tools``, or None if the column ``tools`` is another part of a row."""
    return columns.tools if columns.tools or usual(columns, "tools") else None


@dataclass(frozen=True, slots=True)
class GivenRow(Generic[C]):
    """A row with what its readers need. Its methods raise ``MalformedRow``.

    Args:
        row: the row. A ``RecordedRow`` records the columns that are read.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.
        prefill: the setting ``data.prefill``.
    """

    row: Row
    columns: C
    where: str
    reads: SupportedMedia = NOTHING
    root: Path = Path()
    prefill: bool | Literal["auto"] = "auto"

    @property
    def unrecorded(self) -> GivenRow[C]:
        """Return the row without a record of the columns that are read."""
        return replace(self, row=unrecorded(self.row))

    def malformed(self, problem: str) -> MalformedRow:
        """Return the error for a ``problem`` of the row."""
        return MalformedRow(f"{self.where}: {problem}")

    def finder(self) -> MediaFinder:
        """Return a finder of the media of the row."""
        columns = self.columns
        named = {"image": columns.images, "video": columns.videos, "audio": columns.audios}
        return MediaFinder(self.reads, self.where, self.root, named)

    def named(self, name: str, what: str) -> Any:
        """Return the column ``name`` that ``data.columns.<what>`` selects."""
        return named_column(self.row, name, what, self.where)

    def text(self, name: str) -> Raw:
        """Return the column ``name`` as text or messages: see ``raw_text``."""
        return raw_text(self.row.get(name), name, self.where)

    def pick(self, what: str) -> tuple[str, object]:
        """Return name and value of the column for ``what``, or ``("", None)`` if there is none.

        ``what`` is a key of ``USUAL``.
        """
        if chosen := getattr(self.columns, what):
            return chosen, self.named(chosen, what)
        for name in usual(self.columns, what):
            value = look_up(self.row, name)
            if value is not None:
                return name, value
        return "", None

    def prompt(self) -> Raw:
        """Return the prompt of the row with its system message and history."""
        found = self.find_prompt()
        if found is None:
            raise self.malformed(f"no column with a prompt; the row has: {', '.join(self.row)}")
        return found

    def find_prompt(self, *, has_response: bool = True) -> Raw | None:
        """Return the prompt with its system message and history, or None if the row has none.

        ``has_response`` is False if the response is in the messages of the prompt.
        """
        prompt = self.column_prompt(has_response=has_response)
        return None if prompt is None else self.with_context(prompt)

    def column_prompt(self, *, has_response: bool) -> Raw | None:
        """Return the prompt as its column has it, without system message and history."""
        row, columns = self.row, self.columns
        name = self.prompt_column()
        if not name:
            return None
        value = look_up(row, name)
        if not columns.prompt:
            pair = {"instruction", "input"}.intersection(usual(columns, "prompt"))
            if name in pair and isinstance(row.get("instruction"), str) and "instruction" in pair:
                try:
                    value = with_input({n: row.get(n) for n in pair})
                except ValueError as error:
                    raise self.malformed(str(error)) from None
            elif not has_response and name not in CONVERSATIONS:
                value = self._conversation(name, value)
        return raw_prompt(value, self.where)

    def prompt_column(self) -> str:
        """Return the name of the column of the prompt. Empty if the row has none.

        A column with text comes before one that is blank.
        """
        name = self.columns.prompt
        if name:
            if self.named(name, "prompt") is None:
                raise self.malformed(f"the column {name!r} (data.columns.prompt) is empty")
            return name
        here = unrecorded(self.row)
        given = [name for name in usual(self.columns, "prompt") if here.get(name) is not None]
        given = [name for name in given if name not in CHATS or _is_chat(here[name])]
        return next((name for name in given if has_content(here[name])), (given or [""])[0])

    def _conversation(self, name: str, prompt: object) -> object:
        """Return the messages of the row that begin with ``prompt``, or ``prompt`` without any.

        Raises ``MalformedRow`` for messages that begin with something else than column ``name``.
        """
        for other in CONVERSATIONS:
            value = unrecorded(self.row).get(other)
            value = json_messages(value) if isinstance(value, str) else value
            if other == name or not has_content(value) or not isinstance(value, list | tuple):
                continue
            if other not in usual(self.columns, "prompt"):
                continue
            asked = as_messages(raw_text(prompt, "", self.where))
            if asked[-1:] and asked[-1]["role"] == "assistant":
                return prompt
            messages = as_messages(raw_text(value, "", self.where))
            first = messages[1:] if is_system(messages) and not is_system(asked) else messages
            if [stripped(m) for m in first[: len(asked)]] == [stripped(m) for m in asked]:
                return self.row[other]
            problem = f"the columns {name!r} and {other!r} hold two prompts"
            way_out = f"name one of them in data.columns.prompt, e.g. {other}"
            raise self.malformed(f"{problem}; {way_out}")
        return prompt

    def with_context(self, prompt: Raw) -> Raw:
        """Return ``prompt`` after the system message and the history of the row."""
        before = [*self._system(prompt), *self._history()]
        if not before:
            return prompt
        messages = as_messages(prompt)
        own = messages[:1] if is_system(messages) else []
        return [*own, *before, *messages[len(own) :]]

    def _system(self, prompt: Raw) -> list[Message]:
        """Return the system message of a column, or none if the messages have the same one."""
        if self.columns.system is None:
            return []
        here = unrecorded(self.row)
        given = (n for n in usual(self.columns, "system") if not _is_blank(here.get(n)))
        name = self.columns.system or next(given, "")
        value = system_text(self.named(name, "system")) if name else None
        if _is_blank(value):
            return []
        if not isinstance(value, str):
            kind = type(value).__name__
            problem = f"the system message in column {name!r} must be text, not {kind}"
            raise self.malformed(f"{problem}; {_null('system')}")
        if "chat" in here:  # glaive-function-calling writes the speaker here too
            value = re.sub(r"\ASYSTEM:\s*", "", value)
        if not isinstance(prompt, str) and is_system(prompt):
            own = prompt[0]["content"]
            if isinstance(own, str) and own.strip() == value.strip():
                return []
            problem = f"the messages begin with another system message than column {name!r} holds"
            raise self.malformed(f"{problem}; {_null('system')}")
        return [{"role": "system", "content": value}]

    def _history(self) -> list[Message]:
        """Return the messages of the history: pairs of question and answer, or messages."""
        if self.columns.history is None:
            return []
        name, value = self.pick("history")
        if _is_blank(value):
            return []
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = [value]
        turns = value if isinstance(value, list | tuple) else [value]
        if turns and all(isinstance(turn, Mapping) for turn in turns):
            return as_messages(raw_text(list(turns), name, self.where))
        messages: list[Message] = []
        for k, turn in enumerate(turns, start=1):
            is_pair = isinstance(turn, list | tuple) and len(turn) == 2
            if not is_pair or not all(isinstance(text, str) for text in turn):
                problem = f"{name}, turn {k} is not a question with its answer, nor a message"
                raise self.malformed(f"{problem}; {_null('history')}")
            messages.append({"role": "user", "content": turn[0]})
            messages.append({"role": "assistant", "content": turn[1]})
        return messages

    def continues(self, prompt: Raw) -> bool:
        """Return True if the response, in another column, continues the last turn of ``prompt``.

        Raises ``MalformedRow`` if it does and ``data.prefill`` is False.
        """
        is_begun = ends_with_assistant(prompt)
        if is_begun and self.prefill is False:
            raise self.malformed(
                "the prompt ends with the assistant's message; leave it out, or set "
                "data.prefill: true to have the response continue it"
            )
        return is_begun

    def response_column(self) -> str:
        """Return the name of the column of the response. Empty if the row has none.

        A worked ``solution`` is the response where ``answer`` is its result.
        """
        here = self.unrecorded
        name, _ = here.pick("response")
        if name == "answer" and not self.columns.response and has_content(here.row.get("solution")):
            return "solution"
        return name

    def gold(self) -> Gold:
        """Return the label, the reference and the data source of the row.

        LightRFT names a rule in ``label`` and has the answer elsewhere. The rule is then the data
        source of a row that names none.
        """
        _, data_source = self.pick("data_source")
        # Without a record: a dataset that uses no label says so by not reading it.
        here = self.unrecorded
        name, label = here.pick("label")
        reference_name, reference = here.pick("reference")
        if not self.columns.label and _is_rule(label):
            data_source = label if data_source is None else data_source
            values = {other: look_up(here.row, other) for other in usual(self.columns, "label")}
            values[reference_name] = reference
            answers = (n for n, v in values.items() if v is not None and not _is_rule(v))
            name = next(answers, "")
            label = values.get(name)
        names = tuple(dict.fromkeys(filter(None, (name, reference_name))))
        return Gold(label, reference, "" if data_source is None else str(data_source), names)

    def refuse_unread(self, row: RecordedRow, used: set[str]) -> None:
        """Raise ``MalformedRow`` for a column of a known meaning that nothing has read.

        ``used`` are the settings of ``data.columns`` whose content the messages of ``row`` hold.
        """
        unread = row.unread & MEANINGS.keys()
        known = (n for n in row.keys() & MEANINGS.keys() if n not in unread)
        read = {MEANINGS[name] for name in known if has_content(row.peek(name))} | used
        for name in sorted(unread):
            setting = MEANINGS[name]
            # Null leaves a column out, and a named column or another usual one replaces it.
            if getattr(self.columns, setting) != "" or setting in read:
                continue
            if setting in CONTEXT and name not in usual(self.columns, setting):
                continue  # another part of the row
            problem = f"the column {name!r} is not read in a row of this layout"
            raise self.malformed(f"{problem}; move it into the messages, or {_null(setting)}")


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


def is_system(messages: list[Message]) -> bool:
    """Return True if ``messages`` begin with a system message."""
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def _is_rule(label: object) -> bool:
    return isinstance(label, str) and RULE.fullmatch(label) is not None


def stripped(message: Message) -> tuple[str, object]:
    """Return role and content of a message, without space around a text."""
    content = message["content"]
    return message["role"], content.strip() if isinstance(content, str) else content


def _is_blank(value: object) -> bool:
    """Return True for null, blank text, and an empty list or table."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _null(setting: str) -> str:
    return f"leave the column out with data.columns.{setting}: null"
