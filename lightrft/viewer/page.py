"""An HTML page that holds its styles, scripts and data, and makes no requests."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from lightrft.viewer.figures import plot_data
from lightrft.viewer.plots import Plot


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
