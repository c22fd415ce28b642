"""Memory of a rank that sends weights to a server: copies for a restart of it, and buckets."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.engine import EngineConfig
from lightrft.config.verbs import PolicyConfig, RLConfig, TrainingConfig
from lightrft.diagnostics.memory.phases import Device, Model
from lightrft.engines.base import ServerKind
from lightrft.engines.sending.sglang_weights import BUCKET as SGLANG_BUCKET
from lightrft.engines.sending.sglang_weights import SHARD as SGLANG_FILE
from lightrft.engines.sending.vllm_weights import BUCKET as VLLM_BUCKET
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.module_tensors import factor_of, plain_name


def asks_server(config: TrainingConfig) -> bool:
    """Return True if the run asks ``engine.url`` for responses."""
    if not isinstance(config, PolicyConfig) or config.engine.url is None:
        return False
    return generates(config) or bool(config.eval.data.sources)


def sent_weights(
    config: TrainingConfig, policy: Model, device: Device, server: ServerKind | None
) -> SentWeights:
    """Return the memory of the rank that sends weights to a server.

    Args:
        config: Settings of the run.
        policy: The policy.
        device: Device of each process.
        server: Kind of the server of ``engine.url``. None if it is unknown; the kind that takes
            the most memory counts then.
    """
    if not isinstance(config, PolicyConfig):
        return SentWeights()
    engine = config.engine
    starts = engine.starts_server and (generates(config) or bool(config.eval.data.sources))
    if not starts and not asks_server(config):
        return SentWeights()
    sizes = {name: p.numel() * p.itemsize for name, p in policy.model.named_parameters()}
    # adapters are added to the weights that are sent
    whole = float(sum(size for name, size in sizes.items() if plain_name(name) is not None))
    bases = float(sum(size for name, size in sizes.items() if is_base(name)))
    ahead = isinstance(config, RLConfig) and bool(config.rollout.staleness)
    # the frozen weights under adapters, which rank 0 gathers once for all updates
    frozen = bases if ahead and device.processes > 1 and not starts else 0.0
    changes = bases or sum(p.count * p.itemsize for p in policy.parameters if p.trained)
    return sender_memory(engine, server, whole, changes, frozen)


def is_base(name: str) -> bool:
    """Return True for a weight that an adapter is added to."""
    factor = factor_of(name.removeprefix("model."))
    return factor is not None and factor[1] == "base"


SERVE_BUCKET = 64 * 2**20
"""Bytes of a bucket of ``lightrft serve``, by the default of ``http.max_body_mb``."""


@dataclass(frozen=True, slots=True)
class SentWeights:
    """Bytes that a rank holds to send weights.

    Attributes:
        copies: Copies in CPU memory, for a server that is restarted.
        bucket: Buckets in CPU memory.
        device_bucket: Buckets on the device of the policy.
    """

    copies: float = 0.0
    bucket: float = 0.0
    device_bucket: float = 0.0


def sender_memory(
    engine: EngineConfig,
    server: ServerKind | None,
    whole: float,
    changes: float,
    frozen: float,
) -> SentWeights:
    """Return the memory of the rank that sends weights to the server of ``engine``.

    Args:
        engine: Settings of the engine.
        server: Kind of the server. ``None`` if it is unknown; the kind that takes the most memory
            counts then.
        whole: Bytes of all weights.
        changes: Bytes of the weights that training changes.
        frozen: Bytes of the frozen weights that the rank keeps, to add adapters to them.
    """
    if engine.kind == "sglang":
        if engine.weights_dir is not None:
            return SentWeights(frozen, min(SGLANG_FILE, whole))
        return SentWeights(whole + frozen, device_bucket=min(SGLANG_BUCKET, whole))
    if server == "lightrft":
        return SentWeights(changes + frozen, min(SERVE_BUCKET, changes))
    if engine.weights_dir is not None:
        return SentWeights()
    return SentWeights(whole + frozen, device_bucket=min(2.0 * VLLM_BUCKET, whole))
