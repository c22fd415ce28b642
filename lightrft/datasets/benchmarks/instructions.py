"""Readers of instruction datasets whose prompt is in two columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrft.datasets.row_readers import READERS


@READERS.register("alpaca")
def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``{instruction, input, output}``.

    The prompt is the instruction, followed by a blank line and the input if there is one.
    """
    given = row.get("input") or ""
    prompt = f"{row['instruction']}\n\n{given}" if given else row["instruction"]
    return {**row, "prompt": prompt, "response": row["output"]}
