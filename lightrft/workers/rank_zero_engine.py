"""An engine that rank 0 has, for all ranks of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.types import Request, Rollout

T = TypeVar("T")


class RankZeroEngine(Engine):
    """An engine that rank 0 calls for all ranks. The other ranks only help to gather weights.

    Args:
        engine: The engine. ``None`` on other ranks than 0.
        ranks: All ranks of the run.
    """

    shared_by_all_ranks = True

    def __init__(self, engine: Engine | None, ranks: ProcessGroup) -> None:
        self.engine = engine
        self._ranks = ranks

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses on rank 0, see ``Engine.generate``.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.
        """
        assert self.engine is not None, "other ranks than 0 have no engine"
        return self.engine.generate(requests, sampling, stopped)

    def check_limits(self, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
        """See ``Engine.check_limits``. Every rank must call it.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """

        def check() -> None:
            if self.engine is not None:
                self.engine.check_limits(longest, sampling, key, data)

        run_on_all_ranks(self._ranks, check)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``Engine.refuse_media``."""
        if self.engine is not None:
            self.engine.refuse_media(what, kinds)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``. Every rank must call it."""

        def take(stream: Iterator[tuple[str, Tensor]]) -> Fingerprint:
            assert self.engine is not None
            return self.engine.load_weights(stream, version)

        return led(self._ranks, weights, take)

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``."""
        if self.engine is not None:
            self.engine.sleep(level)

    def wake(self) -> None:
        """See ``Engine.wake``."""
        if self.engine is not None:
            self.engine.wake()

    def take_counts(self) -> Mapping[str, float]:
        """See ``Engine.take_counts``."""
        return {} if self.engine is None else self.engine.take_counts()

    def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()


def led(
    ranks: ProcessGroup,
    weights: Iterable[tuple[str, Tensor]],
    take: Callable[[Iterator[tuple[str, Tensor]]], T],
) -> T:
    """Run ``take`` on ``weights`` on rank 0 and broadcast its result.

    The other ranks only join the collective calls that gather the weights.

    Args:
        ranks: all ranks of the run.
        weights: full tensors by name. Iterating may be a collective operation.
        take: function that consumes them on rank 0.
    """
    stream = iter(weights)

    def work() -> Any:
        try:
            return take(stream) if ranks.rank == 0 else None
        finally:
            # Every rank must exhaust the stream, since gathering a tensor is a collective call.
            deque(stream, maxlen=0)

    return run_on_all_ranks(ranks, work)[0]
