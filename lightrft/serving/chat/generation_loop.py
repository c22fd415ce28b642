"""Generate the responses of all open requests together. New requests join between two tokens."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import GenerationBatch, NativeEngine
from lightrft.engines.requests import check_requests
from lightrft.serving.chat.token_stream import TokenStream
from lightrft.serving.problems import HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.work_queue import Work, WorkQueue
from lightrft.types import Request, Rollout

MOST_BATCHES = 4
"""Most sampling settings that generate in turns. Each has a cache. Requests with further ones
wait."""
TURN_SECONDS = 0.05
"""Seconds that the requests of one sampling setting generate before those of another."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The responses that a request asks for.

    Attributes:
        requests: A request for each choice. ``Request.sample`` is its index.
        sampling: Sampling settings of all of them.
        likely: Number of likely tokens at each place. ``None`` for no log-probs.
        echo: Log-probs are of the tokens of the prompt too.
        stream: Gets the tokens as they are generated. ``None`` for a whole answer.
    """

    requests: Sequence[Request]
    sampling: SamplingConfig
    likely: int | None = None
    echo: bool = False
    stream: TokenStream | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose responses grow, and those that are finished, by their index."""

    work: Work[Asked]
    found: dict[int, Rollout] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.found) == len(self.work.payload.requests)


@dataclass(slots=True, eq=False)
class _Batch:
    """The open requests of one sampling setting."""

    sampling: SamplingConfig
    growing: GenerationBatch
    # by the identity of a prompt, which an ``_Open`` keeps alive
    open: dict[int, _Open] = field(default_factory=dict)


