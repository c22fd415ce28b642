"""What builds an image and a release names files, extras, make targets and versions that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.tree import PACKAGE, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (row.partition(" ") for row in joined.splitlines())]


def jobs() -> dict[str, Any]:
    file = ROOT / ".github" / "workflows" / "release.yml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]


def test_the_image_has_known_instructions_and_copies_files_that_exist() -> None:
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} == known
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M)
    assert sorted(allowed) == sorted(copied)


def test_the_image_installs_extras_that_exist_and_runs_the_command() -> None:
    args = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    assert args["BACKEND"] == "cpu"
    assert set(args["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    (entry,) = (rest for word, rest in instructions() if word == "ENTRYPOINT")
    assert entry == f'["{PACKAGE}"]' and PACKAGE in PROJECT["scripts"]


def test_the_image_passes_a_linter() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_steps_of_the_image_install_the_package_from_the_copied_files(tmp_path: Path) -> None:
    """Without the packages that it needs, which ``make test-wheel`` installs."""
    source, venv = tmp_path / "src", tmp_path / "venv"
    source.mkdir()
    for word, rest in instructions():
        if word == "COPY":
            *names, _ = rest.split()
            for name in names:
                whole = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                whole(ROOT / name, source / name)
    (step,) = (rest for word, rest in instructions() if "uv pip install" in rest)
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    step = step.replace("/venv", str(venv)).replace("/src", str(source))
    step = re.sub(r"&& \S+/python -m pip install --no-cache-dir uv==[\d.]+", "", step)
    step = re.sub(r"\S+/uv pip install", "uv pip install --no-deps --no-build-isolation", step)
    # setuptools, which builds the package, is a package of this environment.
    outer = Path(pytest.__file__).parents[1]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"EXTRAS": "serve", "BACKEND": "cpu", "PYTHONPATH": str(outer)}
    done = subprocess.run(["sh", "-ec", step], cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(source.iterdir()) == []
    said = subprocess.run(
        [venv / "bin" / PACKAGE, "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.stdout == f"lightrft {PROJECT['version']}\n"


def test_the_release_tests_the_wheel_before_it_publishes_it_without_a_token() -> None:
    wheel, publish = jobs()["wheel"], jobs()["publish"]
    commands = [step["run"] for step in wheel["steps"] if "run" in step]
    targets = {name for one in commands for name in re.findall(r"^make (\S+)", one, re.M)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == {"test-wheel"}
    assert all(re.search(rf"^{name}:", makefile, re.M) for name in targets)
    assert publish["needs"] == "wheel" and publish["permissions"] == {"id-token": "write"}
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert wheel["steps"][1]["with"]["python-version"] == minimum


@pytest.mark.parametrize(("tag", "status"), [("v" + PROJECT["version"], 0), ("v9.9.9", 1)])
def test_a_tag_must_have_the_version_of_the_project(tag: str, status: int) -> None:
    (check,) = (step["run"] for step in jobs()["wheel"]["steps"] if "grep" in step.get("run", ""))
    env = {**os.environ, "GITHUB_REF_NAME": tag}
    assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=env).returncode == status
