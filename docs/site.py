"""Build the documentation as a site with search: ``make docs``.

The Markdown pages stay as they are. The site has them, the files that they link to, and the sections of ``docs/index.md`` as
its navigation.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)[^)\s]*\)")
FENCE = re.compile(r"^( *```\w+) [^\n]*$", re.M)
"""The start of a block whose language has a word behind it, such as the verb of a config."""
README = re.compile(r"\]\(((?:\.\./)*)README\.md")
"""A link to the README, which is the first page of the site."""
CONFIG = """\
[project]
site_name = "lightrft"
site_description = "Reinforcement learning of language models"
docs_dir = "source"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
nav = {nav}

[project.theme]
font = false
features = ["navigation.tabs", "navigation.top", "content.code.copy", "search.highlight"]

[[project.theme.palette]]
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark"

[[project.theme.palette]]
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light"

[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
slugify = {{ object = "pymdownx.slugs.slugify", kwds = {{ case = "lower" }} }}
[project.markdown_extensions.pymdownx.superfences]
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.inlinehilite]
"""
STYLE = ".md-typeset td:first-child > code:only-child { white-space: nowrap; }\n"
"""Names in the first column of a table stay whole."""


def main() -> int:
    """Write the source of the site, build it, and return the exit status."""
    shutil.rmtree(BUILD, ignore_errors=True)
    for page in files():
        copy = BUILD / "source" / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".md":
            text = FENCE.sub(r"\1", page.read_text(encoding="utf-8"))
            copy.write_text(README.sub(r"](\1index.md", text), encoding="utf-8")
        else:
            shutil.copyfile(page, copy)
    (BUILD / "source" / "README.md").rename(BUILD / "source" / "index.md")
    (BUILD / "source" / "site.css").write_text(STYLE, encoding="utf-8")
    config = BUILD / "zensical.toml"
    config.write_text(CONFIG.format(nav=navigation()), encoding="utf-8")
    words = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    status = subprocess.run(words, cwd=BUILD, check=False).returncode
    sys.stdout.write(f"{BUILD / 'site' / 'index.html'}\n")
    return status


def files() -> list[Path]:
    """Return the pages, and the files of the repository that pages link to."""
    found: dict[Path, None] = {}
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    while waiting:
        page = waiting.pop(0)
        if page in found or not page.is_file():
            continue
        found[page] = None
        if page.suffix == ".md":
            waiting += [to for _, to in links(page.read_text(encoding="utf-8"), page.parent)]
    return list(found)


def links(text: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the title and the file of each link of a page in ``folder`` to the repository."""
    for title, target in LINK.findall(text):
        to = (folder / target).resolve()
        if "://" not in target and to.is_relative_to(ROOT):
            yield title, to


def navigation() -> str:
    """Return the sections of the index with their pages, as TOML."""
    index = ROOT / "docs" / "index.md"
    _, *sections = re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.M)
    entries: list[dict[str, object]] = [{"Home": "index.md"}, {"All pages": "docs/index.md"}]
    for section in sections:
        title, _, body = section.partition("\n")
        pages = {
            to: name.strip("`")
            for name, to in links(body, index.parent)
            if to.suffix == ".md" and to != index
        }
        inside = [{name: str(to.relative_to(ROOT))} for to, name in pages.items()]
        entries.append({title: inside})
    return re.sub(r'": ', '" = ', json.dumps(entries, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
