"""What the documents say can be typed: verbs, commands, settings, make targets and links exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.generate import SETTINGS as CONFIGS
from docs.generate import pages
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.base import dotted, load_settings
from lightrft.config.other_names.rows import FRAMEWORKS
from lightrft.config.presets import PRESETS
from lightrft.verbs import VERBS
from tests.architecture.tree import ROOT
from tests.architecture.verbs import CONFIG_OF

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```", re.S | re.M)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``kind`` is what stands behind the fence."""

    page: Path
    kind: str
    body: str


def blocks(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(page, found["kind"].strip(), found["body"])


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every line in a shell block, without comments."""
    for block in blocks(page):
        if block.kind in {"bash", "sh", "console"}:
            for line in block.body.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_each_verb_has_a_page_and_each_page_a_verb() -> None:
    assert {p.stem for p in (ROOT / "docs" / "verbs").glob("*.md")} == set(VERBS)


def test_the_index_names_every_page() -> None:
    index, algorithms = ROOT / "docs" / "index.md", ROOT / "docs" / "algorithms.md"
    found = [m for page in (index, algorithms) for m in LINK.finditer(prose(page))]
    linked = {(index.parent / m["target"].partition("#")[0]).resolve() for m in found}
    folders = [
        ROOT / "docs",
        *(ROOT / "docs" / name for name in ("tutorials", "verbs", "algorithms")),
    ]
    assert [
        by_name(p) for p in PAGES if p.parent in folders and p != index and p not in linked
    ] == []


def test_the_index_lists_each_page_under_exactly_one_of_four_kinds() -> None:
    """The pages of ``algorithms`` are listed by ``algorithms.md``."""
    index = ROOT / "docs" / "index.md"
    kinds: dict[Path, list[str]] = {}
    for section in prose(index).split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        targets = {found["target"].partition("#")[0] for found in LINK.finditer(body)}
        for target in targets:
            kinds.setdefault((index.parent / target).resolve(), []).append(title)
    unlisted = {index, *(ROOT / "docs" / "algorithms").glob("*.md")}
    listed = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in unlisted]
    assert {
        by_name(page): kinds.get(page) for page in listed if len(kinds.get(page, [])) != 1
    } == {}
    titles = {title for page in listed for title in kinds[page]}
    assert titles == {"Tutorials", "How-to pages", "Reference", "Explanation"}


@pytest.mark.parametrize("page", pages(), ids=str)
def test_a_page_made_from_the_code_is_up_to_date(page: Path) -> None:
    """``make docs`` mends it."""
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == pages()[page]


def test_no_page_is_left_of_a_preset_that_is_gone() -> None:
    assert {p.stem for p in (ROOT / "docs" / "algorithms").glob("*.md")} == set(PRESETS)


def test_the_pages_made_from_the_code_name_every_setting_with_its_default_and_docstring() -> None:
    text = pages()[Path("configuration.md")]
    for cls in CONFIGS.values():
        for name in cls.model_fields:
            assert f"| `{name}` |" in text
    assert "| `horizon` | int, ≥ 1 | `10000` |" in text
    assert "| `where` | `none` or `reward` or `loss` | `none` |" in text
    assert "* `temperature`: Divisor of the logits; 0 is greedy." in text


def test_the_page_of_parts_has_every_registered_part_with_its_formula() -> None:
    text = pages()[Path("parts.md")]
    for kind in COMPONENT_KINDS.values():
        for name in kind.registry:
            assert (
                f"| `{name}` | `{kind.registry.about(name).formula.replace('|', chr(92) + '|')}` |"
                in text
            )


def test_the_readme_counts_the_families_as_the_page_of_families_does() -> None:
    readme = prose(ROOT / "README.md")
    counts = re.search(r"(\d+) families of causal language models and (\d+) that read", readme)
    assert counts is not None
    page = pages()[Path("families.md")]
    verified = re.search(r"(\d+) text families are verified", page)
    assert verified is not None
    media = page.partition("## Families that read media")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `", media, re.M)
    own = re.search(r"(\d+) more families have no code of their own", page)
    assert own is not None
    assert counts.groups() == (verified[1], str(len(rows) + int(own[1])))


def test_extras_are_installed_from_the_checkout_and_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = extras["project"]["optional-dependencies"]
    named = set()
    written = [
        ROOT / "Makefile",
        *(ROOT / "recipes").rglob("*.yaml"),
        *(ROOT / "examples").glob("*.*"),
    ]
    for file in [*PAGES, *written, *(ROOT / "lightrft").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        # the package index has another project of this name
        assert not re.search(r"install [^\n]*lightrft\[\w", text), file
        named |= set(re.findall(r"install [^\n]*\.\[([a-z,-]+)\]", text))
        named |= set(re.findall(r"install_extra\([\"'](\w+)[\"']\)", text))
    assert {name for one in named for name in one.split(",")} - set(known) == set()
    assert len(named) > 8


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for found in LINK.finditer(prose(page)):
        target, _, anchor = found["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        to = (page.parent / target).resolve() if target else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(found["target"])
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_commands_name_verbs_and_settings_that_exist(page: Path) -> None:
    for words in commands(page):
        if not words or words[0] != "lightrft" or words[1].startswith(("-", "<")):
            continue
        verb, *rest = words[1:]
        assert verb in VERBS
        if verb == "grm":
            verb = f"grm {rest.pop(0)}"
        shown = [w for w in rest if w.endswith(".yaml") and w.startswith(("recipes/", "lightrft/"))]
        assert [w for w in shown if not (ROOT / w).is_file()] == []
        # A number in a setting is an item of a list of these files.
        files = shown if re.search(r"\.\d+\.\S+=", " ".join(rest)) else []
        load_settings(CONFIG_OF[verb], [ROOT / w for w in files], [w for w in rest if "=" in w])


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    )
    used = {words[words.index("make") + 1] for words in commands(page) if "make" in words}
    used |= set(re.findall(r"`make ([a-z0-9-]+)", prose(page)))
    assert sorted(used - targets) == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_configs_in_documents_parse_as_the_verb_that_they_name(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML block says behind its fence which verb or framework reads it: ``yaml rl``, ``yaml trl``."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        kind, _, verb = block.kind.partition(" ")
        if kind == "yaml" and verb not in FRAMEWORKS:
            file = tmp_path / "shown.yaml"
            file.write_text(block.body, encoding="utf-8")
            assert isinstance(load_settings(CONFIG_OF[verb], [file]).settings, CONFIG_OF[verb])


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_settings_named_in_a_verbs_table_exist(verb: str) -> None:
    """The first column of ``Settings that matter``."""
    table = (
        prose(ROOT / "docs" / "verbs" / f"{verb}.md")
        .partition("## Settings that matter")[2]
        .partition("\n## ")[0]
    )
    named = [
        name
        for row in re.findall(r"^\|(.+?)\|", table, re.M)
        for name in re.findall(r"`([\w.]+)`", row)
    ]
    leaves = [key.split(".") for key, _ in dotted(CONFIG_OF[verb]().model_dump())]
    known = {".".join(leaf[: i + 1]) for leaf in leaves for i in range(len(leaf))}
    assert sorted(set(named) - known) == []


def test_the_readme_names_the_layout_that_is_there() -> None:
    tree = next(
        b.body
        for b in blocks(ROOT / "README.md")
        if b.kind == "" and b.body.startswith("lightrft/")
    )
    inside = [f"lightrft/{name}" for name in re.findall(r"^  (\S+)", tree, re.M)]
    assert [n for n in inside + re.findall(r"^(\S+)", tree, re.M) if not (ROOT / n).exists()] == []
