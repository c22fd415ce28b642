"""Parsing of prompts, messages, numbers and tools of a row.

Media that the row names become items, with marks in the text at their positions. A row as a whole
is read by ``rows.row_reader``.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrft.datasets.conversations.messages import (
    CARRIERS,
    ROLES,
    Message,
    in_order,
    known_role,
    with_known_role,
)
from lightrft.datasets.conversations.other_messages import as_tool, spread
from lightrft.datasets.media import NOTHING, Item, MediaFinder, SupportedMedia
from lightrft.datasets.media.items import replaced, with_items
from lightrft.datasets.media.parts import kind_of, text_of
from lightrft.datasets.media.placeholders import PlacedMedia
from lightrft.datasets.row_tables import MalformedRow, Row, named_column, without_nulls
from lightrft.datasets.rows.recorded_row import has_content
from lightrft.utils.yaml_text import parse_json

CONVERSATIONS = ("messages", "message", "conversations", "conversation")
"""Usual columns of messages."""
CHATS = ("chat", "contents")
"""Columns of messages in a row without another prompt: glaive's and Gemini's."""
PROMPTS = ("prompt", "input", "question", *CONVERSATIONS, "problem", "query", "instruction", *CHATS)
"""Usual columns of a prompt, in the order in which they are tried."""
TURN_WEIGHTS = ("weight", "train", "training", "loss")
"""Keys of the weight of a message in the loss.

They are the names of OpenAI and Mistral, of axolotl (two) and of ms-swift.
"""
_AS_FIELDS = {
    "reasoning": "write it as 'reasoning_content' of the message",
    "tool_call": "write it as 'tool_calls' of the message",
    "refusal": "write it as 'refusal' of the message",
}
"""The place of content that other formats write as parts, by the type of the part."""
NO_TOOLS = "set data.columns.tools: null if it is something else"


@dataclass(slots=True)
class ParsedRow:
    """A parsed row.

    Args:
        prompt: the prompt as text or messages.
        response: the response as text or messages. None if the row has none or if the prompt
            contains it.
        label: the value that rewards compare with.
        reference: a worked solution.
        data_source: name of the data source. Empty if the row does not name one.
        id: identifier of the row. Empty if the row has none.
        columns: the remaining columns, without media.
        row: the original row.
        where: location of the row, for messages.
        media: the items whose marks the messages contain, by number.
        turn_weights: weight of a message in the loss, by the number of the message. Other messages
            have weight 1.
        front: marks of media that have no place of their own, at the start of the first message of
            the user.
        words: number of media markers in the text that are ordinary words.
        gold: the columns of ``label`` and ``reference``.
        text: the prompt as the row spells it, if its messages come from a transcript. None for any
            other prompt.
        possible_prompts: columns of text that may be the prompt of a row of media without one.
        is_begun: True if the response continues the assistant turn at the end of the prompt.
    """

    prompt: str | list[Message]
    response: str | list[Message] | None
    label: object
    reference: object
    data_source: str
    id: str
    columns: dict[str, object]
    row: Row
    where: str
    media: list[Item] = field(default_factory=list)
    turn_weights: dict[int, float] = field(default_factory=dict)
    front: str = ""
    words: int = 0
    gold: tuple[str, ...] = ()
    text: str | None = None
    possible_prompts: tuple[str, ...] = ()
    is_begun: bool = False

    @property
    def messages(self) -> list[Message]:
        """Return the whole conversation. A text prompt becomes a user message."""
        asked, said = _as_messages(self.prompt, "user"), _as_messages(self.response, "assistant")
        return continued(asked, said) if self.is_begun and said else [*asked, *said]

    @property
    def request(self) -> list[Message]:
        """Return the messages of the prompt, with media as content parts that have a full path.

        An assistant turn at the end is left out if it is the response.
        """
        asked = _as_messages(self.prompt, "user")
        if ends_with_assistant(asked) and not self.is_begun:
            asked = asked[:-1]
        return [
            {**message, "content": with_items(message["content"], self.media)} for message in asked
        ]

    @property
    def asked(self) -> int:
        """Return the number of messages that belong to the prompt alone."""
        return len(_as_messages(self.prompt, "user")) - self.is_begun

    @property
    def answer(self) -> str | None:
        """Return the text of the last assistant turn, or None if the row ends before it."""
        if isinstance(self.response, str):
            return self.response
        own = self.response or ([] if self.is_begun else _as_messages(self.prompt, "user"))
        if not ends_with_assistant(own):
            return None
        last = own[-1]
        # without the marks of media, which are no text
        return replaced(last["content"], lambda *_: "")


def ends_with_assistant(said: str | Sequence[Mapping[str, Any]] | None) -> bool:
    """Return True for messages of which the last one is the assistant's."""
    return bool(said) and not isinstance(said, str) and said[-1]["role"] == "assistant"


