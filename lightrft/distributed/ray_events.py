"""Pass log records, metrics and stop requests between the driver and the ranks of a Ray run."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from lightrft.distributed.ray_cluster import ActorHandle, ResultRef, package
from lightrft.observability.events import RunEvent
from lightrft.observability.logging_setup import FILE_ONLY, ROOT
from lightrft.observability.trackers import Row

Event = tuple[str, Any]
"""A message of a rank: its kind, e.g. ``log``, and the arguments of that kind."""

LEAVING = 5.0
"""Seconds that a process which ends waits for delivery of its last message."""


class EventQueue:
    """An actor on the driver's node that collects events of ranks and holds the stop flag."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._stop = asyncio.Event()

    async def tell(self, event: Event) -> None:
        """Queue an event of a rank."""
        self._events.append(event)
        self._news.set()

    async def news(self, seconds: float) -> list[Event]:
        """Return all events since the last call, and wait up to ``seconds`` for the first one."""
        if seconds:
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return []
        events, self._events = self._events, []
        # No ``await`` since the list was taken, so no event can come in between and be missed.
        self._news.clear()
        return events

    async def stop(self) -> None:
        """Ask all ranks to stop."""
        self._stop.set()

    async def stopped(self) -> bool:
        """Return once the ranks are asked to stop."""
        return await self._stop.wait()


class EventReporter(logging.Handler):
    """An observer and log handler of a rank that forwards everything to the desk."""

    def __init__(self, desk: ActorHandle, level: int) -> None:
        super().__init__(level)
        self._desk = desk
        self._last: ResultRef | None = None
        # These records are only for the log file of the run, which rank 0 writes itself.
        self.addFilter(lambda record: not any(hasattr(record, key) for key in FILE_ONLY))

    def begin(self, title: str, total: int, done: int) -> None:
        """Forward the start of a phase.

        Args:
            title: name of the phase.
            total: number of steps.
            done: number of steps that are already complete.
        """
        self.tell("begin", (title, total, done))

    def update(self, row: Row) -> None:
        """Forward the metrics of a step."""
        self.tell("update", dict(row))

    def note(self, text: str) -> None:
        """Forward lines of text."""
        self.tell("note", text)

    def event(self, event: RunEvent) -> None:
        """Callbacks are functions of the program, which has no ranks on Ray."""
        return

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log record."""
        self.tell("log", (record.levelno, record.getMessage()))

    def tell(self, kind: str, value: object) -> None:
        """Send an event to the desk, without waiting for delivery."""
        self._last = self._desk.tell.remote((kind, value))

    def leave(self, rank: int, error: BaseException) -> None:
        """Report the ``error`` that ends this process, outside the program's own thread.

        It waits up to ``LEAVING`` seconds for delivery, so the report arrives unless the desk is
        gone.
        """
        self.tell("left", (rank, str(error)))
        package().wait([self._last], timeout=LEAVING)

    def delivered(self) -> None:
        """Wait until all events have been delivered."""
        if self._last is not None:
            package().get(self._last)


def report_logs_and_errors(teller: EventReporter) -> None:
    """Forward all log records of this package to ``teller``."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.addHandler(teller)
