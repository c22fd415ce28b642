"""The table of losses of reward models, and the terms that several of them share.

``REWARD_LOSSES[name](data, **options) -> losses``. Losses are minimised. ``kind`` of a row tells
how many there are:

* ``pair``: one per pair of ``data.pairs()``
* ``tie``: one per pair, then one per tie of ``data.ties()``
* ``group``: one per group
* ``rating``: one per response of ``data.rated()``

``heads`` of a row names the kinds of heads that the loss fits. An ``ensemble`` head trains each
member by itself: a loss is called once for each member, and the losses are averaged.

Import ``REWARD_LOSSES`` from ``lightrft.algorithms.reward_model.losses``, which fills it.

Symbols in the formulas:

* ``r_w``, ``r_l``: scores of the better and of the worse response, ``d = r_w - r_l``
* ``r``, ``y``: score and rating of one response
* ``m``: margin of a pair, ``e``: ``label_smoothing``, ``s``: the logistic function
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.token_ops import require_column
from lightrft.utils.errors import DataError
from lightrft.utils.lazy_imports import Tensor
from lightrft.utils.registry import Registry

RewardLossKind = Literal["pair", "tie", "group", "rating"]
KINDS: tuple[str, ...] = get_args(RewardLossKind)
RewardLoss = Callable[..., Tensor]
REWARD_LOSSES: Registry[RewardLoss] = Registry("reward-model loss")

SIGNED = ("linear", "ensemble", "gaussian")
"""Kinds of heads whose scores may be negative."""


def pair_gaps(data: ScoredResponses) -> Tensor:
    """Return ``d``, the score of the better response less that of the worse one, ``[P]``."""
    better, worse = data.pairs()
    return data.scores[better] - data.scores[worse]


def tie_gaps(data: ScoredResponses) -> Tensor:
    """Return the difference of the scores of each tie, ``[T]``."""
    first, second = data.ties()
    return data.scores[first] - data.scores[second]


def ratings_of(
    data: ScoredResponses,
    loss: str,
    highest: float | None = None,
    way_out: str = "Scale the ratings, or set the size of the head",
) -> tuple[Tensor, Tensor]:
    """Return the responses with a rating: their indices ``[R]`` and their ratings ``[R]``.

    Args:
        data: The responses.
        loss: Name of the loss, for the message.
        highest: Largest rating that the loss allows; 0 is the smallest then. ``None`` allows all.
        way_out: How to mend a rating that is out of range, for the message.

    Raises:
        DataError: If a rating is out of range.
    """
    index = data.rated()
    if data.rating is None:
        return index, data.scores.new_zeros(0)
    rating = require_column(data.rating)[index].to(data.scores.dtype)
    if highest is not None:
        outside = (rating < 0) | (rating > highest)
        if bool(outside.any()):
            raise DataError(
                f"reward-model loss {loss}: a rating is {float(rating[outside][0]):g}; it must be "
                f"from 0 to {highest:g}. {way_out}"
            )
    return index, rating
