"""Define the interface of an object that scores rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from lightrft.types import Rollout


class RewardScorer(Protocol):
    """The interface of a scorer: it returns every submitted rollout once, scored or failed."""

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise ``RewardError`` naming the data sources whose rows have no reward."""
        ...

    def submit(self, rollout: Rollout) -> None:
        """Queue ``rollout`` for scoring and return at once."""
        ...

    def results(self, wait: bool) -> Iterator[Rollout]:
        """Yield each scored rollout once; with ``wait``, block until none is pending."""
        ...

    def close(self) -> None:
        """Stop scoring and release all resources."""
        ...


@dataclass(slots=True)
class NullScorer:
    """A scorer for runs without a reward.

    It returns every rollout with the constant ``reward``, or with none.
    """

    reward: float | None = None
    _waiting: list[Rollout] = field(default_factory=list)

    def check_sources(self, sources: Iterable[str]) -> None:
        return

    def submit(self, rollout: Rollout) -> None:
        rollout.reward = self.reward
        self._waiting.append(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        while self._waiting:
            yield self._waiting.pop(0)

    def close(self) -> None:
        self._waiting.clear()
