"""``lightrft rl``."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.cli.common import memory_errors, settings_of
from lightrft.cli.launch import program, started
from lightrft.cli.show import finish, watching
from lightrft.config import RLConfig
from lightrft.trainer.parts import check_parts, check_rollout


def run(arguments: Sequence[str]) -> int:
    """Train by reinforcement learning; the run folder holds everything."""
    config = settings_of("rl", RLConfig, arguments, "Train a model by reinforcement learning from rewards.")
    if config is None:
        return 0
    check_parts(config.algorithm)  # here too: a misspelt name is refused before torch is loaded
    check_rollout(config)
    if (status := started("rl", arguments, config)) is not None:
        return status
    with memory_errors(), watching(config.run) as observer:
        summary = program("lightrft.trainer.rl:run_rl", config)(config, observer)
    return finish(config.run, summary)
