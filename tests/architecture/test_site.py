"""The documentation as a site: it builds, each link of each page leads somewhere, and its search has the pages."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import site
from tests.architecture.tree import ROOT

LOADED = re.compile(
    r"""<(?:link(?![^>]*rel="?canonical)|script|img)\b[^>]*(?:href|src)="?(https?://[^\s">]+)"""
)
"""What a page loads from another server."""


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {named.get("id") or "", named.get("name") or ""}
        if link := named.get("href") or named.get("src"):
            self.links.add(link)


@cache
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def broken(path: Path, folder: Path) -> list[str]:
    found = []
    for link in page(path).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        above = folder if parts.path.startswith("/") else path.parent
        to = (above / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        if not to.exists() or (
            to.suffix == ".html" and unquote(parts.fragment) not in page(to).anchors
        ):
            found.append(link)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("zensical") is None:
        pytest.skip("needs zensical: the extra docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "BUILD", tmp_path_factory.mktemp("docs"))
        assert site.main() == 0
        return site.BUILD / "site"


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(built: Path) -> None:
    pages = [path for path in built.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 100
    assert {str(p.relative_to(built)): bad for p in pages if (bad := broken(p, built))} == {}


@pytest.mark.slow
def test_the_search_has_every_page_and_its_words(built: Path) -> None:
    found = json.loads((built / "search.json").read_text(encoding="utf-8"))["items"]
    pages = {item["location"].partition("#")[0] for item in found}
    written = {f"{p.relative_to(ROOT).with_suffix('')}.html" for p in (ROOT / "docs").rglob("*.md")}
    assert written - pages == set()
    assert any("grpo" in item["text"].lower() for item in found)


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(built: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in built.rglob("*.html")]
    loaded = {url for text in texts for url in LOADED.findall(text)}
    assert texts and loaded == set()


@pytest.mark.slow
def test_a_page_is_shown_as_it_is_written(built: Path) -> None:
    text = (built / "docs" / "configuration.html").read_text(encoding="utf-8")
    assert "<table>" in text and "<h2" in text and "| `" not in text
    assert "```" not in (built / "index.html").read_text(encoding="utf-8")


def test_the_navigation_has_the_sections_of_the_index() -> None:
    assert site.navigation().startswith('[{"Home" = "index.md"}, {"All pages" = "docs/index.md"}')
    for title in ("Tutorials", "How-to pages", "Reference", "Explanation"):
        assert f'"{title}" = [' in site.navigation()
