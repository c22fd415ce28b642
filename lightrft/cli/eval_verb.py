"""``lightrft eval``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lightrft.cli.common import memory_errors, positional, quick_imports, set_threads, settings_of
from lightrft.config import EvaluateConfig


def run(arguments: Sequence[str]) -> int:
    """Answer and score held-out prompts, print the metrics as JSON, and keep every answer in the run folder."""
    config = settings_of(
        "eval", EvaluateConfig, positional(arguments, "model.path"), "Answer held-out prompts and score the answers."
    )
    if config is None:
        return 0
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.trainer.inference import run_eval

    with memory_errors():
        metrics = run_eval(config)
    sys.stdout.write(json.dumps(metrics, indent=1) + "\n")
    return 0
