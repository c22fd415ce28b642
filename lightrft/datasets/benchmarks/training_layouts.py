"""Readers of the layouts of alpaca, IFEval, verl and lmm-r1."""

from __future__ import annotations

import json

from lightrft.datasets.media.fetch import first_given
from lightrft.datasets.row_tables import READERS, Row
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


@READERS.register("verl")
def verl(row: Row) -> Row:
    """Read ``{data_source, prompt: messages, reward_model: {ground_truth}, extra_info}``.

    ``extra_info`` is ``{split, index, ...}``.
    """
    extra = row.get("extra_info") or {}
    truth = row["reward_model"]["ground_truth"]
    # The worked solution. verl writes that of GSM8K under ``answer``.
    solution = first_given(extra, ("answer", "reference"))
    source = row.get("data_source") or ""
    named = {
        "prompt": row["prompt"],
        "label": truth,
        "reference": truth if solution is None else solution,
        "data_source": source,
    }
    if extra.get("index") is not None:
        # the index counts from 0 in each split of each source
        parts = (source, extra.get("split"), extra["index"])
        named["id"] = "/".join(str(part) for part in parts if part not in (None, ""))
    return {**row, **named}


@READERS.register("lmm_r1")
def lmm_r1(row: Row) -> Row:
    """Read ``{message: "[{...}]", answer, datasource?}``, with messages as a JSON string.

    Raises ``ValueError`` if it is not JSON.
    """
    message = row["message"]
    named = {
        "prompt": json.loads(message) if isinstance(message, str) else message,
        "label": row["answer"],
        "data_source": row.get("datasource") or "",
    }
    return {**row, **named}


vermulti = READERS.register("vermulti")(lmm_r1)
"""VerMulti (arXiv 2503.07536) has the same layout."""
