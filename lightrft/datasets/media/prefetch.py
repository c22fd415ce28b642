"""Threads that decode media, and reading of dataset entries ahead of time.

The decoding libraries release the GIL. Results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from lightrft.datasets.row_tables import MalformedRow

if TYPE_CHECKING:
    from lightrft.datasets.media.reader import MediaReader

A = TypeVar("A")
T = TypeVar("T")


class Workers:
    """A pool of ``count`` threads, started on first use.

    With 0 threads, ``map`` runs in the calling thread. Pickling drops the threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Return ``work(item)`` for each item, in order."""
        # One item gains nothing from a thread, and most rows have one.
        if self.count == 0 or len(items) < 2:
            return [work(item) for item in items]
        return list(self._started().map(work, items))

    def submit(self, work: Callable[[A], T], item: A) -> Future[T]:
        """Start ``work(item)`` in a thread. Requires at least one thread."""
        return self._started().submit(work, item)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="media")
        return self._pool

    # Threads cannot be pickled. The copy starts new ones when it needs them.
    def __getstate__(self) -> dict[str, object]:
        return {"count": self.count, "_pool": None}


class Fetcher(Generic[T]):
    """Reads entries, whose media must be decoded, with ``read`` in the threads of ``media``.

    Without threads, the calling thread reads. Pickling drops the reads in progress.
    """

    def __init__(self, read: Callable[[int], T], media: MediaReader | None) -> None:
        self._read = read
        # without threads, an entry is read when it is asked for
        self._workers = Workers(0) if media is None else media.workers
        self._begun: dict[int, Future[T | MalformedRow]] = {}

    def fetch(self, indices: Sequence[int]) -> list[T | MalformedRow]:
        """Return the entries at ``indices``.

        An unreadable entry is returned as its ``MalformedRow`` error.
        """
        if not self._workers.count:
            return [self._tried(i) for i in indices]
        self._start(indices)
        started = {i: self._begun.pop(i) for i in set(indices)}
        return [started[i].result() for i in indices]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start reading the entries at ``indices``.

        Earlier reads of other entries are dropped, and cancelled if they have not started.
        """
        if not self._workers.count:
            return
        # First, so that no thread starts on an entry that is not wanted any more.
        for i in self._begun.keys() - set(indices):
            self._begun.pop(i).cancel()
        self._start(indices)

    def _start(self, indices: Sequence[int]) -> None:
        for i in indices:
            # an index may occur twice: one read serves both
            if i not in self._begun:
                self._begun[i] = self._workers.submit(self._tried, i)

    def _tried(self, i: int) -> T | MalformedRow:
        try:
            return self._read(i)
        except MalformedRow as error:
            return error

    # Futures hold locks, which cannot be pickled.
    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_begun": {}}
