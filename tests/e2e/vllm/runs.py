"""Runs of the command line, and the metrics that they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import deep_merge

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SAME = ("reward/mean", "policy/grad_norm", "staleness/max")


def train(tree: dict[str, Any], folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the command line with ``tree`` and return the metrics of its steps."""
    folder.mkdir()
    given = deep_merge(tree, {"run": {"dir": str(folder), "progress": False}})
    (folder / "config.yaml").write_text(json.dumps(given))
    words = [sys.executable, "-m", "lightrft", "rl", folder / "config.yaml", *more]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected):
        for name in SAME:
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=1e-3), name


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    [file] = tmp_path.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
