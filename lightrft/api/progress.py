"""Show the progress of a run, and a summary at its end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightrft.api.start import check_trained, exit_status
from lightrft.config.run import RunConfig
from lightrft.distributed.process_group import first_rank
from lightrft.observability.progress_bar import Progress
from lightrft.utils.errors import UserError, first_line, without_overwrite

ACCURACIES = {"heldout_before": " before training", "heldout_after": " after training"}
"""Entries of a summary that hold an accuracy, and the time of its measurement."""


class StepEvent:
    """A finished step, as ``on_step`` gets it.

    Attributes:
        number: Number of the step; 0 for an evaluation before the first one.
        phase: The verb, or a part of it.
        metrics: Its metrics by name.
        stopped: ``stop`` was called.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.number = int(row["step"])
        self.phase = str(row.get("phase", ""))
        self.metrics = dict(row)
        self.stopped = False

    def stop(self) -> None:
        """Stop the run after this step. It writes a checkpoint, and can be resumed."""
        self.stopped = True


OnStep = Callable[[StepEvent], object]
"""A function that is called after each step."""


class ProgressObserver:
    """An observer that shows a progress bar for each phase of a run, and calls ``on_step``."""

    def __init__(self, stack: ExitStack, enabled: bool, on_step: OnStep | None = None) -> None:
        self._stack = stack
        self._enabled = enabled
        self._on_step = on_step
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

    def update(self, row: Mapping[str, Any]) -> str | None:
        """Advance the progress bar with the metrics of a step. Return a reason to stop, or None."""
        if self._progress is not None:
            self._progress.update(row)
        if self._on_step is None:
            return None
        self._on_step(step := StepEvent(row))
        return "on_step" if step.stopped else None

    def note(self, text: str) -> None:
        """Print lines of text above the progress bar."""
        if self._progress is not None:
            self._progress.note(text)


@contextmanager
def watching(run: RunConfig, on_step: OnStep | None = None) -> Generator[ProgressObserver]:
    """Provide an observer for one run, which calls ``on_step`` after each step."""
    with ExitStack() as stack:
        yield ProgressObserver(stack, run.progress, on_step)


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
    from lightrft.viewer.report import write_report

    folder = run.folder
    try:
        said = f"report: {write_report(folder)}"
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
