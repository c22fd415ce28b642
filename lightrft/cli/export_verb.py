"""``lightrft export``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.common import memory_errors, positional, quick_imports, settings_of
from lightrft.config import ExportConfig


def run(arguments: Sequence[str]) -> int:
    """Write a Hugging Face folder from a run or a checkpoint."""
    about = "Write the policy of a run folder or a checkpoint as a Hugging Face folder: lightrft export RUN_OR_CHECKPOINT"
    config = settings_of("export", ExportConfig, positional(arguments, "path"), about)
    if config is None:
        return 0
    with quick_imports():
        from lightrft.trainer.saved import run_export

    with memory_errors():
        output, saved = run_export(config)
    sys.stdout.write(f"step {saved.step} of {saved.checkpoint}: {output}\n  lightrft chat model={output}\n")
    return 0
