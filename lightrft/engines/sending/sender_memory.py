"""Memory of a rank that sends weights to a server."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.engine import EngineConfig
from lightrft.engines.base import ServerKind
from lightrft.engines.sending.sglang_weights import BUCKET as SGLANG_BUCKET
from lightrft.engines.sending.sglang_weights import SHARD as SGLANG_FILE
from lightrft.engines.sending.vllm_weights import BUCKET as VLLM_BUCKET

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
