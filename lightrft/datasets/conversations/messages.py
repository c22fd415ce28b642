"""Messages of any format as messages that chat templates read.

Roles of other formats are mapped, calls of tools become ``tool_calls`` with arguments as objects,
and results of tools follow the order of their calls. ``MessageFit`` proves that a chat template
writes what a message carries.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrft.datasets.row_tables import MalformedRow
from lightrft.utils.errors import did_you_mean
from lightrft.utils.yaml_text import parse_json

Message = dict[str, Any]

_log = logging.getLogger(__name__)
CALLS = "calls"
"""Role of a message whose content is a call of a tool."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "tool_call": CALLS,
    "function_call": CALLS,
}
"""The role of a message by its name in ShareGPT, LLaMA-Factory, ms-swift and the API of OpenAI.

Names are lower case, and rows may write them in any case.
"""
_SPELLINGS = {
    "tool": ("tool", "observation", "function", "ipython"),
    "developer": ("developer", "system"),
}
"""The names of a role in chat templates, the most common first."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names of reasoning in messages and chat templates."""
CARRIERS = ("tool_calls", "function_call", "refusal", *_REASONING)
"""Fields that make a message without content whole."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""The names of the arguments of a call: OpenAI's, Llama's, LangChain's and Anthropic's."""
_CALL = ("id", "type", "index", "function", "name", *_ARGUMENTS)
"""The fields of a call whose content chat templates write or need not."""
_WORD = "sentinelword"
"""A word that no chat template writes itself."""


def known_role(name: object) -> str | None:
    """Return the role that ``name`` means, in any case, or None."""
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def with_known_role(message: Message, where: str) -> Message:
    """Return ``message`` with a role that chat templates know, and its calls as ``tool_calls``.

    A role without a known meaning stays as it is.

    Raises:
        MalformedRow: a call of a tool cannot be read.
    """
    role = known_role(message["role"]) or message["role"]
    if role == CALLS:
        calls = _calls_of(message.pop("content"), f"{where}: content of {message['role']!r}")
        message = {**message, "role": "assistant", "content": "", "tool_calls": calls}
    else:
        message = {**message, "role": role}
    if isinstance(call := message.get("function_call"), Mapping) and role == "assistant":
        message.pop("function_call")
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if message.get("tool_calls"):
        message["tool_calls"] = _calls_of(message["tool_calls"], f"{where}: tool_calls")
    return message


def _calls_of(value: Any, place: str) -> list[Any]:
    """Return calls of tools with their arguments as objects. Raises ``MalformedRow``."""
    if isinstance(value, str):
        value = _parsed(value, place)
    calls = value if isinstance(value, list | tuple) else [value]
    found = []
    for call in calls:
        if isinstance(call, str):
            call = _parsed(call, place)
        if not isinstance(call, Mapping):
            shown = reprlib.repr(call)
            raise MalformedRow(f"{place} must be calls with name and arguments, not {shown}")
        function = call.get("function")
        inner = dict(function if isinstance(function, Mapping) else call)
        if not isinstance(inner.get("name"), str):
            raise MalformedRow(f"{place}: a call without a name; it has: {', '.join(inner)}")
        given = {name: inner.pop(name) for name in _ARGUMENTS if name in inner}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            both = " and ".join(map(repr, named))
            raise MalformedRow(f"{place}: {both} name the arguments of one call; keep one of them")
        arguments = given[named[0]] if named else None
        while isinstance(arguments, str):
            arguments = _parsed(arguments, f"{place}, arguments of {inner['name']!r}")
        if not isinstance(arguments, Mapping | None):
            shown = reprlib.repr(arguments)
            raise MalformedRow(
                f"{place}: arguments of {inner['name']!r} are {shown}, not an object"
            )
        inner["arguments"] = arguments or {}
        if isinstance(function, Mapping):
            found.append({**call, "function": inner})
        else:
            about = {name: inner.pop(name) for name in ("id", "type") if name in inner}
            found.append({"type": "function", **about, "function": inner})
    return found


def _parsed(text: str, place: str) -> Any:
    if not text.strip():
        return {}
    try:
        return parse_json(text)
    except ValueError as error:
        raise MalformedRow(f"{place} is no JSON ({error}): {reprlib.repr(text)}") from None


