"""Messages, as in the API of Anthropic."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightrft.engines.stop_strings import StopStrings
from lightrft.serving.chat.chat_completions import ChatCompletions, Conversation, opened
from lightrft.serving.chat.request_fields import MESSAGES, PASSED_ON, TOOL
from lightrft.serving.chat.response_format import OF_MESSAGES
from lightrft.serving.chat.text_generator import TextGenerator, Wanted, token_fields
from lightrft.serving.chat.token_stream import TokenStream
from lightrft.serving.chat.tool_calls import ToolCall, read_answer
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, anthropic_error, bad
from lightrft.types import Rollout


class Messages:
    """Answers messages by the same model as chat completions.

    Args:
        generator: Generates the answers.
        chat: Renders the conversation.
    """

    def __init__(self, generator: TextGenerator, chat: ChatCompletions) -> None:
        self.generator = generator
        self.chat = chat

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        return [
            Endpoint(("/v1/messages",), self.create, error=anthropic_error, fields=MESSAGES),
            Endpoint(
                ("/v1/messages/count_tokens",), self.count, error=anthropic_error, fields=MESSAGES
            ),
        ]

    async def count(self, call: HTTPCall) -> object:
        """Answer ``/v1/messages/count_tokens``."""
        asked = await asyncio.to_thread(self.chat.read, as_chat(call.body))
        return {"input_tokens": len(asked.prompt.token_ids)}

    async def create(self, call: HTTPCall) -> object:
        """Answer ``/v1/messages``, at once or as a stream."""
        if call.body.get("max_tokens") is None:
            raise bad("max_tokens is missing")
        body = as_chat(call.body)
        wanted = await asyncio.to_thread(self.generator.wanted, replace(call, body=body))
        asked = await asyncio.to_thread(self.chat.read, body)
        future, stream = self.generator.begin([asked.prompt], wanted, call.deadline)
        if stream is not None:
            events = self._events(stream, asked, wanted)
            return opened(stream, future, events, has_names=True)
        (answer,) = await asyncio.wrap_future(future)
        rollout = answer.rollout
        text, calls = read_answer(rollout, asked.tools)
        return {
            **self._heading(asked, wanted),
            "content": [
                *([{"type": "text", "text": text}] if text or not calls else []),
                *map(_tool_use, calls),
            ],
            **self._end(rollout, calls, wanted.sampling.stop),
            "usage": _usage(asked, rollout),
            **token_fields(call.body, rollout),
        }

    def _heading(self, asked: Conversation, wanted: Wanted) -> dict[str, object]:
        return {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self.generator.served.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(asked),
            **wanted.seed_field(),
        }

    def _end(
        self, rollout: Rollout, calls: Sequence[ToolCall], stop: Sequence[str]
    ) -> dict[str, object]:
        """Return why a response ended, and the stop sequence that it ended with."""
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if rollout.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        found = None
        if stop and rollout.finish_reason == "stop":
            tokens = np.array(rollout.token_ids)
            found = StopStrings(self.generator.tokenizer, tuple(stop)).match(tokens)
        if found is None:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": found.stop}

    async def _events(
        self, stream: TokenStream, asked: Conversation, wanted: Wanted
    ) -> AsyncIterator[object]:
        yield {"type": "message_start", "message": self._heading(asked, wanted)}
        if not asked.tools:
            yield _start(0, {"type": "text", "text": ""})
            async for piece in stream.choices():
                if text := piece["delta"].get("content"):
                    yield _delta(0, {"type": "text_delta", "text": text})
            yield {"type": "content_block_stop", "index": 0}
        else:
            # the first tokens do not tell whether a response calls a tool
            async for _ in stream.choices():
                pass
        rollout = stream.rollout(0)
        text, calls = read_answer(rollout, asked.tools)
        if asked.tools:
            for event in _whole(text, calls):
                yield event
        reason = self._end(rollout, calls, wanted.sampling.stop)
        # the counts of this event replace those of the first one
        yield {"type": "message_delta", "delta": reason, "usage": _usage(asked, rollout)}
        yield {"type": "message_stop"}


def _usage(asked: Conversation, rollout: Rollout | None = None) -> dict[str, int]:
    """Return the numbers of tokens of a request, or of one that has no response yet.

    The tokens of the prompt are counted apart from those that came from an earlier sequence, as in
    the API of Anthropic.
    """
    tokens = len(asked.prompt.token_ids)
    if rollout is None:
        return {"input_tokens": tokens, "cache_read_input_tokens": 0, "output_tokens": 0}
    return {
        "input_tokens": tokens - rollout.reused_tokens,
        "cache_read_input_tokens": rollout.reused_tokens,
        "output_tokens": len(rollout),
    }


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for messages as one for a chat completion.

    Raises:
        HTTPProblem: A message or a tool is malformed.
    """
    if not body.get("messages"):
        raise bad("messages must be a list of messages with role and content")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _parts(body["system"])})
    for message in body["messages"]:
        if message.get("role") not in ("user", "assistant"):
            raise bad("a message needs the role user or assistant; put the other text in system")
        messages += _turns(message["role"], message.get("content"))
    kept = {name: body[name] for name in PASSED_ON if name in body}
    return {
        **kept,
        "messages": messages,
        # the model continues a message of the assistant
        "continue_final_message": body["messages"][-1]["role"] == "assistant",
        "tools": [_function(tool, f"tools.{k}") for k, tool in enumerate(body.get("tools", ()))],
        "tool_choice": body.get("tool_choice", {"type": "auto"}).get("type"),
        OF_MESSAGES: _format(body),
    }


