"""An object that lives in a process of its own, as those see it who use it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Maker = Callable[[], Any]
"""Makes the object of a worker, inside its process. It is pickled on the way there."""


class WorkerLost(Exception):
    """The process of a worker ended, or was ended, before it had answered."""


class Worker(Protocol):
    """An object made by a ``Maker``, in a process of its own that may be lost at any time.

    Calls run there one at a time, in the order in which they were made; several may be under way. Nothing of it blocks the caller but
    ``restart`` and ``close``.
    """

    @property
    def name(self) -> str:
        """How messages call it, e.g. ``engine 1``."""
        ...

    def call(self, method: str, *args: Any) -> Future[Any]:
        """The future of what ``method`` of the object returns or raises. It raises ``WorkerLost`` when the process ends first, and
        at once where it is gone already. Arguments have been pickled when this returns; tensors among them, and among results, are on
        the CPU."""
        ...

    def restart(self) -> None:
        """End the process if it is there, whatever it is doing, and start a new one with a new object. Calls under way are lost.
        Where several processes hold the worker, one start serves all of them that have lost it.

        Raises ``ResourceError`` when there is no place for it any more.
        """
        ...

    def close(self) -> None:
        """End the process. Calls under way are lost."""
        ...
