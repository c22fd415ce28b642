"""Metrics of judgements: verdicts that are missing, position bias, and agreement of both orders."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from lightrft.algorithms.reward_model.benchmarks import (
    RewardBench2Row,
    reward_bench_2,
    reward_bench_of_hits,
)
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.prompt_scores import Groups, Scores
from lightrft.types import Rollout
from lightrft.utils.errors import DataError

log = logging.getLogger(__name__)

NO_RATING = -1.0
"""Score of a response whose rating cannot be read, as in the package ``rewardbench``."""


def judgement_scores(groups: Groups, success: Success) -> Scores:
    """Return the metrics of the judgements among ``groups``, with one value per question or pair.

    * ``unparsed``: fraction of judgements without a verdict, per question.
    * ``first_chosen``: fraction of verdicts for the first response, per question with verdicts.
    * ``consistency``: 1 if both orders have the same winner, per pair that is asked in both. Sample
      k of one order is compared with sample k of the other, and a missing verdict counts as 0.
    * ``best_rated``: share of best responses among those with the highest rating, per row whose
      responses are rated one by one.
    * ``both_right``: fraction of samples that are right in both orders, per such pair.

    Args:
        groups: The responses to each prompt.
        success: The rule for right responses.
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
    for answers in rated_rows(groups).values():
        best = max(rating for _, rating in answers)
        winners = [form.right[0] for form, rating in answers if rating == best]
        if len({form.right[0] for form, _ in answers}) == 2:
            scores["best_rated"].append(sum(winners) / len(winners))
    for pair in orders.values():
        if len(pair) == 2:
            _compare(scores, pair[0], pair[1], success)
    return dict(scores)


def benchmark_metrics(groups: Groups, success: Success) -> dict[str, float]:
    """Return the scores of RewardBench 1 and 2 of a judge, as ``eval/reward_bench/...``.

    A benchmark whose rows are incomplete has no scores, and the reason is logged.

    Args:
        groups: The responses to each prompt.
        success: The rule for right responses.
    """
    own: dict[str, list[Sequence[Rollout]]] = {}
    for group in groups:
        name, slash, _ = group[0].prompt.data_source.partition("/")
        if slash and isinstance(group[0].prompt.columns.get("judgement"), Mapping):
            own.setdefault(name, []).append(group)
    found: dict[str, float] = {}
    for name, score in (("reward_bench", _reward_bench), ("reward_bench_2", _reward_bench_2)):
        try:
            scores = score(own[name], success) if name in own else {}
        except DataError as error:
            log.warning("%s has no score: %s", name, error)
            continue
        found |= {f"eval/{name}/{part}": value for part, value in scores.items()}
    return found


def _reward_bench(groups: Groups, success: Success) -> dict[str, float]:
    """Return the scores of RewardBench. Each judgement counts, so a pair counts in both orders.

    A judgement without a verdict counts one half, as in the package ``rewardbench``.
    """
    hits: dict[str, list[float]] = {}
    for group in groups:
        form = VerdictForm.of(group[0].prompt.columns)
        for rollout in group:
            is_read = rollout.failed or read_verdict(rollout.text, form) is not None
            hit = float(success.is_right(rollout)) if is_read else 0.5
            hits.setdefault(_subset(group), []).append(hit)
    found = reward_bench_of_hits(hits)
    return {"score": found.score, **found.sections}


def _reward_bench_2(groups: Groups, _success: Success) -> dict[str, float]:
    """Return the scores of RewardBench 2, from choices of the best response and from ratings.

    Each choice counts as a row. One without a verdict counts 1 / n, as in the package
    ``rewardbench``. The ratings of the responses of a row are their scores, -1 for none; of several
    samples, their mean.
    """
    rows: list[RewardBench2Row] = []
    for group in groups:
        form, subset = VerdictForm.of(group[0].prompt.columns), _subset(group)
        verdicts = [read_verdict(rollout.text, form) for rollout in group]
        if form.form == "best":
            for verdict in verdicts:
                scores = [float(letter == verdict) for letter in form.choices]
                rows.append(_row(subset, form.id, form.right, scores))
    for (source, _), answers in rated_rows(groups).items():
        right, scores = zip(*((form.right[0], rating) for form, rating in answers))
        rows.append(_row(source.partition("/")[2], answers[0][0].id, right, scores))
    if not rows:
        raise DataError("judgement.form must be best or rating for it")
    found = reward_bench_2(rows)
    return {"score": found.score, **found.subsets}


def _row(
    subset: str, row_id: str, right: Sequence[bool], scores: Sequence[float]
) -> RewardBench2Row:
    """Return the scores of the responses of a row, the right ones first."""
    order = sorted(range(len(scores)), key=lambda k: not right[k])
    return RewardBench2Row(subset, [scores[k] for k in order], row_id, sum(right))


def _subset(group: Sequence[Rollout]) -> str:
    return group[0].prompt.data_source.partition("/")[2]


def rated_rows(groups: Groups) -> dict[tuple[str, str], list[tuple[VerdictForm, float]]]:
    """Return the ratings of compared responses by data source and row, with the form of each.

    The rating is the mean over the samples of a question, and ``NO_RATING`` without a verdict.

    Args:
        groups: The responses to each prompt.
    """
    found: dict[tuple[str, str], list[tuple[VerdictForm, float]]] = {}
    for group in groups:
        prompt = group[0].prompt
        if not isinstance(prompt.columns.get("judgement"), Mapping):
            continue
        form = VerdictForm.of(prompt.columns)
        if form.form == "rating" and form.right:
            verdicts = [read_verdict(rollout.text, form) for rollout in group]
            numbers = [v for v in verdicts if isinstance(v, float)]
            rating = fmean(numbers) if numbers else NO_RATING
            found.setdefault((prompt.data_source, form.row), []).append((form, rating))
    return found


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
    success: Success,
) -> None:
    """Add the metrics of one pair, from its two orders."""
    count = min(len(one[0]), len(other[0]))
    same = [a is not None and a == b for a, b in zip(one[1], other[1])]
    scores["consistency"].append(sum(same) / count)
    right = [success.is_right(a) and success.is_right(b) for a, b in zip(one[0], other[0])]
    scores["both_right"].append(sum(right) / count)
