"""Scores of each prompt of an eval set, their means with intervals, and the conditions of both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.rewards.success import Success
from lightrft.types import Rollout
from lightrft.utils.prompt_digest import prompt_digest
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


RATIOS = {
    "ifeval/instruction_strict": ("ifeval/followed_strict", "ifeval/instructions"),
    "ifeval/instruction_loose": ("ifeval/followed_loose", "ifeval/instructions"),
}
"""Name of a ratio to the reward terms of its numerator and denominator."""


def eval_conditions(
    groups: Groups, config: EvalConfig, reward: RewardConfig, seed: int
) -> dict[str, Any]:
    """Return what determines the numbers of an evaluation besides the model, as plain data.

    It is the generation, the text around each prompt, the rewards, and a digest of the prompts.

    Args:
        groups: The responses to each prompt.
        config: The settings ``eval``.
        reward: The settings ``reward``.
        seed: The setting ``run.seed``.
    """
    data = config.data
    terms = {"": reward.terms, **reward.per_source}
    if reward.models:
        terms["models"] = reward.models
    if reward.judges:
        terms["judges"] = reward.judges
    success = Success(reward)
    return {
        "samples": config.samples,
        "threshold": config.threshold,
        "success": {source: success.term(source) for source in success.sources()},
        "seed": seed,
        "sampling": config.sampling.model_dump(mode="json"),
        "template": data.template,
        "system": data.system,
        "apply_chat_template": data.apply_chat_template,
        "chat_template_options": dict(data.chat_template_options),
        "rewards": {
            source: [term.model_dump(mode="json", exclude_defaults=True) for term in some]
            for source, some in terms.items()
            if some
        },
        "prompts": len(groups),
        "prompts_digest": prompt_digest(group[0].prompt.as_json() for group in groups),
    }
