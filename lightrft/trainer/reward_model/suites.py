"""Scores of published benchmarks of reward models, from the scores of responses.

The data source of a row names its benchmark and its subset, as readers of
``lightrft.datasets.benchmarks.reward_models`` write it: ``reward_bench_2/Factuality``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from lightrft.algorithms.reward_model.benchmarks import (
    RewardBench2Row,
    reward_bench,
    reward_bench_2,
)
from lightrft.algorithms.reward_model.quality import ScoredPrompt, judged_pairs, pair_accuracy
from lightrft.utils.errors import DataError

log = logging.getLogger(__name__)

Scores = dict[str, float]
"""Scores of a benchmark, by name."""


def suite_metrics(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    """Return the scores of each benchmark that ``prompts`` belong to, as ``eval/<name>/...``.

    A benchmark whose rows are incomplete has no scores, and the reason is logged.

    Args:
        prompts: The scored prompts.
        head: Head whose scores count.
    """
    rows: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        name, slash, _ = prompt.source.partition("/")
        if slash and name in SUITES:
            rows.setdefault(name, []).append(prompt)
    found: Scores = {}
    for name, own in rows.items():
        try:
            scores = SUITES[name](own, head)
        except DataError as error:
            log.warning("%s has no score: %s", name, error)
            continue
        found |= {f"eval/{name}/{part}": value for part, value in scores.items()}
    return found


def _reward_bench(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    subsets, chosen, rejected = [], [], []
    for prompt in prompts:
        right, wrong = _sides(prompt, head)
        subsets.append(_subset(prompt))
        chosen.append(right[0])
        rejected.append(wrong[0])
    found = reward_bench(subsets, chosen, rejected)
    return {"score": found.score, **found.sections}


def _reward_bench_2(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    rows = []
    for prompt in prompts:
        right, wrong = _sides(prompt, head)
        rows.append(RewardBench2Row(_subset(prompt), [*right, *wrong], prompt.id, len(right)))
    found = reward_bench_2(rows)
    return {"score": found.score, **found.subsets}


def _mean_of_subsets(prompts: Sequence[ScoredPrompt], head: str) -> Scores:
    """Return the accuracy over all pairs, and its mean over subsets."""
    of_subset: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        of_subset.setdefault(_subset(prompt), []).append(prompt)
    accuracies = []
    for own in (prompts, *of_subset.values()):
        pairs = judged_pairs(own, head)
        if not pairs:
            raise DataError(f"subset {_subset(own[0])} has no pair with finite scores")
        accuracies.append(pair_accuracy(pairs).mean)
    return {"score": accuracies[0], "mean_of_subsets": fmean(accuracies[1:])}


SUITES: Mapping[str, Callable[[Sequence[ScoredPrompt], str], Scores]] = {
    "reward_bench": _reward_bench,
    "reward_bench_2": _reward_bench_2,
    "vl_rewardbench": _mean_of_subsets,
    "multimodal_rewardbench": _mean_of_subsets,
}
"""Scorers of benchmarks, by the name of their reader."""


def _subset(prompt: ScoredPrompt) -> str:
    return prompt.source.partition("/")[2]


def _sides(prompt: ScoredPrompt, head: str) -> tuple[list[float], list[float]]:
    """Return the scores of the responses with the highest label, and those of the others."""
    labels = prompt.labels[head]
    highest = max(labels)
    right, wrong = [], []
    for score, label in zip(prompt.scores[head], labels):
        (right if label == highest else wrong).append(score)
    if not right or not wrong:
        raise DataError(f"row {prompt.id!r} lacks a right or a wrong response")
    return right, wrong
