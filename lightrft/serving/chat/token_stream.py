"""Pass growing responses from the thread that generates to the event loop that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from lightrft.types import Rollout


class TokenStream:
    """The responses to one request while they grow. Made in the event loop that sends them.

    Text is sent once it cannot change: not the beginning of a character, nor text that a stop
    string may cut. The texts of all events make the text of the response.

    Args:
        tokenizer: Decodes responses.
        count: Number of responses.
        stop: Strings that end a response, and are cut from its text.
        has_tokens: Send a piece for new tokens without text too.
    """

    def __init__(
        self, tokenizer: Any, count: int, stop: Sequence[str], *, has_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._has_tokens = has_tokens
        self._held = max(map(len, stop), default=0)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._grown: list[tuple[list[int], list[float]]] = [([], [])] * count
        self._passed = [0] * count
        self._done: dict[int, Rollout] = {}
        self._sent = [""] * count
        self._has_left = False
        self._error: BaseException | None = None

    def grown(self, k: int, token_ids: list[int], logprobs: list[float]) -> bool:
        """Take the tokens of response ``k``. Return False once the client has left.

        Other threads call it.

        Args:
            k: Index of the response.
            token_ids: All its tokens so far.
            logprobs: Their log-probs.
        """
        self._grown[k] = token_ids, logprobs
        self._notify()
        return not self._has_left

    def finished(self, rollout: Rollout) -> None:
        """Take a finished response. Other threads call it."""
        self._done[rollout.sample] = rollout
        self._notify()

    def ended(self, future: Future) -> None:
        """Take the error of a failed computation. Other threads call it."""
        if not future.cancelled() and future.exception() is not None:
            self._error = future.exception()
            self._notify()

    def leave(self) -> None:
        """Note that the client has left, so that generation ends."""
        self._has_left = True

    def rollouts(self) -> list[Rollout]:
        """Return all finished responses."""
        return list(self._done.values())

    def rollout(self, k: int) -> Rollout:
        """Return the finished response ``k``."""
        return self._done[k]

    def new_tokens(self, k: int) -> tuple[list[int], list[float]]:
        """Return the tokens of response ``k`` since the last call, with their log-probs."""
        done = self._done.get(k)
        ids, logprobs = self._grown[k] if done is None else (done.token_ids, done.logprobs)
        start, self._passed[k] = self._passed[k], len(ids)
        return ids[start:], logprobs[start:]

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of all responses, in the form of the API of OpenAI.

        Tokens that arrive while an event is sent are sent together.
        """
        begun: set[int] = set()
        ended: set[int] = set()
        while len(ended) < len(self._sent):
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            for k in range(len(self._sent)):
                if k in ended or not (self._grown[k][0] or k in self._done):
                    continue
                if k not in begun:
                    begun.add(k)
                    yield _piece(k, {"role": "assistant", "content": ""})
                done = self._done.get(k)
                text = self._new_text(k, done)
                is_new = self._has_tokens and len(self._grown[k][0]) > self._passed[k]
                if text or (is_new and done is None):
                    yield _piece(k, {"content": text})
                if done is not None:
                    ended.add(k)
                    yield _piece(k, {}, done.finish_reason)

    def _new_text(self, k: int, done: Rollout | None) -> str:
        """Return the text of response ``k`` that is not sent yet."""
        if done is not None:
            text = done.plain_text
        else:
            text = str(self._tokenizer.decode(self._grown[k][0], skip_special_tokens=True))
            # a character of several tokens is not whole yet
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - self._held)]
        if not text.startswith(self._sent[k]):
            return ""
        new, self._sent[k] = text[len(self._sent[k]) :], max(text, self._sent[k], key=len)
        return new

    def _notify(self) -> None:
        # the loop is closed after the server has stopped
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)


def _piece(k: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": k, "delta": delta, "finish_reason": reason}
