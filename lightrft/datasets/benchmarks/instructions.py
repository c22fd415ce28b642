"""Readers of instruction datasets whose prompt is in two columns."""

from __future__ import annotations

from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row


@READERS.register("alpaca")
def alpaca(row: Row) -> Row:
    """Read ``{instruction, input, output}``.

    The prompt is the instruction, followed by a blank line and the input if there is one.
    """
    prompt = row["instruction"]
    if given := row.get("input"):
        prompt = f"{prompt}\n\n{given}"
    return {**row, "prompt": prompt, "response": row["output"]}
