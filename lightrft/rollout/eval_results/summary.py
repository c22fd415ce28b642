"""The full result of ``lightrft eval``: metrics, majority votes, intervals and a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from lightrft.config.reward import RewardConfig
from lightrft.rewards.rules.answers import answer_finder
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.judgements import benchmark_metrics, judgement_scores
from lightrft.rollout.eval_results.prompt_scores import (
    Groups,
    Scores,
    by_prefix,
    error_metrics,
    estimates,
    pass_scores,
)
from lightrft.types import Rollout
from lightrft.utils.statistics.intervals import Estimate
from lightrft.utils.statistics.repeated_samples import maj_at_k, powers_of_two


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


FindAnswer = Callable[[str], str | None]
"""Return the answer in a response, in a form that equal answers share; None if it has none."""


def finder_of(success: Success, data_source: str) -> FindAnswer | None:
    """Return the function that finds the answer in a response to a prompt of ``data_source``.

    It belongs to the outcome term, else to the first reward term that compares an answer. None if
    no term does.
    """
    terms = success.reward.terms_of(data_source)
    outcome = success.term(data_source)
    for term in sorted(terms, key=lambda term: term.label != outcome):
        finder = answer_finder(term.function, term.options)
        if finder is not None:
            return finder
    return None


def vote_scores(groups: Groups, success: Success) -> Scores:
    """Return ``maj@k`` and ``no_answer`` of each prompt.

    ``no_answer`` is the share of responses without an answer. The result is empty if the reward of
    some prompt compares no answer.

    Args:
        groups: The responses to each prompt.
        success: The rule for right responses.
    """
    finders: dict[str, FindAnswer | None] = {}
    scores: Scores = defaultdict(list)
    for group in groups:
        source = group[0].prompt.data_source
        if source not in finders:
            finders[source] = finder_of(success, source)
        finder = finders[source]
        if finder is None:
            return {}
        answers = [finder(rollout.text) for rollout in group]
        scores["no_answer"].append(sum(answer is None for answer in answers) / len(group))
        right, wrong, blank = _votes(group, answers, success)
        for k in powers_of_two(len(group))[1:]:
            scores[f"maj@{k}"].append(maj_at_k(right, wrong, blank, k))
    return dict(scores)


def _votes(
    group: Sequence[Rollout], answers: Sequence[str | None], success: Success
) -> tuple[int, list[int], int]:
    """Return the numbers of correct responses, of each wrong answer, and of those without one."""
    right = blank = 0
    wrong: Counter[str] = Counter()
    for rollout, answer in zip(group, answers, strict=True):
        if success.is_right(rollout):
            right += 1
        elif answer is None:
            blank += 1
        else:
            wrong[answer] += 1
    return right, list(wrong.values()), blank
