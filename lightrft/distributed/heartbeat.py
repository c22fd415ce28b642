"""Write a heartbeat of each rank to the shared TCP store, and watch the heartbeats of other ranks.

Other ranks use it to name a rank that has stopped. A rank also exits when its launcher is gone.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lightrft.distributed.error_report import report_error
from lightrft.utils.errors import RESUMES, RankError, first_line

Sign = tuple[int, dict[str, int]]
"""A heartbeat: its number, and the collective calls that the rank has reached on each line."""

BEAT = 1.0
"""Seconds between two heartbeats."""
MISSED = 2.5
"""Number of missed heartbeats after which a rank is reported as silent."""
GRACE = 20.0
"""Extra seconds before a silent rank ends the run. Ranks waiting for it can time out first."""
LOST = 10
"""Number of heartbeats without a reply of the store after which the store counts as unreachable."""


class Heartbeat:
    """The heartbeat thread of this rank, and the state of the other ranks.

    If a rank is silent for ``minutes`` plus ``GRACE`` seconds, all other ranks exit. This also ends
    ranks that wait in calls without a timeout. When the launcher has died, the rank sends itself
    SIGTERM, and exits ``minutes`` later if it is still running.

    Args:
        store: TCP store that every rank reaches.
        rank: index of this process in ``range(size)``.
        size: number of ranks.
        minutes: silence, in minutes, after which a rank counts as lost.
    """

    # ``Any``: torch's type stubs of a store lack ``clone``.
    def __init__(self, store: Any, rank: int, size: int, minutes: float) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.limit = rank, size, 60 * minutes
        self.reached: dict[str, int] = {}
        # The run of a failure is kept too, so that one of an earlier run does not count.
        self._run, self._failing = 0, -1
        # A clone has a connection of its own: the main thread may block in the store for minutes.
        self._store = dist.PrefixStore("pulse", store.clone())
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._beats = 0
        self._over = threading.Event()
        self._store.set(f"who/{rank}", f"process {os.getpid()} on {platform.node()}")
        self._beat()
        # A daemon, so that a main thread that ends without ``end`` is not kept alive.
        self._thread = threading.Thread(target=self._live, name="pulse", daemon=True)
        self._thread.start()

    def next_run(self) -> None:
        """Begin another run of the same ranks, for which earlier failures do not count.

        Every rank must call it the same number of times.
        """
        self._run += 1

    @property
    def failing(self) -> bool:
        """True if some rank is known to end this run with an error."""
        return self._failing == self._run

    def end(self, error: BaseException | None) -> None:
        """Stop the heartbeat. If ``error`` is given, report it to the other ranks."""
        self._over.set()
        self._thread.join(MISSED * BEAT)
        if error is not None:
            self.fail(error)
            return
        with suppress(RuntimeError):  # the store may be gone already
            self._store.set(f"done/{self.rank}", "")

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that ``error`` is about to end this rank."""
        with suppress(RuntimeError):  # the store may be gone already
            self._store.set(f"left/{self._run}/{self.rank}", f"{type(error).__name__}: {error}")
            self._store.set(f"failing/{self._run}", "")

    def count_collective(self, line: str) -> None:
        """Count one more collective call on ``line``, the call sequence of one process group."""
        self.reached[line] = self.reached.get(line, 0) + 1

    def diagnose_peers(self, line: str = "", members: Iterable[int] = ()) -> str:
        """Return a description of the rank that blocks a collective call, or "" if none is found.

        It names ranks that have failed and ranks without a heartbeat. Otherwise it names ranks that
        have made fewer calls on ``line`` than this one. The check takes a few seconds.

        Args:
            line: name of a sequence of collective calls, as passed to ``count_collective``.
            members: ranks that take part in the calls of ``line``.
        """
        mine = self.reached.get(line, 0)
        try:
            before = self._signs(range(self.size))
            self._over.wait(MISSED * BEAT)
            after = self._signs(range(self.size))
            rest = [*range(self.rank), *range(self.rank + 1, self.size)]
            # In this order: a rank that failed is also silent and late, and its error says more.
            said = {rank: self._get(f"left/{self._run}/{rank}") for rank in rest}
            if any(said.values()):
                return "; ".join(f"rank {rank}: {text}" for rank, text in said.items() if text)
            silent = [rank for rank in rest if after[rank] in (None, before[rank])]
            if silent:
                return f"{self._named(silent)} sends no heartbeat: it was killed, or is stopped"
            late = []
            for rank in members:
                _, reached = after[rank] or (0, {})
                if rank != self.rank and reached.get(line, 0) < mine:
                    late.append(rank)
            if late:
                return f"{self._named(late)} is alive, and has not come to where the others wait"
        except RuntimeError as error:  # raised by the store
            return (
                "the launcher, or the machine of the first rank, cannot be reached "
                f"({first_line(error)})"
            )
        return ""

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(
            f"rank {rank} ({self._get(f'who/{rank}') or 'never seen'})" for rank in ranks
        )

    def _live(self) -> None:
        heard: dict[int, tuple[Sign | None, float]] = {}
        for rank in range(self.size):
            heard[rank] = None, time.monotonic()
        woke = last_answer = time.monotonic()
        orphaned = 0.0
        while not self._over.wait(BEAT):
            slept, woke = time.monotonic() - woke, time.monotonic()
            # This process itself was suspended: the other ranks did not time out.
            if slept > 2 * MISSED * BEAT:
                for rank in heard:
                    heard[rank] = None, woke
                last_answer = woke
            # A process whose parent dies gets another parent.
            if self._launcher and os.getppid() != self._launcher and not orphaned:
                orphaned = woke
                _say("the launcher has ended; this process stops too")
                os.kill(os.getpid(), signal.SIGTERM)
            if orphaned and woke - orphaned > self.limit:
                _leave(
                    f"it has not stopped within {self.limit / 60:g} minutes after its launcher "
                    "ended"
                )
            try:
                self._beat()
                self._watch(heard, woke)
                last_answer = woke
            except RuntimeError as error:  # raised by the store
                if not orphaned and woke - last_answer > LOST * BEAT:
                    orphaned = woke
                    _say(
                        "the launcher, or the machine of the first rank, cannot be reached "
                        f"({first_line(error)}); this process stops"
                    )
                    os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, heard: dict[int, tuple[Sign | None, float]], now: float) -> None:
        """Exit if a rank has timed out. Rank 0 watches all ranks and the others watch rank 0.

        This keeps the load on the store linear in the number of ranks.
        """
        run = self._run
        if self._store.check([f"failing/{run}"]):
            self._failing = run
        watched = range(self.size) if self.rank == 0 else [0]
        late = []
        for rank, sign in self._signs(watched).items():
            if sign != heard[rank][0]:
                heard[rank] = (sign, now)
            elif now - heard[rank][1] > self.limit + GRACE:
                late.append(rank)
        # A rank that is done sends no heartbeats while it waits for others to clean up.
        silent = [rank for rank in late if not self._store.check([f"done/{rank}"])]
        if silent:
            verdict = (
                f"{self._named(silent)} has sent no heartbeat for strategy.timeout_minutes = "
                f"{self.limit / 60:g} minutes"
            )
            # Stored, so that every rank exits with the same message.
            self._store.set("verdict", verdict)
        elif not self._store.check(["verdict"]):
            return
        _leave(f"{self._get('verdict')}. {RESUMES}")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.rank}", json.dumps([self._beats, self.reached.copy()]))

    def _signs(self, ranks: Iterable[int]) -> dict[int, Sign | None]:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        names = list(keys.values())
        # One request for all ranks. It would block if a key were missing, hence the check.
        if self._store.check(names):
            values = self._store.multi_get(names)
            return {rank: json.loads(value) for rank, value in zip(keys, values)}
        return {rank: json.loads(self._get(key) or "null") for rank, key in keys.items()}

    def _get(self, key: str) -> str:
        # ``TCPStore.get`` waits for a missing key until its timeout.
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may be left to read it
        # Not ``sys.stderr``: a main thread that is stuck may hold its lock.
        os.write(2, f"\n{text}\n".encode())


def _leave(text: str) -> None:
    """End this process from the heartbeat thread, while the main thread is stuck in a call."""
    if not report_error(RankError(text)):
        _say(text)
    # ``sys.exit`` would end only this thread.
    os._exit(2)