def in_order(messages: Sequence[Message], where: str) -> list[Message]:
    """Return ``messages`` with calls in the turn that makes them, and results in their order.

    Raises:
        MalformedRow: a result names a call that the turn before it does not have.
    """
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        only_calls = message["role"] == "assistant" and message.get("tool_calls")
        if only_calls and last and last["role"] == "assistant" and not message["content"]:
            calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
            found[-1] = {**last, **message, "content": last["content"], "tool_calls": calls}
        else:
            found.append(message)
    at = 0
    while at < len(found):
        end = at + 1
        calls = found[at].get("tool_calls")
        if found[at]["role"] == "assistant" and calls:
            while end < len(found) and found[end]["role"] == "tool":
                end += 1
            found[at + 1 : end] = _results(found[at + 1 : end], calls, where)
        at = end
    return found


def _results(results: list[Message], calls: Sequence[Any], where: str) -> list[Message]:
    """Return the results of ``calls`` in the order of the calls.

    The id of a result tells its call, or else the name of a tool that is called once. Other results
    stay in their places.

    Raises:
        MalformedRow: a result names no call or the call of another one, or a call before it has no
            result. A chat template without ids would show it as the result of another call.
    """
    known = [_text(call.get("id")) for call in calls]
    named = [_text(result.get("tool_call_id")) for result in results]
    if len(calls) == len(results) == 1:
        return results
    if "" in known or not any(named):
        known = [call["function"]["name"] for call in calls]
        named = [_text(result.get("name")) for result in results]
        if len(set(known)) < len(known) or not set(named) <= set(known):
            return results
    places = [
        (known.index(name) if name in known else -1) if name else k for k, name in enumerate(named)
    ]
    if sorted(places) != list(range(len(places))):
        given = ", ".join(name or "(no id)" for name in named)
        problem = f"results of the calls {given}, and the calls are {', '.join(known)}"
        raise MalformedRow(f"{where}: {problem}; write one result of each call, from the first")
    return [result for _, result in sorted(zip(places, results), key=lambda pair: pair[0])]


def _is_given(value: object) -> bool:
    """Return True for a field that says something: 0 and False do, and empty text does not."""
    return bool(value) or isinstance(value, int | float)


def _text(name: object) -> str:
    """Return an id or a name as text. Empty for null."""
    return "" if name is None else str(name)


