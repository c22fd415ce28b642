"""Run preference learning, from the first step or from a checkpoint."""

from __future__ import annotations

from functools import partial

from lightrft.config.verbs import DPOConfig
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.trainer.preference.checks import check
from lightrft.trainer.preference.given import prepare_given
from lightrft.trainer.preference.online import prepare_online
from lightrft.trainer.training_loop import run_training


def run_preference(config: DPOConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    requirements = check(config)
    prepare = prepare_online if config.online.group_size else prepare_given
    return run_training(config, observer, partial(prepare, config, requirements))
