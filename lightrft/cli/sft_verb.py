"""``lightrft sft``."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.cli.common import memory_errors, settings_of
from lightrft.cli.launch import program, started
from lightrft.cli.show import finish, watching
from lightrft.config import SFTConfig


def run(arguments: Sequence[str]) -> int:
    """Fine-tune on conversations; the run folder holds everything."""
    config = settings_of("sft", SFTConfig, arguments, "Fine-tune a model on conversations, with the loss on assistant tokens.")
    if config is None:
        return 0
    if (status := started("sft", arguments, config)) is not None:
        return status
    with memory_errors(), watching(config.run) as observer:
        summary = program("lightrft.trainer.sft:run_sft", config)(config, observer)
    return finish(config.run, summary)
