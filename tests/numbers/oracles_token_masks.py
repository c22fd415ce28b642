"""Which tokens of a whole mini-batch a method looks at, as slow loops in float64.

A mask is a ``Mask``: true where the token is kept (or, for the covariance methods, where it is chosen), false wherever nothing
was sampled. Means, quantiles and shares are over the sampled tokens of the batch that the function is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.numbers.oracles import Case, Mask
from tests.numbers.scalars import Rows, mean, number

Place = tuple[int, int]


def empty_mask(case: Case) -> Mask:
    return [[False] * n for n in case.lengths]


def places(case: Case) -> list[Place]:
    """(response, position) of every sampled token."""
    return [(i, t) for i in range(len(case)) for t in case.sampled(i)]


def mask_of(case: Case, kept: Sequence[Place]) -> Mask:
    out = empty_mask(case)
    for i, t in kept:
        out[i][t] = True
    return out


def quantile(xs: Sequence[float], share: float) -> float:
    """Between the two order statistics around place share * (n - 1), in proportion: numpy's and torch's linear rule."""
    ordered = sorted(xs)
    at = share * (len(xs) - 1)
    below = math.floor(at)
    above = min(below + 1, len(xs) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


# The most uncertain tokens. Beyond the 80/20 rule, arXiv 2506.01939: entropy >= the threshold of the top rho


def among(case: Case, level: str, choose: Callable[[list[Place]], list[Place]]) -> Mask:
    """``choose`` on all sampled tokens together (``batch``, the paper), or on those of each response (``sequence``)."""
    if level == "batch":
        groups = [places(case)]
    else:
        groups = [[(i, t) for t in case.sampled(i)] for i in range(len(case))]
    return mask_of(case, [place for group in groups if group for place in choose(group)])


def top_entropy(case: Case, entropies: Rows, rho: float, level: str = "batch") -> Mask:
    """Entropy >= its (1 - rho) quantile, which is interpolated. Equal ones at the threshold are all kept."""

    def choose(group: list[Place]) -> list[Place]:
        threshold = quantile([entropies[i][t] for i, t in group], 1 - rho)
        return [(i, t) for i, t in group if entropies[i][t] >= threshold]

    return among(case, level, choose)


def top_entropy_by_count(case: Case, entropies: Rows, rho: float, level: str = "batch") -> Mask:
    """The variant that counts: the ceil(rho n) largest; of equal ones the earlier."""

    def choose(group: list[Place]) -> list[Place]:
        return sorted(group, key=lambda at: (-entropies[at[0]][at[1]], at))[
            : math.ceil(rho * len(group))
        ]

    return among(case, level, choose)


# Covariance of log-prob and advantage. The entropy mechanism of RL for reasoning models, arXiv 2505.22617


def covariances(case: Case, advantages: Rows) -> dict[Place, float]:
    """(A - mean A)(log pi - mean log pi) of each sampled token, log pi of the current policy."""
    at = places(case)
    if not at:
        return {}
    middle = (
        mean([advantages[i][t] for i, t in at]),
        mean([number(case.logprobs[i][t]) for i, t in at]),
    )
    return {
        (i, t): (advantages[i][t] - middle[0]) * (number(case.logprobs[i][t]) - middle[1])
        for i, t in at
    }


def held_by_clip(case: Case, advantages: Rows, low: float, high: float, i: int, t: int) -> bool:
    """Whether PPO's clip already takes the gradient of this token away."""
    ratio = math.exp(number(case.logprobs[i][t]) - case.old[i][t])
    return (advantages[i][t] > 0 and ratio > 1 + high) or (advantages[i][t] < 0 and ratio < 1 - low)


def clip_cov_eligible(
    case: Case, advantages: Rows, bounds: tuple[float, float], low: float, high: float
) -> Mask:
    """Tokens with a covariance strictly inside ``bounds`` that PPO's clip does not hold already."""
    found = covariances(case, advantages)
    inside = [at for at, cov in found.items() if bounds[0] < cov < bounds[1]]
    return mask_of(
        case, [(i, t) for i, t in inside if not held_by_clip(case, advantages, low, high, i, t)]
    )


def share_of(count: int, share: float, at_least_one: bool = True) -> int:
    """How many of ``count`` tokens a share is: floor(share * count), as in the paper; the released code takes at least one."""
    return min(count, max(int(at_least_one), math.floor(share * count)))


def kl_cov_chosen(case: Case, advantages: Rows, share: float, at_least_one: bool = True) -> Mask:
    """The ``share`` of sampled tokens with the largest covariance; of equal ones the earlier."""
    found = covariances(case, advantages)
    largest = sorted(found, key=lambda at: (-found[at], at))
    return mask_of(case, largest[: share_of(len(found), share, at_least_one)])


# Second moment


def m2po(case: Case, tau: float) -> Mask:
    """Without the tokens of the largest (log pi - log pi_behavior)^2, as few as make the mean of the rest <= tau.
    M2PO, arXiv 2510.01161. When a single token is left and is still above tau, it goes too. Of equal ones the later
    goes first."""
    kept = sorted(places(case), key=lambda at: (second_moment(case, at), at))
    while kept and mean([second_moment(case, at) for at in kept]) > tau:
        kept.pop()
    return mask_of(case, kept)


def second_moment(case: Case, at: Place) -> float:
    i, t = at
    return (number(case.logprobs[i][t]) - case.behavior[i][t]) ** 2
