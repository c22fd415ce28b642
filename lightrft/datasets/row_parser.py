"""A row of any layout to a ``Record``: its prompt as text or messages, its answer, its label.

Empty settings of ``Columns`` mean the usual names, tried in the order of ``USUAL``; a column that is null counts as absent.
Media that the row names become items, and marks in the text where they belong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrft.config.data import Columns
from lightrft.datasets.media import NOTHING, Finder, Item, Reads
from lightrft.datasets.media.items import is_raw, replaced
from lightrft.datasets.row_tables import BadRow, Row, look_up, named_column

Message = dict[str, Any]

USUAL: dict[str, tuple[str, ...]] = {
    "prompt": (
        "prompt",
        "input",
        "question",
        "messages",
        "message",
        "conversations",
        "conversation",
        "problem",
        "query",
        "instruction",
    ),
    "response": ("response", "output", "completion", "answer", "target", "solution"),
    "label": ("label", "answer", "final_answer", "reward_model.ground_truth", "ground_truth", "extra_info.label"),
    "reference": ("reference", "solution", "response", "output", "reward_model.ground_truth", "ground_truth"),
    "data_source": ("data_source", "datasource"),
    "id": ("id",),
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(slots=True)
class Record:
    """A row whose columns have been found.

    ``response`` is None where the row has none or its conversation ends with it. ``columns`` are those that no other field
    took, without media. ``where`` names the row in messages. ``media`` are the items whose marks the messages hold, by number.
    """

    prompt: str | list[Message]
    response: str | list[Message] | None
    label: Any
    reference: Any
    data_source: str
    id: str
    columns: dict[str, Any]
    row: Row
    where: str
    media: list[Item] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, a text prompt as the user's message."""
        asked = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        if isinstance(self.response, str):
            return [*asked, {"role": "assistant", "content": self.response}]
        return [*asked, *(self.response or [])]

    @property
    def asked(self) -> int:
        """How many of ``messages`` are the prompt's."""
        return 1 if isinstance(self.prompt, str) else len(self.prompt)

    @property
    def answer(self) -> str | None:
        """The text of the assistant's last turn, None when the row ends before it."""
        if isinstance(self.response, str):
            return self.response
        last = self.messages[-1]
        return replaced(last["content"], lambda *_: "") if last["role"] == "assistant" else None


def read_record(row: Row, columns: Columns, where: str, reads: Reads = NOTHING, root: Path = Path()) -> Record:
    """``row`` with its columns found, for a model that ``reads`` certain media; their relative paths start from ``root``.

    Raises ``BadRow``, naming the row, the column and the columns that exist, when there is no prompt or an empty one, when a
    column that the settings name is missing, when messages are malformed, and when places and media do not match.
    """
    chosen = {
        "prompt": columns.prompt,
        "response": columns.response,
        "label": columns.label,
        "reference": columns.reference,
        "data_source": columns.data_source,
        "id": columns.id,
    }
    found = {what: _pick(row, what, name, where) for what, name in chosen.items()}
    finder = Finder(reads, where, root, {"image": columns.images, "video": columns.videos, "audio": columns.audios})
    asked = found["prompt"][1]
    if (asked is None or asked == "") and finder.has_columns(row):
        found["prompt"] = (found["prompt"][0], " ")
    if found["prompt"][1] is None:
        if any(name in row for name in USUAL["prompt"]):
            raise BadRow(f"{where}: the prompt is empty")
        raise BadRow(
            f"{where}: no column with a prompt (looked for {', '.join(USUAL['prompt'])}); the row has: "
            f"{', '.join(row) or 'nothing'}. Name the column in data.columns.prompt"
        )
    if found["prompt"][0] in ("input", "instruction") and not columns.prompt and "instruction" in row and "input" in row:
        raise BadRow(f"{where}: both 'instruction' and 'input'; set the source's reader: alpaca, or data.columns.prompt")
    prompt = read_prompt(found["prompt"][1], where, finder, blank=finder.has_columns(row))
    ends = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
    response = None if ends else _response(found["response"][1], where, finder)
    prompt, response = _placed(prompt, response, finder, row)
    taken = {found[what][0] for what in chosen if what != "response"} | finder.taken(row)
    return Record(
        prompt=prompt,
        response=response,
        label=found["label"][1],
        reference=found["reference"][1],
        data_source=_text(found["data_source"][1]),
        id=_text(found["id"][1]),
        columns={k: v for k, v in row.items() if k not in taken and not (reads.spellings and is_raw(v))},
        row=row,
        where=where,
        media=finder.items,
    )


def read_conversation(messages: Sequence[Mapping[str, Any]], where: str, reads: Reads = NOTHING, root: Path = Path()) -> Record:
    """A record of messages alone, whose content may hold media as parts; markers are words. Raises ``BadRow``."""
    finder = Finder(Reads(dict.fromkeys(reads.spellings, ())), where, root, {})
    prompt = read_prompt(list(messages), where, finder)
    prompt, _ = _placed(prompt, None, finder, {})
    return Record(prompt, None, None, None, "", "", {}, {}, where, finder.items)


