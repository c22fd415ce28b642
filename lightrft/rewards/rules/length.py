"""Rewards for how long an answer is, in tokens."""

from __future__ import annotations

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import RolloutView


@REWARDS.register("length")
def length(rollout: RolloutView, *, limit: int, buffer: int) -> float:
    """The soft over-long punishment of DAPO (arXiv 2503.14476, equation 13), from 0 to -1.

    0 up to ``limit - buffer`` tokens, then falling in a straight line to -1 at ``limit`` and beyond.
    Raises ``ValueError`` unless ``0 < buffer <= limit``.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer {buffer} must be above 0 and at most limit {limit}")
    over = len(rollout) - (limit - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


@REWARDS.register("length_target")
def length_target(rollout: RolloutView, *, target: int, tolerance: int = 0) -> float:
    """0 within ``tolerance`` tokens of ``target``, then minus the distance from there as a share of ``target``, down to -1.

    Raises ``ValueError`` unless ``target`` is above 0 and ``tolerance`` is not below 0.
    """
    if target <= 0 or tolerance < 0:
        raise ValueError(f"target {target} must be above 0 and tolerance {tolerance} not below 0")
    off = abs(len(rollout) - target) - tolerance
    return -min(max(off / target, 0.0), 1.0)
