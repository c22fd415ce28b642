"""The full result of ``lightrft eval``: metrics, intervals and a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lightrft.config.reward import RewardConfig
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.judgements import benchmark_metrics, judgement_scores
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
            return "no prompt has a response that can be right or wrong; see reward.success"
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
        threshold: Smallest value of the outcome term of a right response.
        reward: The settings ``reward``.
    """
    every = dict(metrics)
    success = Success(reward, threshold)
    intervals: dict[str, Estimate] = {}
    for prefix, members in by_prefix(groups).items():
        scores = {
            **pass_scores(members, success),
            **judgement_scores(members, success),
            **vote_scores(members, success),
        }
        found = estimates(prefix, scores)
        intervals |= found
        every |= error_metrics(found)
    every |= benchmark_metrics(groups, success)
    return EvalSummary(every, intervals)
