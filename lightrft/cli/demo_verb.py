"""``lightrft demo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from lightrft.cli.common import memory_errors, set_threads, settings_of
from lightrft.cli.show import closing_lines, watching
from lightrft.config import DemoConfig


def run(arguments: Sequence[str]) -> int:
    """A tiny model learns arithmetic; at the end a report shows how."""
    about = "From nothing to a model trained by reinforcement learning, and its report."
    with resources.as_file(resources.files("lightrft.cli") / "demo.yaml") as preset:
        config = settings_of("demo", DemoConfig, arguments, about, [str(preset)])
    if config is None:
        return 0
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
