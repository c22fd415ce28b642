"""Make batches of waiting requests, by tokens and by the time that they have waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightrft.config.serving import BatchingConfig
from lightrft.serving.problems import HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics

P = TypeVar("P")


@dataclass(slots=True)
class Work(Generic[P]):
    """The computation of one request.

    Attributes:
        payload: The data to compute.
        tokens: Number of tokens.
        deadline: Time of ``time.monotonic`` after which the answer is of no use.
        key: Only works of equal keys share a batch.
        future: Gets the result.
    """

    payload: P
    tokens: int
    deadline: float
    key: Hashable = None
    future: Future = field(default_factory=Future)


class Batcher(Generic[P]):
    """A thread that computes waiting works in batches, the oldest first.

    If a batch fails, each of its works is computed alone, so that a request fails only by itself.

    Args:
        compute: Returns the result of each work of a batch.
        config: Tokens of a batch and the longest wait.
        metrics: Counts batches, tokens and works.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work[P]]], Sequence[object]],
        config: BatchingConfig,
        metrics: ServerMetrics,
    ) -> None:
        self.compute = compute
        self.config = config
        self.metrics = metrics
        self._waiting: deque[Work[P]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        metrics.gauges["queued_requests"] = lambda: float(len(self._waiting))
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """The reason why nothing is computed; empty while the thread runs."""
        is_over = not self._closed and not self._thread.is_alive()
        return "the thread that computes scores has ended; restart the server" if is_over else ""

    def submit(self, work: Work[P]) -> Future:
        """Queue ``work`` and return its future."""
        with self._changed:
            if self._closed:
                raise HTTPProblem(503, "the server is stopping; repeat the request later")
            if self.problem:
                raise HTTPProblem(503, self.problem)
            self._waiting.append(work)
            self._changed.notify()
        return work.future

    def close(self) -> None:
        """Compute the works that wait, then stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while batch := self._next():
            live = [work for work in batch if self._is_wanted(work)]
            if live:
                self._run(live)

    def _next(self) -> list[Work[P]]:
        """Wait for the next batch. It is empty once the batcher is closed and nothing waits."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            until = time.monotonic() + self.config.wait_ms / 1000
            while not self._closed and self._tokens_waiting() < self.config.max_tokens:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._taken()

    def _tokens_waiting(self) -> int:
        """Return the number of tokens that could share a batch with the oldest work."""
        key = self._waiting[0].key
        return sum(work.tokens for work in self._waiting if work.key == key)

    def _taken(self) -> list[Work[P]]:
        """Remove the oldest work, and later ones that fit its batch."""
        batch: list[Work[P]] = []
        kept: deque[Work[P]] = deque()
        used = 0
        for work in self._waiting:
            fits = used + work.tokens <= self.config.max_tokens
            if not batch or (fits and work.key == batch[0].key):
                batch.append(work)
                used += work.tokens
            else:
                kept.append(work)
        self._waiting = kept
        return batch

    def _is_wanted(self, work: Work[P]) -> bool:
        if not work.future.set_running_or_notify_cancel():
            return False
        if work.deadline > time.monotonic():
            return True
        self.metrics.count("expired_requests")
        work.future.set_exception(
            HTTPProblem(504, "the request waited longer than http.timeout; send it later")
        )
        return False

    def _run(self, works: list[Work[P]]) -> None:
        self.metrics.count("batches")
        self.metrics.count("batch_tokens", sum(work.tokens for work in works))
        try:
            results = self.compute(works)
        except Exception as error:  # an error of one request must not end the server
            if len(works) > 1:
                for work in works:
                    self._run([work])
            else:
                works[0].future.set_exception(error)
            return
        for work, result in zip(works, results, strict=True):
            work.future.set_result(result)
