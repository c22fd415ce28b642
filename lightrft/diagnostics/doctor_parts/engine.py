"""Examine the engine of a run for ``lightrft doctor``, without starting it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DistillVerbConfig, DPOConfig, RLConfig, TrainingConfig
from lightrft.diagnostics.findings import Finding
from lightrft.engines.base import Engine
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.errors import ConfigError, UserError
from lightrft.workers.engine_kinds import check_media, kind_of
from lightrft.workers.local_served import check_server_media
from lightrft.workers.local_vllm import check_replica, check_shared_copy


def engine_findings(config: TrainingConfig, device: str) -> Iterator[Finding]:
    """Check the package of ``engine.kind``, and the settings that its engine cannot keep.

    Args:
        config: Settings of the run.
        device: Kind of the device of each process.
    """
    if not isinstance(config, RLConfig | DistillVerbConfig | DPOConfig) or not generates(config):
        return
    kind = kind_of(config.engine)
    if kind.copies_weights and not isinstance(config, RLConfig):
        # that of ``rl`` is checked with its other settings
        try:
            check_replica(config.engine.kind, config.strategy.tensor_parallel)
        except ConfigError as error:
            yield Finding("engine", "bad", "engine.kind", str(error))
    try:
        check_shared_copy(config.engine, config.launch.processes)
    except ConfigError as error:
        yield Finding("engine", "bad", "engine.tensor_parallel", str(error))
    for level, about, says in kind.examine(config, torch.device(device)) if kind.examine else ():
        yield Finding("engine", level, about, says)


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
