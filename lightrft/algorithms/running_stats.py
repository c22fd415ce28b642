"""Mean and deviation of every number that a run has seen: exactly the same in whatever order a batch holds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightrft.utils.lazy_imports import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Of ``count`` numbers: their mean, the sum of their squared distances from it, the lowest and the highest."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def including(self, x: Tensor) -> Moments:
        """With the numbers of ``x`` too. Their sums are rounded once, so that their order cannot matter."""
        x = x.detach().double().flatten().cpu()
        if not len(x):
            return self
        lowest, highest = float(x.min()), float(x.max())
        mean = lowest if lowest == highest else math.fsum(x.tolist()) / len(x)
        return self.joined(Moments(len(x), mean, math.fsum((x - mean).square().tolist()), lowest, highest))

    def joined(self, other: Moments) -> Moments:
        """Of the numbers of both (Chan, Golub and LeVeque 1979)."""
        if not self.count or not other.count:
            return other if other.count else self
        count, gap = self.count + other.count, other.mean - self.mean
        return Moments(
            count,
            self.mean + gap * other.count / count,
            self.squares + other.squares + gap * gap * self.count * other.count / count,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
        )

    def deviation(self) -> float:
        """Over ``count``; exactly 0 while all numbers are equal."""
        return math.sqrt(self.squares / self.count) if self.lowest < self.highest else 0.0

    def scale(self, eps: float) -> float:
        """Deviation + eps; 1 while all numbers are equal, since they have no scale yet."""
        deviation = self.deviation()
        return deviation + eps if deviation > 0 else 1.0

    def standardised(self, x: Tensor, eps: float) -> Tensor:
        return (x - self.mean) / self.scale(eps)

    def natural(self, x: Tensor, eps: float) -> Tensor:
        """The inverse of ``standardised``."""
        return x * self.scale(eps) + self.mean

    def scaled(self, x: Tensor, eps: float) -> Tensor:
        """Without a shift, so that the sign stays."""
        return x / self.scale(eps)


def _as_they_are(seen: Moments, x: Tensor, eps: float) -> Tensor:
    return x


RUNNING: dict[str, Callable[[Moments, Tensor, float], Tensor]] = {
    "none": _as_they_are,
    "standard": Moments.standardised,
    "scale": Moments.scaled,
}
"""``RUNNING[mode](everything seen, x included, x, eps)`` -> x on that scale"""
