"""Rule-based reward functions, and the processes that run reward functions."""

from lightrft.rewards.registry import REWARDS, Reward, load_reward
from lightrft.rewards.rules import (
    exact_match,
    format,
    ifeval,
    judgement,
    length,
    math,
    multiple_choice,
)

__all__ = [
    "REWARDS",
    "Reward",
    "exact_match",
    "format",
    "ifeval",
    "judgement",
    "length",
    "load_reward",
    "math",
    "multiple_choice",
]
