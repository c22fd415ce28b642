"""``lightrft generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.common import memory_errors, positional, quick_imports, set_threads, settings_of
from lightrft.config import GenerateConfig


def run(arguments: Sequence[str]) -> int:
    """Write answers to every prompt as JSON lines; with ``reward.terms`` each is scored."""
    config = settings_of(
        "generate", GenerateConfig, positional(arguments, "model.path"), "Answer a file of prompts, as JSON lines."
    )
    if config is None:
        return 0
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.trainer.inference import run_generate

    with memory_errors():
        count = run_generate(config)
    sys.stdout.write(f"{count} answers in {config.output}\n")
    return 0
