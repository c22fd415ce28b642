"""Where a verb's program runs: in this process, in several that torchrun starts with the same command, or on a Ray cluster."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightrft.cli.common import set_threads
from lightrft.config import LaunchConfig, RLConfig, SFTConfig
from lightrft.utils.errors import ConfigError


def started(verb: str, arguments: Sequence[str], config: LaunchConfig) -> int | None:
    """The exit status of the run, when torchrun has to start it and this is none of its processes; else ``None``."""
    under_torchrun = "WORLD_SIZE" in os.environ
    if config.kind == "ray" and under_torchrun:
        raise ConfigError(
            "launch.kind = 'ray': ranks are started by Ray, not by torchrun; call lightrft itself, or set launch.kind=local"
        )
    if config.kind == "ray" or config.processes == 1 or under_torchrun:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.processes}"]
    return subprocess.run([*torchrun, "-m", "lightrft", verb, *arguments], check=False).returncode


def program(path: str, config: RLConfig | SFTConfig) -> Callable[..., dict[str, Any]]:
    """The function ``module:name`` of a config and an observer, to be called here; on a cluster, one that has it called there."""
    if config.launch.kind == "ray":
        from lightrft.trainer.launch.ray import run_on_ray

        return partial(run_on_ray, path)
    set_threads(config.run.threads)
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
