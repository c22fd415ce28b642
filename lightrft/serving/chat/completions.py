"""Completions of texts and tokens, as in the API of OpenAI, and the tokenizer as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lightrft.engines.served.media_wire import media_from_base64
from lightrft.models.processors.base import check_placeholders
from lightrft.serving.chat.chat_completions import ChatCompletions, opened, streams_usage
from lightrft.serving.chat.request_fields import COMPLETIONS, CONVERSATION, DETOKENIZE, TOKENIZE
from lightrft.serving.chat.text_generator import (
    MOST_LIKELY,
    TextGenerator,
    Wanted,
    token_fields,
    usage,
)
from lightrft.serving.chat.token_logprobs import ChatAnswer, TokenLogprobs
from lightrft.serving.chat.token_stream import TokenStream
from lightrft.serving.http_server import Endpoint, EventStream
from lightrft.serving.problems import HTTPCall, bad
from lightrft.types import Media, Prompt
from lightrft.utils.errors import DataError

MOST_PROMPTS = 1024
"""Most prompts of a request."""


class Completions:
    """Answers completions, and requests for tokens.

    Args:
        generator: Generates the answers.
        chat: Renders the messages of ``/tokenize``.
    """

    def __init__(self, generator: TextGenerator, chat: ChatCompletions) -> None:
        self.generator = generator
        self.chat = chat
        self.tokenizer = generator.tokenizer

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        return [
            Endpoint(("/v1/completions",), self.complete, fields=COMPLETIONS),
            Endpoint(("/tokenize",), self.tokenize, fields=TOKENIZE),
            Endpoint(("/detokenize",), self.detokenize, fields=DETOKENIZE),
        ]

    async def complete(self, call: HTTPCall) -> object:
        """Answer ``/v1/completions``, at once or as a stream.

        With ``return_token_ids``, each event of a stream has the ids of its tokens. ``media`` are
        the tensors of a prompt of token ids, see ``media_to_base64``. The last ``response_tokens``
        of that prompt are the beginning of a response, in which placeholders stand for no media.
        """
        body = call.body
        echo = bool(body.get("echo"))
        likely = None
        if body.get("logprobs") is not None:
            likely = call.number("logprobs", 0, 0, MOST_LIKELY)
        if body.get("stream") and (echo or likely is not None):
            raise bad("echo and logprobs are given with the whole answer; leave out stream")
        given = call.number("response_tokens", 0, 0, 2**31)
        prompts = await asyncio.to_thread(self._prompts, body, given)
        if echo and body.get("max_tokens") == 0:
            # one token is generated to share the code, and is not shown
            call = replace(call, body={**body, "max_tokens": 1, "n": 1})
        wanted = await asyncio.to_thread(self.generator.wanted, call, likely, echo)
        has_tokens = bool(body.get("return_token_ids"))
        wanted = replace(wanted, has_tokens=has_tokens, response_tokens=given)
        future, stream = self.generator.begin(prompts, wanted, call.deadline)
        if stream is not None:
            return self._stream(stream, future, prompts, wanted, body)
        return self._answer(prompts, await asyncio.wrap_future(future), body, wanted)

    def _prompts(self, body: Mapping[str, Any], response_tokens: int) -> list[Prompt]:
        given = body.get("prompt")
        is_ids = isinstance(given, list) and bool(given) and isinstance(given[0], int)
        several = given if isinstance(given, list) and given and not is_ids else [given]
        if len(several) > MOST_PROMPTS:
            raise bad(f"{len(several)} prompts; send {MOST_PROMPTS} at most in a request")
        prompts = [Prompt(str(k), self._ids(one, "prompt")) for k, one in enumerate(several)]
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        if response_tokens > shortest:
            raise bad(
                f"response_tokens = {response_tokens} is above the {shortest} tokens of the prompt "
                "whose last tokens they are"
            )
        if body.get("media") is not None:
            if not is_ids:
                raise bad("media come with the token ids of one prompt")
            ids = prompts[0].token_ids
            asked = ids[: max(0, len(ids) - response_tokens)]
            prompts[0].media = self._media(body["media"], asked)
        return prompts

    def _media(self, given: object, ids: Sequence[int]) -> Media:
        """Return the media of a request, which must fit the placeholders among ``ids``."""
        processor = self.chat.encoder.processor
        if processor is None:
            raise bad("the model reads text alone, and the request has media")
        try:
            media = media_from_base64(given, 1, "media")
            check_placeholders(processor, ids, media)
        except DataError as error:
            raise bad(str(error)) from error
        return media

    def _ids(self, given: Any, field: str) -> list[int]:
        """Return the token ids of the value ``given`` of ``field``, which may be a text."""
        if isinstance(given, str) and given:
            # as in vLLM, special tokens that the text spells are special tokens
            return list(self.tokenizer(given)["input_ids"])
        vocabulary = self.generator.vocabulary
        is_ids = isinstance(given, list) and bool(given)
        if is_ids and all(type(id) is int and 0 <= id < vocabulary for id in given):
            return given
        ids = f"token ids from 0 to {vocabulary - 1}"
        if field == "tokens":
            raise bad(f"tokens must be a list of {ids}")
        raise bad(f"{field} must be a text, or {ids}, or a list of such")

    def _stream(
        self,
        stream: TokenStream,
        future: Future,
        prompts: Sequence[Prompt],
        wanted: Wanted,
        body: Mapping[str, Any],
    ) -> EventStream:
        async def events() -> AsyncIterator[object]:
            heading, version = self._heading(wanted), self.generator.engine.version
            async for piece in stream.choices():
                index, reason = piece["index"], piece["finish_reason"]
                text = piece["delta"].get("content", "")
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
                if wanted.has_tokens:
                    ids, logprobs = stream.new_tokens(index)
                    choice |= {"token_ids": ids, "sampled_logprobs": logprobs}
                    choice["policy_version"] = version
                    text = text or ids
                if text or reason is not None:
                    yield {**heading, "choices": [choice]}
            if streams_usage(body):
                found = usage(prompts, stream.rollouts())
                yield {**heading, "choices": [], "usage": found}

        return opened(stream, future, events())

    def _answer(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[ChatAnswer],
        body: Mapping[str, Any],
        wanted: Wanted,
    ) -> dict[str, object]:
        is_scored_alone = wanted.echo and body.get("max_tokens") == 0
        choices = []
        for k, answer in enumerate(answers):
            rollout = answer.rollout
            prompt = rollout.prompt
            ids = [] if is_scored_alone else rollout.token_ids
            text = "" if is_scored_alone else rollout.plain_text
            if wanted.echo:
                text = str(self.tokenizer.decode(prompt.token_ids)) + text
            choice: dict[str, object] = {
                "index": k,
                "text": text,
                "logprobs": None,
                "finish_reason": "length" if is_scored_alone else rollout.finish_reason,
                **token_fields(body, rollout),
            }
            if answer.logprobs is not None:
                before = prompt.token_ids if wanted.echo else []
                choice["logprobs"] = self._logprobs([*before, *ids], answer.logprobs, wanted.echo)
            if body.get("return_token_ids"):
                choice["prompt_token_ids"] = prompt.token_ids
            choices.append(choice)
        rollouts = [answer.rollout for answer in answers]
        found = usage(prompts, rollouts, has_response=not is_scored_alone)
        return {**self._heading(wanted), "choices": choices, "usage": found}

    def _logprobs(self, ids: list[int], found: TokenLogprobs, echo: bool) -> dict[str, object]:
        """Return log-probs as the API of OpenAI has them. The first token of a text has none."""
        tokens = [str(self.tokenizer.decode([id])) for id in ids]
        chosen: list[float | None] = list(found.chosen)
        likely: list[dict[str, float] | None] = [
            {str(self.tokenizer.decode([id])): value for id, value in row} for row in found.likely
        ]
        if echo:
            chosen, likely = [None, *chosen], [None, *likely]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        n = len(ids)
        return {
            "tokens": tokens,
            "token_logprobs": chosen[:n],
            "top_logprobs": likely[:n],
            "text_offset": offsets,
        }

    def _heading(self, wanted: Wanted) -> dict[str, object]:
        served = self.generator.served
        named = served.named("cmpl") | {"object": "text_completion"}
        return {**named, "system_fingerprint": served.digest, **wanted.seed_field()}

    async def tokenize(self, call: HTTPCall) -> object:
        """Answer ``/tokenize`` for a text or for messages."""
        body = call.body
        if "prompt" in body:
            if of_chat := [name for name in CONVERSATION if name in body]:
                raise bad(f"the request has a prompt and {of_chat[0]}; give a prompt or messages")
            special = body.get("add_special_tokens", True)
            ids = self.tokenizer(body["prompt"], add_special_tokens=special)["input_ids"]
        elif "messages" in body:
            if body.get("add_special_tokens"):
                raise bad("add_special_tokens = True needs a prompt; leave it out")
            ids = (await asyncio.to_thread(self.chat.read, body)).prompt.token_ids
        else:
            raise bad("give a text as prompt, or messages")
        limit = self.generator.served.max_model_len
        return {"tokens": list(ids), "count": len(ids), "max_model_len": limit}

    async def detokenize(self, call: HTTPCall) -> object:
        """Answer ``/detokenize``."""
        ids = self._ids(call.body.get("tokens"), "tokens")
        return {"prompt": str(self.tokenizer.decode(ids))}
