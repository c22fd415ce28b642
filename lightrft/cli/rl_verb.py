"""``lightrft rl``."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.cli.common import memory_errors, settings_of
from lightrft.cli.launch import program, started
from lightrft.cli.show import finish, watching
from lightrft.config import RLConfig


def run(arguments: Sequence[str]) -> int:
    """Train by reinforcement learning; the run folder holds everything."""
    config = settings_of("rl", RLConfig, arguments, "Train a model by reinforcement learning from rewards.")
    if config is None:
        return 0
    if (status := started("rl", arguments, config)) is not None:
        return status
    with memory_errors(), watching(config.run) as observer:
        summary = program("lightrft.trainer.rl:run_rl", config)(config, observer)
    return finish(config.run, summary)
