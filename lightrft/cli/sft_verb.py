"""``lightrft sft``."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.cli.show import finish, watching
from lightrft.config import SFTConfig


def run(arguments: Sequence[str]) -> int:
    """Fine-tune on conversations; the run folder holds everything."""
    if asked_for_help("sft", SFTConfig, arguments, "Fine-tune a model on conversations, with the loss on assistant tokens."):
        return 0
    config = parse(SFTConfig, arguments).settings
    set_threads(config.run.threads)
    from lightrft.trainer.sft import run_sft

    with memory_errors(), watching(config.run) as observer:
        summary = run_sft(config, observer)
    return finish(config.run, summary)
