"""Workers of a role: asked, watched, and started anew when one is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from lightrft.config.verbs import RLConfig
from lightrft.distributed.worker_api import Maker, Worker, WorkerLost
from lightrft.utils.errors import WorkerError

__all__ = ["Crew", "Limits", "Maker", "Seat", "Worker", "WorkerLost"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Between two looks at a worker that may have fallen silent."""
GRACE_SECONDS = 10.0
"""For a sign of life, where ``Limits.silence`` leaves as much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is borne of workers: ``restarts`` of one in a row, without an answer between them, and ``silence`` in seconds, within which
    a call must have come back, that of loading a model too."""

    restarts: int = 3
    silence: float = 300.0

    @property
    def grace(self) -> float:
        """Seconds within which a worker must give a sign of life once it has been waited for in vain."""
        return min(self.silence, max(self.silence / 5, GRACE_SECONDS))

    @staticmethod
    def of(config: RLConfig) -> Limits:
        """Those that ``launch.ray`` sets. Unless told otherwise, a worker is missed before the ranks that wait for it miss one another."""
        asked = config.launch.ray
        minutes = config.strategy.timeout / 2 if asked.silence is None else asked.silence
        return Limits(asked.restarts, 60 * minutes)


@dataclass(slots=True, eq=False)
class Seat:
    """A worker and the one call of it that is under way, made in its life number ``life``."""

    worker: Worker
    call: Future[Any] | None = None
    since: float = 0.0
    life: int = 0


