"""What people install is whole: the wheel holds every module and data file, and works without the source tree.

``make test-wheel`` sets WHEEL_PYTHON, the Python of an environment that pip has made from the wheel and its packages alone.
Otherwise the packages of this environment stand in for those that pip would download.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import nbclient
import nbformat
import pytest

import lightrft
from tests.architecture.tree import PACKAGE, ROOT
from tests.e2e.test_demo import FEW, parity


def plain() -> dict[str, str]:
    """The environment without the path that would put a source tree in front."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=plain(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of an earlier build slips in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with pip; the packages of this one are visible behind its own."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    site = next(folder.glob("lib/*/site-packages"))
    # The one of Python 3.11 is too old for torch, and hides the one of this environment.
    run(folder / "bin" / "python", "-m", "pip", "uninstall", "-y", "setuptools", cwd=ROOT)
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with the installed wheel and its extra ``serve``."""
    if clean := os.environ.get("WHEEL_PYTHON"):
        return Path(clean).absolute()
    environment, wheel = map(request.getfixturevalue, ("environment", "wheel"))
    python = environment / "bin" / "python"
    # Fails unless the packages that are there have the versions that the wheel asks for.
    run(python, "-m", "pip", "install", "--no-index", f"{wheel}[serve]", cwd=environment)
    return python


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = [p for p in (ROOT / PACKAGE).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert sorted({str(p.relative_to(ROOT)) for p in files} - packed) == []
    assert any(name.endswith("licenses/LICENSE") for name in packed)


@pytest.mark.slow
def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {PACKAGE, f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}


@pytest.mark.slow
def test_the_installed_wheel_runs_away_from_the_source_tree(python: Path, tmp_path: Path) -> None:
    show = "import lightrft; from lightrft.utils.errors import install_extra as extra"
    show += "; print(lightrft.__file__, lightrft.__version__, extra('audio'), sep='\\n')"
    origin, version, extra = run(python, "-c", show, cwd=tmp_path).splitlines()
    assert origin.startswith(str(python.parents[1]))
    assert run(python.parent / PACKAGE, "--version", cwd=tmp_path) == f"lightrft {version}\n"
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert extra == "pip install 'lightrft-rl[audio]'"


@pytest.mark.slow
def test_the_installed_demo_trains_and_its_model_is_served_by_the_extra(
    python: Path, tmp_path: Path
) -> None:
    words = ["run.dir=.", "run.name=demo", parity(tmp_path), *FEW]
    assert "report.html" in run(python.parent / PACKAGE, "demo", *words, cwd=tmp_path)
    report = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "uPlot" in report and "reward" in report
    words = [python.parent / PACKAGE, "serve", "demo/rl/model", "http.port=0"]
    with subprocess.Popen(words, cwd=tmp_path, env=plain(), stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().decode().split()[-1]
            with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
                assert json.load(answer)["data"][0]["id"]
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.mark.slow
def test_three_cells_of_a_notebook_lead_from_the_wheel_to_a_trained_model(
    python: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cell installs the wheel, and the others are the notebook's: rows and a model, and the run."""
    run(python, "-m", "pip", "uninstall", "-y", "lightrft-rl", cwd=tmp_path)
    words = ("-m", "ipykernel", "install", "--prefix", tmp_path, "--name", "wheel")
    run(python, *words, cwd=tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells[0] = nbformat.v4.new_code_cell(f"%pip install {wheel}")
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1000, kernel_name="wheel", resources=place).execute()
    installed, _, *shown = (cell.outputs for cell in notebook.cells)
    assert "Successfully installed lightrft-rl" in str(installed)
    shown = [outputs[-1]["data"] for outputs in shown]
    assert "finished at step 20" in shown[0]["text/plain"]
    assert shown[3]["text/html"].startswith("<iframe srcdoc=")
    metrics = lightrft.Run(tmp_path / "runs" / "run").metrics
    assert metrics["reward/mean"].iloc[-1] > 0.5 > metrics["reward/mean"].iloc[0]
