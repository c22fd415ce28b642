"""The verb ``lightrft iterate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.api.progress import closing_lines, watching, with_report
from lightrft.api.start import check_trained, exit_status, memory_errors, quick_imports, set_threads
from lightrft.cli.arguments import settings_of
from lightrft.config.verbs import IterateConfig
from lightrft.verbs import VERBS

COLUMNS = {
    "round": "round",
    "prompts": "prompts",
    "responses": "responses",
    "mean_reward": "mean reward",
    "rows": "rows",
    "steps": "steps",
    "heldout_after": "eval accuracy",
}
"""Columns of the table of rounds: entry of the summary to title."""


def run(arguments: Sequence[str]) -> int:
    """Repeat generation, selection and training, and print a table of the rounds."""
    config = settings_of("iterate", IterateConfig, arguments, VERBS["iterate"].purpose)
    if config is None:
        return 0
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.trainer.pipelines.iterate import run_iterate

    with memory_errors(), watching(config.run) as observer:
        summary = run_iterate(config, observer)
    lines = closing_lines(config.run, summary)
    if summary.get("finished"):
        lines = with_report(config.run, lines)
    sys.stdout.write("\n".join([*table(summary["rounds"]), *lines]) + "\n")
    check_trained(summary)
    return exit_status(summary)


def table(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of rounds. A column that no round has is left out."""
    if not rounds:
        return []
    names = [name for name in COLUMNS if any(name in entry for entry in rounds)]
    rows = [[COLUMNS[name] for name in names]]
    for entry in rounds:
        rows.append([_shown(name, entry.get(name)) for name in names])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "heldout_after":
        return f"{value:.1%}"
    return f"{value:.3f}" if name == "mean_reward" else str(value)
