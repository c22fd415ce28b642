"""Reward a response in the requested format."""

from __future__ import annotations

import re
from functools import lru_cache

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import RolloutView

_NO_TAG = r"(?:(?!</?think>|</?answer>)[\s\S])"
THINK_ANSWER = rf"\s*<think>{_NO_TAG}+</think>\s*<answer>{_NO_TAG}+</answer>\s*"
"""Thinking, then an answer, each tag once.

This is the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
"""


@REWARDS.register("format")
def format_reward(rollout: RolloutView, *, pattern: str = THINK_ANSWER) -> float:
    """Return 1 if the regular expression ``pattern`` matches the whole response, else 0."""
    return float(_compiled(pattern).fullmatch(rollout.text) is not None)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
