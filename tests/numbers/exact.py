"""Numbers of 50 digits and derivatives of functions of them, for oracles without torch.

An oracle is plain arithmetic on numbers: floats, ints or mpmath's ``mpf``. ``evaluate`` and
``gradient`` call it with ``mpf`` of 50 digits and return floats. Derivatives are central
differences at more than 100 digits, so their error is far below that of a float.

Three rules make a derivative unique where the mathematical one is not. torch has the same rules.

- ``constant(x)`` has derivative 0, like a detached tensor.
- A condition keeps the value that it has at the point of differentiation. ``positive_part`` and
  ``absolute`` therefore have derivative 0 at 0, like ``relu`` and ``abs``.
- A sort keeps the order that it has at the point, and equal numbers keep their given order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpmath import mp, mpf

DIGITS = 50

Number = Any
"""An ``mpf``, a float or an int."""

Nested = Any
"""A number, or a list of ``Nested``."""


class Tape:
    """The constants of a function, recorded in its first call and returned in all later ones."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.position: int | None = None

    def hold(self, value: Any) -> Any:
        if self.position is None:
            self.values.append(value)
            return value
        held = self.values[self.position]
        self.position += 1
        return held


_tapes: list[Tape] = []


def constant(value: Any) -> Any:
    """Return ``value``, for ``gradient`` a constant."""
    return _tapes[-1].hold(value) if _tapes else value


def flatten(nested: Nested) -> Iterator[Number]:
    """Yield the numbers of nested lists in order."""
    if isinstance(nested, list | tuple):
        for part in nested:
            yield from flatten(part)
    else:
        yield nested


def rebuild(numbers: Iterator[Number], like: Nested) -> Nested:
    """Return nested lists of the shape of ``like`` with the next of ``numbers``."""
    if isinstance(like, list | tuple):
        return [rebuild(numbers, part) for part in like]
    return next(numbers)


def evaluate(function: Callable[..., Nested], arguments: Sequence[Nested]) -> Nested:
    """Return ``function(*arguments)``, computed with 50 digits, as floats."""
    with mp.workdps(DIGITS):
        exact = rebuild(map(mpf, flatten(arguments)), arguments)
        found = function(*exact)
        return rebuild(map(float, flatten(found)), found)


def gradient(function: Callable[..., Number], arguments: Sequence[Nested]) -> Nested:
    """Return the partial derivatives of ``function(*arguments)`` in the shape of ``arguments``.

    Close over what is no variable: ``gradient(lambda pw: dpo(pw, -2, ...), [-1.5])``.
    """
    with mp.workdps(DIGITS):
        point = [mpf(number) for number in flatten(arguments)]
        tape = Tape()

        def call(numbers: Sequence[Number]) -> Number:
            _tapes.append(tape)
            try:
                return function(*rebuild(iter(numbers), arguments))
            finally:
                _tapes.pop()

        call(point)

        def along(i: int, x: Number) -> Number:
            tape.position = 0
            return call([*point[:i], x, *point[i + 1 :]])

        partials = [mp.diff(lambda x, i=i: along(i, x), point[i]) for i in range(len(point))]
        return rebuild(map(float, partials), arguments)


def exp(x: Number) -> Number:
    return mp.exp(x)


def log(x: Number) -> Number:
    return mp.log(x)


def sigmoid(x: Number) -> Number:
    return 1 / (1 + mp.exp(-x))


def log_sigmoid(x: Number) -> Number:
    return -mp.log1p(mp.exp(-x))


def log_one_minus_exp(x: Number) -> Number:
    """Return log(1 - e^x) of a negative x."""
    return mp.log(-mp.expm1(x))


def positive_part(x: Number) -> Number:
    """Return max(0, x)."""
    return x if constant(x > 0) else 0 * x


def absolute(x: Number) -> Number:
    """Return |x|."""
    return x * constant((x > 0) - (x < 0))


def order(numbers: Sequence[Number], descending: bool = False) -> list[int]:
    """Return the indices that sort ``numbers``. Of equal numbers the earlier comes first."""
    sign = -1 if descending else 1
    return constant(sorted(range(len(numbers)), key=lambda i: (sign * numbers[i], i)))


def mean(numbers: Sequence[Number]) -> Number:
    return sum(numbers) / mpf(len(numbers))


def log_softmax(logits: Sequence[Number]) -> list[Number]:
    """Return z - log sum e^z. The exponents of 50 digits cannot overflow."""
    total = mp.log(sum(mp.exp(z) for z in logits))
    return [z - total for z in logits]