def continued(
    asked: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Return a conversation in which ``said`` continues the last message of ``asked``.

    Args:
        asked: messages that end with one of the assistant.
        said: messages that begin with one of the assistant.
    """
    begun, first = asked[-1], said[0]
    whole = {**begun, **first, "content": joined_content(begun["content"], first["content"])}
    return [dict(message) for message in (*asked[:-1], whole, *said[1:])]


def joined_content(one: Any, other: Any) -> Any:
    """Return two contents of messages as one: texts as a text, and parts as parts."""
    if isinstance(one, str) and isinstance(other, str):
        return one + other
    parts: list[Any] = []
    for content in (one, other):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _as_messages(said: str | list[Message] | None, role: str) -> list[Message]:
    """Return a text as one message of ``role``, messages unchanged, and None as no messages."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    return said or []


def read_conversation(
    messages: Sequence[Mapping[str, object]],
    where: str,
    reads: SupportedMedia = NOTHING,
    root: Path = Path(),
) -> ParsedRow:
    """Return a record of messages whose content may contain media as parts.

    Media markers in the text are ordinary words.

    Args:
        messages: the messages, with content as text or parts.
        where: location of the conversation, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.

    Raises:
        MalformedRow: a message is malformed or names media that the model does not read.
    """
    finder = MediaFinder(SupportedMedia(dict.fromkeys(reads.spellings, ())), where, root, {})
    prompt = read_prompt(list(messages), where, finder)
    prompt, _, _ = place_media(prompt, None, finder, {})
    return ParsedRow(prompt, None, None, None, "", "", {}, {}, where, finder.items)


def read_prompt(
    value: object, where: str, finder: MediaFinder, *, blank: bool = False
) -> str | list[Message]:
    """Return a prompt as text, or as messages with ``role`` and ``content``.

    Args:
        value: text, a list of messages (``role``/``content`` or ShareGPT's ``from``/``value``), or
            such a list as a JSON string.
        where: location of the row, for messages.
        finder: collects media.
        blank: if True, an empty prompt is allowed.

    Raises:
        MalformedRow: the prompt is empty or has another type.
    """
    if isinstance(value, str):
        inside = json_messages(value)
        if inside is None:
            text = value if value.strip() else ""
            if not text and not blank:
                raise MalformedRow(f"{where}: the prompt is empty")
            return finder.text(text, where)
        value = inside
    if not isinstance(value, list | tuple):
        kind = type(value).__name__
        raise MalformedRow(f"{where}: a prompt must be text or a list of messages, not {kind}")
    messages = read_messages(value, f"{where}, message", finder)
    # A message of the system or of the assistant asks nothing.
    asking = [m["content"] for m in messages if m["role"] not in ("system", "assistant")]
    if not messages or not (blank or any(asking)):
        raise MalformedRow(f"{where}: the prompt is empty")
    return messages


def message_fields(value: object, where: str) -> Message:
    """Return one message as ``{"role", "content", ...}``, with its content as in the row.

    Null fields are left out. Raises ``MalformedRow`` if ``value`` is not a message, or if its role
    or a text of its content is no text.
    """
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise MalformedRow(f"{where}: a message must have a role and content, not be a {kind}")
    # parquet stores null for the fields of other messages
    fields = {k: v for k, v in value.items() if v is not None}
    have = ", ".join(map(str, value)) or "nothing"
    if "role" in fields:
        role = fields.pop("role")
    elif "from" in fields:
        role = fields.pop("from")
        if known_role(role) is None:
            raise MalformedRow(f"{where}: 'from' is {role!r}; known: {', '.join(ROLES)}")
    else:
        raise MalformedRow(f"{where}: neither 'role' nor 'from'; it has: {have}")
    # A table leaves null contents out, so a message of a role alone is an empty one.
    is_whole = not fields.keys().isdisjoint(("content", "value", *CARRIERS))
    if not is_whole and any(map(has_content, fields.values())):
        raise MalformedRow(f"{where}: neither 'content' nor 'value'; it has: {have}")
    content = fields.pop("content" if "content" in fields else "value", "")
    if not isinstance(role, str):
        raise MalformedRow(f"{where}: role is {role!r}, not a text such as 'user'")
    _check_content(content, where)
    return with_known_role({"role": role, "content": content, **fields}, where)


def _check_content(content: object, where: str) -> None:
    """Raise ``MalformedRow`` unless ``content`` is text or parts, and the text of a part is one."""
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise MalformedRow(f"{where}: content must be text or a list of parts, not {kind}")
    for part in content:
        if isinstance(part, Mapping) and kind_of(part) is None:
            text_of(part, where)


def _content(content: str | Sequence[Any], where: str, finder: MediaFinder) -> str:
    if isinstance(content, str):
        return finder.text(content, where)
    return "".join(_content_part(part, where, finder) for part in content)


def _content_part(part: Any, where: str, finder: MediaFinder) -> str:
    """Return the text of a content part, or the mark of its media."""
    if isinstance(part, str):
        problem = f"a content part is the text {reprlib.repr(part)}"
        raise MalformedRow(f'{where}: {problem}; write {{"type": "text", "text": ...}}')
    if not isinstance(part, Mapping):
        kind = type(part).__name__
    else:
        # first: a part without a type may be media
        place = finder.part(part, where)
        if place is not None:
            return place
        text = text_of(part, where)
        if text is not None:
            return finder.plain(text, where)
        kind = part.get("type")
    way_out = _AS_FIELDS.get(str(kind)) or f"the model reads {finder.reads}"
    raise MalformedRow(f"{where}: a content part of type {kind!r}; {way_out}")


def _check_texts(value: object, where: str, finder: MediaFinder) -> None:
    """Raise ``MalformedRow`` if any text in ``value`` contains reserved mark characters.

    A chat template may write such text, however deeply it is nested.
    """
    if isinstance(value, str):
        finder.plain(value, where)
    elif isinstance(value, Mapping):
        _check_texts([*value, *value.values()], where, finder)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_texts(inner, where, finder)


def place_media(
    prompt: str | list[Message], response: str | list[Message] | None, finder: MediaFinder, row: Row
) -> tuple[str | list[Message], str | list[Message] | None, PlacedMedia]:
    """Return prompt and response with the media of the row at their positions.

    Args:
        prompt: the prompt, with marks that wait for media.
        response: the response, or None.
        finder: collects the media of the row.
        row: the row.

    Raises:
        MalformedRow: places and media do not match.
    """
    asked = _as_messages(prompt, "user")
    answers = response if isinstance(response, list) else []
    messages = [*asked, *answers]
    placed = finder.place([m["content"] for m in messages], [m["role"] for m in messages], row)
    texts = placed.texts
    if not finder.items and not placed.words:
        return prompt, response, placed
    whole = [{**m, "content": text} for m, text in zip(messages, texts)]
    if isinstance(response, list):
        response = whole[len(asked) :]
    prompt = texts[0] if isinstance(prompt, str) else whole[: len(asked)]
    return prompt, response, placed


def number(value: Any, what: str, where: str) -> float:
    """Return a column as a finite number. Numbers in text, as CSV files have them, are read too.

    Args:
        value: the value.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value is no finite number.
    """
    read = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            read = float(value)
    if not math.isfinite(read):
        raise MalformedRow(f"{where}: {what} is {value!r}, not a finite number")
    return read


def pop_turn_weights(
    prompt: str | list[Message], response: str | list[Message] | None, where: str
) -> dict[int, float]:
    """Remove the weights from messages. Return those other than 1, by number of the message.

    Args:
        prompt: the prompt.
        response: the response, or None.
        where: location of the row, for messages.

    Raises:
        MalformedRow: a weight is no number from 0, or no turn can have it.
    """
    weights: dict[int, float] = {}
    messages = [*_as_messages(prompt, "user"), *_as_messages(response, "assistant")]
    for k, message in enumerate(messages):
        weight = 1.0
        for key in TURN_WEIGHTS:
            if key in message:
                value, place = message.pop(key), f"{where}, message {k + 1}"
                own = float(value) if isinstance(value, bool) else number(value, key, place)
                if own < 0:
                    raise MalformedRow(f"{place}: {key} is {own:g}, below 0")
                weight *= own
        role = message["role"]
        if role != "assistant":
            # formats with a flag for each message write 0 or 1 here
            if weight not in (0.0, 1.0):
                problem = f"weight {weight:g} of a message of {role!r}"
                way_out = "only turns of the assistant have weights"
                raise MalformedRow(f"{where}, message {k + 1}: {problem}; {way_out}")
        elif weight != 1.0:
            weights[k] = weight
    return weights


def read_tools(row: Row, name: str | None, where: str) -> list[object]:
    """Return the JSON schemas of the tools of a row: an empty list if it has none.

    Null fields are left out, since parquet stores them for the fields of other tools.

    Args:
        row: the row.
        name: the setting ``data.columns.tools``.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the column is no list of JSON schemas, or the named column is missing.
    """
    if name is None:
        return []
    value = named_column(row, name, "tools", where) if name else row.get("tools")
    if value is None or value == "":
        return []
    place = f"{where}: {name or 'tools'}"
    value = _json(value, place)
    tools = [_json(one, place) for one in value] if isinstance(value, list | tuple) else [value]
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in tools):
        raise MalformedRow(f"{place} must be a list of JSON schemas; {NO_TOOLS}")
    return [tool for one in tools for tool in as_tool(without_nulls(one))]


