"""Runs of several processes: from the command line, and by the benchmark's runner of many in the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.parity import LIMIT, compared
from lightrft.utils.settings import deep_merge

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def config_file(tree: dict[str, Any], folder: Path, name: str) -> Path:
    """``tree`` as a file, for a run of that name."""
    run = {"run": {"dir": str(folder), "name": name, "threads": 1, "progress": False}, "strategy": {"device": "cpu"}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(deep_merge(tree, run)))
    return file


def train(tree: dict[str, Any], folder: Path, name: str, processes: int, *more: str) -> Path:
    """``lightrft rl`` with ``tree`` in as many processes; the run's folder."""
    file = config_file(tree, folder, name)
    command = [sys.executable, "-m", "lightrft", "rl", str(file), f"launch.processes={processes}", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def check_equal(found: Path, expected: Path) -> None:
    """The metrics of two runs, but for rounding, and their weights."""
    gap, where = compared(found, expected).worst
    assert gap <= LIMIT, where
