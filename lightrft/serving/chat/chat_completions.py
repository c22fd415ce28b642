"""Chat completions, as in the API of OpenAI."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.data import DataConfig, MediaConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.models.processors import Processor
from lightrft.serving.chat.request_fields import CHAT
from lightrft.serving.chat.text_generator import (
    MOST_LIKELY,
    TextGenerator,
    Wanted,
    token_fields,
    usage,
)
from lightrft.serving.chat.token_logprobs import ChatAnswer, TokenTexts, shown_logprobs
from lightrft.serving.chat.token_stream import TokenStream
from lightrft.serving.chat.tool_calls import read_answer, read_tools, with_parsed_arguments
from lightrft.serving.http_server import Endpoint, EventStream
from lightrft.serving.problems import HTTPCall, bad
from lightrft.types import Prompt, Rollout
from lightrft.utils.chat_template import argument_problem, names_of_rendering


@dataclass(slots=True)
class Conversation:
    """The prompt of a chat request, and the tools that its answer may call."""

    prompt: Prompt
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)


class ChatCompletions:
    """Answers chat completions.

    Args:
        generator: Generates the answers.
        processor: Media processor of the model. ``None`` for a model that reads text alone.
        media: What requests may name, and limits.
    """

    def __init__(
        self, generator: TextGenerator, processor: Processor | None, media: MediaConfig
    ) -> None:
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.encoder = ChatEncoder(
            DataConfig(apply_chat_template=True, media=media), self.tokenizer, processor
        )
        self._texts = TokenTexts(self.tokenizer)
        self._lock = threading.Lock()

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        return [Endpoint(("/v1/chat/completions",), self.complete, fields=CHAT)]

    async def complete(self, call: HTTPCall) -> object:
        """Answer ``/v1/chat/completions``, at once or as a stream."""
        body = call.body
        wanted = await asyncio.to_thread(self.generator.wanted, call, self._likely(call))
        asked = await asyncio.to_thread(self.read, body)
        future, stream = self.generator.begin([asked.prompt], wanted, call.deadline)
        if stream is not None:
            return self._stream(stream, future, asked, body, wanted)
        answers = await asyncio.wrap_future(future)
        return self._answer(asked, answers, body, wanted)

    def read(self, body: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a request.

        Raises:
            HTTPProblem: The messages, the tools or the arguments of the template are malformed.
        """
        messages = body.get("messages")
        if not messages:
            raise bad("messages must be a list of messages with role and content")
        tools = read_tools(body)
        options = read_template_kwargs(body, self.tokenizer, tools)
        messages = with_parsed_arguments(messages)
        is_begun = bool(body.get("continue_final_message"))
        if is_begun:
            last = messages[-1]
            is_text = isinstance(last.get("content"), str) and not last.get("tool_calls")
            if len(messages) == 1 or not is_text or last.get("role") != "assistant":
                raise bad("the last message cannot be continued; end with a text of the assistant")
        elif body.get("add_generation_prompt") is False:
            raise bad("add_generation_prompt = false needs continue_final_message = true")
        with self._lock:
            prompt = self.encoder.ask(messages, "messages", tools, options, is_begun=is_begun)
        return Conversation(prompt, tools)

    def _stream(
        self,
        stream: TokenStream,
        future: Future,
        asked: Conversation,
        body: Mapping[str, Any],
        wanted: Wanted,
    ) -> EventStream:
        """Return the events of a request.

        Args:
            stream: Gets the tokens.
            future: Gets the error if the computation fails.
            asked: The conversation.
            body: The request.
            wanted: The settings of the request.
        """
        wants_usage = streams_usage(body)

        async def events() -> AsyncIterator[object]:
            shared = self._heading("chat.completion.chunk", wanted)
            async for piece in pieces(stream, asked.tools):
                choice = dict(piece)
                if choice["finish_reason"] is not None:
                    choice.update(token_fields(body, stream.rollout(piece["index"])))
                yield {**shared, "choices": [choice], **({"usage": None} if wants_usage else {})}
            if wants_usage:
                found = usage([asked.prompt], stream.rollouts())
                yield {**shared, "choices": [], "usage": found}

        return opened(stream, future, events())

    def _likely(self, call: HTTPCall) -> int | None:
        """Return the number of likely tokens that a request asks for at each place."""
        if not call.body.get("logprobs"):
            if call.body.get("top_logprobs"):
                raise bad("top_logprobs needs logprobs = true")
            return None
        if call.body.get("stream"):
            raise bad("logprobs are given with the whole answer; leave out stream or logprobs")
        return call.number("top_logprobs", 0, 0, MOST_LIKELY)

    def _answer(
        self,
        asked: Conversation,
        answers: Sequence[ChatAnswer],
        body: Mapping[str, Any],
        wanted: Wanted,
    ) -> dict[str, object]:
        choices = []
        for k, answer in enumerate(answers):
            message, reason = said(answer.rollout, asked.tools)
            choice: dict[str, object] = {
                "index": k,
                "message": message,
                "finish_reason": reason,
                **token_fields(body, answer.rollout),
            }
            if answer.logprobs is not None:
                choice["logprobs"] = {"content": shown_logprobs(answer, self._texts)}
            choices.append(choice)
        found = usage([asked.prompt], [answer.rollout for answer in answers])
        ids = {"prompt_token_ids": asked.prompt.token_ids} if body.get("return_token_ids") else {}
        heading = self._heading("chat.completion", wanted)
        return {**heading, **ids, "choices": choices, "usage": found}

    def _heading(self, kind: str, wanted: Wanted) -> dict[str, object]:
        """Return the first fields of an answer or of an event."""
        served = self.generator.served
        named = served.named("chatcmpl") | {"object": kind}
        return {**named, "system_fingerprint": served.digest, **wanted.seed_field()}


