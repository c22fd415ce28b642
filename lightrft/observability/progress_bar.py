"""Progress of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from lightrft.observability.trackers import Row

if TYPE_CHECKING:
    from rich.progress import Progress as Live
    from rich.progress import ProgressColumn, TaskID

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("loss", "loss", ".4f"),
    ("policy/loss", "loss", ".4f"),
    ("reward/mean", "reward", ".3f"),
    ("preference/accuracy", "accuracy", ".1%"),
    ("preference/margin", "margin", ".3f"),
    ("reward_model/*/accuracy", "pair accuracy", ".1%"),
    ("process_model/step_accuracy", "step accuracy", ".1%"),
    ("distill/divergence", "divergence", ".4f"),
    ("eval/accuracy", "eval", ".1%"),
    ("eval/pair_accuracy", "eval pairs", ".1%"),
    ("eval/step_accuracy", "eval steps", ".1%"),
    ("eval/loss", "held out", ".4f"),
    ("response/length", "length", ".0f"),
    ("tokens_per_second", "tok/s", ",.0f"),
)
"""Metric, label and format of each value in the progress line. ``*`` stands for the first head.

A value that a row lacks keeps its last value, because eval accuracy is not measured at every step.
"""

RECENT = 20  # number of steps whose mean time gives the remaining time


class Progress:
    """Shows the progress of ``total`` steps of one phase while the context is entered.

    In a terminal, the progress is one live line. Elsewhere, a line is printed for the first step,
    the last step and each evaluated step. Between these, at most one line is printed per
    ``interval``, so that a log stays readable.

    Args:
        total: number of steps of the phase.
        title: name of the phase, at the start of the line.
        done: number of steps that a resumed run has already taken.
        enabled: if False, nothing is printed.
        interval: shortest time between two plain lines, in seconds.
        stream: where to print. None means standard error.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        total: int,
        title: str = "",
        *,
        done: int = 0,
        enabled: bool = True,
        interval: float = 10.0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self.total = total
        self.done = done
        self._title = title
        self._enabled = enabled
        self._interval = interval
        self._clock = clock
        self._console = Console(file=stream, stderr=stream is None, highlight=False)
        self._live: tuple[Live, TaskID] | None = None
        self._values: dict[str, float] = {}
        # One more than steps, since n steps lie between n + 1 times.
        self._times: deque[float] = deque([clock()], maxlen=RECENT + 1)
        # The first step is shown at once.
        self._spoke = -float("inf")

    def update(self, row: Row) -> None:
        """Record that a step is done. ``row`` contains its metrics and ``step``."""
        self.done = int(row["step"])
        self._times.append(self._clock())
        for name, _, _ in SHOWN:
            known = (key for key in row if fnmatchcase(key, name))
            value = row.get(next(known, "")) if "*" in name else row.get(name)
            if isinstance(value, int | float):
                self._values[name] = value
        if not self._enabled:
            return
        if self._live is not None:
            live, task = self._live
            live.update(
                task,
                completed=self.done,
                details=self.details(),
                left=clock_time(self.seconds_left()),
            )
        elif self._is_due(row):
            self._spoke = self._times[-1]
            self._console.print(self.line(), markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line above the live line."""
        if self._enabled:
            self._console.print(text, markup=False, soft_wrap=True)

    def details(self) -> str:
        """Return the newest values, e.g. ``reward 0.512 · held-out 61.0%``."""
        known = [row for row in SHOWN if row[0] in self._values]
        return " · ".join(f"{label} {self._values[name]:{form}}" for name, label, form in known)

    def line(self) -> str:
        """Return the plain line for the newest step."""
        parts = [
            f"{self._title} {self.done}/{self.total}".strip(),
            self.details(),
            f"{clock_time(self.seconds_left())} left",
        ]
        return " · ".join(part for part in parts if part)

    def seconds_left(self) -> float | None:
        """Return the remaining time in seconds, estimated from the mean of the recent steps.

        Returns None before the first step.
        """
        steps = len(self._times) - 1
        if not steps:
            return None
        return max(0, self.total - self.done) * (self._times[-1] - self._times[0]) / steps

    def _is_due(self, row: Row) -> bool:
        evaluated = any(name.startswith("eval/") for name in row)
        waited = self._times[-1] - self._spoke
        return evaluated or self.done >= self.total or waited >= self._interval

    def __enter__(self) -> Self:
        # restarts the clock: the setup between construction and entry is not a step
        self._times = deque([self._clock()], maxlen=RECENT + 1)
        if self._enabled and self._console.is_terminal:
            live = self._make_live()
            live.start()
            task = live.add_task(
                self._title, total=self.total, completed=self.done, details="", left="--:--"
            )
            self._live = live, task
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def _make_live(self) -> Live:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Live

        narrow = self._console.width < 100
        columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}")]
        if not narrow:
            columns.append(BarColumn(bar_width=24))
        columns += [
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            TextColumn("[dim]{task.fields[left]} left"),
        ]
        return Live(*columns, console=self._console, refresh_per_second=4)


def clock_time(seconds: float | None) -> str:
    """Return ``75`` as ``1:15``, ``3675`` as ``1:01:15``, and None as ``--:--``."""
    if seconds is None:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
