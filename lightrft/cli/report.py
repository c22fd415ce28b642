"""The verb ``lightrft report``."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.arguments import wants_usage
from lightrft.utils.errors import ConfigError
from lightrft.viewer.report import write_report

USAGE = "lightrft report <run folder or name> [...]"
RUNS = Path("runs")


def run(arguments: Sequence[str]) -> int:
    """Write the report of each run, finished or not, and print its path."""
    if wants_usage(arguments):
        sys.stdout.write(
            f"{USAGE}\n\nWrite report.html into the folder of a run, from what the run has "
            "written so far.\n"
        )
        return 0
    if settings := [word for word in arguments if "=" in word]:
        raise ConfigError(f"{settings[0]}: there are no settings here, but runs alone: {USAGE}")
    from lightrft.rewards.rules.answers import extracted

    # All names are looked up first: an unknown one fails before any report is written.
    folders = [folder_of(name) for name in arguments]
    for folder in folders:
        sys.stdout.write(f"{write_report(folder, extracted)}\n")
    if len(folders) == 2:
        sys.stdout.write(f"each page is of one run; lightrft compare {shlex.join(arguments)}\n")
    return 0


def folder_of(name: str) -> Path:
    """Return the folder of a run. Raises ``ConfigError`` with the closest name if there is none."""
    for path in (Path(name).expanduser(), RUNS / name):
        if path.is_dir():
            return path
    # The slash matches folders alone. A parent that does not exist has none.
    folders = [*RUNS.glob("*/"), *Path(name).parent.glob("*/")]
    known = list(map(str, folders))
    # A misspelled path first, then a misspelled name of a run.
    near = [
        *difflib.get_close_matches(name, known, n=1),
        *difflib.get_close_matches(str(RUNS / name), known, n=1),
    ]
    hint = f"; did you mean {near[0]}?" if near else ""
    if known and not near:
        hint = f"; there are {', '.join(sorted(known)[:8])}"
    raise ConfigError(f"there is no run folder {name}{hint}")
