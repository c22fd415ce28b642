"""Threads that decode media.

The decoding libraries release the GIL. Results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