def _format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the form of the response, as chat completions have it."""
    given = body.get("output_config", {}).get("format")
    if given is None:
        given = body.get("output_format")
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise bad("the format of the output must be {type: json_schema, schema}")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise bad(f"{where}.type = {kind!r} is not supported; use tools of type custom")
    TOOL.check(tool, f"{where}.")
    about = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**about, "parameters": tool.get("input_schema", {})}}


def _turns(role: str, content: Any) -> list[dict[str, Any]]:
    """Return the messages of one turn. Results of tools are messages of their own."""
    if not isinstance(content, list):
        return [{"role": role, "content": _parts(content)}]
    found: list[dict[str, Any]] = []
    shown: list[Any] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            answer = {"role": "tool", "content": _parts(block.get("content") or "")}
            found.append({**answer, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            shown.append(block)
    if calls:
        found.append({"role": role, "content": _parts(shown), "tool_calls": calls})
    elif shown:
        found.append({"role": role, "content": _parts(shown)})
    return found


def _parts(content: Any) -> Any:
    """Return text, or content parts as chat completions have them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad("content must be a text or a list of blocks")
    parts = [_part(block) for block in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, Mapping) and source.get("type") == "base64":
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": data}}
    if isinstance(source, Mapping) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    raise bad(f"a block of type {kind!r} is not supported; use text, image, tool_use, tool_result")


def _tool_use(call: ToolCall) -> dict[str, object]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _start(index: int, block: Mapping[str, object]) -> dict[str, object]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: Mapping[str, object]) -> dict[str, object]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _whole(text: str, calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    """Return the events of a finished response."""
    events: list[dict[str, object]] = []
    index = 0
    if text or not calls:
        events.append(_start(index, {"type": "text", "text": ""}))
        events.append(_delta(index, {"type": "text_delta", "text": text}))
        events.append({"type": "content_block_stop", "index": index})
        index += 1
    for call in calls:
        arguments = call.shown()["function"]
        assert isinstance(arguments, dict)
        events.append(_start(index, {**_tool_use(call), "input": {}}))
        json_delta = {"type": "input_json_delta", "partial_json": arguments["arguments"]}
        events.append(_delta(index, json_delta))
        events.append({"type": "content_block_stop", "index": index})
        index += 1
    return events
