"""Bytes and seconds of weight updates."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

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
