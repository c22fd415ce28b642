"""``lightrft generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.config import GenerateConfig


def run(arguments: Sequence[str]) -> int:
    """Write answers to every prompt as JSON lines; with ``reward.terms`` each is scored."""
    if asked_for_help("generate", GenerateConfig, arguments, "Answer a file of prompts, as JSON lines."):
        return 0
    config = parse(GenerateConfig, arguments).settings
    set_threads(config.run.threads)
    from lightrft.trainer.inference import run_generate

    with memory_errors():
        count = run_generate(config)
    sys.stdout.write(f"{count} answers in {config.output}\n")
    return 0
