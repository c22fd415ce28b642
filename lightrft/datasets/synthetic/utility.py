"""Texts with a known utility, compared by noisy judges.

A judge prefers a text with the probability of Bradley-Terry, so that the best possible accuracy on
pairs is known.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

PROMPT = "Write:"
"""Prompt of all rows."""
WEIGHTS = dict(zip("abcdefgh", (1.2, -0.9, 0.6, -0.5, 0.3, -0.2, 0.9, -1.4)))
"""Utility of each letter."""


def utility(text: str, curvature: float = 0.0) -> float:
    """Return ``sum_k w_k c_k - curvature c_k^2`` over the counts ``c_k`` of letters.

    Args:
        text: the text. Other characters count nothing.
        curvature: positive values make many equal letters worse.
    """
    counts = [(weight, text.count(letter)) for letter, weight in WEIGHTS.items()]
    return sum(weight * count - curvature * count**2 for weight, count in counts)


def texts(count: int = 1000, seed: int = 0, length: int = 8) -> Iterator[dict[str, str]]:
    """Yield rows with a random text as ``response``.

    Args:
        count: number of rows.
        seed: seed of the texts.
        length: letters of a text.
    """
    chance = random.Random(f"texts {seed}")
    for _ in range(count):
        yield {"prompt": PROMPT, "response": _text(chance, length)}


def pairs(
    count: int = 1000, seed: int = 0, length: int = 8, curvature: float = 0.0, scale: float = 1.0
) -> Iterator[dict[str, str]]:
    """Yield rows of a preferred and another random text: ``chosen`` and ``rejected``.

    The first text is preferred with probability ``sigmoid(scale (u_1 - u_2))`` (Bradley-Terry).

    Args:
        count: number of rows.
        seed: seed of the texts and of the judges.
        length: letters of a text.
        curvature: see ``utility``.
        scale: factor of the utility. A small one makes judges noisy.
    """
    chance = random.Random(f"pairs {seed}")
    made = 0
    while made < count:
        one, other = _text(chance, length), _text(chance, length)
        gap = scale * (utility(one, curvature) - utility(other, curvature))
        prefers_one = chance.random() < _sigmoid(gap)
        if one == other:  # nothing to compare
            continue
        made += 1
        better, worse = (one, other) if prefers_one else (other, one)
        yield {"prompt": PROMPT, "chosen": better, "rejected": worse}


def bayes_probability(row: Mapping[str, str], curvature: float = 0.0, scale: float = 1.0) -> float:
    """Return the probability that the utility itself orders a pair as its judge did.

    It is ``1 - sigmoid(-|u|)`` for a gap ``u`` of the utility. No model has a higher accuracy.

    Args:
        row: a row of ``pairs``.
        curvature: see ``utility``.
        scale: see ``pairs``.
    """
    gap = utility(row["chosen"], curvature) - utility(row["rejected"], curvature)
    return 1 - _sigmoid(-abs(scale * gap))


def _text(chance: random.Random, length: int) -> str:
    return "".join(chance.choices("".join(WEIGHTS), k=length))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
