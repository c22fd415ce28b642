"""Options of the SGLang server that a run starts, and the package that it needs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)

COMPARED = ("0.5.5", "0.5.23")
"""First and last version of SGLang whose source has the options and the protocol used here."""
SPARE_TOKENS = 256
"""Tokens in addition to ``engine.max_cache_tokens``: SGLang rounds to pages and keeps a few."""


def server_options(
    model: ModelConfig,
    folder: str,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None,
) -> list[str]:
    """Return the options of ``sglang.launch_server``, without address and key.

    Args:
        model: The model to serve.
        folder: Folder or name of its weights. Those of ``model.path`` may be adapters alone.
        config: Limits of rows and tokens.
        dtype: Type of the weights and of the computation.
        device: Device of the server.
        context: Most tokens that the model can read. ``None`` if it is unknown.
    """
    tokens = config.max_cache_tokens + SPARE_TOKENS
    options: dict[str, object] = {
        "model-path": folder,
        # It is not left out: SGLang refuses min_new_tokens without a tokenizer.
        "tokenizer-path": model.tokenizer or folder,
        "revision": model.revision,
        "trust-remote-code": model.trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "tp-size": 1,
        "max-total-tokens": tokens,
        "max-running-requests": config.max_num_seqs,
        # SGLang holds a table of as many places for each running request
        "context-length": None if context is None else min(context, tokens),
        "random-seed": 0,
        # without it, the seeds of responses have no effect
        "enable-deterministic-inference": True,
        "disable-cuda-graph": config.compile is False,
        "log-level": "warning",
    }
    if device.type == "cuda":
        options |= {
            "base-gpu-id": 0 if device.index is None else device.index,
            # between batches the trainer uses the memory of keys, values and weights
            "enable-memory-saver": True,
            "enable-weights-cpu-backup": True,
        }
    options |= config.server_options
    return [word for name, value in options.items() for word in words_of(name, value)]


def words_of(name: str, value: object) -> Sequence[str]:
    """Return the words of an option. ``None`` and False leave it out, and True has no value."""
    if value is None or value is False:
        return ()
    return (f"--{name}",) if value is True else (f"--{name}", str(value))


def command_of(options: Sequence[str]) -> str:
    """Return the command that starts a server, for messages."""
    return " ".join(["python -m sglang.launch_server", *options])


def installed_version() -> str:
    """Return the version of the package ``sglang``, or an empty string if it is unknown."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def check_package() -> None:
    """Raise ``ConfigError`` without the package ``sglang``. Warn about a version not compared."""
    if problem := missing_package():
        raise ConfigError(problem)
    if warning := version_warning():
        log.warning("%s", warning)


def missing_package() -> str:
    """Return what to do if the package is missing, or an empty string."""
    if importlib.util.find_spec("sglang") is not None:
        return ""
    return (
        "engine.kind = sglang without engine.url starts an SGLang server, and the package sglang "
        f"is not installed here: pip install 'sglang>={COMPARED[0]},<={COMPARED[1]}' on a machine "
        "with a GPU, set engine.url to a running SGLang, or set engine.kind=native"
    )


def version_warning() -> str:
    """Return a warning about a version outside ``COMPARED``, or an empty string."""
    found = installed_version()
    first, last = (_numbers(one) for one in COMPARED)
    if first <= _numbers(found) <= last:
        return ""
    return (
        f"sglang {found or 'of unknown version'}: its options and protocol were compared with the "
        f"source of versions {COMPARED[0]} to {COMPARED[1]} alone; install one of these if it does "
        "not start. Log-probs and weights are checked in any version"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that ``version`` begins with."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            # 0.5.5.post1 is after 0.5.5
            break
        found.append(int(part))
    return tuple(found)
