"""The full result of ``lightrft eval``: metrics, intervals and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import fsum

from lightrft.config.reward import RewardConfig
from lightrft.rewards.ratios import RATIOS
from lightrft.rollout.eval_results.judgements import judgement_scores
from lightrft.rollout.eval_results.prompt_scores import (
    Groups,
    by_prefix,
    error_metrics,
    estimates,
    pass_scores,
)
from lightrft.rollout.eval_results.votes import vote_scores
from lightrft.utils.statistics.intervals import Estimate


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """The result of an evaluation.

    Attributes:
        metrics: Metrics by name.
        intervals: Means with their 95 % intervals, by the name of the metric.
    """

    metrics: dict[str, float]
    intervals: dict[str, Estimate]

    def intervals_as_json(self) -> dict[str, dict[str, float]]:
        """Return the intervals as plain data."""
        return {name: asdict(found) for name, found in self.intervals.items()}

    def table(self) -> str:
        """Return one line per metric: mean, interval and number of prompts."""
        if not self.intervals:
            return "no prompt has a response"
        width = max(len(name) for name in self.intervals)
        head = f"{'':{width}}    mean  95 % interval    prompts"
        rows = [
            f"{name:<{width}}  {found.mean:6.1%}  {found.low:6.1%} to {found.high:6.1%}  "
            f"{found.count:7}"
            for name, found in self.intervals.items()
        ]
        return "\n".join([head, *rows])


def summarize(
    metrics: Mapping[str, float], groups: Groups, threshold: float, reward: RewardConfig
) -> EvalSummary:
    """Add to the metrics of ``evaluate`` those that only ``lightrft eval`` reports.

    Args:
        metrics: The metrics of ``evaluate``.
        groups: The responses to each prompt.
        threshold: The reward from which on a response is correct.
        reward: The settings ``reward``.
    """
    every = dict(metrics)
    intervals: dict[str, Estimate] = {}
    for prefix, members in by_prefix(groups).items():
        scores = {
            **pass_scores(members, threshold),
            **judgement_scores(members, threshold),
            **vote_scores(members, threshold, reward),
        }
        found = estimates(prefix, scores)
        intervals |= found
        every |= error_metrics(found)
        every |= _term_metrics(prefix, members)
    return EvalSummary(every, intervals)


def _term_metrics(prefix: str, groups: Groups) -> dict[str, float]:
    """Return the mean over scored responses of each term, where a reward has several terms.

    A term that some of the responses do not have is left out: it is reported by data source. A
    ratio of ``RATIOS`` is the ratio of two sums.
    """
    scored = [rollout.terms for group in groups for rollout in group if not rollout.failed]
    values: dict[str, list[float]] = defaultdict(list)
    for terms in scored:
        for name, value in terms.items():
            values[name].append(value)
    values = {name: some for name, some in values.items() if len(some) == len(scored)}
    if len(values) < 2:
        return {}
    found = {f"{prefix}/terms/{name}": fsum(some) / len(some) for name, some in values.items()}
    for name, (part, whole) in RATIOS.items():
        parts, wholes = values.get(part, []), values.get(whole, [])
        if fsum(wholes):
            found[f"{prefix}/terms/{name}"] = fsum(parts) / fsum(wholes)
    return found
