"""Convert the result of a reward function to named numbers, or to the reason why it is invalid."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import SupportsFloat, TypeGuard

VALUE = ""
"""Key of the reward itself in the result of ``terms_of``. Other terms are only logged."""

REWARD_KEYS = ("reward", "score")
"""Keys of a dict that name its reward, the first one present."""

UNGRADED = "ungraded"
"""Key of a term that is 1 if a response could not be graded and therefore counts as wrong."""


class InvalidReward(Exception):
    """A function returned something that is not a reward. The message describes it."""


def wrong_and_ungraded() -> dict[str, float]:
    """Return the terms of a response that cannot be graded: reward 0 and ``ungraded`` 1."""
    return {VALUE: 0.0, UNGRADED: 1.0}


def number_of(value: object) -> float:
    """Convert ``value`` to a finite float.

    Raises:
        InvalidReward: If that is not possible.
    """
    # By its attributes, since a worker loads neither numpy nor torch.
    shape = getattr(value, "shape", None)
    item = getattr(value, "item", None)
    is_scalar_array = shape is not None and tuple(shape) == () and item is not None
    if is_scalar_array:
        value = item()
    # Decimal is no numbers.Real.
    if not isinstance(value, SupportsFloat) or (shape is not None and not is_scalar_array):
        of_shape = "" if shape is None else f" of shape {tuple(shape)}"
        problem = f"returned {type(value).__name__}{of_shape}, not a number"
        raise InvalidReward(f"{problem}{_CURES.get(type(value).__name__, '')}")
    try:
        number = float(value)
    # Of a formula with a variable, and of a signaling NaN.
    except (TypeError, ValueError):
        raise InvalidReward(f"returned {value!r:.60}, not a finite number") from None
    # Of an integer of more than 308 digits.
    except OverflowError:
        raise InvalidReward("returned an integer too large for a float") from None
    if not math.isfinite(number):
        raise InvalidReward(f"returned {number}")
    return number


_CURES = {
    "NoneType": "; end each way through it by return and a number",
    "coroutine": "; await it, in a function that is async",
    "generator": "; write return in place of yield",
    "list": "; for several responses at once, name its parameter rollouts",
}
"""Advice by the type of a value that is no reward."""


def terms_of(result: object) -> dict[str, float]:
    """Return the reward under ``VALUE`` and, for a dict, every other named term.

    The reward of a dict is its ``"reward"``, else its ``"score"``.

    Raises:
        InvalidReward: If a value is not a finite number, or a key is not a name, or no key names
            the reward.
    """
    if not isinstance(result, Mapping):
        return {VALUE: number_of(result)}
    if not result:
        raise InvalidReward("returned an empty dict")
    terms = {}
    for key, value in result.items():
        if not isinstance(key, str) or not key:
            raise InvalidReward(f"returned a dict with the key {key!r}, not a name")
        try:
            terms[key] = number_of(value)
        except InvalidReward as error:
            raise InvalidReward(f"{error} for {key!r}; leave {key!r} out of the dict") from None
    name = next((name for name in REWARD_KEYS if name in terms), None)
    if name is None:
        raise InvalidReward(
            f"returned a dict with the keys {', '.join(map(repr, terms))}, and none is 'reward' or "
            "'score'; name the number to train on 'reward'"
        )
    return {VALUE: terms.pop(name), **terms}


def rows_of(result: object, count: int) -> list[object]:
    """Split the result of a batched function into one result per rollout.

    Raises:
        InvalidReward: If there are not ``count`` results.
    """
    if not isinstance(result, Mapping):
        return _row(result, count, "")
    columns = {}
    for key, column in result.items():
        columns[key] = _row(column, count, f" for {key!r}")
    if not columns:
        raise InvalidReward("returned an empty dict")
    return [{key: column[i] for key, column in columns.items()} for i in range(count)]


def _row(column: object, count: int, where: str) -> list[object]:
    if not _is_list(column):
        raise InvalidReward(f"returned {type(column).__name__}{where}, not a list of {count}")
    if len(column) != count:
        raise InvalidReward(f"returned {len(column)} values{where} for {count} rollouts")
    return list(column)


def _is_list(column: object) -> TypeGuard[Collection[object]]:
    """Return whether ``column`` is a sequence other than text, or an array with an axis."""
    # A text is a sequence of as many "rewards" as it has characters.
    if isinstance(column, str | bytes):
        return False
    if isinstance(column, Sequence):
        return True
    shape = getattr(column, "shape", ())
    return len(shape) >= 1 and isinstance(column, Sized)
