"""Mathematics with pictures: Geometry3K (arXiv 2105.04165) and MathVista (arXiv 2310.02255)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrft.datasets.benchmarks.multiple_choice import letter_of, lettered, shown
from lightrft.datasets.benchmarks.verl_parquet import verl
from lightrft.datasets.row_readers import READERS


@READERS.register("geo3k")
def geo3k(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """``{images, problem, answer}`` as hiyouga/geometry3k has it, or the layout of verl's preprocessing."""
    if "reward_model" in row:
        return verl(row)
    named = {"images": row["images"], "prompt": row["problem"], "label": row["answer"], "reference": row["answer"]}
    return {**row, **named, "data_source": "geo3k"}


@READERS.register("mathvista")
def mathvista(row: Mapping[str, Any]) -> dict[str, Any]:
    """``{pid, question, decoded_image or image, choices, unit, answer, question_type}``.

    The label is a letter where there are choices. The data source ends in the question's type, so that each can have a reward
    of its own. Raises ``ValueError`` for an answer that is not among the choices.
    """
    picture = row["image"] if row.get("decoded_image") is None else row["decoded_image"]
    unit = f" (Unit: {row['unit']})" if row.get("unit") else ""
    prompt, label = f"{row['question']}{unit}", row["answer"]
    if row.get("choices"):
        choices = lettered(row["choices"])
        prompt += shown(choices)
        label = None if label is None else letter_of(choices, label)
    named = {
        "images": [picture],
        "decoded_image": None,
        "prompt": prompt,
        "label": label,
        "reference": row["answer"],
        "id": row.get("pid"),
    }
    return {**row, **named, "data_source": f"mathvista/{row['question_type']}"}
