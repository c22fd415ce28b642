"""The verb ``lightrft report``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from lightrft.api.run import folder_of
from lightrft.cli.arguments import wants_usage
from lightrft.utils.errors import ConfigError
from lightrft.viewer.report import write_report

USAGE = "lightrft report <run folder or name> [...]"


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
