"""Readers of instructions: alpaca, and IFEval, whose instructions can be verified."""

from __future__ import annotations

from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row
from lightrft.datasets.rows.row_content import with_input


@READERS.register("alpaca")
def alpaca(row: Row) -> Row:
    """Read ``{instruction, input, output}``.

    The prompt is the instruction, followed by a blank line and the input if there is one.
    """
    return {**row, "prompt": with_input(row), "response": row["output"]}


@READERS.register("ifeval")
def ifeval(row: Row) -> Row:
    """Read ``{key, prompt, instruction_id_list, kwargs}`` of IFEval (arXiv 2311.07911).

    The reward is ``ifeval``. Raises ``ValueError`` unless each instruction has its arguments.
    """
    names, options = row["instruction_id_list"], row["kwargs"]
    if len(names) != len(options):
        raise ValueError(f"{len(names)} instructions have {len(options)} tables of arguments")
    # Parquet gives each table the arguments of all instructions, with null for the others'.
    given = [{k: v for k, v in table.items() if v is not None} for table in options]
    named = {"id": str(row["key"]), "kwargs": given, "data_source": "ifeval"}
    return {**row, **named}
