"""Readers of math problems with images.

They cover Geometry3K (arXiv 2105.04165) and MathVista (arXiv 2310.02255).
"""

from __future__ import annotations

from lightrft.datasets.benchmarks.multiple_choice import format_choices, letter_of, shown
from lightrft.datasets.benchmarks.verl_parquet import verl
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row


@READERS.register("geo3k")
def geo3k(row: Row) -> Row:
    """Read ``{images, problem, answer}`` of hiyouga/geometry3k, or the layout of verl."""
    if "reward_model" in row:
        return verl(row)
    named = {
        "images": row["images"],
        "prompt": row["problem"],
        "label": row["answer"],
        "reference": row["answer"],
    }
    return {**row, **named, "data_source": "geo3k"}


@READERS.register("mathvista")
def mathvista(row: Row) -> Row:
    """Read ``{pid, question, decoded_image or image, choices, unit, answer, question_type}``.

    The label is a letter if there are choices. The data source ends in the question type, so that
    each type can have its own reward. Raises ``ValueError`` if the answer is not among the choices.
    """
    picture = row["image"] if row.get("decoded_image") is None else row["decoded_image"]
    unit = f" (Unit: {row['unit']})" if row.get("unit") else ""
    prompt, label = f"{row['question']}{unit}", row["answer"]
    if row.get("choices"):
        choices = format_choices(row["choices"])
        prompt += shown(choices)
        label = None if label is None else letter_of(choices, label)
    named = {
        "images": [picture],
        # Or the row would keep the decoded picture among its columns.
        "decoded_image": None,
        "prompt": prompt,
        "label": label,
        "reference": row["answer"],
        "id": row.get("pid"),
    }
    return {**row, **named, "data_source": f"mathvista/{row['question_type']}"}
