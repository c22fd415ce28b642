"""The interface that a run reports its progress to."""

from __future__ import annotations

from typing import Protocol

from lightrft.observability.events import RunEvent
from lightrft.observability.trackers import Row


class Observer(Protocol):
    """An object that receives the progress of a run."""

    def begin(self, title: str, total: int, done: int) -> None:
        """Start a phase.

        Args:
            title: name of the phase.
            total: number of steps of the phase.
            done: number of steps that are already done.
        """
        ...

    def update(self, row: Row) -> str | None:
        """Report a step. ``row`` contains its metrics and ``step``.

        Returns:
            A reason to stop the run after this step, or None.
        """
        ...

    def note(self, text: str) -> None:
        """Show lines of text."""
        ...

    def event(self, event: RunEvent) -> None:
        """Call the callback of an event."""
        ...


class NullObserver:
    """An observer that ignores all calls."""

    def begin(self, title: str, total: int, done: int) -> None:
        return

    def update(self, row: Row) -> None:
        return

    def note(self, text: str) -> None:
        return

    def event(self, event: RunEvent) -> None:
        return
