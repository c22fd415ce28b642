"""Messages and transcripts of other formats, as messages with role and content.

A message of Anthropic or Gemini may hold calls and results of tools as parts. A turn of Capybara is
a question with its answer. A transcript is a conversation in one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.datasets.conversations.messages import Message, known_role
from lightrft.datasets.row_tables import MalformedRow

_SPEAKERS = {
    **dict.fromkeys(("tool_use", "thinking"), ("assistant",)),
    "tool_result": ("user", "tool"),
}
"""The roles that may write a part, by the type of the part."""
_NOTES = ("cache_control", "signature", "thoughtSignature", "thought_signature")
"""Keys of parts and messages that say nothing to a model."""


def spread(value: object, where: str) -> list[Any]:
    """Return the messages that a message of another format holds, or the message alone.

    Args:
        value: the message, as the row has it.
        where: location of the message, for messages.

    Raises:
        MalformedRow: parts stand in an order or in a role that other formats cannot write.
    """
    if not isinstance(value, Mapping):
        return [value]
    has_role = not {"role", "from"}.isdisjoint(value)
    if not has_role and {"input", "output"} <= value.keys():
        rest = {name: one for name, one in value.items() if name not in ("input", "output")}
        asked = {"role": "user", "content": value["input"]}
        said = {"role": "assistant", "content": value["output"], **rest}
        return [asked, said] if value["output"] else [asked]
    message = _without_notes(value)
    parts = message.get("content")
    if parts is None and isinstance(message.get("parts"), list | tuple):
        parts = [_gemini_part(part) for part in message.pop("parts")]
        message["content"] = parts
    return _of_parts(message, parts, where) if isinstance(parts, list | tuple) else [message]


def _of_parts(message: Message, parts: Sequence[Any], where: str) -> list[Message]:
    """Return a message with its parts of tools and of thinking as messages and fields."""
    found: list[Message] = []
    shown: list[Any] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for part in parts:
        part = _without_notes(part) if isinstance(part, Mapping) else part
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        role = message.get("role")
        if kind in _SPEAKERS and known_role(role) not in _SPEAKERS[kind]:
            roles = " or ".join(_SPEAKERS[kind])
            problem = f"a content part of type {kind!r} in a message of {role!r}"
            raise MalformedRow(f"{where}: {problem}; write it in one of {roles}")
        # A message has its reasoning first and its calls last.
        if (calls and kind != "tool_use") or (kind == "thinking" and shown):
            problem = f"a content part of type {kind!r} after text or calls"
            raise MalformedRow(f"{where}: {problem}; split the message there")
        if kind == "tool_result":
            if shown:
                found.append({**message, "content": shown})
                shown = []
            result = {"tool_call_id": part.get("tool_use_id"), "name": part.get("name")}
            known = ("type", "content", "tool_use_id", "name")
            rest = {name: one for name, one in part.items() if name not in known and one}
            found.append({"role": "tool", "content": part.get("content") or "", **result, **rest})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            known = ("type", "name", "input")
            rest = {name: one for name, one in part.items() if name not in known}
            calls.append({**rest, "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        else:
            shown.append(part)
    own: Message = {"tool_calls": calls} if calls else {}
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*found, {**message, "content": shown, **own}] if shown or own or not found else found


def _without_notes(value: Mapping[str, Any]) -> Message:
    return {name: inner for name, inner in value.items() if name not in _NOTES}


def _gemini_part(part: Any) -> Any:
    """Return a part of Gemini, whose only key with content is its type, as one of Anthropic."""
    if not isinstance(part, Mapping):
        return part
    given = {_camel(name): value for name, value in part.items() if value is not None}
    given = _without_notes(given)
    is_thought = given.pop("thought", False)
    if len(given) != 1:
        return part
    ((kind, value),) = given.items()
    if kind == "text":
        return (
            {"type": "thinking", "thinking": value} if is_thought else {"type": kind, kind: value}
        )
    if not isinstance(value, Mapping):
        return part
    value = {_camel(name): inner for name, inner in value.items() if inner is not None}
    call = {"id": value["id"]} if "id" in value else {}
    if kind == "functionCall":
        return {"type": "tool_use", "name": value.get("name"), "input": value.get("args"), **call}
    if kind == "functionResponse":
        text = json.dumps(value.get("response"), ensure_ascii=False)
        result = {"tool_use_id": value.get("id"), "name": value.get("name"), "content": text}
        return {"type": "tool_result", **result}
    media = str(value.get("mimeType")).partition("/")[0]
    if kind == "inlineData":
        return {"type": media, "data": value.get("data")}
    return {"type": media, "url": value.get("fileUri")} if kind == "fileData" else {"type": kind}


def _camel(name: str) -> str:
    """Return a name of Gemini in the spelling of its HTTP interface."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def system_text(value: object) -> object:
    """Return a system message of text parts as text; other values unchanged."""
    parts = value.get("parts") if isinstance(value, Mapping) else value
    if not isinstance(parts, list | tuple):
        return value
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]
    return "\n\n".join(map(str, texts)) if len(texts) == len(parts) else value


