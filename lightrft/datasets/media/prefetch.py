"""Concurrent reading of dataset entries ahead of time, for entries whose media must be decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from lightrft.datasets.media import MediaReader, Workers
from lightrft.datasets.row_tables import MalformedRow

T = TypeVar("T")


class Fetcher(Generic[T]):
    """Reads entries with ``read`` in the threads of ``media``.

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
