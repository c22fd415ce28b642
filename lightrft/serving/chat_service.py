"""Chat completions of a generative reward model, as in the API of OpenAI."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lightrft.config.data import DataConfig, MediaConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.engines.base import Engine
from lightrft.models.processors import Processor
from lightrft.serving.batcher import Batcher, Work
from lightrft.serving.chat_logprobs import ChatAnswer, TokenLogprobs, shown_logprobs
from lightrft.serving.http_server import Endpoint, EventStream
from lightrft.serving.problems import HTTPCall, bad
from lightrft.serving.reward_service import ServedModel
from lightrft.serving.token_stream import TokenStream
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import first_line
from lightrft.utils.seeding import derive_seed

MOST_CHOICES = 64
"""Largest ``n`` of a request."""
MOST_LIKELY = 20
"""Largest ``top_logprobs`` of a request, as in the API of OpenAI."""
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""Field of a request to the setting ``sampling`` of this name."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The computation of a chat completion.

    Attributes:
        requests: A request for each choice. All have one prompt.
        likely: Number of likely tokens at each place. ``None`` for no log-probs.
        stream: Gets the tokens as they are generated. ``None`` for a whole answer.
    """

    requests: Sequence[Request]
    likely: int | None = None
    stream: TokenStream | None = None


class ChatService:
    """Answers chat completions by ``engine``.

    Args:
        engine: Generates the answers.
        likely: Returns the log-probs of the tokens of responses, and the likeliest tokens.
        tokenizer: Its tokenizer.
        processor: Its media processor. ``None`` for a model that reads text alone.
        media: What requests may name, and limits.
        sampling: Settings for requests that set nothing else.
        served: Name and digest of the model.
        context: Context length of the model in tokens. ``None`` for no limit.
    """

    def __init__(
        self,
        engine: Engine,
        likely: Callable[[Sequence[Rollout], int], list[TokenLogprobs]],
        tokenizer: Any,
        processor: Processor | None,
        media: MediaConfig,
        sampling: SamplingConfig,
        served: ServedModel,
        context: int | None,
    ) -> None:
        self.engine = engine
        self.likely = likely
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.served = served
        self.context = context
        self.encoder = ChatEncoder(
            DataConfig(apply_chat_template=True, media=media), tokenizer, processor
        )
        self.batcher: Batcher[Asked] | None = None
        self._lock = threading.Lock()

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses of this model."""
        return [Endpoint(("/v1/chat/completions",), self.complete)]

    def close(self) -> None:
        """Finish the requests that wait, and stop."""
        if self.batcher is not None:
            self.batcher.close()

    def compute(self, works: Sequence[Work[Asked]]) -> list[list[ChatAnswer]]:
        """Return the responses of each work, generated together. See ``Batcher``."""
        sampling = works[0].key
        assert isinstance(sampling, SamplingConfig)
        requests = [request for work in works for request in work.payload.requests]
        streams = {id(w.payload.requests[0].prompt): w.payload.stream for w in works}
        found: dict[tuple[int, int], Rollout] = {}
        for rollout in self.engine.generate(requests, sampling):
            found[id(rollout.prompt), rollout.sample] = rollout
            stream = streams[id(rollout.prompt)]
            if stream is not None:
                stream.finished(rollout)
        return [self._weighed(work.payload, found) for work in works]

    def _weighed(self, asked: Asked, found: Mapping[tuple[int, int], Rollout]) -> list[ChatAnswer]:
        """Return the responses of a request, with log-probs if it asks for them."""
        rollouts = [found[id(r.prompt), r.sample] for r in asked.requests]
        if asked.likely is None:
            return [ChatAnswer(rollout) for rollout in rollouts]
        rows = self.likely(rollouts, asked.likely)
        return [ChatAnswer(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]

    async def complete(self, call: HTTPCall) -> object:
        """ChatAnswer ``/v1/chat/completions``, at once or as a stream."""
        body = call.body
        count = int(call.number("n", 1, 1, MOST_CHOICES))
        seed = int(call.number("seed", 0, 0, 2**63 - 1))
        likely = self._likely(call)
        sampling = self._sampling(body)
        prompt = await asyncio.to_thread(self._asked, body)
        room = self._room(prompt, sampling)
        stream = TokenStream(self.tokenizer, count, sampling.stop) if body.get("stream") else None
        requests = []
        for k in range(count):
            request = Request(prompt, derive_seed(seed, "choice", k), k, max_new_tokens=room)
            if stream is not None:
                request.watch = functools.partial(stream.grown, k)
            requests.append(request)
        assert self.batcher is not None
        tokens = len(prompt.token_ids) + count * room
        # requests with other limits share a batch: each has its own limit
        key = sampling.model_copy(update={"max_new_tokens": self.sampling.max_new_tokens})
        work = Work[Asked](Asked(requests, likely, stream), tokens, call.deadline, key)
        future = self.batcher.submit(work)
        if stream is not None:
            return self._stream(stream, future, prompt, body)
        answers = await asyncio.wrap_future(future)
        return self._answer(prompt, answers)

    def _stream(
        self, stream: TokenStream, future: Future, prompt: Prompt, body: Mapping[str, Any]
    ) -> EventStream:
        """Return the events of a request.

        Args:
            stream: Gets the tokens.
            future: Gets the error if the computation fails.
            prompt: The prompt.
            body: The request.
        """
        options = body.get("stream_options")
        wants_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        future.add_done_callback(stream.ended)

        def left() -> None:
            stream.leave()
            future.cancel()

        async def events() -> AsyncIterator[object]:
            shared = self._heading("chat.completion.chunk")
            async for choice in stream.choices():
                yield {**shared, "choices": [choice], **({"usage": None} if wants_usage else {})}
            if wants_usage:
                yield {**shared, "choices": [], "usage": usage(prompt, stream.count_tokens())}

        return EventStream(events(), left)

    def _likely(self, call: HTTPCall) -> int | None:
        """Return the number of likely tokens that a request asks for at each place."""
        if not call.body.get("logprobs"):
            if call.body.get("top_logprobs"):
                raise bad("top_logprobs needs logprobs = true")
            return None
        if call.body.get("stream"):
            raise bad("logprobs are given with the whole answer; leave out stream or logprobs")
        return int(call.number("top_logprobs", 0, 0, MOST_LIKELY))

    def _asked(self, body: Mapping[str, Any]) -> Prompt:
        """Return the prompt of the messages of a request."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad("messages must be a list of messages with role and content")
        begun = ""
        if body.get("continue_final_message"):
            messages, last = messages[:-1], messages[-1]
            begun = last.get("content") if isinstance(last, Mapping) else None
            if not messages or not isinstance(begun, str) or last.get("role") != "assistant":
                raise bad("continue_final_message needs a text of the assistant as last message")
        with self._lock:
            prompt = self.encoder.ask(messages, "messages")
            if begun:
                shown = self.encoder.escape_special_tokens(begun, answer=True)
                prompt.token_ids = [*prompt.token_ids, *self.encoder.encode([shown])[0]]
        return prompt

    def _sampling(self, body: Mapping[str, Any]) -> SamplingConfig:
        """Return the sampling of a request."""
        given: dict[str, Any] = {}
        for name, setting in NAMES.items():
            if body.get(name) is not None:
                given[setting] = body[name]
        if (stop := body.get("stop")) is not None:
            given["stop"] = (stop,) if isinstance(stop, str) else stop
        try:
            return SamplingConfig.model_validate({**self.sampling.model_dump(), **given})
        except ValidationError as error:
            raise bad(f"sampling of the request: {first_line(error)}: {error.errors()}") from error

    def _room(self, prompt: Prompt, sampling: SamplingConfig) -> int:
        """Return the longest answer to ``prompt`` in tokens."""
        room = sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt.token_ids))
        if room < max(1, sampling.min_new_tokens):
            raise bad(
                f"{len(prompt.token_ids)} tokens of messages leave no room in the context of "
                f"{self.context}"
            )
        return room

    def _answer(self, prompt: Prompt, answers: Sequence[ChatAnswer]) -> dict[str, object]:
        choices = []
        for k, answer in enumerate(answers):
            choice: dict[str, object] = {
                "index": k,
                "message": {"role": "assistant", "content": answer.rollout.text},
                "finish_reason": answer.rollout.finish_reason,
            }
            if answer.logprobs is not None:
                choice["logprobs"] = {"content": shown_logprobs(answer, self.tokenizer)}
            choices.append(choice)
        made = sum(len(answer.rollout) for answer in answers)
        heading = self._heading("chat.completion")
        return {**heading, "choices": choices, "usage": usage(prompt, made)}

    def _heading(self, kind: str) -> dict[str, object]:
        """Return the first fields of an answer or of an event."""
        return {
            **self.served.named("chatcmpl"),
            "object": kind,
            "system_fingerprint": self.served.digest,
        }


def usage(prompt: Prompt, made: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    asked = len(prompt.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
