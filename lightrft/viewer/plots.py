"""Descriptions of plots, which ``plots.js`` renders in the browser, and numbers as short texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

POINTS = 600
"""Largest number of points of a line in the page. It leaves detail for a zoom."""
BARS = 48
"""Largest number of bars that a plot of 360 pixels can show apart."""
DIGITS = 6
"""Significant digits of a value in the page."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot, or one part of each stacked bar.

    Args:
        name: name at hover.
        points: ``(step, value)`` pairs.
        color: index of the palette.
        label: text in the legend. Empty stands for ``name``.
        faint: if True, this is the raw line of the next series, which is smoothed.
        dots: if True, each point is marked.
        dashed: if True, the values were not measured at each step, as for a baseline.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    label: str = ""
    faint: bool = False
    dots: bool = False
    dashed: bool = False


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


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot.

    Args:
        title: title of the plot.
        note: subtitle with the unit.
        now: the latest value, as text.
        series: the lines, or the parts of the bars from the bottom up. Each has points.
        kind: lines over steps, or one stacked bar per step.
        form: formatting of a value.
        y_range: range of the value axis. None fits the values.
        zero: if True, the value axis starts at 0.
        axis: name of the step axis. Plots with the same axis share the cursor and the zoom.
        whole: if True, steps are whole numbers.
        heads: text at hover for each bar. Empty for lines.
    """

    title: str
    note: str
    now: str
    series: Sequence[Series]
    kind: Literal["lines", "bars"] = "lines"
    form: Form = "compact"
    y_range: tuple[float, float] | None = None
    zero: bool = False
    axis: str = "step"
    whole: bool = True
    heads: Sequence[str] = ()

    def data(self) -> dict[str, object]:
        """Return what ``plots.js`` reads, as values of JSON."""
        columns = [dict(thin(series.points)) for series in self.series]
        # Series may have been measured at different steps.
        every: set[float] = set().union(*columns)
        steps = sorted(every)
        return {
            "kind": self.kind,
            "form": self.form,
            "range": self.y_range,
            "zero": self.zero,
            "axis": self.axis,
            "whole": self.whole,
            "heads": list(self.heads),
            "steps": steps,
            "series": [
                {
                    "name": series.name,
                    "color": series.color % 8,
                    "faint": series.faint,
                    "dots": series.dots,
                    "dashed": series.dashed,
                    "values": [_rounded(column.get(step)) for step in steps],
                }
                for series, column in zip(self.series, columns, strict=True)
            ],
        }

    def described(self) -> str:
        """Return a description in words, for screen readers and pages without scripts."""
        if self.kind == "bars":
            return f"Mean per step: {', '.join(self._mean(series) for series in self.series)}."
        named = [series for series in self.series if not series.faint]
        return " ".join(self._course(series) for series in named)

    def _mean(self, series: Series) -> str:
        values = [y for _, y in series.points]
        return f"{series.name} {FORMS[self.form](sum(values) / len(values))}"

    def _course(self, series: Series) -> str:
        form = FORMS[self.form]
        values = [y for _, y in series.points]
        (x0, y0), (x1, y1) = series.points[0], series.points[-1]
        at = "step {:.0f}" if self.whole else f"{self.axis} {{:.3g}}"
        return (
            f"{series.name}: {form(y0)} at {at.format(x0)}, {form(y1)} at {at.format(x1)}, "
            f"between {form(min(values))} and {form(max(values))}."
        )


def thin(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """Return at most ``most`` points, each the mean of equally many neighbors.

    The first and the last point are kept unchanged.
    """
    if len(points) <= most:
        return list(points)
    inner, buckets = points[1:-1], most - 2
    cuts = [round(i * len(inner) / buckets) for i in range(buckets + 1)]
    means = []
    for start, stop in pairwise(cuts):
        part = inner[start:stop]
        step = sum(x for x, _ in part) / len(part)
        means.append((round(step), sum(y for _, y in part) / len(part)))
    return [points[0], *means, points[-1]]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a centered moving average, which neither lags nor leads.

    A point near an end averages fewer neighbors.
    """
    reach = max(1, len(points) // 30)
    out = []
    for i, (x, _) in enumerate(points):
        part = points[max(0, i - reach) : i + reach + 1]
        out.append((x, sum(y for _, y in part) / len(part)))
    return out


def time_bars(title: str, steps: Sequence[float], columns: Mapping[str, Sequence[float]]) -> Plot:
    """Return a plot with one stacked bar of seconds per step.

    Neighboring steps are averaged if there are many.

    Args:
        title: title of the plot.
        steps: the steps, ascending.
        columns: seconds per step by name, stacked from the bottom up.
    """
    size = math.ceil(len(steps) / BARS)
    groups = [range(i, min(i + size, len(steps))) for i in range(0, len(steps), size)]
    # The last group may be shorter. A bar at its own middle would be nearer to its neighbor, and
    # uPlot makes every bar as narrow as the smallest distance.
    middle = (steps[groups[0][-1]] - steps[0]) / 2
    heads = []
    for group in groups:
        first, last = steps[group[0]], steps[group[-1]]
        one = f"step {first:.0f}"
        heads.append(one if len(group) == 1 else f"steps {first:.0f} to {last:.0f}, mean")
    total = sum(sum(values) for values in columns.values())
    series = []
    for color, (name, values) in enumerate(columns.items()):
        points = []
        for group in groups:
            mean = sum(values[i] for i in group) / len(group)
            points.append((steps[group[0]] + middle, mean))
        series.append(Series(name, points, color, f"{name} {_share(sum(values) / total)}"))
    now = seconds(total / len(steps))
    return Plot(title, "seconds per step", now, series, "bars", "seconds", heads=heads)


def _share(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.005 else "<1%"


def _rounded(value: float | None) -> float | None:
    """Return a value of JSON. JSON has no infinity, which the sum of huge values may be."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
