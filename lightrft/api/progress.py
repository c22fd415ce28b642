"""Show the progress of a run, and a summary at its end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightrft.api.start import check_trained, exit_status
from lightrft.config.run import RunConfig
from lightrft.distributed.process_group import first_rank
from lightrft.observability.events import Callbacks, RunEvent
from lightrft.observability.progress_bar import Progress
from lightrft.utils.errors import ConfigError, UserError, first_line, without_overwrite
from lightrft.utils.stop_signal import in_notebook

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
        from lightrft.api.notebook import watching_in_notebook

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
