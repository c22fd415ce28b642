"""Start the function of a verb in this process, in processes of torchrun, or on a Ray cluster."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.config.base import Settings, has_setting
from lightrft.config.run import RunConfig
from lightrft.config.verbs import TrainingConfig
from lightrft.distributed.torchrun import run_processes
from lightrft.utils.errors import ConfigError, NothingTrained, ResourceError, first_line
from lightrft.verbs import Verb


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


def function_of(verb: Verb, config: Any) -> Callable[..., Any]:
    """Import and return the function of a verb of the kind ``call`` or ``server``.

    Raises ``ConfigError`` if no file can be written where the setting ``output`` says.
    """
    check_output(config)
    threads = 0
    if has_setting(type(config), "run.threads"):
        threads = config.run.threads
    elif has_setting(type(config), "threads"):
        threads = config.threads
    return import_function(verb.function, threads)


def import_function(path: str, threads: int) -> Callable[..., Any]:
    """Set the number of threads, if not 0, then import and return the function ``module:name``."""
    module, _, name = path.partition(":")
    with quick_imports():
        # Inside too: where a number is given, this call is the one that imports torch.
        set_threads(threads)
        return getattr(importlib.import_module(module), name)


def check_output(config: Settings) -> None:
    """Raise ``ConfigError`` if no file can be written where the setting ``output`` says."""
    output = dict(config).get("output")
    if not isinstance(output, str):
        return
    # Folders that do not exist are made inside the first one that does.
    folder = next(one for one in Path(output).expanduser().absolute().parents if one.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"output = {output!r}: no file can be written in {folder} ({error.strerror}); choose "
            "another output"
        ) from None


def exit_status(summary: Mapping[str, Any]) -> int:
    """Return 0 for a finished run, or 128 plus the number of the signal that stopped it.

    A rank of a launcher always returns 0. A launcher treats any other status as a failure and ends
    the other ranks.
    """
    stopped = str(summary.get("stopped_by", ""))
    # A run may also be stopped by a request that is no signal.
    if "WORLD_SIZE" in os.environ or stopped not in signal.Signals.__members__:
        return 0
    return 128 + signal.Signals[stopped]


def summary_text(run: RunConfig) -> str:
    """Return the text of ``summary.json`` of a run, which is empty if there is none."""
    file = run.folder / "summary.json"
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def status_in(run: RunConfig, before: str) -> int:
    """Return the exit status of a run from ``summary.json``, once all ranks have ended with 0.

    Args:
        run: Settings of the run.
        before: ``summary_text`` before the run.
    """
    text = summary_text(run)
    if run.overwrite and before and text == before:
        # it was stopped before its first step, and the run that it was to replace is back
        return 128 + signal.SIGTERM
    try:
        return exit_status(json.loads(text))
    except ValueError:  # ranks that fail to write it report that and do not end with 0
        return 0


def check_trained(summary: Mapping[str, Any]) -> None:
    """Raise ``NothingTrained`` for a finished run in which no step trained anything."""
    if summary.get("finished") and summary["steps"] and summary.get("steps_trained") == 0:
        raise NothingTrained(
            f"nothing was trained (steps: {summary['steps']}): no response had an advantage, or "
            "no optimizer step was taken; the warnings above and in log.txt say why"
        )


@contextmanager
def quick_imports() -> Generator[None]:
    """Disable garbage collection: it takes a fifth of the import time of torch and transformers.

    Raises ``ConfigError`` if Python has removed the docstrings, which transformers reads.
    """
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python runs with -OO (PYTHONOPTIMIZE=2), which removes docstrings, and transformers "
            "needs its own; run it with -O at most"
        )
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|could not (create|execute) a primitive(?! descriptor)"
)
"""Messages of a ``RuntimeError`` for want of memory: of a GPU, of a CPU, and of oneDNN."""


@contextmanager
def memory_errors() -> Generator[None]:
    """Turn an out-of-memory error into a ``ResourceError`` that names the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            raise ResourceError(
                "out of memory; lower train.max_tokens_per_micro_batch, engine.max_cache_tokens or "
                f"model.logits_mb, or set model.gradient_checkpointing=true ({first_line(error)})"
            ) from error
        raise


def set_threads(threads: int) -> None:
    """Set the number of CPU threads. 0 keeps torch's own choice."""
    if threads:
        import torch

        torch.set_num_threads(threads)
