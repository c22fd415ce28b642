"""Reward functions by rule, and the processes that reward functions run in."""

from lightrft.trainer.rewards import exact_match, format, length, mathematics, multiple_choice
from lightrft.trainer.rewards.registry import REWARDS, Reward, load_reward

__all__ = ["REWARDS", "Reward", "exact_match", "format", "length", "load_reward", "mathematics", "multiple_choice"]
