"""The changes that people make often touch few files. Each is a patch with the checks that it must pass."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import ROOT

PATCHES = sorted((ROOT / "tests" / "drills").glob("*.patch"))
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*cache", ".hypothesis"
)


def files_of(patch: Path) -> list[str]:
    return re.findall(r"^diff --git a/(\S+)", patch.read_text(encoding="utf-8"), re.M)


def checks_of(patch: Path) -> list[list[str]]:
    found = re.findall(r"^check: (.+)$", patch.read_text(encoding="utf-8"), re.M)
    return [shlex.split(line) for line in found]


def passes(words: list[str], tree: Path) -> bool:
    """Run a check in ``tree``, whose package is imported in place of the installed one."""
    program, *rest = words
    start = {
        "pytest": ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"],
        "lightrft": ["-m", "lightrft"],
        "python": [],
    }
    command = [*start[program], *rest]
    outcome = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    return outcome.returncode == 0


def apply(patch: Path, tree: Path, *options: str) -> bool:
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_change_touches_the_files_of_its_kind_and_passes_its_checks(patch: Path, tmp_path: Path):
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=LEFT_OUT)
    # A drill that the tree has is undone first.
    assert apply(patch, tree, "--check") or apply(patch, tree, "--reverse")
    first, *others = checks_of(patch)
    assert not passes(first, tree)
    assert apply(patch, tree)
    assert [words for words in (first, *others) if not passes(words, tree)] == []


def test_the_page_of_changes_names_the_files_of_each() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Where a change goes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[.+?\]\((tests/drills/\S+?\.patch)\) \| (.+?) \|$", section, re.M)
    shown = {patch: re.findall(r"`(\S+?)`", files) for patch, files in rows}
    assert shown == {str(patch.relative_to(ROOT)): files_of(patch) for patch in PATCHES}
