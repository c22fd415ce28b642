"""Live progress of a run, and what is said when it ends."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightrft.config import RunConfig
from lightrft.utils.progress import Progress
from lightrft.utils.ranks import first_rank


class Watch:
    """An observer that shows each phase of a run as it goes on."""

    def __init__(self, stack: ExitStack, enabled: bool) -> None:
        self._stack = stack
        self._enabled = enabled
        self._progress: Progress | None = None

    def begin(self, title: str, total: int, done: int) -> None:
        self._stack.close()
        self._progress = self._stack.enter_context(Progress(total, title, done=done, enabled=self._enabled))

    def update(self, row: Mapping[str, Any]) -> None:
        if self._progress is not None:
            self._progress.update(row)


@contextmanager
def watching(run: RunConfig) -> Generator[Watch]:
    """An observer for the time of one run."""
    with ExitStack() as stack:
        yield Watch(stack, run.progress)


def finish(run: RunConfig, summary: Mapping[str, Any]) -> int:
    """Say where everything is, and what to type next; the exit status."""
    if first_rank():
        sys.stdout.write("\n".join(closing_lines(run, summary)) + "\n")
    return 0


def closing_lines(run: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """Headline numbers and where they are from."""
    lines = []
    if "heldout_after" in summary:
        lines.append(f"held-out accuracy {summary['heldout_before']:.1%} -> {summary['heldout_after']:.1%}")
    state = "finished" if summary.get("finished") else "stopped; the same command goes on"
    lines.append(f"{state} at step {summary['steps']} after {summary['seconds']:.0f} s; everything is in {run.dir}/{run.name}")
    commands = list(summary.get("next", []))
    if commands and shutil.which("lightrft") is None:
        commands.insert(0, f"source {os.path.relpath(sys.prefix)}/bin/activate")
    return lines + [f"  {command}" for command in commands]
