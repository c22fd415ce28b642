"""Stop asking a server that does not answer, and try it again from time to time."""

from __future__ import annotations

import threading
import time

TRIPS_AFTER = 3
"""Failures in a row after which requests are held back."""
PAUSE = 1.0
"""Seconds between two trials of a server that does not answer."""


class CircuitBreaker:
    """Holds requests back while a server does not answer.

    After some failures in a row, one request at a time tries the server, once in a pause. The first
    answer lets all requests through again. A thread reports the end of each request that it has
    entered, by one of the methods ``succeeded``, ``failed`` and ``ended``.

    Args:
        after: Failures in a row after which requests are held back.
        pause: Seconds between two trials.

    Attributes:
        problem: Reason of the last failure.
    """

    def __init__(self, after: int = TRIPS_AFTER, pause: float = PAUSE) -> None:
        self.after = after
        self.pause = pause
        self.problem = ""
        self._failures = 0
        self._first = 0.0
        self._next = 0.0
        # Thread whose request tries the server. Earlier requests may still fail meanwhile.
        self._trial: int | None = None
        self._changed = threading.Condition()

    @property
    def silent_for(self) -> float:
        """Seconds since the first failure after the last answer; 0 without one."""
        return time.monotonic() - self._first if self._failures else 0.0

    @property
    def holds(self) -> bool:
        """The last requests failed, so others are held back."""
        return self._failures >= self.after

    @property
    def is_ready(self) -> bool:
        """A request may be sent now, if only to try the server."""
        with self._changed:
            return not self.holds or (self._trial is None and time.monotonic() >= self._next)

    def enter(self, deadline: float) -> bool:
        """Wait until a request may be sent. Return False if that is after ``deadline``.

        Args:
            deadline: Time of ``time.monotonic``.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                if not self.holds:
                    return True
                if self._trial is None and now >= self._next:
                    self._trial = threading.get_ident()
                    return True
                if now >= deadline:
                    return False
                until = deadline if self._trial else min(deadline, self._next)
                self._changed.wait(max(0.001, until - now))

    def succeeded(self) -> None:
        """Note an answer of the server."""
        with self._changed:
            self._failures = 0
            self._trial = None
            self._changed.notify_all()

    def failed(self, problem: str) -> None:
        """Note a request without an answer, and its reason."""
        with self._changed:
            self.problem = problem
            now = time.monotonic()
            self._first = self._first if self._failures else now
            self._failures += 1
            self._next = now + self.pause
        self.ended()

    def ended(self) -> None:
        """Note a request that ended before it could tell whether the server answers."""
        with self._changed:
            if self._trial == threading.get_ident():
                self._trial = None
                self._changed.notify_all()
