"""Threads that decode: the libraries let go of the interpreter while they do. Results never depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")


class Workers:
    """``count`` threads, started when first needed; 0 works in the caller's. Pickles without them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """``work`` of each item, in their order."""
        if self.count == 0 or len(items) < 2:
            return [work(item) for item in items]
        return list(self._started().map(work, items))

    def submit(self, work: Callable[[A], T], item: A) -> Future[T]:
        """``work(item)`` at some time; without threads once it is asked for."""
        return self._started().submit(work, item)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="media")
        return self._pool

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "_pool": None}
