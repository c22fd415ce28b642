"""The interface that a run reports its progress to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """An object that receives the progress of a run.

    ``begin`` is called once with the total number of steps and the number already done. ``update``
    is called after each step with its metrics.
    """

    def begin(self, title: str, total: int, done: int) -> None: ...

    def update(self, row: Mapping[str, Any]) -> None: ...


class Nobody:
    """An observer that ignores all calls."""

    def begin(self, title: str, total: int, done: int) -> None:
        return

    def update(self, row: Mapping[str, Any]) -> None:
        return