class GenerationLoop(WorkQueue[Asked]):
    """A thread that generates.

    If a token cannot be computed, each request of its batch is computed alone, so that a request
    fails only by itself.

    Args:
        engine: Generates the responses.
        finish: Returns the result of a request from its responses, in the order of its requests.
        metrics: Counts requests and tokens.
    """

    def __init__(
        self,
        engine: NativeEngine,
        finish: Callable[[Asked, Sequence[Rollout]], object],
        metrics: ServerMetrics,
    ) -> None:
        super().__init__("generation", "generates", metrics)
        self.engine = engine
        self.finish = finish
        self._batches: list[_Batch] = []
        self._held = ""
        self._busy = False
        metrics.gauges["generating_requests"] = lambda: float(
            sum(len(batch.open) for batch in self._batches)
        )
        self._thread.start()

    def submit(self, work: Work[Asked]) -> Any:
        """Queue ``work`` and return its future.

        Raises:
            HTTPProblem: The server is stopping, or the thread has ended.
            ResourceError: A request is longer than the engine's limit.
        """
        check_requests(work.payload.requests, work.payload.sampling, self.engine.config)
        return super().submit(work)

    def _check_open(self) -> None:
        if self._held:
            raise HTTPProblem(503, self._held, {"Retry-After": "1"})

    def hold(self, reason: str, deadline: float) -> bool:
        """Refuse requests from now on, and wait until all accepted ones are finished.

        Args:
            reason: Message of the refusals.
            deadline: Time of ``time.monotonic``.

        Returns:
            True if no request is open. False after the deadline.
        """
        with self._changed:
            self._held = reason
            return self._changed.wait_for(self._is_idle, max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Accept requests again."""
        with self._changed:
            self._held = ""

    def _is_idle(self) -> bool:
        return not self._waiting and not self._batches and not self._busy

    def _loop(self) -> None:
        while self._begin_waiting():
            for batch in list(self._batches):
                try:
                    self._advance(batch)
                except Exception as error:  # an error of one request must not end the server
                    self._batches.remove(batch)
                    self._retry_alone(batch, error)

    def _forget(self) -> None:
        super()._forget()
        self._batches.clear()
        self._busy = False

    def _begin_waiting(self) -> bool:
        """Begin the requests that can join. Return False once the loop is closed and empty."""
        with self._changed:
            while not self._waiting and not self._batches:
                self._busy = False
                self._changed.notify_all()
                if self._closed:
                    return False
                self._changed.wait()
            self._busy = True
            works, self._waiting = self._waiting, deque()
        kept = [work for work in works if not self._begun(work)]
        with self._changed:
            self._waiting.extendleft(reversed(kept))
        return True

    def _begun(self, work: Work[Asked]) -> bool:
        """Begin ``work``, or end it by its error. Return False if it must wait for another
        sampling setting to end."""
        asked = work.payload
        if not work.is_wanted:
            self._end(_Open(work))
            return True
        batch = next((b for b in self._batches if b.sampling == asked.sampling), None)
        if batch is None and len(self._batches) == MOST_BATCHES:
            return False
        try:
            self._join(work, batch)
        except Exception as error:  # an error of one request must not end the server
            work.settle(error=error)
        return True

    def _join(self, work: Work[Asked], batch: _Batch | None) -> None:
        """Add ``work`` to ``batch``, or to a new one."""
        asked = work.payload
        if batch is None:
            batch = _Batch(asked.sampling, GenerationBatch(self.engine, (), asked.sampling))
            self._batches.append(batch)
        # adds all of its requests, or fails
        _add(work, batch.growing)
        opened = _Open(work)
        for request in asked.requests:
            batch.open[id(request.prompt)] = opened

    def _advance(self, batch: _Batch) -> None:
        """Generate until a response is finished, requests wait, or another batch has its turn."""
        tokens, until = itertools.count(), time.monotonic() + TURN_SECONDS

        def over() -> bool:
            # one token at least, so that waiting requests cannot stop the others
            if next(tokens) == 0:
                return False
            return bool(self._waiting) or (len(self._batches) > 1 and time.monotonic() > until)

        for rollout in batch.growing.advance(over):
            opened = batch.open[id(rollout.prompt)]
            self._take(opened, rollout)
            if opened.is_whole:
                for request in opened.work.payload.requests:
                    batch.open.pop(id(request.prompt), None)
                self._end(opened)
        if not batch.growing.unfinished:
            self._batches.remove(batch)

    def _take(self, opened: _Open, rollout: Rollout) -> None:
        opened.found[rollout.sample] = rollout
        self.metrics.count("generated_tokens", len(rollout))
        if rollout.sample == 0:
            self.metrics.count("reused_prompt_tokens", rollout.reused_tokens)
        if rollout.drafted:
            self.metrics.count("drafted_tokens", rollout.drafted)
            self.metrics.count("accepted_tokens", rollout.accepted)
        stream = opened.work.payload.stream
        if stream is not None:
            stream.finished(rollout)

    def _retry_alone(self, batch: _Batch, error: Exception) -> None:
        """Compute each request of a failed batch alone. A lone request fails by ``error``."""
        works = list({id(opened): opened.work for opened in batch.open.values()}.values())
        for work in works:
            if len(works) == 1:
                work.settle(error=error)
                continue
            opened = _Open(work)
            try:
                growing = GenerationBatch(self.engine, (), work.payload.sampling)
                _add(work, growing)
                while growing.unfinished:
                    for rollout in growing.advance():
                        self._take(opened, rollout)
            except Exception as own:
                work.settle(error=own)
            else:
                self._end(opened)

    def _end(self, opened: _Open) -> None:
        """Give the result of a request to those who wait for it."""
        work = opened.work
        if not work.is_wanted:
            self.metrics.count("expired_requests")
            late = "the answer took longer than http.timeout; ask for less at once"
            work.settle(error=HTTPProblem(504, late))
            return
        try:
            result = self.finish(
                work.payload, [rollout for _, rollout in sorted(opened.found.items())]
            )
        except Exception as error:
            work.settle(error=error)
        else:
            work.settle(result)


def _add(work: Work[Asked], growing: GenerationBatch) -> None:
    """Add the requests of ``work``. Their tokens go to its stream, as long as it is wanted."""
    stream = work.payload.stream

    def watch(k: int, token_ids: list[int]) -> bool:
        if stream is None:
            return work.is_wanted
        return work.is_wanted and stream.grown(k, token_ids, growing.watched_logprobs())

    for request in work.payload.requests:
        request.watch = functools.partial(watch, request.sample)
    growing.add(work.payload.requests)
