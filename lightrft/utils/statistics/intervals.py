"""Standard errors and confidence intervals of a mean over prompts.

A prompt is the unit. Several responses to one prompt are not independent, so their mean is one
value (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2).

Two evaluations of the same prompts are compared in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
EXPANDED_FROM = 200
"""Degrees of freedom from which the expansion of Student's quantile is exact to 1e-6."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error and confidence interval.

    Attributes:
        mean: The mean.
        stderr: Its standard error. NaN for a single value.
        low: Lower end of the interval.
        high: Upper end of the interval.
        count: Number of values.
    """

    mean: float
    stderr: float
    low: float
    high: float
    count: int


def estimate(
    values: Sequence[float],
    confidence: float = CONFIDENCE,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return the mean of one value per prompt, with its interval.

    The interval is Wilson's if each value is 0 or 1. Otherwise it is Student's, cut at ``bounds``.

    Args:
        values: One value per prompt, at least one.
        confidence: Coverage of the interval, between 0 and 1.
        bounds: The smallest and the largest possible mean.

    Raises:
        ValueError: If there is no value.
    """
    if not all(value in (0, 1) for value in values):
        return student(values, confidence, bounds)
    count = _checked_count(values)
    mean = math.fsum(values) / count
    low, high = wilson(mean, count, confidence)
    return Estimate(mean, standard_error(values), low, high, count)


def student(
    values: Sequence[float],
    confidence: float = CONFIDENCE,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return the mean of ``values`` with Student's interval, cut at ``bounds``.

    A single value has the interval ``bounds``.

    Args:
        values: One value per prompt, at least one.
        confidence: Coverage of the interval, between 0 and 1.
        bounds: The smallest and the largest possible mean.

    Raises:
        ValueError: If there is no value.
    """
    count = _checked_count(values)
    mean = math.fsum(values) / count
    error = standard_error(values)
    if count == 1:
        return Estimate(mean, error, *bounds, count)
    half = t_quantile(confidence, count - 1) * error
    return Estimate(mean, error, max(mean - half, bounds[0]), min(mean + half, bounds[1]), count)


def _checked_count(values: Sequence[float]) -> int:
    if not values:
        raise ValueError("an estimate needs at least one value")
    return len(values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of ``values``; NaN for a single value."""
    count = len(values)
    if count < 2:
        return math.nan
    mean = math.fsum(values) / count
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (count - 1) / count)


def wilson(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927).

    Args:
        share: The observed proportion.
        count: The number of trials.
        confidence: Coverage of the interval, between 0 and 1.
    """
    z = z_quantile(confidence)
    scale = 1 + z * z / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Exactly 0 and 1 there: rounding must not move an end past the proportion.
    low = 0.0 if share == 0 else (centre - half) / scale
    high = 1.0 if share == 1 else (centre + half) / scale
    return low, high


def z_quantile(confidence: float) -> float:
    """Return the half-width, in standard errors, of a normal interval."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@lru_cache(maxsize=256)
def t_quantile(confidence: float, freedom: int) -> float:
    """Return the half-width, in standard errors, of Student's interval.

    Args:
        confidence: Coverage of the interval, between 0 and 1.
        freedom: Degrees of freedom, at least 1.
    """
    z = z_quantile(confidence)
    if freedom >= EXPANDED_FROM:
        # Abramowitz and Stegun, 26.7.5.
        first = (z**3 + z) / (4 * freedom)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        return z + first + second + third
    low, high = 0.0, 2 * z
    while _t_coverage(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if _t_coverage(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high


def _t_coverage(t: float, freedom: int) -> float:
    """Return P(|T| <= t) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    if freedom == 1:
        return 2 * angle / math.pi
    term = cosine if is_odd else 1.0
    series = term
    for n in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        series += term
    return 2 / math.pi * (angle + sine * series) if is_odd else sine * series


POWER = 0.8
"""Probability with which a difference of the size of ``minimum_effect`` is detected."""
MOST_STEPS = 10**9
"""Largest number of additions of an exact test: about two seconds."""


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the mean of ``second - first`` over prompts, with its interval.

    The interval is that of Agresti and Min (2005, Statistics in Medicine 24) if each value is 0 or
    1: half a prompt is added to each cell of the table of agreement. Otherwise it is Student's
    interval of the differences (arXiv 2411.00640, section 4.2), cut at -1 and 1.

    Args:
        first: One value from 0 to 1 per prompt.
        second: One value from 0 to 1 per prompt, in the same order.
        confidence: Coverage of the interval, between 0 and 1.

    Raises:
        ValueError: If there is no value, or the lengths differ.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    if not all(value in (0, 1) for value in (*first, *second)):
        return student(differences, confidence, (-1.0, 1.0))
    if not differences:
        raise ValueError("a comparison needs at least one prompt")
    count = len(differences)
    mean = sum(differences) / count
    centre = sum(differences) / (count + 2)
    spread = (sum(d * d for d in differences) + 1) / (count + 2) - centre**2
    error = math.sqrt(spread / (count + 2))
    half = z_quantile(confidence) * error
    return Estimate(mean, error, max(centre - half, -1.0), min(centre + half, 1.0), count)


def sign_flip_test(differences: Sequence[int]) -> float:
    """Return the exact two-sided p-value of the sum of ``differences`` under random signs.

    Without a difference between the models, each difference has either sign with probability 1/2.
    For differences of -1, 0 and 1 this is McNemar's exact test (McNemar 1947): the two-sided
    binomial test of the discordant pairs. Where the exact sum would take more than ``MOST_STEPS``
    additions, a normal distribution with the variance of the sum replaces it.

    Args:
        differences: One whole number per prompt: the difference in correct responses, in units
            that are the same for all prompts.
    """
    sizes = [abs(d) for d in differences if d]
    reached = abs(sum(differences))
    total = sum(sizes)
    if reached == 0:
        return 1.0
    if len(sizes) * total > MOST_STEPS:
        # Sums are two common divisors apart, and half of that is the correction for continuity.
        distance = reached - math.gcd(*sizes)
        return math.erfc(distance / math.sqrt(2 * sum(size * size for size in sizes)))
    # chances[s + total] is the probability that the signed sum is s.
    chances = np.ones(1)
    for size in sizes:
        grown = np.zeros(len(chances) + 2 * size)
        grown[: len(chances)] += chances / 2
        grown[2 * size :] += chances / 2
        chances = grown
    return float(min(1.0, chances[: total - reached + 1].sum() + chances[total + reached :].sum()))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values adjusted for their number (Holm 1979), by the same names."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def minimum_effect(error: float, confidence: float = CONFIDENCE, power: float = POWER) -> float:
    """Return the smallest true difference that a comparison finds with probability ``power``.

    It is ``(z_confidence + z_power) * error`` (arXiv 2411.00640, section 5).

    Args:
        error: Standard error of the difference.
        confidence: Coverage of the interval, between 0 and 1.
        power: Probability of finding the difference, between 0 and 1.
    """
    return (z_quantile(confidence) + z_quantile(2 * power - 1)) * error
