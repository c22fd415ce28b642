"""Scores of each prompt of an eval set, and their means with intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum

from lightrft.rewards.ratios import RATIOS
from lightrft.rewards.success import Success
from lightrft.types import Rollout
from lightrft.utils.statistics.intervals import Estimate, estimate
from lightrft.utils.statistics.repeated_samples import pass_at_k, pass_hat_k, powers_of_two

Groups = Sequence[Sequence[Rollout]]
"""The responses to each prompt."""
Scores = dict[str, list[float]]
"""One value per prompt, from 0 to 1, by metric."""


def by_prefix(groups: Groups) -> dict[str, list[Sequence[Rollout]]]:
    """Return all groups under ``eval``, and those of each of several sources under its name."""
    by_source: dict[str, list[Sequence[Rollout]]] = defaultdict(list)
    for group in groups:
        by_source[group[0].prompt.data_source].append(group)
    if not groups:
        return {}
    found = {"eval": list(groups)}
    if len(by_source) > 1:
        for source, members in by_source.items():
            found[f"eval/{source or 'unnamed'}"] = members
    return found


def pass_scores(groups: Groups, success: Success) -> Scores:
    """Return ``accuracy`` and, with several responses, ``pass@k`` and ``pass^k`` of each prompt.

    k is 2, 4, 8, ... up to the number of responses. A response that failed to be scored is wrong.
    Prompts whose data source has no outcome term are left out.
    """
    scores: Scores = defaultdict(list)
    for group in groups:
        if not success.judges(group[0].prompt.data_source):
            continue
        samples = len(group)
        right = sum(map(success.is_right, group))
        scores["accuracy"].append(right / samples)
        for k in powers_of_two(samples)[1:]:
            scores[f"pass@{k}"].append(pass_at_k(samples, right, k))
            scores[f"pass^{k}"].append(pass_hat_k(samples, right, k))
    return dict(scores)


def estimates(prefix: str, scores: Scores) -> dict[str, Estimate]:
    """Return the mean of each metric with its interval, under ``prefix/metric``."""
    bounds = (0.0, 1.0)
    return {f"{prefix}/{name}": estimate(values, bounds=bounds) for name, values in scores.items()}


def error_metrics(found: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the standard error and the interval of each accuracy, and the mean of all else.

    A standard error that is unknown, as for a single prompt, is left out.
    """
    values: dict[str, float] = {}
    for name, result in found.items():
        if not name.endswith("/accuracy"):
            values[name] = result.mean
            continue
        if math.isfinite(result.stderr):
            values[f"{name}_stderr"] = result.stderr
        values[f"{name}_low"] = result.low
        values[f"{name}_high"] = result.high
    return values


def term_metrics(prefix: str, groups: Groups) -> dict[str, float]:
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
