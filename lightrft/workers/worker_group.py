"""Groups of workers of a role: call them, watch them, and restart lost ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightrft.config.verbs import RLConfig
from lightrft.distributed.worker_api import Maker, Worker, WorkerLost
from lightrft.utils.errors import RESUMES, WorkerError

__all__ = ["WorkerGroup", "FaultPolicy", "Maker", "PendingCall", "Worker", "WorkerLost"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Polling interval for a call that may have timed out, in seconds."""
GRACE_SECONDS = 10.0
"""Minimum timeout of a ping, in seconds, unless ``FaultPolicy.call_timeout`` is shorter."""


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """Limits after which a worker is given up.

    It is given up after ``restarts`` consecutive restarts without a successful call. A call,
    including loading the model, must return within ``call_timeout`` seconds.
    """

    restarts: int = 3
    call_timeout: float = 300.0

    @property
    def grace(self) -> float:
        """Seconds within which a worker must reply to a ping after a call to it has timed out."""
        return min(self.call_timeout, max(self.call_timeout / 5, GRACE_SECONDS))

    @staticmethod
    def of(config: RLConfig) -> FaultPolicy:
        """Return the limits that ``launch.ray`` sets.

        The timeout defaults to half of ``strategy.timeout_minutes``. A dead worker is then
        restarted before the ranks that wait for it time out.
        """
        asked = config.launch.ray
        minutes = asked.call_timeout_minutes
        if minutes is None:
            minutes = config.strategy.timeout_minutes / 2
        return FaultPolicy(asked.restarts, 60 * minutes)


Reply = tuple[Any, ...]
"""The result of a call in a tuple, which is empty while there is none. The result may be None."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A worker and its pending call, made in its start number ``start``."""

    worker: Worker
    call: Future[Any] | None = None
    since: float = 0.0
    start: int = 0


