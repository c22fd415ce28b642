"""Reward the length of a response, in tokens."""

from __future__ import annotations

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import RolloutView


@REWARDS.register("length", kind="measure")
def length(rollout: RolloutView, *, limit: int, buffer: int) -> float:
    """Return the soft over-long punishment of DAPO, from 0 to -1 (arXiv 2503.14476, eq. 13).

    It is 0 up to ``limit - buffer`` tokens, then falls linearly to -1 at ``limit`` and stays there.

    Args:
        limit: Length in tokens at which the reward reaches -1.
        buffer: Length of the falling range, in tokens.

    Raises:
        ValueError: Unless ``0 < buffer <= limit``.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer {buffer} must be above 0 and at most limit {limit}")
    over = len(rollout) - (limit - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


@REWARDS.register("length_target", kind="measure")
def length_target(rollout: RolloutView, *, target: int, tolerance: int = 0) -> float:
    """Return the negative distance from a target length, from 0 to -1.

    It is 0 within ``tolerance`` tokens of ``target``. Beyond, it is minus the further distance as a
    fraction of ``target``.

    Args:
        target: Length in tokens.
        tolerance: Distance from ``target`` without penalty, in tokens.

    Raises:
        ValueError: Unless ``target`` is positive and ``tolerance`` is not negative.
    """
    if target <= 0 or tolerance < 0:
        raise ValueError(f"target {target} must be above 0 and tolerance {tolerance} not below 0")
    off = abs(len(rollout) - target) - tolerance
    return -min(max(off / target, 0.0), 1.0)
