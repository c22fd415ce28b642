"""The page of ``lightrft data``: the first rows of each section of data, and their figures.

The page has no scripts, and every text of a row is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightrft.observability.data_record import ShownRow, ShownSection, Span, TokenLengths, safe
from lightrft.viewer.page import embedded, page

HEAD = (
    '<header>\n<p class="eyebrow">Rows as a run reads them</p>\n<h1>Data</h1>\n<p class="lede">'
    "<mark>Trained tokens</mark> are green. Special tokens are visible.</p>\n</header>"
)


def data_page(sections: Sequence[ShownSection]) -> str:
    """Return the page."""
    parts = [_section(k, section) for k, section in enumerate(sections)]
    return page("Rows of a run", "Written by lightrft data.", [HEAD, *parts])


def _section(number: int, section: ShownSection) -> str:
    notes = "".join(f"<li>{_text(note)}</li>" for note in section.notes())
    drawn = "".join(map(_histogram, section.lengths))
    rows = "".join(map(_row, section.rows))
    return (
        f'<section aria-labelledby="s{number}">\n<h2 id="s{number}">{_text(section.title)}</h2>\n'
        f'<ul class="notes">{notes}</ul>\n'
        f'<div class="plots">{drawn}</div>\n<ol class="answers">{rows}</ol>\n</section>'
    )


def _histogram(lengths: TokenLengths) -> str:
    """Return a card with one bar for each bin of lengths."""
    bins = lengths.bins
    most = max(count for _, _, count in bins)
    bars = ""
    for k, (low, high, count) in enumerate(bins):
        height = 100 * count / most
        bars += f'<rect class="f2" x="{k + 0.04:.2f}" y="{100 - height:.2f}" width="0.92" '
        bars += f'height="{height:.2f}"><title>{low}-{high} tokens: {count}</title></rect>'
    view = f'viewBox="0 0 {len(bins)} 100" preserveAspectRatio="none"'
    about = f"{lengths.kind}s: {lengths.range}; {lengths.histogram}"
    return (
        f'<figure class="card"><figcaption><h3>Tokens of {lengths.kind}s</h3><p>{lengths.range}'
        f'</p></figcaption><svg class="histogram" {view} role="img" aria-label="{about}">{bars}'
        f'</svg><p class="ends"><span>{bins[0][0]}</span><span>{bins[-1][1]}</span></p></figure>'
    )


def _row(row: ShownRow) -> str:
    about = f"media of {safe(row.name)}"
    media = "".join(embedded(name, data, about) for name, data in row.media.items())
    given = f'<div class="given">{media}</div>' if media else ""
    return (
        f'<li class="card"><div class="ask"><p class="prompt">{_text(row.name)}</p>'
        f'<p class="expected">{_text(row.about)}</p></div>{given}'
        f'<div class="answer"><pre tabindex="0">{"".join(map(_span, row.spans))}</pre></div></li>'
    )


def _span(span: Span) -> str:
    text = _text(span.text)
    return f"<mark>{text}</mark>" if span.trained else text


def _text(text: str) -> str:
    return escape(safe(text))
