"""Reward a final answer that equals the label."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import reference_answer, visible_answer
from lightrft.rewards.sandbox.rollout_view import RolloutView

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@REWARDS.register("exact_match", needs={"label"}, kind="outcome")
def exact_match(
    rollout: RolloutView,
    *,
    ignore_case: bool = False,
    ignore_space: bool = True,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> float:
    r"""Return 1 if the final answer equals the label, or one of a list of labels, else 0.

    The final answer is the text after any thinking, or the content of its last ``<answer>`` tag or
    ``\boxed{}``.

    Args:
        ignore_case: Compare without case.
        ignore_space: Replace runs of white space by one space and trim the ends.
        ignore_punctuation: Remove ASCII punctuation.
        ignore_articles: Remove a, an and the (as in SQuAD, arXiv 1606.05250).

    Raises:
        ValueError: If the prompt has neither label nor reference, or a label is a table.
    """

    def normal(value: object) -> str:
        text = unicodedata.normalize("NFC", str(value))
        if ignore_case:
            text = text.casefold()
        if ignore_punctuation:
            text = text.translate(_PUNCTUATION)
        if ignore_articles:
            text = re.sub(r"\b(a|an|the)\b", " ", text, flags=re.IGNORECASE)
        return " ".join(text.split()) if ignore_space else text

    gold = reference_answer(rollout)
    labels = gold if isinstance(gold, list | tuple) else [gold]
    for label in labels:
        # No response spells them, so every reward would be 0.
        if isinstance(label, Mapping | list | tuple | bytes):
            raise ValueError(f"label {label!r} is {type(label).__name__}, not a text or a number")
    answer = visible_answer(rollout.turn)
    if answer is None:
        return 0.0
    return float(normal(answer) in {normal(label) for label in labels})
