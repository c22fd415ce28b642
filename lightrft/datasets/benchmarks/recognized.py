"""The reader of benchmarks whose columns identify them."""

from __future__ import annotations

from collections.abc import Callable

from lightrft.datasets.benchmarks.knowledge import mmlu, mmlu_pro
from lightrft.datasets.benchmarks.math_sets import ANSWER, gpqa, gsm8k, math
from lightrft.datasets.benchmarks.training_layouts import ifeval
from lightrft.datasets.benchmarks.visual_math import mathvista, mmmu
from lightrft.datasets.row_tables import READERS, Row

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
