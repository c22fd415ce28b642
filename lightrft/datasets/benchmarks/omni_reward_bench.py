"""Readers of Omni-RewardBench (arXiv 2510.23451).

A row has two candidates and a criterion to compare them by.
"""

from __future__ import annotations

from lightrft.datasets.benchmarks.preference_pairs import Instruction, Winner, preference_label
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row

WINNERS: dict[str, Winner] = {"response1": 0, "response2": 1, "tie": None}


@READERS.register("omnirewardbench-t2i")
def omnirewardbench_t2i(
    row: Row,
    *,
    task_instruction: Instruction | None = None,
    root: str = "",
) -> Row:
    """Read ``{prompt, response1, response2, criteria, criteria_preference, id, model1, model2}``.

    If the row has no ``response1``, the path ``response1_path`` is used.
    """
    return _read(row, "omnirewardbench-t2i", "text-to-image", task_instruction, root)


@READERS.register("omnirewardbench-t2v")
def omnirewardbench_t2v(
    row: Row,
    *,
    task_instruction: Instruction | None = None,
    root: str = "",
) -> Row:
    """Read rows as ``omnirewardbench-t2i`` does, with videos."""
    return _read(row, "omnirewardbench-t2v", "text-to-video", task_instruction, root)


@READERS.register("omnirewardbench-t2a")
def omnirewardbench_t2a(
    row: Row,
    *,
    task_instruction: Instruction | None = None,
    root: str = "",
) -> Row:
    """Read rows as ``omnirewardbench-t2i`` does, with sounds."""
    return _read(row, "omnirewardbench-t2a", "text-to-audio", task_instruction, root)


def _read(
    row: Row,
    source: str,
    task: str,
    task_instruction: Instruction | None,
    root: str,
) -> Row:
    said = row["criteria_preference"]
    if said not in WINNERS:
        raise ValueError(f"criteria_preference is {said!r}, not one of {', '.join(WINNERS)}")
    return preference_label(
        row,
        source=source,
        task=task,
        request=row["prompt"],
        candidates=[_response(row, f"response{k}") for k in (1, 2)],
        heads={"preference": WINNERS[said]},
        ties=True,
        criteria=row["criteria"],
        task_instruction=task_instruction,
        root=root,
    )


def _response(row: Row, name: str) -> object:
    return row[f"{name}_path"] if row.get(name) is None else row[name]
