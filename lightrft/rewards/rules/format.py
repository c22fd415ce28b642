"""Reward a response in the requested format."""

from __future__ import annotations

import re
from functools import lru_cache

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import RolloutView

_NO_TAG = r"(?:(?!</?think>|</?answer>)[\s\S])"
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z|<answer>\s*\Z")
"""A tag at the end of a prompt, which the response continues."""
THINK_ANSWER = rf"\s*<think>{_NO_TAG}+</think>\s*<answer>{_NO_TAG}+</answer>\s*"
"""Thinking, then an answer, each tag once.

This is the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
"""


@REWARDS.register("format", kind="measure")
def format_reward(rollout: RolloutView, *, pattern: str = THINK_ANSWER) -> float:
    """Return 1 if the regular expression ``pattern`` matches the whole response, else 0.

    The prompt may end with the beginning of the response, or with its first tag, which a chat
    template writes. The default pattern is then matched with it. Your own pattern may match with or
    without it.
    """
    opened = _OPENED.search(rollout.prompt.text)
    begun = rollout.prompt.begun or (opened.group() if opened else "")
    texts = [begun + rollout.text]
    if begun and pattern != THINK_ANSWER:
        texts.append(rollout.text)
    return float(any(_compiled(pattern).fullmatch(text) for text in texts))


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
