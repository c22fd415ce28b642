"""Reads the metrics of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    [file] = (tmp_path / "runs").rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
