"""Whether an answer has the form that was asked for."""

from __future__ import annotations

import re
from functools import lru_cache

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import RolloutView

_NO_TAG = r"(?:(?!</?think>|</?answer>)[\s\S])"
THINK_ANSWER = rf"\s*<think>{_NO_TAG}+</think>\s*<answer>{_NO_TAG}+</answer>\s*"
"""Thinking, then an answer, each tag once (the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2)."""


@REWARDS.register("format")
def format_reward(rollout: RolloutView, *, pattern: str = THINK_ANSWER) -> float:
    """1 when the regular expression ``pattern`` matches the whole answer, else 0."""
    return float(_compiled(pattern).fullmatch(rollout.text) is not None)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