class WorkerGroup:
    """A group of interchangeable workers. ``restarts`` counts the restarts.

    A lost worker is restarted in a background thread.

    Args:
        workers: the workers.
        limits: timeouts and restarts.
        prepare: called in the background thread with a restarted worker, before it gets other
            calls.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        limits: FaultPolicy,
        prepare: Callable[[Worker], None] | None = None,
    ) -> None:
        self.workers = list(workers)
        self.limits = limits
        self.restarts = 0
        self._prepare = prepare
        self._closed = False
        self._lock = threading.Lock()
        self._coming: dict[int, Future[None]] = {}
        self._in_a_row: Counter[int] = Counter()
        self._busy: Counter[int] = Counter()
        self._starts: Counter[int] = Counter()
        # A thread per worker: a restart may wait for minutes, and must not delay another one.
        self._restarter = ThreadPoolExecutor(
            max(1, len(self.workers)), thread_name_prefix="worker-start"
        )

    def ready(self, worker: Worker) -> bool:
        """Return False while ``worker`` is restarting. Raise ``WorkerError`` if it is given up."""
        with self._lock:
            coming = self._coming.get(id(worker))
            if coming is None:
                return True
            if not coming.done():
                return False
        coming.result()  # raises if the worker was given up, in every caller and not only the first
        with self._lock:
            # Another thread may have removed it and begun another restart in the meantime.
            if self._coming.get(id(worker)) is coming:
                del self._coming[id(worker)]
        return True

    def take(self, pending: PendingCall) -> Reply:
        """Return the result of the call of ``pending``, if the call is done.

        Exceptions of the call are raised. After ``WorkerLost`` the worker is restarting.
        """
        call = pending.call
        if call is None:
            return ()
        if not call.done():
            if time.monotonic() - pending.since <= self.limits.call_timeout:
                return ()
            reason = f"no response for {self.limits.call_timeout:g} s"
        else:
            pending.call = None
            try:
                found = call.result()
            except WorkerLost as lost:
                reason = str(lost)
            else:
                self.answered(pending.worker)
                return (found,)
        pending.call = None
        self.revive(pending.worker, reason, pending.start)
        raise WorkerLost(reason)

    def begin(self, pending: PendingCall, method: str, *args: object) -> None:
        """Start the call of ``pending``. The caller must take its result before the next call.

        Args:
            pending: the worker to call.
            method: name of the method.
            args: arguments of the method.
        """
        pending.start, pending.since = self._starts[id(pending.worker)], time.monotonic()
        pending.call = pending.worker.call(method, *args)

    def outcome(self, pending: PendingCall) -> Reply:
        """Wait for the call of ``pending`` and return its result, or () without a call."""
        while pending.call is not None:
            wait([pending.call], timeout=LOOK_SECONDS)
            if found := self.take(pending):
                return found
        return ()

    def each(self, method: str, *args: object) -> list[Any]:
        """Call ``method`` on each worker and return the results. A restarting or lost worker gives
        None.
        """
        pending_calls = [PendingCall(worker) for worker in self.workers]
        for pending in pending_calls:
            if self.ready(pending.worker):
                self.begin(pending, method, *args)
        found = []
        for pending in pending_calls:
            outcome: Reply = ()
            # If it is lost, its restart has begun.
            with suppress(WorkerLost):
                outcome = self.outcome(pending)
            found.append(outcome[0] if outcome else None)
        return found

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of restarts of each worker so far."""
        return tuple(self._starts[id(worker)] for worker in self.workers)

    def answered(self, worker: Worker) -> None:
        """Record a successful call of ``worker``: its count of consecutive restarts is reset."""
        with self._lock:
            self._in_a_row.pop(id(worker), None)

    def revive(self, worker: Worker, reason: str, start: int | None = None) -> None:
        """Restart ``worker`` in the background.

        Args:
            worker: the lost worker.
            reason: cause, for the log.
            start: start number in which it was lost. A later start is not repeated. None always
                restarts.
        """
        with self._lock:
            # Several pending calls fail when one worker dies. It must be restarted only once.
            stale = start is not None and start != self._starts[id(worker)]
            if id(worker) not in self._coming and not stale:
                self._coming[id(worker)] = self._restarter.submit(self._start, worker, reason)

    def beside(self, worker: Worker, work: Callable[[Worker], None]) -> None:
        """Run ``work`` with ``worker`` in the background. A worker that is lost is restarted."""
        with self._lock:
            if id(worker) not in self._coming:
                self._coming[id(worker)] = self._restarter.submit(self._beside, worker, work)

    def settle(self) -> None:
        """Wait until no worker is restarting. Raises ``WorkerError`` when one is given up."""
        with self._lock:
            coming = list(self._coming.values())
        wait(coming)
        for worker in self.workers:
            self.ready(worker)

    def ask(self, method: str, *args: object) -> Any:
        """Call ``method`` on the worker with the fewest pending calls and return the result.

        If the worker is lost, the call is repeated on another one. Thread-safe.
        """
        while True:
            worker, start = self._choose()
            try:
                found = worker.call(method, *args).result(self.limits.call_timeout)
            except (WorkerLost, TimeoutError) as error:
                # A ``TimeoutError`` has no text.
                reason = str(error) or f"no response for {self.limits.call_timeout:g} s"
                self.revive(worker, reason, start)
            else:
                self.answered(worker)
                return found
            finally:
                with self._lock:
                    self._busy[id(worker)] -= 1

    def take_restarts(self) -> int:
        """Return the number of restarts since the last call of this method."""
        with self._lock:
            count, self.restarts = self.restarts, 0
        return count

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        # Not waited for: a restart may take minutes, and ``_start`` looks at ``_closed``.
        self._restarter.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def _choose(self) -> tuple[Worker, int]:
        while True:
            there = [worker for worker in self.workers if self.ready(worker)]
            with self._lock:
                if there:
                    # Counted under the same lock, so that two threads do not choose the same one.
                    worker = min(there, key=lambda w: self._busy[id(w)])
                    self._busy[id(worker)] += 1
                    return worker, self._starts[id(worker)]
                coming = list(self._coming.values())
            wait(coming, return_when="FIRST_COMPLETED")

    def _beside(self, worker: Worker, work: Callable[[Worker], None]) -> None:
        try:
            work(worker)
        except (WorkerLost, TimeoutError) as error:
            self._start(worker, str(error) or "no response")

    def _start(self, worker: Worker, reason: str) -> None:
        while True:
            with self._lock:
                self.restarts += 1
                self._starts[id(worker)] += 1
                # Counted before the restart is tried: one that fails counts as well.
                self._in_a_row[id(worker)] += 1
                tried = self._in_a_row[id(worker)] - 1
            if tried >= self.limits.restarts:
                raise WorkerError(
                    f"{worker.name} was lost again after launch.ray.restarts = {tried} restarts "
                    f"in a row ({reason}); see what the lines above say of it. {RESUMES}"
                )
            log.warning("%s was lost (%s); restarting it", worker.name, reason)
            try:
                worker.restart()
                # ``close`` cannot stop a restart that is under way, so the new process ends here.
                if self._closed:
                    worker.close()
                elif self._prepare is not None:
                    self._prepare(worker)
            except (WorkerLost, TimeoutError) as error:
                reason = str(error) or "no response"
            else:
                return
