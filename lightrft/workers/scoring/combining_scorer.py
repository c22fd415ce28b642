"""Combine the terms of rewards by gates, or take the worst one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lightrft.algorithms.reward_terms.combination import gated, worst
from lightrft.config.reward import RewardConfig
from lightrft.rewards.base import RewardScorer
from lightrft.types import Rollout
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.workers.scoring.collecting import counts_of


class CombiningScorer:
    """A scorer that combines the terms of another scorer, see ``reward.gates`` and ``combine``.

    Args:
        inner: Scores the responses.
        config: The settings ``reward``.
        models: Names of the terms of reward models.

    Raises:
        ConfigError: ``reward.gates`` names an unknown term.
    """

    def __init__(
        self, inner: RewardScorer, config: RewardConfig, models: Iterable[str] = ()
    ) -> None:
        self.inner = inner
        self.config = config
        names = {*models, *(judge.name for judge in config.judges)}
        for terms in (config.terms, *config.per_source.values()):
            names |= {term.label for term in terms}
        for gated_term, gate in config.gates.items():
            for name in (gated_term, gate):
                # A function may return several named values: function/value.
                if name.partition("/")[0] not in names:
                    raise ConfigError(
                        f"reward.gates = {{{gated_term}: {gate}}}: there is no term {name!r}"
                        f"{did_you_mean(name, names)}; the terms: {', '.join(sorted(names))}"
                    )

    def check_sources(self, sources: Iterable[str]) -> None:
        """See ``RewardScorer.check_sources``."""
        self.inner.check_sources(sources)

    def submit(self, rollout: Rollout) -> None:
        """See ``RewardScorer.submit``."""
        self.inner.submit(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        """See ``RewardScorer.results``."""
        for rollout in self.inner.results(wait):
            if not rollout.failed and rollout.reward is not None:
                self._combine(rollout)
            yield rollout

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``."""
        return counts_of(self.inner)

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        self.inner.close()

    def _combine(self, rollout: Rollout) -> None:
        """Set the reward and the weights of ``rollout``."""
        config, terms = self.config, rollout.terms
        weights = gated(terms, rollout.weights, config.gates, config.gate_threshold)
        if config.combine == "worst":
            weights = worst(terms, weights)
        rollout.weights = weights
        rollout.reward = math.fsum(weight * terms[name] for name, weight in weights.items())
