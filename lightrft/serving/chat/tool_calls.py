"""Tools in chat requests, and the calls of tools in responses."""

from __future__ import annotations

import json
import re
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.serving.problems import bad
from lightrft.types import Rollout

# Without blanks around the group: a long run of them would take quadratic time.
MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call in the format of Hermes and Qwen."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: Name of the tool.
        arguments: Its arguments.
        id: Id by which the result refers to the call.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str

    def shown(self, index: int | None = None) -> dict[str, object]:
        """Return the call as the API of OpenAI has it, with its ``index`` in a stream."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        place = {} if index is None else {"index": index}
        return {**place, "id": self.id, "type": "function", "function": function}


def read_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools of a chat request. It is empty if the request forbids their use.

    Raises:
        HTTPProblem: ``tools`` is malformed, or ``tool_choice`` forces a call.
    """
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    if not all(isinstance(tool.get("function"), Mapping) for tool in tools):
        raise bad("tools must be a list of {type: function, function: {name, parameters}}")
    for k, tool in enumerate(tools):
        if tool["function"].get("strict"):
            why = "is not supported, since nothing holds the model to the schema; leave it out"
            raise bad(f"tools.{k}.function.strict = True {why}")
    if choice not in (None, "auto", "none"):
        raise bad(f"tool_choice = {choice!r} is not supported; use auto or none")
    return [] if choice == "none" else tools


def with_parsed_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the arguments of earlier calls as objects, as templates read them.

    Raises:
        HTTPProblem: The calls of a message are no list, or the arguments of one are not JSON.
    """
    found = []
    for k, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                given = f"messages.{k}.tool_calls = {reprlib.repr(calls)}"
                raise bad(f"{given}: it should be a list")
            message = {**message, "tool_calls": [_parsed(call) for call in calls]}
        found.append(message)
    return found


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        # clients send an empty text for a call without arguments
        arguments = json.loads(function["arguments"].strip() or "{}")
        return {**call, "function": {**function, "arguments": arguments}}
    except ValueError as error:
        raise bad(f"the arguments of tool call {call.get('id')!r} are not JSON: {error}") from error


def read_answer(rollout: Rollout, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text of a response without its calls, and the calls of ``tools``.

    The tags of calls may be special tokens. A text without calls has no special tokens.
    """
    left, calls = find_calls(rollout.text, tools) if tools else ("", [])
    return (left, calls) if calls else (rollout.plain_text, [])


def find_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return a text without its calls, and the calls.

    A call is JSON with ``name`` and ``arguments`` between ``<tool_call>`` tags (Hermes, Qwen), or
    the whole response is such an object or a list of them (Llama 3, Mistral). Text that is no call
    of one of ``tools`` stays text.
    """
    names = {tool["function"].get("name") for tool in tools}
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        found = _calls(match[1].strip(), names)
        calls.extend(found)
        return "" if found else match[0]

    left = MARKED.sub(taken, text)
    if calls:
        return left.strip(), calls
    whole = _calls(text.strip(), names)
    return ("", whole) if whole else (text, [])


def _calls(text: str, names: set[Any]) -> list[ToolCall]:
    """Return the calls that JSON ``text`` holds; none unless all of it is calls."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[ToolCall] = []
    for item in found if isinstance(found, list) else [found]:
        if not isinstance(item, Mapping):
            return []
        arguments = item.get("arguments", item.get("parameters"))
        if item.get("name") not in names or not isinstance(arguments, Mapping):
            return []
        calls.append(ToolCall(item["name"], arguments, f"call_{uuid.uuid4().hex[:24]}"))
    return calls
