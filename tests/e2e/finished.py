"""What finished runs leave behind, compared bit for bit: of runs that were killed, and of whole ones."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lightrft.config.base import deep_merge
from lightrft.observability.trackers import read_rows
from tests import warm

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]


def steady(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what the clock says."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "seconds", "tokens_per"))}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model that the run has written."""
    files = sorted((folder / "model").glob("*.safetensors"))
    assert files
    return {k: v for file in files for k, v in load_file(file).items()}


def assert_same_run(one: Path, other: Path) -> None:
    rows, others = (read_rows(folder / "metrics.jsonl") for folder in (one, other))
    assert [steady(row) for row in rows] == [steady(row) for row in others]
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def assert_a_kill_changes_nothing(
    tree: dict[str, Any], verb: str, where: str, nth: int, folder: Path
) -> None:
    """Run ``tree`` whole, and killed at the ``nth`` call of ``where`` and resumed."""
    often = deep_merge(tree, {"checkpoint": {"every": 1}, "run": {"threads": 1}})

    def start(name: str, place: str) -> int:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(deep_merge(often, {"run": {"name": name}})))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return warm.run([KILLING, file, place, str(nth), "0", "kill", verb], env=env).returncode

    assert start("whole", "never") == 0
    assert start("killed", where) == -signal.SIGKILL
    assert start("killed", "never") == 0
    runs = Path(tree["run"]["dir"])
    assert_same_run(runs / "whole", runs / "killed")
