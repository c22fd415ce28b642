"""Show the progress of a run in a terminal or a notebook, and a summary at its end."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightrft.api.start import check_trained, exit_status
from lightrft.config.run import RunConfig
from lightrft.distributed.process_group import first_rank
from lightrft.observability.events import Callbacks, RunEvent
from lightrft.observability.logging_setup import ROOT
from lightrft.observability.progress_bar import SHOWN, Progress, clock_time
from lightrft.utils.errors import ConfigError, UserError, first_line, without_overwrite
from lightrft.utils.stop_signal import in_notebook
from lightrft.viewer.plots import thin

ACCURACIES = {"heldout_before": " before training", "heldout_after": " after training"}
"""Entries of a summary that hold an accuracy, and the time of its measurement."""


class ProgressObserver:
    """An observer that shows a progress bar for each phase of a run, and calls ``callbacks``."""

    def __init__(
        self, stack: ExitStack, enabled: bool, callbacks: Callbacks = MappingProxyType({})
    ) -> None:
        self._stack = stack
        self._enabled = enabled
        self._callbacks = callbacks
        self._progress: Progress | None = None

    def begin(self, title: str, total: int, done: int) -> None:
        """Start the progress bar of a phase and close the previous one.

        Args:
            title: name of the phase.
            total: number of steps.
            done: number of steps that are already complete.
        """
        self._stack.close()
        self._progress = self._stack.enter_context(
            Progress(total, title, done=done, enabled=self._enabled)
        )

    def update(self, row: Mapping[str, Any]) -> None:
        """Advance the progress bar with the metrics of a step."""
        if self._progress is not None:
            self._progress.update(row)

    def note(self, text: str) -> None:
        """Print lines of text above the progress bar."""
        if self._progress is not None:
            self._progress.note(text)

    def event(self, event: RunEvent) -> None:
        """Call the callback of an event, if there is one.

        Raises ``ConfigError`` for a callback whose event the run does not have.
        """
        for name in self._callbacks:
            if name in event.requests.missing:
                raise ConfigError(f"{name} is never called: {event.requests.missing[name]}")
        if event.name in self._callbacks:
            self._callbacks[event.name](event)


@contextmanager
def watching(
    run: RunConfig, callbacks: Callbacks = MappingProxyType({})
) -> Generator[ProgressObserver]:
    """Provide an observer for one run, which calls ``callbacks``.

    In a notebook it is one output of the cell.
    """
    if run.progress and in_notebook():
        with watching_in_notebook(callbacks) as observer:
            yield observer
        return
    with ExitStack() as stack:
        yield ProgressObserver(stack, run.progress, callbacks)


def finish(run: RunConfig, summary: Mapping[str, Any]) -> int:
    """Print the location of the results and the next commands, and return the exit status.

    Raises ``NothingTrained``.
    """
    if first_rank():
        lines = closing_lines(run, summary)
        if not stopped_at_start(summary):
            lines = with_report(run, lines)
        sys.stdout.write("\n".join(lines) + "\n")
    check_trained(summary)
    return exit_status(summary)


def with_report(run: RunConfig, lines: Sequence[str]) -> list[str]:
    """Write the report of a finished run, and insert its path into ``lines`` before the commands.

    If the report cannot be written, the line says so. The run is safe, and ``lightrft report`` can
    write the report later.
    """
    # A run needs it at its end, and imports it then.
    from lightrft.rewards.rules.answers import extracted
    from lightrft.viewer.report import write_report

    folder = run.folder
    try:
        said = f"report: {write_report(folder, extracted)}"
    except (UserError, OSError) as error:
        said = f"report: not written ({first_line(error)}); lightrft report {folder} tries again"
    commands = next((k for k, line in enumerate(lines) if line.startswith("  ")), len(lines))
    return [*lines[:commands], said, *lines[commands:]]


def stopped_at_start(summary: Mapping[str, Any]) -> bool:
    """Return True if the run has nothing to resume from."""
    is_begun = summary.get("finished") or summary["steps"] or "saved_step" not in summary
    return not is_begun and summary["saved_step"] is None


def closing_lines(run: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """Return the headline metrics, the location of the results, and the next commands."""
    if stopped_at_start(summary):
        return ["stopped before the first step; the same command starts over"]
    lines = []
    measured = {when: summary[name] for name, when in ACCURACIES.items() if name in summary}
    if measured:
        # A resumed run may lack the first. Of two, the arrow says which is which.
        when = "" if len(measured) == 2 else next(iter(measured))
        values = " -> ".join(f"{value:.1%}" for value in measured.values())
        kind = {"rm": "pair ", "prm": "step "}.get(summary.get("verb", ""), "")
        lines.append(f"eval {kind}accuracy{when} {values}")
    resumes = "stopped; the same command resumes"
    if run.overwrite:
        resumes = without_overwrite(resumes)
    state = "finished" if summary.get("finished") else resumes
    lines.append(
        f"{state} at step {summary['steps']} after {summary['seconds']:.0f} s; everything is in "
        f"{run.dir}/{run.name}"
    )
    if "most_unsaved_steps" in summary:
        steps, seconds = summary["most_unsaved_steps"], summary["most_unsaved_seconds"]
        saved = f"the checkpoint is of step {summary['saved_step']}"
        if summary["saved_step"] is None:
            saved = "there is no checkpoint"
        lines.append(
            f"{saved}; a kill would have lost at most {steps} step{'s' * (steps != 1)} "
            f"({seconds:.0f} s)"
        )
    commands = list(summary.get("next", []))
    # The program was started by the path of its environment, which the commands do not name.
    if commands and shutil.which("lightrft") is None:
        prefix, here = Path(sys.prefix).absolute(), Path.cwd()
        script = (prefix.relative_to(here) if here in prefix.parents else prefix) / "bin/activate"
        commands.insert(0, f"source {shlex.quote(str(script))}")
    return lines + [f"  {command}" for command in commands]


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
