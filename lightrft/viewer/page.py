"""An HTML page that holds its styles, scripts, plots, media and data, and makes no requests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from lightrft.viewer.plots import Plot, Series


def page(
    title: str, footer: str, sections: Sequence[str], plotted: Sequence[Plot] | None = None
) -> str:
    """Return a page.

    A content security policy allows only this page's styles and scripts, by their hashes.

    Args:
        title: title of the page.
        footer: text at its end.
        sections: HTML of each part, with every other text escaped; empty ones are left out.
        plotted: plots of the sections. None makes a page without scripts.
    """
    styles = [_asset("vendor/uplot/uPlot.min.css"), _asset("report.css")]
    # A copy of uPlot must have its licence.
    notice = f"/*\n{_asset('vendor/uplot/LICENSE')}\n*/\n"
    scripts = [
        notice + _asset("vendor/uplot/uPlot.iife.min.js"),
        _asset("plots.js"),
        _asset("report.js"),
    ]
    if plotted is None:
        styles, scripts = styles[1:], []
    allowed = _hashes(scripts) or "'none'"
    given = f"style-src {_hashes(styles)}; script-src {allowed}"
    policy = f"default-src 'none'; img-src data:; media-src data:; {given}; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n"
        + "".join(f"<style>{style}</style>\n" for style in styles)
        + "</head>\n<body>\n<main>\n"
        + "\n".join(part for part in sections if part)
        + f"\n<footer>{escape(footer)}</footer>\n</main>\n"
        + ("" if plotted is None else plot_data(plotted))
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("lightrft.viewer").joinpath(name).read_text(encoding="utf-8")


def _hashes(texts: Sequence[str]) -> str:
    """Return the hashes of inline elements, as a content security policy writes them."""
    hashes = []
    for text in texts:
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")
    return " ".join(hashes)


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


TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
}
"""Suffixes of the files that a browser can show."""
TINY = 64
"""Images with at most this many pixels per side are enlarged without smoothing."""


def shown(names: Sequence[str], folder: Path, about: str) -> str:
    """Return HTML elements that embed the named files.

    A file that is missing or of unknown type is mentioned by name.

    Args:
        names: names of the files.
        folder: folder of the files.
        about: alternative text for screen readers.
    """
    return "".join(embedded(name, _content(folder, name), about) for name in names)


def embedded(name: str, data: bytes | None, about: str) -> str:
    """Return the HTML element that embeds a file.

    Args:
        name: name of the file.
        data: its content, or None if it is missing.
        about: alternative text for screen readers.
    """
    kind = TYPES.get(Path(name).suffix.lower(), "")
    if not kind or data is None:
        why = "is missing" if kind else "cannot be shown"
        return f'<p class="empty">{escape(name)} {why}</p>'
    source = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    if kind.startswith("audio/"):
        label = escape(about)
        return f'<audio controls preload="metadata" src="{source}" aria-label="{label}"></audio>'
    return f'<img src="{source}" alt="{escape(about)}"{_tiny(data)}>'


def _content(folder: Path, name: str) -> bytes | None:
    path = folder / name
    return path.read_bytes() if Path(name).name == name and path.is_file() else None


def _tiny(data: bytes) -> str:
    """Return the CSS class of a small PNG, whose size is in bytes 16 to 24."""
    if data[:4] != b"\x89PNG":
        return ""
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    return ' class="tiny"' if max(width, height) <= TINY else ""
