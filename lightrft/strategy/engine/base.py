"""The sampling seam: what a loop may ask of whatever draws answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from lightrft.strategy.settings import SamplingConfig
from lightrft.types import Request, Rollout

Fingerprint = dict[str, str]
"""Parameter name to a checksum of what the engine holds."""


class Engine(Protocol):
    """Sampling only: native, vllm, sglang, http."""

    def generate(self, requests: Iterable[Request], sampling: SamplingConfig) -> Iterator[Rollout]:
        """Answers, as each finishes, in no order. Requests whose prompts are one object share that prompt's computation."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Take over ``weights`` as policy ``version``; answers drawn from now on carry that version."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory while others need it: 1 keeps weights, 2 does not."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
