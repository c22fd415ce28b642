"""Reject engines that cannot do what the rest of the config asks, before models are loaded."""

from __future__ import annotations

from lightrft.config.verbs import RLConfig
from lightrft.engines.native_parts.compiled_steps import SHARDED
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_kinds import kind_of
from lightrft.workers.local_vllm import check_replica


def check_engine(config: RLConfig) -> None:
    """Raise ``ConfigError`` for an engine that cannot generate as the config asks."""
    engine, workers = config.engine, config.launch.ray.engines
    kind = kind_of(engine)
    if workers and kind.build_worker is None:
        raise ConfigError(
            f"launch.ray.engines = {workers}: engine.kind = {engine.kind} runs in no worker; leave "
            "out launch.ray.engines, or set engine.kind to native or vllm"
        )
    if config.rollout.staleness and kind.build_async is None:
        raise ConfigError(
            f"rollout.staleness = {config.rollout.staleness}: engine.kind = {engine.kind} "
            "generates between steps alone; leave out rollout.staleness, or set engine.kind=native"
        )
    if workers and not kind.shares_weights and config.model.load_in_4bit:
        raise ConfigError(
            f"launch.ray.engines = {workers}: workers of engine.kind = {engine.kind} hold whole "
            "weights, and are sent those of model.load_in_4bit = true in 4 bits; leave out "
            "launch.ray.engines, or set engine.kind=native"
        )
    alone = {"launch.ray.engines": workers, "rollout.staleness": config.rollout.staleness}
    for name, value in alone.items():
        if value and engine.tensor_parallel > 1:
            raise ConfigError(
                f"engine.tensor_parallel = {engine.tensor_parallel} with {name} = {value}: the "
                "processes that share a copy of the model generate in step with each other, between "
                f"updates alone; leave out {name}, or set engine.tensor_parallel=1"
            )
    # a worker loads the whole model by itself
    if kind.copies_weights and not workers:
        check_replica(engine.kind, config.strategy.tensor_parallel)
    # Other engines have weights of their own.
    samples_itself = kind.shares_weights and not workers and not config.rollout.staleness
    if engine.compile and samples_itself and config.launch.processes > 1:
        raise ConfigError(SHARDED)
