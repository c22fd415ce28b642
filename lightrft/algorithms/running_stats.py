"""Compute running mean and deviation of the rewards of a run.

The result is exactly the same in any order of the numbers of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightrft.utils.lazy_imports import Tensor


@dataclass(frozen=True, slots=True)
class RunningStats:
    """Statistics of a set of numbers.

    Attributes:
        count: How many numbers.
        mean: Their mean.
        squares: Sum of their squared distances from the mean.
        lowest: The smallest number.
        highest: The largest number.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def including(self, x: Tensor) -> RunningStats:
        """Return the statistics with the numbers of ``x`` added.

        The sums are rounded once (``math.fsum``), so the order of the numbers does not matter.
        """
        # math.fsum works on Python numbers
        x = x.detach().double().flatten().cpu()
        if not len(x):
            return self
        lowest, highest = float(x.min()), float(x.max())
        # The mean of equal numbers is exact, so that their deviation is exactly 0.
        mean = lowest if lowest == highest else math.fsum(x.tolist()) / len(x)
        return self.merged(
            RunningStats(len(x), mean, math.fsum((x - mean).square().tolist()), lowest, highest)
        )

    def merged(self, other: RunningStats) -> RunningStats:
        """Merge two sets of statistics (Chan, Golub and LeVeque 1979)."""
        if not self.count or not other.count:
            return other if other.count else self
        count, gap = self.count + other.count, other.mean - self.mean
        return RunningStats(
            count,
            self.mean + gap * other.count / count,
            self.squares + other.squares + gap * gap * self.count * other.count / count,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
        )

    def deviation(self) -> float:
        """Return the standard deviation over ``count``; exactly 0 while all numbers are equal."""
        # by the bounds: rounding in ``merged`` may leave squares above 0 for equal numbers
        if self.lowest >= self.highest:
            return 0.0
        return math.sqrt(self.squares / self.count)

    def scale(self, eps: float) -> float:
        """Return deviation + eps; 1 while all numbers are equal, since they have no scale yet."""
        deviation = self.deviation()
        return deviation + eps if deviation > 0 else 1.0

    def standardised(self, x: Tensor, eps: float) -> Tensor:
        """Return ``(x - mean) / scale(eps)``."""
        return (x - self.mean) / self.scale(eps)

    def natural(self, x: Tensor, eps: float) -> Tensor:
        """Invert ``standardised``."""
        return x * self.scale(eps) + self.mean

    def scaled(self, x: Tensor, eps: float) -> Tensor:
        """Divide by the scale without a shift, so that signs do not change."""
        return x / self.scale(eps)


RUNNING: dict[str, Callable[[RunningStats, Tensor, float], Tensor]] = {
    "none": lambda seen, x, eps: x,
    "standard": RunningStats.standardised,
    "scale": RunningStats.scaled,
}
"""Running normalizations: ``RUNNING[mode](seen, x, eps)`` normalizes ``x``.

``seen`` are the statistics of all numbers, including ``x``.
"""
