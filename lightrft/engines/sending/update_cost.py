"""Bytes, seconds and memory of weight updates."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.engines.base import ServerKind
from lightrft.engines.sending.sglang_weights import BUCKET as SGLANG_BUCKET
from lightrft.engines.sending.sglang_weights import SHARD as SGLANG_FILE
from lightrft.engines.sending.vllm_weights import BUCKET as VLLM_BUCKET

UPDATE_COSTS = ("update_bytes", "update_seconds")
"""Names of the numbers of ``UpdateCost``."""


@dataclass(slots=True)
class UpdateCost:
    """The cost of the weight updates since the last call of ``take``.

    Attributes:
        num_bytes: Bytes of the tensors that an engine was sent, also again after its restart.
        seconds: Time until the engine had the weights. It includes gathering them.
    """

    num_bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Generator[None]:
        """Return the context in which an update is made."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, and count their bytes."""
        for name, tensor in weights:
            self.num_bytes += tensor.nbytes
            yield name, tensor

    def take(self) -> dict[str, float]:
        """Return the numbers by name, and start from 0. Empty without an update."""
        found: dict[str, float] = {}
        if self.seconds or self.num_bytes:
            found = dict(zip(UPDATE_COSTS, (self.num_bytes, self.seconds)))
        self.num_bytes, self.seconds = 0, 0.0
        return found


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
