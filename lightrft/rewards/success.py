"""Decide which responses are right: by one term of the reward, never by the sum of its terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.rewards import REWARDS
from lightrft.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lightrft.types import Rollout

OUTCOME = "outcome"
"""Kind of a built-in reward that says if a response is right. ``measure`` never says it."""
RANKS = {OUTCOME: 0, "": 1}
"""Kinds of rewards that may say if a response is right, the surest first. A user's function has the
kind ``""``. Scores of models and of judges say how good a response is, not if it is right."""

DEFAULT_THRESHOLD = 1.0
GIVEN = RewardConfig()
"""Settings without rewards: responses come with a reward that something else gives."""


@dataclass(frozen=True, slots=True)
class Success:
    """The rule for right responses: the outcome term of their data source reaches a threshold.

    The outcome term is the term of the source that ``reward.success`` names. Without one it is the
    only term that says right or wrong. Where no reward is configured, it is the reward itself.

    Attributes:
        reward: The settings ``reward``.
        threshold: Smallest value of a right response. The weight of the term does not count.
        costs: Names of the costs of ``algorithm.lagrangian``. A cost never says that a response is
            right.
    """

    reward: RewardConfig = GIVEN
    threshold: float = DEFAULT_THRESHOLD
    costs: frozenset[str] = frozenset()
    _names: dict[str, str | None] = field(default_factory=dict, init=False, repr=False)

    def term(self, source: str) -> str | None:
        """Return the name of the outcome term of a data source, or ``None`` if it has none.

        Raises:
            ConfigError: If several terms may be the outcome.
        """
        if source not in self._names:
            self._names[source] = _outcome_term(self.reward, source, self.costs)
        return self._names[source]

    def judges(self, source: str) -> bool:
        """Return whether responses of a data source are right or wrong."""
        return not self.reward.scores or self.term(source) is not None

    def outcome(
        self, source: str, reward: float | None, terms: Mapping[str, float]
    ) -> float | None:
        """Return the outcome of a response, or ``None`` if it has none.

        Args:
            source: Its data source.
            reward: Its reward.
            terms: The terms of its reward by name.
        """
        if not self.reward.scores:
            return reward
        name = self.term(source)
        return None if name is None else terms.get(name)

    def outcome_of(self, rollout: Rollout) -> float | None:
        """Return the outcome of a rollout, or ``None`` if it has none."""
        return self.outcome(rollout.prompt.data_source, rollout.reward, rollout.terms)

    def is_right(self, rollout: Rollout) -> bool:
        """Return whether a response is right. A response that failed to be scored is not."""
        value = self.outcome_of(rollout)
        return not rollout.failed and value is not None and value >= self.threshold

    def check(self, rollout: Rollout) -> None:
        """Mark a scored response as failed if its terms lack the outcome."""
        name = self.term(rollout.prompt.data_source) if self.reward.scores else None
        if name is not None and not rollout.failed and name not in rollout.terms:
            given = ", ".join(map(repr, rollout.terms)) or "none"
            rollout.failed = (
                f"its terms lack the outcome {name!r} of reward.success; it has {given}"
            )

    def outcome_values(self, outcomes: Iterable[tuple[str, float]]) -> int:
        """Return the number of values that an outcome has on one side of the threshold, or 0.

        A term with several values on one side is a score. A term that ``reward.success`` names, or
        a threshold that is set, declares what is right, so only functions without either count.

        Args:
            outcomes: Data sources, each with the outcome of a scored response.
        """
        sides: dict[tuple[str, bool], set[float]] = {}
        for source, value in outcomes:
            if self._is_assumed(source):
                sides.setdefault((source, value >= self.threshold), set()).add(value)
        return max(map(len, sides.values()), default=0)

    def _is_assumed(self, source: str) -> bool:
        is_set = self.threshold != DEFAULT_THRESHOLD or self.term(source) in self.reward.success
        return not is_set and self._kind(source) == ""

    def _kind(self, source: str) -> str | None:
        """Return the kind of the outcome of a data source, or ``None`` if it is no function."""
        name = self.term(source)
        terms = self.reward.terms_of(source)
        return next((_kind(term) for term in terms if term.label == name), None)

    def problems(self) -> Iterator[str]:
        """Yield problems of ``reward.success``, and of data sources whose outcome is unclear."""
        for name in self.reward.success:
            if name in self.costs:
                yield (
                    f"reward.success = {name!r}: it is a cost of algorithm.lagrangian, and a high "
                    "cost does not make a response right; name another term"
                )
                return
        if problem := unknown_success(self.reward, self.reward.term_names()):
            yield problem
            return
        for source in self.sources():
            try:
                kind = self._kind(source)
            except ConfigError as error:
                yield str(error)
                continue
            if kind == OUTCOME and not 0 < self.threshold <= 1:
                share = "every" if self.threshold <= 0 else "no"
                yield (
                    f"eval.threshold = {self.threshold:g}: {self.term(source)!r} is from 0 to 1, so "
                    f"{share} response would be right; set it above 0 and at most to 1"
                )

    def sources(self) -> list[str]:
        """Return the data sources with terms of their own, and "" for all others."""
        others = [""] if self.reward.terms or not self.reward.per_source else []
        return [*others, *self.reward.per_source]


def unknown_success(reward: RewardConfig, known: Set[str] | None) -> str:
    """Return the problem if ``reward.success`` names none of the terms ``known``, or "".

    Args:
        reward: The settings ``reward``.
        known: The names of all terms. ``None`` where they are not known yet.
    """
    if known is None:
        return ""
    for name in reward.success:
        if not _names(name, known):
            return (
                f"reward.success = {name!r}: there is no such term{did_you_mean(name, known)}; "
                f"the terms: {', '.join(sorted(known))}"
            )
    return ""


def _outcome_term(reward: RewardConfig, source: str, costs: frozenset[str]) -> str | None:
    """Return the outcome term of a data source. Raise ``ConfigError`` if it is unclear."""
    terms = reward.terms_of(source)
    own = {term.label for term in terms} | {judge.name for judge in reward.judges}
    models = [m.label for m in reward.models if not m.sources or source in m.sources]
    own |= {label for label in models if label is not None}
    where = f"reward.per_source.{source}" if reward.per_source.get(source) else "reward.terms"
    chosen = [name for name in reward.success if _names(name, own)]
    if not chosen and None in models:
        # The name of a head is known once its model is loaded.
        known = reward.term_names() or set()
        chosen = [name for name in reward.success if not _names(name, known)]
    if len(chosen) > 1:
        raise ConfigError(
            f"reward.success = {list(reward.success)}: {' and '.join(map(repr, chosen))} are both "
            f"terms of {where}; name one of them"
        )
    if chosen:
        return chosen[0]
    kinds = {
        term.label: _kind(term)
        for term in terms
        if term.label not in costs and not _is_penalty(term)
    }
    ranked = [(RANKS[kind], label) for label, kind in kinds.items() if kind in RANKS]
    best = [label for rank, label in ranked if rank == min(ranked)[0]]
    if len(best) > 1:
        raise ConfigError(
            f"{where} has {len(best)} terms that may say if a response is right: "
            f"{', '.join(best)}. Accuracy is the share of right responses; set reward.success to "
            f"the term that says it, e.g. reward.success={best[0]}"
        )
    return best[0] if best else None


def _kind(term: RewardTerm) -> str:
    return REWARDS.about(term.function).kind if term.function in REWARDS else ""


def _is_penalty(term: RewardTerm) -> bool:
    """Return whether a high value of a user's function makes a response worse."""
    return term.weight < 0 and not _kind(term)


def _names(name: str, terms: Set[str]) -> bool:
    """Return whether ``name`` is one of ``terms``, or ``term/value`` of several named values."""
    return name in terms or any(name.startswith(f"{term}/") for term in terms)