def read_prompt(value: Any, where: str, finder: Finder | None = None, *, blank: bool = False) -> str | list[Message]:
    """Text, or messages with ``role`` and ``content``.

    Takes text, a list of messages (``role``/``content`` or ShareGPT's ``from``/``value``), or such a list as a JSON string.
    Media go to ``finder``. Raises ``BadRow`` when it is empty (unless it may be ``blank``) or none of these.
    """
    finder = finder or Finder(NOTHING, where, Path(), {})
    if isinstance(value, str):
        inside = _json_messages(value)
        if inside is None:
            if not value.strip() and not blank:
                raise BadRow(f"{where}: the prompt is empty")
            return finder.text(value.strip() if blank and not value.strip() else value, where)
        value = inside
    if not isinstance(value, list | tuple):
        raise BadRow(f"{where}: a prompt must be text or a list of messages, not {type(value).__name__}")
    messages = [read_message(m, f"{where}, message {k + 1}", finder) for k, m in enumerate(value)]
    if not messages or not (blank or any(m.get("content") for m in messages if m["role"] != "system")):
        raise BadRow(f"{where}: the prompt is empty")
    return messages


def read_message(value: Any, where: str, finder: Finder) -> Message:
    """One message as ``{"role", "content", ...}``, its content as text with marks for media. Null fields are left out.

    Raises ``BadRow`` for what is not a message, and for content that the model does not read.
    """
    if not isinstance(value, Mapping):
        raise BadRow(f"{where}: a message must have a role and content, not be a {type(value).__name__}")
    fields = {k: v for k, v in value.items() if v is not None}
    if "role" in fields:
        role, content = fields.pop("role"), fields.pop("content", "")
    elif "from" in fields:
        speaker, content = fields.pop("from"), fields.pop("value", "")
        if speaker not in SHAREGPT_ROLES:
            raise BadRow(f"{where}: 'from' is {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
        role = SHAREGPT_ROLES[speaker]
    else:
        raise BadRow(f"{where}: neither 'role' nor 'from'; it has: {', '.join(value) or 'nothing'}")
    _check_texts([str(role), fields], where, finder)
    return {"role": str(role), "content": _content(content, where, finder), **fields}


def _content(content: Any, where: str, finder: Finder) -> str:
    if isinstance(content, str):
        return finder.text(content, where)
    if not isinstance(content, list | tuple):
        raise BadRow(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(finder.plain(part["text"], where))
        elif isinstance(part, Mapping) and (place := finder.part(part, where)) is not None:
            texts.append(place)
        else:
            raise BadRow(f"{where}: a content part of type {kind!r}; the model reads {finder.reads}")
    return "".join(texts)


def _check_texts(value: Any, where: str, finder: Finder) -> None:
    """Raises ``BadRow`` for text, however deep in ``value``, that a chat template may write and that holds marks of its own."""
    if isinstance(value, str):
        finder.plain(value, where)
    elif isinstance(value, Mapping):
        _check_texts([*value, *value.values()], where, finder)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_texts(inner, where, finder)


def _placed(
    prompt: str | list[Message], response: str | list[Message] | None, finder: Finder, row: Row
) -> tuple[str | list[Message], str | list[Message] | None]:
    """Prompt and response with the row's media in their places."""
    asked = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    answers = [m["content"] for m in response] if isinstance(response, list) else []
    users = [0] if isinstance(prompt, str) else [k for k, m in enumerate(prompt) if m["role"] == "user"]
    texts = finder.place([*asked, *answers], users[-1] if users else len(asked) - 1, row)
    if not finder.items:
        return prompt, response
    if isinstance(response, list):
        response = [{**m, "content": text} for m, text in zip(response, texts[len(asked) :])]
    if isinstance(prompt, str):
        return texts[0], response
    return [{**m, "content": text} for m, text in zip(prompt, texts)], response


def _json_messages(text: str) -> list[Any] | None:
    """The messages that ``text`` holds as JSON, or None when it is plain text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    keys = ({"role", "content"}, {"from", "value"})
    good = isinstance(value, list) and value and all(isinstance(m, dict) and any(k <= set(m) for k in keys) for m in value)
    return value if good else None


def _response(value: Any, where: str, finder: Finder) -> str | list[Message] | None:
    if isinstance(value, list | tuple):
        return [read_message(m, f"{where}, response message {k + 1}", finder) for k, m in enumerate(value)]
    return None if value is None else finder.plain(str(value), f"{where}, response")


def _pick(row: Row, what: str, chosen: str, where: str) -> tuple[str, Any]:
    """Name and value of the column that holds ``what``; ``("", None)`` where no usual name exists."""
    if not chosen:
        return next(((name, value) for name in USUAL[what] if (value := look_up(row, name)) is not None), ("", None))
    value = named_column(row, chosen, what, where)
    if value is None and what == "prompt":
        raise BadRow(f"{where}: the column {chosen!r} (data.columns.prompt) is empty")
    return chosen, value


def _text(value: Any) -> str:
    return "" if value is None else str(value)
