"""Show a run in a notebook: one output of the cell, which changes while the run trains."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from html import escape
from typing import Any

from lightrft.api.progress import ProgressObserver
from lightrft.observability.events import Callbacks
from lightrft.observability.logging_setup import ROOT
from lightrft.observability.progress_bar import SHOWN, clock_time
from lightrft.viewer.plots import thin

INTERVAL = 0.5
"""Shortest time between two changes of the output, in seconds."""
WARNINGS = 8
"""Number of the newest warnings that stay in the output. ``log.txt`` has all."""
DRAWN = ("reward", "loss", "accuracy", "eval")
"""Labels of metrics that have a curve, if the run has them."""
WIDTH, HEIGHT = 340, 110
"""Size of a curve, in pixels."""


class NotebookObserver(ProgressObserver):
    """An observer that shows a run in one output of a cell, and calls ``callbacks``.

    The output has progress with the time left, the newest metrics, curves, the newest responses and
    the warnings.

    Args:
        stack: Closed by the owner of the observer.
        callbacks: Functions of events, by keyword.
    """

    def __init__(self, stack: ExitStack, callbacks: Callbacks) -> None:
        super().__init__(stack, False, callbacks)
        self._id = uuid.uuid4().hex
        self._is_shown = False
        self._drawn = -INTERVAL
        self._points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._responses = ""
        self._warnings: deque[str] = deque(maxlen=WARNINGS)

    def begin(self, title: str, total: int, done: int) -> None:
        """Start a phase, with new curves.

        Args:
            title: Name of the phase.
            total: Number of its steps.
            done: Number of steps that are already complete.
        """
        super().begin(title, total, done)
        self._title = title
        self._points.clear()
        self.draw()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        super().update(row)
        for name, label, _ in SHOWN:
            if label in DRAWN and isinstance(row.get(name), int | float):
                self._points[label].append((row["step"], row[name]))
        self._draw_if_due()

    def note(self, text: str) -> None:
        """Show ``text``, such as responses of a step, in place of the one before."""
        self._responses = text
        self._draw_if_due()

    def write(self, text: str) -> None:
        """Show a warning. The handler of warnings writes here as to a stream."""
        if text.strip():
            self._warnings.append(text.strip())
            self.draw()

    def flush(self) -> None:
        """Do nothing: a warning is shown at once."""

    def _draw_if_due(self) -> None:
        if time.monotonic() - self._drawn >= INTERVAL:
            self.draw()

    def draw(self) -> None:
        """Show the state of the run: the first time as a new output, later in its place."""
        from IPython.display import display

        self._drawn = time.monotonic()
        content = {"text/html": self._html(), "text/plain": self._line()}
        display(content, raw=True, display_id=self._id, update=self._is_shown)
        self._is_shown = True

    def _line(self) -> str:
        return "" if self._progress is None else self._progress.line()

    def _html(self) -> str:
        parts = []
        if self._progress is not None:
            done, total = self._progress.done, self._progress.total
            left = clock_time(self._progress.seconds_left())
            bar = f'<progress value="{done}" max="{total}" style="width:{WIDTH}px"></progress>'
            parts += [
                f"<div><b>{escape(self._title)}</b> {bar} {done}/{total} · {left} left</div>",
                f"<div>{escape(self._progress.details())}</div>",
            ]
        named = ((label, self._points.get(label, ())) for label in DRAWN)
        parts += [curve(label, points) for label, points in named if len(points) > 1]
        style = "max-height:16em;overflow:auto;white-space:pre-wrap"
        if self._responses:
            parts.append(f'<pre style="{style}">{escape(self._responses)}</pre>')
        if self._warnings:
            lines = escape("\n".join(self._warnings))
            parts.append(f'<pre style="{style};color:#a40">{lines}</pre>')
        return f'<div class="lightrft">{"".join(parts)}</div>'


def curve(label: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a line over steps as SVG, with its range and its newest value.

    Args:
        label: Name of the metric.
        points: Pairs of step and value, at least two.
    """
    shown = [(x, y) for x, y in thin(points) if abs(y) < float("inf")]
    if len(shown) < 2:
        return ""
    steps, values = zip(*shown)
    low, high = min(values), max(values)
    width, height = (steps[-1] - steps[0]) or 1, (high - low) or 1
    line = " ".join(
        f"{6 + (x - steps[0]) / width * (WIDTH - 12):.1f},"
        f"{HEIGHT - 18 - (y - low) / height * (HEIGHT - 38):.1f}"
        for x, y in shown
    )
    text = '<text x="6" y="{}" font-size="11" fill="currentColor">{}</text>'
    head = text.format(12, f"{escape(label)} {values[-1]:.4g}, from {low:.4g} to {high:.4g}")
    foot = text.format(HEIGHT - 4, f"steps {steps[0]:g} to {steps[-1]:g}")
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(label)}">{head}'
        f'<polyline points="{line}" fill="none" stroke="#2a78d6" stroke-width="1.5"/>{foot}</svg>'
    )


@contextmanager
def watching_in_notebook(callbacks: Callbacks) -> Generator[NotebookObserver]:
    """Provide an observer of one run, which also shows the warnings of the run."""
    with ExitStack() as stack:
        observer = NotebookObserver(stack, callbacks)
        handlers = logging.getLogger(ROOT).handlers
        shown: list[Any] = [each for each in handlers if type(each) is logging.StreamHandler]
        before = [each.setStream(observer) for each in shown]
        try:
            yield observer
        finally:
            for each, own in zip(shown, before):
                each.setStream(own or sys.stderr)
            observer.draw()
