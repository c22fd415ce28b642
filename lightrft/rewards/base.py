"""The interface of an object that scores rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from lightrft.types import Rollout


class Scoring(Protocol):
    """What a loop needs of a reward: every rollout that goes in comes out once, scored or failed."""

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raises ``RewardError`` naming the data sources for whose rows there is no reward."""
        ...

    def submit(self, rollout: Rollout) -> None: ...

    def results(self, wait: bool) -> Iterator[Rollout]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Unscored:
    """For runs without a reward: every rollout comes out as it went in, with ``reward`` for one if that is given."""

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
