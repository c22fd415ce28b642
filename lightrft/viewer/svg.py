"""Small plots as inline SVG.

They use CSS classes, show values on hover, and have a description for screen readers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 360, 208
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 10, 26
COLUMNS = 180  # largest number of points that a plot of this width can resolve


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot.

    Args:
        name: name in the legend.
        points: ``(step, value)`` pairs, by ascending step.
        color: index of the palette.
        faint: if True, this is the raw line under a smoothed line.
        dots: if True, each point is marked.
        dashed: if True, the values were not measured at each step, as for a baseline.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    faint: bool = False
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """Mapping from values to coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers that enclose ``low`` and ``high``.

    Their spacing is 1, 2, 2.5 or 5 times a power of ten.

    Args:
        low: smallest value.
        high: largest value.
        count: approximate number of intervals.
    """
    if (
        not (high - low) / count > sys.float_info.min
    ):  # the values are equal or too close to distinguish
        pad = abs(low) * 0.5 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    # + 0.0 turns -0.0 into 0.0
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


def compact(value: float) -> str:
    """Return a number in about five characters: ``1.25``, ``0.0031``, ``12.4k``, ``3e-06``."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size and size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    """Return a fraction as a percentage, e.g. ``0.9731`` as ``97.3%`` and ``0.5`` as ``50%``."""
    return f"{value * 100:.1f}".rstrip("0").rstrip(".") + "%"


def thin(points: Sequence[tuple[float, float]], most: int = COLUMNS) -> list[tuple[float, float]]:
    """Return at most ``most`` points, each the mean of equally many neighbors.

    The first and the last point are kept unchanged.
    """
    if len(points) <= most:
        return list(points)
    inner, buckets = points[1:-1], most - 2
    cuts = [round(i * len(inner) / buckets) for i in range(buckets + 1)]
    means = [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
        for a, b in pairwise(cuts)
        if (part := inner[a:b])
    ]
    return [points[0], *((round(x), y) for x, y in means), points[-1]]


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


def line_plot(
    title: str,
    series: Sequence[Series],
    *,
    y_format: Callable[[float], str] = compact,
    y_range: tuple[float, float] | None = None,
    zero: bool = False,
) -> str:
    """Return a plot of lines over steps.

    Args:
        title: title for screen readers.
        series: the lines. Lines without points are left out.
        y_format: formatting of a value.
        y_range: range of the value axis. None fits the values.
        zero: if True, the value axis starts at 0.
    """
    series = [
        Series(s.name, thin(s.points), s.color, s.faint, s.dots, s.dashed)
        for s in series
        if s.points
    ]
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    low, high = y_range or (min(0.0, *ys) if zero else min(ys), max(ys))
    ticks = nice_ticks(low, high)
    frame = _Frame(min(xs), max(xs), ticks[0], ticks[-1])
    parts = [_axes(frame, ticks, _step_ticks(frame.x0, frame.x1), y_format)]
    for s in series:
        parts.append(_line(s, frame))
    parts.append(_hover([s for s in series if not s.faint and not s.dashed], frame, y_format))
    return _svg(title, _describe(series, y_format), "".join(parts))


def stacked_bars(
    title: str, steps: Sequence[float], columns: Mapping[str, Sequence[float]], unit: str = "s"
) -> str:
    """Return a plot with one stacked bar per step.

    Neighboring steps are averaged if there are many.

    Args:
        title: title for screen readers.
        steps: the steps.
        columns: values per step by name, stacked from the bottom up.
        unit: unit of the values.
    """
    size = max(1, math.ceil(len(steps) / 48))
    groups = [range(i, min(i + size, len(steps))) for i in range(0, len(steps), size)]
    means = {
        name: [sum(values[i] for i in g) / len(g) for g in groups]
        for name, values in columns.items()
    }
    totals = [sum(values[k] for values in means.values()) for k in range(len(groups))]
    ticks = nice_ticks(0.0, max(totals) or 1.0)
    frame = _Frame(0, len(groups), 0.0, ticks[-1])
    labels = {}
    for tick in _step_ticks(steps[0], steps[-1]):
        labels[min(range(len(groups)), key=lambda k: abs(steps[groups[k][0]] - tick)) + 0.5] = tick
    parts = [_axes(frame, ticks, labels, lambda v: f"{compact(v)} {unit}" if v else "0")]
    width = frame.x(1) - frame.x(0)
    for k, group in enumerate(groups):
        base, bar, lines = 0.0, "", []
        for color, (name, values) in enumerate(means.items()):
            top, bottom = frame.y(base + values[k]), frame.y(base)
            base += values[k]
            if bottom - top > 0.05:
                gap = min(1.0, width * 0.15)
                bar += (
                    f'<rect class="f{color % 8}" x="{frame.x(k) + gap / 2:.2f}" y="{top:.2f}" '
                    f'width="{width - gap:.2f}" height="{bottom - top:.2f}"/>'
                )
                lines.append(f"{name}: {compact(values[k])} {unit}")
        first, last = steps[group[0]], steps[group[-1]]
        head = f"step {first:.0f}" if len(group) == 1 else f"steps {first:.0f} to {last:.0f}, mean"
        parts.append(
            f'<g class="bar"><title>{escape(chr(10).join([head, *reversed(lines)]))}</title>{bar}</g>'
        )
    means_text = ", ".join(f"{name} {compact(sum(v) / len(v))} {unit}" for name, v in means.items())
    return _svg(title, f"Mean per step: {means_text}.", "".join(parts))


def share_bar(title: str, shares: Mapping[str, float], classes: Sequence[str]) -> str:
    """Return one horizontal bar that is divided in proportion to ``shares``.

    Args:
        title: title for screen readers.
        shares: values by name.
        classes: CSS class of each part.
    """
    total = sum(shares.values()) or 1.0
    x, parts = 0.0, []
    for (name, value), css in zip(shares.items(), classes, strict=True):
        width = value / total * 1000
        parts.append(
            f'<rect class="{css}" x="{x:.2f}" y="0" width="{width:.2f}" height="14">'
            f"<title>{escape(name)}: {value:,.0f} ({percent(value / total)})</title></rect>"
        )
        x += width
    return (
        f'<svg class="share" viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _svg(title: str, description: str, body: str) -> str:
    label = escape(f"{title}. {description}")
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}">{body}</svg>'
    )


def _step_ticks(low: float, high: float) -> dict[float, float]:
    """Return the whole steps inside the range, as position and label."""
    if low == high:
        return {low: low}
    return {t: t for t in nice_ticks(low, high) if low <= t <= high and t == int(t)}


def _axes(
    frame: _Frame,
    ticks: Sequence[float],
    steps: Mapping[float, float],
    y_format: Callable[[float], str],
) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        css = "base" if tick == ticks[0] else "grid"
        parts.append(
            f'<line class="{css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick end" x="{LEFT - 7}" '
            f'y="{y + 3.6:.1f}">{escape(y_format(tick))}</text>'
        )
    parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{HEIGHT - 8}">step</text>')
    for place, step in steps.items():
        parts.append(
            f'<text class="tick mid" x="{frame.x(place):.1f}" y="{HEIGHT - 8}">{step:.0f}</text>'
        )
    return "".join(parts)


def _line(series: Series, frame: _Frame) -> str:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    css = (
        f"line s{series.color % 8}"
        + (" faint" if series.faint else "")
        + (" dashed" if series.dashed else "")
    )
    drawn = f'<path class="{css}" d="{path}"/>' if len(places) > 1 else ""
    if series.dots or len(places) == 1:
        drawn += "".join(
            f'<circle class="f{series.color % 8}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
            for x, y in places
        )
    return drawn


def _hover(series: Sequence[Series], frame: _Frame, y_format: Callable[[float], str]) -> str:
    """Return an invisible column per step that shows its values and a dot on each line on hover."""
    at: dict[float, list[tuple[Series, float]]] = {}
    for s in series:
        for x, y in s.points:
            at.setdefault(x, []).append((s, y))
    xs = sorted(at)
    edges = [LEFT, *(frame.x((a + b) / 2) for a, b in pairwise(xs)), WIDTH - RIGHT]
    parts = []
    for i, x in enumerate(xs):
        text = "\n".join([f"step {x:.0f}", *(f"{s.name}: {y_format(y)}" for s, y in at[x])])
        place = frame.x(x)
        dots = "".join(
            f'<circle class="f{s.color % 8}" cx="{place:.1f}" cy="{frame.y(y):.1f}" r="3.4"/>'
            for s, y in at[x]
        )
        parts.append(
            f'<g class="at"><title>{escape(text)}</title><rect x="{edges[i]:.1f}" y="{TOP}" '
            f'width="{edges[i + 1] - edges[i]:.1f}" height="{HEIGHT - TOP - BOTTOM}"/><line '
            f'x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{dots}</g>'
        )
    return "".join(parts)


def _describe(series: Sequence[Series], y_format: Callable[[float], str]) -> str:
    """Return a description of all lines in words."""
    parts = []
    for s in series:
        if s.faint:
            continue
        (x0, y0), (x1, y1) = s.points[0], s.points[-1]
        ys = [y for _, y in s.points]
        parts.append(
            f"{s.name}: {y_format(y0)} at step {x0:.0f}, {y_format(y1)} at step {x1:.0f}, "
            f"between {y_format(min(ys))} and {y_format(max(ys))}."
        )
    return " ".join(parts)
