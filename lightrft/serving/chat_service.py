"""Chat completions of a generative reward model, as in the API of OpenAI."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lightrft.config.data import DataConfig, MediaConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.engines.base import Engine
from lightrft.models.processors import Processor
from lightrft.serving.batcher import Batcher, Work
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, bad
from lightrft.serving.reward_service import ServedModel
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import first_line
from lightrft.utils.seeding import derive_seed

MOST_CHOICES = 64
"""Largest ``n`` of a request."""
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


class ChatService:
    """Answers chat completions by ``engine``.

    Args:
        engine: Generates the answers.
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
        tokenizer: Any,
        processor: Processor | None,
        media: MediaConfig,
        sampling: SamplingConfig,
        served: ServedModel,
        context: int | None,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.served = served
        self.context = context
        self.encoder = ChatEncoder(
            DataConfig(apply_chat_template=True, media=media), tokenizer, processor
        )
        self.batcher: Batcher[Sequence[Request]] | None = None
        self._lock = threading.Lock()

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses of this model."""
        return [Endpoint(("/v1/chat/completions",), self.complete)]

    def close(self) -> None:
        """Finish the requests that wait, and stop."""
        if self.batcher is not None:
            self.batcher.close()

    def compute(self, works: Sequence[Work[Sequence[Request]]]) -> list[list[Rollout]]:
        """Return the responses of each work, generated together. See ``Batcher``."""
        sampling = works[0].key
        assert isinstance(sampling, SamplingConfig)
        requests = [request for work in works for request in work.payload]
        found: dict[tuple[int, int], Rollout] = {}
        for rollout in self.engine.generate(requests, sampling):
            found[id(rollout.prompt), rollout.sample] = rollout
        return [[found[id(r.prompt), r.sample] for r in work.payload] for work in works]

    async def complete(self, call: HTTPCall) -> dict[str, object]:
        """Answer ``/v1/chat/completions``."""
        body = call.body
        if body.get("stream"):
            raise bad("stream = true: this server answers as a whole; leave it out")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad("messages must be a list of messages with role and content")
        count = int(call.number("n", 1, 1, MOST_CHOICES))
        seed = int(call.number("seed", 0, 0, 2**63 - 1))
        sampling = self._sampling(body)
        prompt = await asyncio.to_thread(self._asked, messages)
        room = self._room(prompt, sampling)
        requests = []
        for k in range(count):
            request = Request(prompt, derive_seed(seed, "choice", k), k, max_new_tokens=room)
            requests.append(request)
        assert self.batcher is not None
        tokens = len(prompt.token_ids) + count * room
        # requests with other limits share a batch: each has its own limit
        key = sampling.model_copy(update={"max_new_tokens": self.sampling.max_new_tokens})
        work = Work[Sequence[Request]](requests, tokens, call.deadline, key)
        answers = await asyncio.wrap_future(self.batcher.submit(work))
        return self._answer(prompt, answers)

    def _asked(self, messages: list[dict[str, Any]]) -> Prompt:
        with self._lock:
            return self.encoder.ask(messages, "messages")

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

    def _answer(self, prompt: Prompt, answers: Sequence[Rollout]) -> dict[str, object]:
        choices = []
        for k, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text}
            choices.append({"index": k, "message": message, "finish_reason": answer.finish_reason})
        asked, made = len(prompt.token_ids), sum(map(len, answers))
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.served.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": asked,
                "completion_tokens": made,
                "total_tokens": asked + made,
            },
        }