def said(rollout: Rollout, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, object], str]:
    """Return the message of a response that may call ``tools``, and why it ended."""
    left, calls = read_answer(rollout, tools)
    message: dict[str, object] = {"role": "assistant", "content": left}
    if not calls:
        return message, rollout.finish_reason
    shown = [call.shown() for call in calls]
    return {**message, "content": left or None, "tool_calls": shown}, "tool_calls"


async def pieces(
    stream: TokenStream, tools: Sequence[Mapping[str, Any]]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the pieces of a stream. With ``tools``, a response is sent once it is finished, since
    its first tokens do not tell whether it calls one."""
    async for piece in stream.choices():
        if tools and piece["finish_reason"] is None:
            if "role" in piece["delta"]:
                yield piece
            continue
        if tools:
            index = piece["index"]
            left, calls = read_answer(stream.rollout(index), tools)
            delta: dict[str, object] = {"content": left} if left else {}
            if calls:
                delta["tool_calls"] = [call.shown(k) for k, call in enumerate(calls)]
                piece = {**piece, "finish_reason": "tool_calls"}
            yield {"index": index, "delta": delta, "finish_reason": None}
        yield piece


def streams_usage(body: Mapping[str, Any]) -> bool:
    """Return True if a request asks for the numbers of tokens at the end of its stream."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def opened(
    stream: TokenStream, future: Future, events: AsyncIterator[object], *, has_names: bool = False
) -> EventStream:
    """Return an event stream that ends the generation once the client leaves.

    Args:
        stream: Gets the tokens.
        future: Gets the error if the computation fails.
        events: The events.
        has_names: Events are named by their ``type``.
    """
    future.add_done_callback(stream.ended)

    def left() -> None:
        stream.leave()
        future.cancel()

    return EventStream(events, left, has_names)


FIELD = "chat_template_kwargs"


def read_template_kwargs(
    body: Mapping[str, Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the arguments of the chat template that a request gives.

    Args:
        body: The request.
        tokenizer: The tokenizer with its chat template.
        tools: Tools of the request. Some tokenizers have another template for them.

    Raises:
        HTTPProblem: The server sets an argument itself, or the template does not read it.
    """
    given = body.get(FIELD) or {}
    if not given:
        return {}
    # a template gets the special tokens by their names
    reserved = names_of_rendering(tokenizer) | set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
    template = tokenizer.get_chat_template(tools=list(tools) or None)
    if problem := argument_problem(FIELD, given, [template], reserved):
        raise bad(problem)
    return given
