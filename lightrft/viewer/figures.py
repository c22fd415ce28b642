"""The plots of a page as HTML: cards with a legend and a description, and their data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from lightrft.viewer.plots import Plot, Series


def figures(plots: Sequence[Plot]) -> str:
    """Return one card per plot. ``plots.js`` renders into the elements of class ``plot``."""
    return f'<div class="plots">{"".join(_figure(plot) for plot in plots)}</div>'


def plot_data(plots: Sequence[Plot]) -> str:
    """Return the element that ``plots.js`` reads, with the plots in the order of their cards."""
    rows = [plot.data() for plot in plots]
    text = json.dumps(rows, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # In a name, "</script>" would end the element, and "<!--" would hide its end.
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="plot-data">{text}</script>\n'


def _figure(plot: Plot) -> str:
    words = escape(f"{plot.title}. {plot.described()}")
    return (
        f'<figure class="card"><figcaption><span class="now">{escape(plot.now)}</span>'
        f"<h3>{escape(plot.title)}</h3><p>{escape(plot.note)}</p>{_legend(plot)}</figcaption>"
        f'<div class="plot" role="img" aria-label="{words}"></div>'
        f"<noscript><p>{words}</p></noscript></figure>"
    )


def _legend(plot: Plot) -> str:
    named = [series for series in plot.series if not series.faint]
    if len(named) == 1:
        return ""
    items = "".join(f"<li>{_key(series, plot.kind)}</li>" for series in named)
    return f'<ul class="legend">{items}</ul>'


def _key(series: Series, kind: str) -> str:
    """Return the switch of a series. Without the script, it is a text."""
    css = f"key {kind} c{series.color % 8}"
    if series.dashed:
        css += " dashed"
    name = escape(series.label or series.name)
    return f'<button type="button" class="{css}" aria-pressed="true" disabled>{name}</button>'
