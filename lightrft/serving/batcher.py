"""Make batches of waiting requests, by tokens and by the time that they have waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightrft.config.generation.serving import BatchingConfig
from lightrft.serving.problems import HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.work_queue import Work, WorkQueue

P = TypeVar("P")


class Batcher(WorkQueue[P]):
    """A thread that computes waiting works in batches, the oldest first.

    If a batch fails, each of its works is computed alone, so that a request fails only by itself.

    Args:
        compute: Returns the result of each work of a batch.
        config: Tokens of a batch and the longest wait.
        metrics: Counts batches, tokens and works.
        task: What the thread does, for messages.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work[P]]], Sequence[object]],
        config: BatchingConfig,
        metrics: ServerMetrics,
        task: str = "computes scores",
    ) -> None:
        super().__init__("batches", task, metrics)
        self.compute = compute
        self.config = config
        self._stopping = False
        self._thread.start()

    def stop(self) -> None:
        """Let no batch wait for further works, since the server accepts no more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while batch := self._next():
            live = [work for work in batch if self._is_live(work)]
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
            while self._tokens_waiting() < self.config.max_tokens:
                left = until - time.monotonic()
                if left <= 0 or self._stopping or self._closed or not self._changed.wait(left):
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

    def _is_live(self, work: Work[P]) -> bool:
        """Return True if somebody waits for ``work``. Else end it."""
        if work.is_wanted:
            return True
        if not work.future.cancelled():
            self.metrics.count("expired_requests")
            late = "the request waited longer than http.timeout; send it later"
            work.settle(error=HTTPProblem(504, late))
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
                works[0].settle(error=error)
            return
        for work, result in zip(works, results, strict=True):
            work.settle(result)
