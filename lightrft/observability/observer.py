"""The interface that a run reports its progress to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """Who looks on: told once how many steps there are, then of each."""

    def begin(self, title: str, total: int, done: int) -> None: ...

    def update(self, row: Mapping[str, Any]) -> None: ...


class Nobody:
    """An observer that does not look."""

    def begin(self, title: str, total: int, done: int) -> None:
        return

    def update(self, row: Mapping[str, Any]) -> None:
        return
