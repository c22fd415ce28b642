"""``lightrft rl``."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.cli.show import finish, watching
from lightrft.config import RLConfig


def run(arguments: Sequence[str]) -> int:
    """Train by reinforcement learning; the run folder holds everything."""
    if asked_for_help("rl", RLConfig, arguments, "Train a model by reinforcement learning from rewards."):
        return 0
    config = parse(RLConfig, arguments).settings
    set_threads(config.run.threads)
    from lightrft.trainer.rl import run_rl

    with memory_errors(), watching(config.run) as observer:
        summary = run_rl(config, observer)
    return finish(config.run, summary)
