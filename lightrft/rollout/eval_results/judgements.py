"""Metrics of judgements: verdicts that are missing, position bias, and agreement of both orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightrft.algorithms.reward_model.benchmarks import reward_bench
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from lightrft.rollout.eval_results.prompt_scores import Groups, Scores, correct
from lightrft.types import Rollout


def judgement_scores(groups: Groups, threshold: float) -> Scores:
    """Return the metrics of the judgements among ``groups``, with one value per question or pair.

    * ``unparsed``: fraction of judgements without a verdict, per question.
    * ``first_chosen``: fraction of verdicts for the first response, per question with verdicts.
    * ``consistency``: 1 if both orders have the same winner, per pair that is asked in both. Sample
      k of one order is compared with sample k of the other, and a missing verdict counts as 0.
    * ``both_right``: fraction of samples that are right in both orders, per such pair.

    Args:
        groups: The responses to each prompt.
        threshold: The reward from which on a response is correct.
    """
    scores: Scores = defaultdict(list)
    orders: dict[tuple[str, str], list[tuple[Sequence[Rollout], list[str | None]]]] = {}
    for group in groups:
        columns = group[0].prompt.columns
        if not isinstance(columns.get("judgement"), Mapping):
            continue
        form = VerdictForm.of(columns)
        verdicts = [read_verdict(rollout.text, form) for rollout in group]
        found = [verdict for verdict in verdicts if verdict is not None]
        scores["unparsed"].append(1 - len(found) / len(group))
        if not form.choices:
            continue
        firsts = [v == "A" or (isinstance(v, tuple) and v[0] == "A") for v in found]
        if firsts:
            scores["first_chosen"].append(sum(firsts) / len(firsts))
        winners = [None if v is None else winner(v, form) for v in verdicts]  # ty: ignore
        orders.setdefault((group[0].prompt.data_source, form.key), []).append((group, winners))
    for pair in orders.values():
        if len(pair) == 2:
            _compare(scores, pair[0], pair[1], threshold)
    return dict(scores)


def benchmark_metrics(groups: Groups, threshold: float) -> dict[str, float]:
    """Return the scores of RewardBench of a judge, as ``eval/reward_bench/...``.

    Each judgement counts as a row, so a pair that is asked in both orders counts in both. Sections
    weight their subsets as the benchmark does for scores of responses.

    Args:
        groups: The responses to each prompt.
        threshold: The reward from which on a response is correct.

    Raises:
        DataError: A subset is unknown.
    """
    subsets: list[str] = []
    hits: list[float] = []
    for group in groups:
        name, _, subset = group[0].prompt.data_source.partition("/")
        if name == "reward_bench" and isinstance(group[0].prompt.columns.get("judgement"), Mapping):
            subsets += [subset] * len(group)
            hits += [float(correct(rollout, threshold)) for rollout in group]
    if not subsets:
        return {}
    found = reward_bench(subsets, hits, [0.5] * len(hits))
    scores = {"score": found.score, **found.sections}
    return {f"eval/reward_bench/{name}": value for name, value in scores.items()}


def winner(verdict: str | Sequence[str], form: VerdictForm) -> str:
    """Return the verdict in terms of positions in the row, which both orders share."""
    places = [form.choices.index(letter) for letter in verdict]
    # A tie is none of the responses.
    names = [str(form.shown[k]) if k < len(form.shown) else "tie" for k in places]
    return ">".join(names)


def _compare(
    scores: Scores,
    one: tuple[Sequence[Rollout], list[str | None]],
    other: tuple[Sequence[Rollout], list[str | None]],
    threshold: float,
) -> None:
    """Add the metrics of one pair, from its two orders."""
    count = min(len(one[0]), len(other[0]))
    same = [a is not None and a == b for a, b in zip(one[1], other[1])]
    scores["consistency"].append(sum(same) / count)
    right = [correct(a, threshold) and correct(b, threshold) for a, b in zip(one[0], other[0])]
    scores["both_right"].append(sum(right) / count)
