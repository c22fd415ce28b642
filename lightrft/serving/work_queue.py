"""Requests that wait for the thread that computes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lightrft.serving.problems import HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.utils.errors import first_line

_log = logging.getLogger(__name__)
P = TypeVar("P")


@dataclass(slots=True, eq=False)
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

    @property
    def is_wanted(self) -> bool:
        """False once the client has left or the deadline is over."""
        return not self.future.cancelled() and time.monotonic() < self.deadline

    def settle(self, result: object = None, error: Exception | None = None) -> None:
        """Give the result, or the error, to those who wait for it."""
        # False for a future that was cancelled meanwhile
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class WorkQueue(Generic[P]):
    """A queue of works, and the thread that computes them.

    If the thread ends by an error, all accepted works end at once, and later ones are refused. A
    subclass defines ``_loop``, which the thread runs, and starts the thread.

    Args:
        name: Name of the thread.
        task: What the thread does, for messages.
        metrics: Counts the works that wait.

    Attributes:
        problem: The reason why the thread has ended; empty while it runs.
    """

    def __init__(self, name: str, task: str, metrics: ServerMetrics) -> None:
        self.task = task
        self.metrics = metrics
        self.problem = ""
        self._waiting: deque[Work[P]] = deque()
        self._accepted: set[Work[P]] = set()
        self._changed = threading.Condition()
        self._closed = False
        metrics.gauges["queued_requests"] = lambda: float(len(self._waiting))
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    def submit(self, work: Work[P]) -> Future[Any]:
        """Queue ``work`` and return its future.

        Raises:
            HTTPProblem: The server is stopping, or the thread has ended.
        """
        with self._changed:
            if self._closed:
                raise HTTPProblem(503, "the server is stopping; repeat the request later")
            if self.problem:
                raise HTTPProblem(503, self.problem)
            self._check_open()
            self._accepted.add(work)
            work.future.add_done_callback(lambda _: self._accepted.discard(work))
            self._waiting.append(work)
            self._changed.notify_all()
        return work.future

    def close(self) -> None:
        """Finish the accepted works, then stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        """Compute works until the queue is closed and nothing waits."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise ``HTTPProblem`` if no work is accepted for now. The lock is held."""

    def _forget(self) -> None:
        """Drop all works, since the thread has ended. The lock is held."""
        self._waiting.clear()

    def _run_loop(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            _log.exception("the thread that %s has ended", self.task)
            problem = f"the server {self.task} no more ({first_line(error)}); restart it"
            with self._changed:
                self.problem = problem
                self._forget()
                self._changed.notify_all()
            for work in list(self._accepted):
                work.settle(error=HTTPProblem(503, problem))