def check_row_options(row: Row, options: Mapping[str, object], where: str) -> None:
    """Refuse arguments of the chat template that a row asks for and the run does not give.

    Args:
        row: the row. Its column ``chat_template_kwargs`` has the arguments.
        options: the setting ``data.chat_template_options``.
        where: location of the row, for messages.

    Raises:
        MalformedRow: an argument has another value in the row, or the column has no arguments.
    """
    asked = row.get("chat_template_kwargs")
    if asked is None or asked == "":
        return
    if not isinstance(asked, Mapping):
        raise MalformedRow(f"{where}: chat_template_kwargs is {asked!r}, not a table of arguments")
    for name, value in without_nulls(asked).items():
        if name not in options or options[name] != value:
            given = repr(options[name]) if name in options else "not set"
            raise MalformedRow(
                f"{where}: chat_template_kwargs asks for {name} = {value!r}, and all rows of a run "
                f"have data.chat_template_options.{name}, which is {given}; set it, or leave the "
                "column out"
            )


def _json(value: Any, place: str) -> Any:
    """Return ``value``, parsed if it is JSON text. Raises ``MalformedRow``."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise MalformedRow(f"{place} is no JSON ({error}); {NO_TOOLS}") from None


def json_messages(text: str) -> list[object] | None:
    """Return the messages that ``text`` contains as JSON, or None if it is plain text."""
    # parsing every prompt would be slow
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    # a JSON text that begins with a bracket is a list
    return value if value and all(map(_is_message, value)) else None


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    is_spoken = not value.keys().isdisjoint(("role", "from"))
    return is_spoken and not value.keys().isdisjoint(("content", "value", "parts", *CARRIERS))


def no_prompt(row: Row, where: str) -> MalformedRow:
    """Return the error of a row without a usual column of a prompt."""
    way_out = "Name the column in data.columns.prompt"
    if list(row) == ["text"]:
        way_out = "Split the text into the columns prompt and completion"
    return MalformedRow(
        f"{where}: no column with a prompt (looked for {', '.join(PROMPTS)}); "
        f"the row has: {', '.join(row) or 'nothing'}. {way_out}"
    )


def read_messages(values: Sequence[object], where: str, finder: MediaFinder) -> list[Message]:
    """Return each of ``values`` as a message, with results of tools in the order of their calls.

    Contents become texts with marks for media. Null fields are left out.

    Args:
        values: the messages, as the row has them.
        where: location of the list, to which the number of a message is added.
        finder: collects media.

    Raises:
        MalformedRow: a message is malformed.
    """
    read: list[Message] = []
    for k, one in enumerate(values, start=1):
        place = f"{where} {k}"
        for value in spread(one, place):
            message = message_fields(value, place)
            fields = {k: v for k, v in message.items() if k not in ("role", "content")}
            # Other fields, such as tool calls, reach the template too.
            _check_texts([message["role"], fields], place, finder)
            content = _content(message["content"], place, finder)
            read.append({"role": message["role"], "content": content, **fields})
    return in_order(read, where)
