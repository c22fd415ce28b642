"""Run the program of a verb in this process, in processes of torchrun, or on a Ray cluster."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightrft.cli.arguments import quick_imports, set_threads
from lightrft.cli.progress import status_in, summary_text
from lightrft.config.verbs import TrainingConfig
from lightrft.distributed.torchrun import run_processes
from lightrft.utils.errors import ConfigError


def started(verb: str, arguments: Sequence[str], config: TrainingConfig) -> int | None:
    """Start the run with torchrun if needed, and return its exit status, else None.

    None is also returned inside a process that torchrun has started.

    Args:
        verb: name of the verb.
        arguments: its arguments, which each process gets too.
        config: settings of the run.
    """
    under_torchrun = "WORLD_SIZE" in os.environ
    uses_ray = config.launch.kind == "ray"
    if uses_ray and under_torchrun:
        raise ConfigError(
            "launch.kind = 'ray': ranks are started by Ray, not by torchrun; call lightrft "
            "itself, or set launch.kind=local"
        )
    processes = config.launch.processes
    if uses_ray or under_torchrun or processes == 1:
        return None
    before = summary_text(config.run)
    words = ["-m", "lightrft", verb, *arguments]
    status = run_processes(f"lightrft {verb}", words, processes, config.strategy.timeout_minutes)
    # The ranks return 0 after a signal (see ``exit_status``). Their summary names it.
    return status or status_in(config.run, before)


def program(path: str, config: TrainingConfig) -> Callable[..., dict[str, Any]]:
    """Return the function ``module:name``, or with Ray one that calls it on the cluster."""
    if config.launch.kind == "ray":
        from lightrft.distributed.ray_launcher import run_on_ray

        return partial(run_on_ray, path)
    return import_function(path, config.run.threads)


def import_function(path: str, threads: int) -> Callable[..., Any]:
    """Set the number of threads, if not 0, then import and return the function ``module:name``."""
    module, _, name = path.partition(":")
    with quick_imports():
        # Inside too: where a number is given, this call is the one that imports torch.
        set_threads(threads)
        return getattr(importlib.import_module(module), name)
