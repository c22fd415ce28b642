"""Numbers as short texts. ``plots.js`` formats in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

UNITS = ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k"))
"""Smallest number that is written in a unit, the unit, and its letter.

999.5 thousand has the unit M, because three digits of it in thousands are ``1e+03``.
"""

Form = Literal["compact", "percent", "count", "seconds"]


def compact(value: float) -> str:
    """Return a number in about five characters: ``1.25``, ``0.0031``, ``12.4k``, ``3e-06``."""
    size = abs(value)
    for limit, scale, unit in UNITS:
        if size >= limit:
            return f"{value / scale:.3g}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    if 0 < size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Return a fraction as a percentage, e.g. ``0.9731`` as ``97.3%`` and ``0.5`` as ``50%``."""
    return f"{value * 100:.1f}".removesuffix(".0") + "%"


def count(value: float) -> str:
    """Return a number without decimals: ``1,385``, and ``12.4k`` from ten thousand on."""
    return f"{value:,.0f}" if abs(value) < 1e4 else compact(value)


def seconds(value: float) -> str:
    """Return a number of seconds, e.g. ``1.25 s``."""
    return f"{compact(value)} s"


def css_of(value: float) -> str:
    """Return the CSS class of a change or an advantage; empty if it is 0."""
    if value == 0:
        return ""
    return "good" if value > 0 else "bad"


FORMS: Mapping[Form, Callable[[float], str]] = {
    "compact": compact,
    "percent": percent,
    "count": count,
    "seconds": seconds,
}
"""Formattings of a value by the name that a plot gives to ``plots.js``."""
