"""Drop groups that are not worth training on: ``FILTERS[name](group, **options) -> reason``.

An empty reason keeps the group. A filter sees every scored response of a group, before a selection
reduces the group. Options that make no sense raise ``ConfigError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from lightrft.config.base import ComponentConfig
from lightrft.types import Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry

Group = Sequence[Rollout]
Filter = Callable[..., str]
FILTERS: Registry[Filter] = Registry("filter")


def pass_rate_of(group: Group, threshold: float) -> float:
    """Return the fraction of responses whose reward reaches ``threshold``; 0 for an empty group."""
    passed = 0
    for rollout in group:
        if rollout.reward is not None and rollout.reward >= threshold:
            passed += 1
    return passed / max(1, len(group))


@FILTERS.register(
    "zero_variance",
    formula="drop groups whose rewards are all equal",
    latex=r"\operatorname{std}(R)>0",
    paper="DAPO, arXiv 2503.14476, eq. 11",
)
def zero_variance(group: Group) -> str:
    """Drop groups of equal rewards, which have no group-relative gradient."""
    rewards = {r.reward for r in group}
    # 0 for a group without responses, which has nothing to learn either
    return "zero_variance" if len(rewards) <= 1 else ""


@FILTERS.register(
    "reward_bounds",
    formula="keep groups with low <= mean R <= high",
    latex=r"a\le\bar R\le b",
    paper="",
)
def reward_bounds(
    group: Group,
    *,
    low: float = float("-inf"),
    high: float = float("inf"),
) -> str:
    """Drop groups whose mean reward is outside ``[low, high]``.

    Args:
        low: Smallest mean reward that is kept.
        high: Largest mean reward that is kept.
    """
    _ordered("reward_bounds", low, high)
    total = sum(rollout.reward or 0.0 for rollout in group)
    mean = total / max(1, len(group))
    return "" if low <= mean <= high else "reward_bounds"


@FILTERS.register(
    "pass_rate",
    formula="keep groups with low <= fraction of responses with R >= threshold <= high",
    latex=r"a\le\tfrac1G\sum_i\mathbb 1[R_i\ge\tau]\le b",
    paper="balanced online filtering, arXiv 2504.03380",
)
def pass_rate(group: Group, *, low: float, high: float, threshold: float = 1.0) -> str:
    """Drop groups with too few or too many correct responses.

    Args:
        low: Smallest fraction of correct responses that is kept.
        high: Largest fraction of correct responses that is kept.
        threshold: Smallest reward of a correct response.

    Raises:
        ConfigError: If the bounds keep all groups or none.
    """
    _ordered("pass_rate", low, high)
    keeps_none = high < 0 or low > 1
    keeps_all = low <= 0 and high >= 1
    if keeps_none or keeps_all:
        raise ConfigError(
            f"filter pass_rate: low {low} and high {high} bound a share in [0, 1]; together they "
            "keep all or none"
        )
    rate = pass_rate_of(group, threshold)
    return "" if low <= rate <= high else "pass_rate"


@FILTERS.register(
    "perplexity",
    formula="keep groups with low <= mean_i exp(-mean_t logp_behavior) <= high, over sampled tokens",
    latex=r"a\le\tfrac1G\sum_i\exp\!\big(-\tfrac1{|y_i|}\sum_t\log\mu(y_{i,t})\big)\le b",
)
def perplexity(group: Group, *, high: float, low: float = 0.0) -> str:
    """Drop groups whose mean perplexity under the sampler is outside ``[low, high]``.

    Responses without a sampled token have no perplexity. A group of only such responses is kept.

    Args:
        high: Largest mean perplexity that is kept.
        low: Smallest mean perplexity that is kept.
    """
    _ordered("perplexity", low, high)
    perplexities = [_perplexity(rollout) for rollout in group]
    known = [value for value in perplexities if value is not None]
    if not known:
        return ""
    mean = sum(known) / len(known)
    return "" if low <= mean <= high else "perplexity"


@FILTERS.register(
    "repeated_answers",
    formula="drop groups with 1 - distinct responses / responses > limit",
    latex=r"1-|\{y_1,\dots,y_G\}|/G\le a",
)
def repeated_answers(
    group: Group,
    *,
    limit: float,
    by: Literal["tokens", "text"] = "tokens",
) -> str:
    """Drop groups in which too many responses repeat an earlier response of the group.

    Args:
        limit: Largest fraction of repeated responses that is kept, in ``[0, 1)``.
        by: Compare token ids, or the text without leading and trailing white space.
    """
    _share("repeated_answers", limit)
    if by not in ("tokens", "text"):
        raise ConfigError(f"filter repeated_answers: options.by is {by!r}; it is tokens or text")
    if not group:
        return ""
    distinct: set[object]
    if by == "tokens":
        distinct = {tuple(rollout.token_ids) for rollout in group}
    else:
        distinct = {rollout.text.strip() for rollout in group}
    repeated = 1 - len(distinct) / len(group)
    return "repeated_answers" if repeated > limit else ""


@FILTERS.register(
    "repeated_ngrams",
    formula="drop groups with mean_i (1 - distinct n-grams / n-grams of response i) > limit",
    latex=r"\tfrac1G\sum_i\big(1-|\operatorname{set}(\operatorname{ngrams}(y_i))|/|\operatorname{ngrams}(y_i)|\big)\le a",
    paper="seq-rep-n, arXiv 1908.04319",
)
def repeated_ngrams(group: Group, *, limit: float, n: int = 4) -> str:
    """Drop groups whose responses repeat their own n-grams too often.

    A response shorter than ``n`` tokens repeats nothing.

    Args:
        limit: Largest mean fraction of repeated n-grams that is kept, in ``[0, 1)``.
        n: Length of an n-gram in tokens.
    """
    _share("repeated_ngrams", limit)
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"filter repeated_ngrams: options.n is {n}; it counts tokens, 1 or more")
    if not group:
        return ""
    fractions = [_repetition(rollout.token_ids, n) for rollout in group]
    mean = sum(fractions) / len(fractions)
    return "repeated_ngrams" if mean > limit else ""


def drop_reason(group: Group, parts: Sequence[ComponentConfig], least: int) -> str:
    """Return the reason to drop a group, or an empty string to keep it.

    Args:
        group: The scored responses of one prompt.
        parts: The filters, applied in order; the first reason is returned.
        least: Smallest number of scored responses. A smaller group is ``too_few_scored``.
    """
    if len(group) < least:
        return "too_few_scored"
    for part in parts:
        reason = FILTERS[part.name](group, **part.options)
        if not isinstance(reason, str | None):
            raise ConfigError(
                f"filter {part.name} returned {reason!r}; return the reason to drop the group as "
                "text, or an empty text to keep it"
            )
        if reason:
            return reason
    return ""


def _perplexity(rollout: Rollout) -> float | None:
    """Return the perplexity of the sampled tokens, or None if there are none."""
    # tokens of an environment have no log-prob under the sampler
    own = [x for x, sampled in zip(rollout.logprobs, rollout.sampled) if sampled]
    if not own:
        return None
    mean = -sum(own) / len(own)
    # math.exp raises OverflowError past 709.
    return math.exp(min(700.0, mean))


def _repetition(tokens: Sequence[int], n: int) -> float:
    """Return the fraction of n-grams that occurred before."""
    count = len(tokens) - n + 1
    if count <= 0:
        return 0.0
    distinct = {tuple(tokens[i : i + n]) for i in range(count)}
    return 1 - len(distinct) / count


def _ordered(name: str, low: float, high: float) -> None:
    # `not <=` also rejects NaN.
    if not low <= high:
        raise ConfigError(
            f"filter {name}: options.low is {low}, above options.high, {high}; every group would "
            "be dropped"
        )


def _share(name: str, limit: float) -> None:
    if not 0 <= limit < 1:
        raise ConfigError(
            f"filter {name}: options.limit is {limit}; it is a share, from 0 to less than 1"
        )
