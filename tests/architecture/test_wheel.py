"""What people install is whole: the wheel holds every module and data file, and works without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT


def run(*command: str | Path, cwd: Path) -> str:
    # Which would put a source tree in front.
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=plain,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with pip; the packages of this one are visible behind its own."""
    folder = tmp_path_factory.mktemp("wheel") / "env"
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    site = Path(
        run(
            folder / "bin" / "python",
            "-c",
            "import site; print(site.getsitepackages()[0])",
            cwd=ROOT,
        ).strip()
    )
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def wheel(environment: Path) -> Path:
    """Built from a copy, so that nothing of an earlier build slips in."""
    source = environment.parent / "source"
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        f"from setuptools import build_meta; build_meta.build_wheel({str(environment.parent)!r})"
    )
    run(sys.executable, "-c", build, cwd=source)
    return next(environment.parent.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = [p for p in (ROOT / PACKAGE).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert sorted({str(p.relative_to(ROOT)) for p in files} - packed) == []
    assert any(name.endswith("licenses/LICENSE") for name in packed)


@pytest.mark.slow
def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    assert {
        name.partition("/")[0].partition("-")[0] for name in zipfile.ZipFile(wheel).namelist()
    } == {PACKAGE}


@pytest.mark.slow
def test_the_installed_wheel_runs_away_from_the_source_tree(
    environment: Path, wheel: Path, tmp_path: Path
) -> None:
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    origin = run(
        python,
        "-c",
        f"import {PACKAGE}; print({PACKAGE}.__file__, {PACKAGE}.__version__)",
        cwd=tmp_path,
    ).split()
    assert origin[0].startswith(str(environment))
    assert origin[1] != "0+source"
    assert "demo" in run(environment / "bin" / PACKAGE, "--help", cwd=tmp_path)