class MessageFit:
    """Fits messages to a chat template, and proves that it writes what they carry.

    The proof is one rendering for each role and each set of fields.

    Args:
        render: Renders messages with the chat template. It may raise any error.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], Callable[[Message], Message] | str] = {}
        self._told: set[tuple[str, str]] = set()

    def fit(self, messages: Sequence[Message], where: str) -> list[Message]:
        """Return ``messages`` in the spellings of the chat template.

        Args:
            messages: The messages, with content as text.
            where: Location of the row, for messages.

        Raises:
            MalformedRow: The template does not write a field of a message.
        """
        fitted = []
        for message in messages:
            given = (k for k, v in message.items() if _is_given(v) and k != "role")
            key = (message["role"], *sorted(given))
            if key not in self._known:
                self._known[key] = self._examined(key[0], key[1:], where)
            known = self._known[key]
            if isinstance(known, str):
                raise MalformedRow(f"{where}: {known}")
            self._tell_role(message["role"], where)
            self._tell_calls(message.get("tool_calls") or (), where)
            fitted.append(known(message))
        return fitted

    def _tell_role(self, role: str, where: str) -> None:
        """Warn once about a role that no format has, since a template may write any name."""
        if role in ROLES.values() or (role, "") in self._told:
            return
        self._told.add((role, ""))
        hint = did_you_mean(role, ROLES)
        told = "the chat template writes it as it is"
        _log.warning("%s: the role %r has no known meaning, and %s%s", where, role, told, hint)

    def _tell_calls(self, calls: Sequence[Any], where: str) -> None:
        """Warn once about each field of a call that the chat template does not write."""
        for call in calls:
            for field in {*call, *call["function"]}.difference(_CALL):
                name = f"tool_calls.{field}"
                if ("assistant", name) not in self._told and not self._writes(field):
                    self._tell("assistant", name, where)

    def _writes(self, field: str) -> bool:
        """Return True if the template writes ``field`` of a call, or of the function in it."""
        call: Message = _call("look", as_text=False)
        call = {**call, field: _WORD, "function": {**call["function"], field: _WORD}}
        user: Message = {"role": "user", "content": "Hello"}
        try:
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            return _WORD in self._render([user, asked])
        # A template can raise any error, by jinja or by its own checks.
        except Exception:
            return False

    def _examined(
        self, role: str, fields: Sequence[str], where: str
    ) -> Callable[[Message], Message] | str:
        """Return the function that fits a message of ``role`` with ``fields``, or its problem."""
        names: dict[str, tuple[str, ...]] = {field: (field,) for field in fields}
        reasoning = [field for field in fields if field in _REASONING]
        if len(reasoning) == 1:
            names[reasoning[0]] = tuple(dict.fromkeys((reasoning[0], *_REASONING)))
        problem = ""
        for spelling in _SPELLINGS.get(role, (role,)):
            chosen: dict[str, str] = {}
            as_text = False
            lost, silent = "", []
            for field in fields:
                written = self._written(spelling, field, names[field], fields)
                if written is None:
                    continue  # the template refuses such a message
                chosen[field], as_text = written[0], as_text or written[1]
                if written[0]:
                    continue
                if field in ("content", "refusal", "tool_calls", *_REASONING):
                    others = [name for name in fields if name not in (field, "tool_call_id")]
                    beside = f" with {', '.join(others)}" if others else ""
                    lost = f"the chat template does not write {field!r} of role {role!r}{beside}"
                elif field != "tool_call_id":
                    silent.append(field)
            if chosen and not lost:
                for field in silent:
                    self._tell(role, field, where)
                return _fitting(spelling, chosen, as_text=as_text)
            problem = problem or lost
        if not problem:
            return lambda message: message
        return f"{problem}; put it into another message, or set model.chat_template"

    def _tell(self, role: str, field: str, where: str) -> None:
        if (role, field) in self._told or (role, field) == ("tool", "name"):
            return
        self._told.add((role, field))
        told = "the chat template does not write it, so the model does not see it"
        _log.warning("%s: %r of messages of role %r: %s", where, field, role, told)

    def _written(
        self, role: str, field: str, names: Sequence[str], fields: Sequence[str]
    ) -> tuple[str, bool] | None:
        """Return the name under which the template writes ``field``, and if arguments are text.

        The name is empty if it is not written. None if the template renders no such message.
        """
        rendered = False
        for name in names:
            for as_text in (False, True) if "tool_calls" in fields else (False,):
                others = [other for other in fields if other != field]
                text = self._probe(role, name, others, as_text=as_text)
                rendered |= text is not None
                # a call has its name and an argument
                expected = 2 if field == "tool_calls" else 1
                if text is not None and text.count(_WORD) >= expected:
                    return name, as_text
        return ("", False) if rendered else None

    def _probe(self, role: str, field: str, others: Sequence[str], *, as_text: bool) -> str | None:
        """Return the text of a conversation with a sentinel in ``field`` of a message of ``role``.

        The message has ``others`` too. None if the template renders no such conversation.
        """
        message: Message = {"role": role, "content": "", **dict.fromkeys(others, "Hello")}
        if "tool_calls" in others:
            message["tool_calls"] = [_call("look", as_text=as_text)]
        message[field] = [_call(_WORD, as_text=as_text)] if field == "tool_calls" else _WORD
        user: Message = {"role": "user", "content": "Hello"}
        before, after = [user], []
        if role in ("system", "developer"):
            before, after = [], [user]
        elif role == "user":
            before = []
        elif role in _SPELLINGS["tool"]:
            calls = [_call("look", as_text=as_text)]
            before = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
            message = {"name": "look", "tool_call_id": "sentinel1", **message}
        for start in (before, before[:1]):
            try:
                return self._render([*start, message, *after])
            # A template can raise any error, by jinja or by its own checks.
            except Exception:
                text = None
        return text


def _call(word: str, *, as_text: bool) -> Message:
    """Return a call of the tool ``word``, which is its argument too."""
    arguments: object = json.dumps({"value": word}) if as_text else {"value": word}
    # an id that Mistral's templates accept
    return {
        "id": "sentinel1",
        "type": "function",
        "function": {"name": word, "arguments": arguments},
    }


def _fitting(role: str, names: Mapping[str, str], *, as_text: bool) -> Callable[[Message], Message]:
    """Return the function that gives a message the spellings of a chat template."""

    def fit(message: Message) -> Message:
        fitted = {names.get(k) or k: v for k, v in message.items()}
        fitted["role"] = role
        if as_text:
            calls = []
            for call in fitted["tool_calls"]:
                function = call["function"]
                shown = json.dumps(function["arguments"], ensure_ascii=False)
                calls.append({**call, "function": {**function, "arguments": shown}})
            fitted["tool_calls"] = calls
        return fitted

    return fit
