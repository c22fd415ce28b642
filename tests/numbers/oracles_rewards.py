"""Rewards, what follows a run of numbers, and coefficients that move, from their papers, as slow loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.numbers.oracles import Case
from tests.numbers.scalars import clip, deviation, mean

# Length


def cosine_length(
    length: int,
    max_length: int,
    correct: bool,
    right: tuple[float, float],
    wrong: tuple[float, float],
    cut: float,
) -> float:
    """``cut`` from ``max_length`` on; else r_L + (r_0 - r_L) (1 + cos(pi l / L)) / 2: r_0 at length 0, r_L at ``max_length``, as
    ``right`` = (r_0, r_L) or ``wrong``. Demystifying long chain-of-thought, arXiv 2502.03373.
    (The paper prints the arguments of its CosFn as eta_min = r_0, eta_max = r_L; its text and code mean this.)"""
    if length >= max_length:
        return cut
    start, end = right if correct else wrong
    return end + (start - end) * (1 + math.cos(math.pi * length / max_length)) / 2


def kimi_length(case: Case, correct: Sequence[bool]) -> list[float]:
    """lambda if correct, else min(0, lambda); lambda = 1/2 - (l - shortest) / (longest - shortest) inside the group; 0 where all are
    equally long. Lengths in sampled tokens. Kimi k1.5, arXiv 2501.12599, section 2.3.3."""
    out = [0.0] * len(case)
    for members in case.groups().values():
        sizes = [len(case.sampled(j)) for j in members]
        for i, size in zip(members, sizes, strict=True):
            if max(sizes) > min(sizes):
                lam = 0.5 - (size - min(sizes)) / (max(sizes) - min(sizes))
                out[i] = lam if correct[i] else min(0.0, lam)
    return out


# Running moments


def moments(batches: Sequence[Sequence[float]], unbiased: bool) -> tuple[float, float]:
    """Mean and std of all numbers of all batches, in whatever order they came; (0, 0) of none."""
    every = [x for batch in batches for x in batch]
    return (mean(every), deviation(every, unbiased)) if every else (0.0, 0.0)


def running_normalized(
    batches: Sequence[Sequence[float]], unbiased: bool, eps: float
) -> list[float]:
    """(R - mean) / (std + eps) of the last batch, over everything seen, the last batch included. Exactly 0 while all are equal."""
    centre, std = moments(batches, unbiased)
    return [0.0 if std == 0 else (r - centre) / (std + eps) for r in batches[-1]]


def running_scaled(batches: Sequence[Sequence[float]], unbiased: bool, eps: float) -> list[float]:
    """R / (std + eps): the sign of a reward stays. While all are equal there is no scale, and R stays as it is."""
    _, std = moments(batches, unbiased)
    return [r if std == 0 else r / (std + eps) for r in batches[-1]]


def normalized_terms(
    history: Sequence[Sequence[Sequence[float]]],
    weights: Sequence[float],
    unbiased: bool,
    eps: float,
) -> list[float]:
    """Each term over its own past, ``history[term][batch]``, then the weighted sum: a term of large numbers cannot drown another."""
    each = [running_normalized(batches, unbiased, eps) for batches in history]
    return [
        sum(w * term[i] for w, term in zip(weights, each, strict=True)) for i in range(len(each[0]))
    ]


def normalized_value_target(target: float, centre: float, std: float, eps: float) -> float:
    """What a critic on a normalised scale learns. PopArt, arXiv 1602.07714; MAPPO, arXiv 2103.01955."""
    return (target - centre) / (std + eps)


def denormalized_value(value: float, centre: float, std: float, eps: float) -> float:
    """What such a critic says, on the scale of returns."""
    return value * (std + eps) + centre


def ema(values: Sequence[float], decay: float, start: float) -> float:
    """m <- decay m + (1 - decay) x, from ``start``."""
    for x in values:
        start = decay * start + (1 - decay) * x
    return start


def unbiased_ema(values: Sequence[float], decay: float) -> float:
    """From 0, over 1 - decay^n: a weighted mean of what was seen. Adam, arXiv 1412.6980."""
    return ema(values, decay, 0.0) / (1 - decay ** len(values)) if values else 0.0


# Coefficients


def linear_kl(step: int, start: float, end: float, steps: int) -> float:
    """From ``start`` at step 0 to ``end`` at step ``steps``, and there it stays."""
    return start + (end - start) * min(step / steps, 1.0) if steps else end


def entropy_step(
    coef: float,
    entropy: float,
    target: float,
    delta: float,
    low: float = 0.0,
    high: float = math.inf,
) -> tuple[float, float]:
    """(the weight of the entropy now, the coefficient of the next step): the weight is ``coef`` while entropy <= target and 0 above;
    the coefficient grows by ``delta`` below the target, falls by it above. Skywork OR1, arXiv 2505.22312; the
    bounds are of its released settings."""
    moved = coef + delta if entropy < target else coef - delta if entropy > target else coef
    return (coef if entropy <= target else 0.0), clip(moved, low, high)
