"""Collect the responses of a scorer, to score them together, and combine the terms of rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from lightrft.algorithms.reward_terms.combination import gated, worst
from lightrft.config.reward import RewardConfig
from lightrft.rewards.base import RewardScorer
from lightrft.roles import HasEventCounts
from lightrft.types import Batch, Rollout, Segments
from lightrft.utils.errors import ConfigError, did_you_mean


def counts_of(scorer: RewardScorer) -> dict[str, int]:
    """Return the events that ``scorer`` has counted since the last call; none if it counts none."""
    if not isinstance(scorer, HasEventCounts):
        return {}
    return {name: int(count) for name, count in scorer.take_counts().items()}


class WrappingScorer:
    """A scorer over another one, which answers for all but the results.

    Args:
        inner: Scores responses first.
    """

    def __init__(self, inner: RewardScorer) -> None:
        self.inner = inner

    def check_sources(self, sources: Iterable[str]) -> None:
        """See ``RewardScorer.check_sources``."""
        self.inner.check_sources(sources)

    def submit(self, rollout: Rollout) -> None:
        """See ``RewardScorer.submit``."""
        self.inner.submit(rollout)

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``. The counts are those of ``inner``."""
        return counts_of(self.inner)

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        self.inner.close()


class CollectingScorer(WrappingScorer):
    """A scorer that collects the responses of another scorer, and scores them together.

    Args:
        inner: Scores responses first. A response that it fails is not collected.
        budget: Number of tokens that are collected before they are scored. ``None`` waits for all
            responses.

    Attributes:
        events: Names of the events that are counted.
        counts: Number of events by name, since they were taken.
    """

    events: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: RewardScorer, budget: int | None) -> None:
        super().__init__(inner)
        self.budget = budget
        self.counts: Counter[str] = Counter(dict.fromkeys(self.events, 0))
        self._waiting: list[Rollout] = []
        self._tokens = 0

    def results(self, wait: bool) -> Iterator[Rollout]:
        """See ``RewardScorer.results``."""
        for rollout in self.inner.results(wait):
            # a response that a function could not score has no reward, whatever the models say
            if rollout.failed:
                yield rollout
                continue
            self._waiting.append(rollout)
            self._tokens += len(rollout)
            if self.budget is not None and self._tokens >= self.budget:
                yield from self._collected()
        if wait:
            yield from self._collected()

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``. The counts of ``inner`` are among them."""
        found, self.counts = self.counts, Counter(dict.fromkeys(self.events, 0))
        # Scorers by models of several kinds count some events by the same name.
        found.update(super().take_counts())
        return dict(found)

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Add terms to the rewards of ``rollouts``, or fail them."""
        raise NotImplementedError

    def _collected(self) -> Iterator[Rollout]:
        """Score all collected responses, and yield them."""
        rollouts, self._waiting, self._tokens = self._waiting, [], 0
        if rollouts:
            self.score(rollouts)
        yield from rollouts


def add_term(rollout: Rollout, name: str, weight: float, score: float) -> None:
    """Add a term to the reward of ``rollout``, unless it has failed.

    Args:
        rollout: The response.
        name: Name of the term.
        weight: Factor of the score.
        score: The score.
    """
    if rollout.failed:
        return
    rollout.terms[name] = score
    rollout.weights[name] = weight
    rollout.reward = (rollout.reward or 0.0) + weight * score


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """Collate ``rollouts`` to a batch in which responses to one prompt are a group."""
    prompts: dict[int, int] = {}
    prompt_of: list[int] = []
    distinct = []
    for rollout in rollouts:
        # by identity, since two rows of the data may have equal ids and different media
        key = id(rollout.prompt)
        if key not in prompts:
            prompts[key] = len(distinct)
            distinct.append(rollout.prompt)
        prompt_of.append(prompts[key])
    return Batch(
        Segments.of_prompts(distinct),
        Segments.of([rollout.token_ids for rollout in rollouts]),
        torch.tensor(prompt_of, dtype=torch.long),
    )


class CombiningScorer(WrappingScorer):
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
        super().__init__(inner)
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

    def results(self, wait: bool) -> Iterator[Rollout]:
        """See ``RewardScorer.results``."""
        for rollout in self.inner.results(wait):
            if not rollout.failed and rollout.reward is not None:
                self._combine(rollout)
            yield rollout

    def _combine(self, rollout: Rollout) -> None:
        """Set the reward and the weights of ``rollout``."""
        config, terms = self.config, rollout.terms
        weights = gated(terms, rollout.weights, config.gates, config.gate_threshold)
        if config.combine == "worst":
            weights = worst(terms, weights)
        rollout.weights = weights
        rollout.reward = math.fsum(weight * terms[name] for name, weight in weights.items())
