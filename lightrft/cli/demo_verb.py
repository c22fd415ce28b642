"""``lightrft demo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.cli.show import closing_lines, watching
from lightrft.config import DemoConfig


def run(arguments: Sequence[str]) -> int:
    """A tiny model learns arithmetic; at the end a report shows how."""
    if asked_for_help(
        "demo", DemoConfig, arguments, "From nothing to a model trained by reinforcement learning, and its report."
    ):
        return 0
    with resources.as_file(resources.files("lightrft.cli") / "demo.yaml") as preset:
        config = parse(DemoConfig, [str(preset), *arguments]).settings
    set_threads(config.run.threads)
    from lightrft.trainer.demo import run_demo

    with memory_errors(), watching(config.run) as observer:
        summary = run_demo(config, observer)
    lines = closing_lines(config.run, summary)
    if summary["verb"] == "demo" and summary.get("finished"):
        from lightrft.viewer.report import write_report

        lines.insert(1, f"report: {write_report(Path(config.run.dir).expanduser() / config.run.name)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
