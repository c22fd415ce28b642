"""``lightrft eval``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.config import EvaluateConfig


def run(arguments: Sequence[str]) -> int:
    """Answer and score held-out prompts, print the metrics as JSON, and keep every answer in the run folder."""
    if asked_for_help("eval", EvaluateConfig, arguments, "Answer held-out prompts and score the answers."):
        return 0
    config = parse(EvaluateConfig, arguments).settings
    set_threads(config.run.threads)
    from lightrft.trainer.inference import run_eval

    with memory_errors():
        metrics = run_eval(config)
    sys.stdout.write(json.dumps(metrics, indent=1) + "\n")
    return 0
