"""Whether the answer is the label, letter for letter."""

from __future__ import annotations

import re
import string
import unicodedata

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import gold_of, visible_answer
from lightrft.rewards.sandbox.rollout_view import RolloutView

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@REWARDS.register("exact_match", needs={"label"})
def exact_match(
    rollout: RolloutView,
    *,
    ignore_case: bool = False,
    ignore_space: bool = True,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> float:
    """1 when the answer equals the label, or one of a list of labels, else 0.

    The answer is the text after any thinking, or what its last ``<answer>`` tag or ``\\boxed{}`` holds. ``ignore_space`` makes
    runs of white space one space and trims the ends; ``ignore_articles`` drops a, an and the (as in SQuAD, arXiv 1606.05250).
    Raises ``ValueError`` when the prompt has neither label nor reference.
    """

    def normal(value: object) -> str:
        text = unicodedata.normalize("NFC", str(value))
        text = text.casefold() if ignore_case else text
        text = text.translate(_PUNCTUATION) if ignore_punctuation else text
        text = re.sub(r"\b(a|an|the)\b", " ", text, flags=re.IGNORECASE) if ignore_articles else text
        return " ".join(text.split()) if ignore_space else text

    gold = gold_of(rollout)
    answer = visible_answer(rollout.text)
    if answer is None:
        return 0.0
    labels = gold if isinstance(gold, list | tuple) else [gold]
    return float(normal(answer) in {normal(label) for label in labels})