def as_tool(tool: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a declaration of Anthropic or Gemini as those of chat templates."""
    declared = tool.get("functionDeclarations", tool.get("function_declarations"))
    if isinstance(declared, list | tuple) and all(isinstance(one, Mapping) for one in declared):
        return [{"type": "function", "function": dict(one)} for one in declared]
    if "input_schema" not in tool:
        return [tool]
    about = {name: value for name, value in tool.items() if name not in ("type", *_NOTES)}
    about["parameters"] = about.pop("input_schema")
    return [{"type": "function", "function": about}]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A form of a conversation in one text.

    Args:
        begins: pattern of a text of this form.
        mark: pattern before the words of a speaker, with the speaker as its group.
        roles: role of each speaker.
        first: role of the words before the first mark. Empty if there are none.
        turn: returns a message of a role and its words.
    """

    begins: re.Pattern[str]
    mark: re.Pattern[str]
    roles: Mapping[str, str]
    first: str = ""
    turn: Callable[[str, str], Message] = lambda role, words: {"role": role, "content": words}

    def messages(self, text: str) -> list[Message]:
        """Return the messages of a text of this form."""
        # the split gives: first words, speaker, words, speaker, words ...
        before, *pieces = self.mark.split(text.lstrip())
        said = [(self.roles[speaker], words) for speaker, words in zip(pieces[::2], pieces[1::2])]
        if self.first and before.strip():
            said.insert(0, (self.first, before))
        return [self.turn(role, words.strip()) for role, words in said]


_CALL = re.compile(r"\A(.*?)<functioncall>\s*(\{.*\})\s*\Z", re.DOTALL)
_QUOTED = re.compile(r"""(["']arguments["']:\s*)'(.*)'(\s*\})\Z""", re.DOTALL)


def _glaive_turn(role: str, words: str) -> Message:
    """Return a turn of glaive-function-calling, whose calls are JSON with quoted arguments."""
    words = words.removesuffix("<|endoftext|>").strip()
    found = _CALL.match(words) if role == "assistant" else None
    if found is None:
        return {"role": role, "content": words}
    call = _QUOTED.sub(r"\1\2\3", found[2]).replace("\\'", "'")
    return {"role": role, "content": found[1].strip(), "tool_calls": [call]}


TRANSCRIPTS = (
    Transcript(
        re.compile(r"\A\s*Human:.*\n\nAssistant:", re.DOTALL),
        re.compile(r"(?:\A|\n\n)(Human|Assistant):"),
        {"Human": "user", "Assistant": "assistant"},
    ),
    Transcript(
        re.compile(r"\A\s*USER:.*\n\nASSISTANT:", re.DOTALL),
        re.compile(r"(?:\A|\n\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):"),
        {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"},
        turn=_glaive_turn,
    ),
    Transcript(
        re.compile(r"(?:\A|\n)<extra_id_1>Assistant\n"),
        re.compile(r"(?:\A|\n)<extra_id_1>(User|Assistant)(?:\n|\Z)"),
        {"User": "user", "Assistant": "assistant"},
        first="user",
    ),
)
"""Forms of HH-RLHF, of glaive-function-calling, and of HelpSteer and HelpSteer2."""
