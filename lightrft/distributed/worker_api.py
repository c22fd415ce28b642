"""Protocol of a worker: an object in another process, as its callers see it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Maker = Callable[[], object]
"""A function that makes the object of a worker inside its process. It is pickled and sent there."""


class WorkerLost(Exception):
    """Raised when the process of a worker ended before a call returned."""


class Worker(Protocol):
    """An object made by a ``Maker`` in another process, which may be lost at any time.

    Calls run one after the other, in the order in which they were made. Several calls may be
    pending. Only ``restart`` and ``close`` block the caller.
    """

    @property
    def name(self) -> str:
        """The name of the worker in messages, e.g. ``engine 1``."""
        ...

    def call(self, method: str, *args: object) -> Future[Any]:
        """Return a future with the result or exception of ``method`` of the object.

        The future raises ``WorkerLost`` when the process ends first, and at once if it is already
        gone. Arguments are pickled before this returns. Tensors in arguments and results are on the
        CPU.
        """
        ...

    def restart(self) -> None:
        """End the process if it exists, and start a new process with a new object.

        Pending calls are lost. If several processes use the worker and have lost it, it is
        restarted once for all of them.

        Raises:
            ResourceError: the cluster has no room for the worker any more.
        """
        ...

    def close(self) -> None:
        """End the process. Pending calls are lost."""
        ...