class Crew:
    """Workers that do the same. One that is lost is started anew in a thread beside, and ``prepare``, called there with it, makes it fit
    for work. ``restarts`` counts those starts."""

    def __init__(self, workers: Sequence[Worker], limits: Limits, prepare: Callable[[Worker], Any] | None = None) -> None:
        self.workers = list(workers)
        self.limits = limits
        self.restarts = 0
        self._prepare = prepare
        self._closed = False
        self._lock = threading.Lock()
        self._coming: dict[int, Future[None]] = {}
        self._in_a_row: Counter[int] = Counter()
        self._busy: Counter[int] = Counter()
        self._lives: Counter[int] = Counter()
        self._starts = ThreadPoolExecutor(max(1, len(self.workers)), thread_name_prefix="worker-start")

    def ready(self, worker: Worker) -> bool:
        """Whether ``worker`` is not on its way back. Raises ``WorkerError`` when it will not come."""
        with self._lock:
            coming = self._coming.get(id(worker))
            if coming is None:
                return True
            if not coming.done():
                return False
        coming.result()
        with self._lock:
            if self._coming.get(id(worker)) is coming:
                del self._coming[id(worker)]
        return True

    def take(self, seat: Seat) -> tuple[Any, ...]:
        """What the call of ``seat`` returned, in a tuple, empty while it is under way; raises what it raised. Where it raises
        ``WorkerLost``, the worker is on its way back."""
        call = seat.call
        if call is None:
            return ()
        if not call.done():
            if time.monotonic() - seat.since <= self.limits.silence:
                return ()
            reason = f"it did not answer for {self.limits.silence:g} s"
        else:
            seat.call = None
            try:
                found = call.result()
            except WorkerLost as lost:
                reason = str(lost)
            else:
                self.heard(seat.worker)
                return (found,)
        seat.call = None
        self.revive(seat.worker, reason, seat.life)
        raise WorkerLost(reason)

    def begin(self, seat: Seat, method: str, *args: Any) -> None:
        """Make the call of ``seat``."""
        seat.life, seat.since = self._lives[id(seat.worker)], time.monotonic()
        seat.call = seat.worker.call(method, *args)

    def outcome(self, seat: Seat) -> tuple[Any, ...]:
        """``take``, once the call is over; empty where there is none."""
        while seat.call is not None:
            wait([seat.call], timeout=LOOK_SECONDS)
            if found := self.take(seat):
                return found
        return ()

    def each(self, method: str, *args: Any) -> list[Any]:
        """What ``method`` returns on each worker, ``None`` where it is on its way back or lost meanwhile."""
        seats = [Seat(worker) for worker in self.workers]
        for seat in seats:
            if self.ready(seat.worker):
                self.begin(seat, method, *args)
        found: list[Any] = []
        for seat in seats:
            try:
                found += self.outcome(seat) or (None,)
            except WorkerLost:
                found.append(None)
        return found

    def life(self, worker: Worker) -> int:
        """How often ``worker`` was started anew so far."""
        return self._lives[id(worker)]

    @property
    def lives(self) -> tuple[int, ...]:
        """``life`` of each worker."""
        return tuple(map(self.life, self.workers))

    def heard(self, worker: Worker) -> None:
        """``worker`` has done something: its starts in a row are over."""
        with self._lock:
            self._in_a_row.pop(id(worker), None)

    def revive(self, worker: Worker, reason: str, life: int | None = None) -> None:
        """Start ``worker`` anew, in the background; not again where it is no longer in the ``life`` that was lost."""
        with self._lock:
            stale = life is not None and life != self._lives[id(worker)]
            if id(worker) not in self._coming and not stale:
                self._coming[id(worker)] = self._starts.submit(self._start, worker, reason)

    def beside(self, worker: Worker, work: Callable[[Worker], Any]) -> None:
        """Have ``work`` done with ``worker`` in the background; one that is lost with it is started anew."""
        with self._lock:
            if id(worker) not in self._coming:
                self._coming[id(worker)] = self._starts.submit(self._beside, worker, work)

    def settle(self) -> None:
        """Wait until all workers are there. Raises ``WorkerError`` when one will not come."""
        with self._lock:
            coming = list(self._coming.values())
        wait(coming)
        for worker in self.workers:
            self.ready(worker)

    def ask(self, method: str, *args: Any) -> Any:
        """What ``method`` returns on the worker that has least to do. A loss is made good and the call made again; may be used by
        several threads."""
        while True:
            worker, life = self._choose()
            try:
                found = worker.call(method, *args).result(self.limits.silence)
            except (WorkerLost, TimeoutError) as error:
                self.revive(worker, str(error) or f"it did not answer for {self.limits.silence:g} s", life)
            else:
                self.heard(worker)
                return found
            finally:
                with self._lock:
                    self._busy[id(worker)] -= 1

    def take_restarts(self) -> int:
        """Restarts since this was last asked."""
        with self._lock:
            count, self.restarts = self.restarts, 0
        return count

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        self._starts.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def _choose(self) -> tuple[Worker, int]:
        while True:
            there = [worker for worker in self.workers if self.ready(worker)]
            with self._lock:
                if there:
                    worker = min(there, key=lambda w: self._busy[id(w)])
                    self._busy[id(worker)] += 1
                    return worker, self._lives[id(worker)]
                coming = list(self._coming.values())
            wait(coming, return_when="FIRST_COMPLETED")

    def _beside(self, worker: Worker, work: Callable[[Worker], Any]) -> None:
        try:
            work(worker)
        except (WorkerLost, TimeoutError) as error:
            self._start(worker, str(error) or "it did not answer")

    def _start(self, worker: Worker, reason: str) -> None:
        while True:
            with self._lock:
                self.restarts += 1
                self._lives[id(worker)] += 1
                self._in_a_row[id(worker)] += 1
                tried = self._in_a_row[id(worker)] - 1
            if tried >= self.limits.restarts:
                raise WorkerError(
                    f"{worker.name} was lost again after launch.ray.restarts = {tried} new starts in a row ({reason}); see what the "
                    "lines above say of it. The same command goes on from the last checkpoint"
                )
            log.warning("%s was lost (%s); it is started anew", worker.name, reason)
            try:
                worker.restart()
                if self._closed:
                    worker.close()
                elif self._prepare is not None:
                    self._prepare(worker)
            except (WorkerLost, TimeoutError) as error:
                reason = str(error) or "it did not answer"
            else:
                return
