"""Readers of the layouts of alpaca, IFEval, verl and lmm-r1, and of benchmarks by their columns."""

from __future__ import annotations

import json
from collections.abc import Callable

from lightrft.datasets.benchmarks.knowledge import mmlu, mmlu_pro
from lightrft.datasets.benchmarks.math_sets import ANSWER, gpqa, gsm8k, math
from lightrft.datasets.benchmarks.visual_math import mathvista, mmmu
from lightrft.datasets.media.fetch import first_given
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


LAYOUTS: tuple[tuple[frozenset[str], Callable[..., Row]], ...] = (
    (frozenset(("instruction_id_list", "kwargs", "prompt")), ifeval),
    (frozenset(("Question", "Correct Answer")), gpqa),
    (frozenset(("image_1", "options", "question_type")), mmmu),
    (frozenset(("pid", "question", "question_type", "choices")), mathvista),
    (frozenset(("question", "options", "answer_index")), mmlu_pro),
    (frozenset(("question", "subject", "choices", "answer")), mmlu),
    (frozenset(("problem", "answer")), math),
    (frozenset(("problem", "solution")), math),
    (frozenset(("Problem", "Answer")), math),
)
"""Columns that identify a benchmark, and its reader. The first that fits is taken."""


@READERS.register("benchmark")
def benchmark(row: Row) -> Row:
    """Read a row of GSM8K, MATH, AIME, AMC, MMLU, MMLU-Pro, GPQA, IFEval, MMMU or MathVista.

    The columns of the row identify the benchmark. The data source is the name of its reader; it is
    ``math`` for MATH, AIME and AMC. Raises ``ValueError`` if no benchmark has these columns.
    """
    for columns, reader in LAYOUTS:
        if columns <= row.keys():
            return reader(row)
    if {"question", "answer"} <= row.keys() and ANSWER.search(str(row["answer"])):
        return gsm8k(row)
    raise ValueError(
        "the columns are those of no known benchmark; name its reader, or the columns in "
        "data.columns"
    )
