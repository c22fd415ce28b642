"""Readers of preference datasets of sounds, and of several media.

They cover Audio-Alpaca (arXiv 2404.09956) and Omni-RewardBench (arXiv 2510.23451). A row of
Omni-RewardBench has two candidates and a criterion to compare them by.
"""

from __future__ import annotations

from lightrft.datasets.benchmarks.preference_pairs import (
    Instruction,
    Pair,
    Winner,
    judged,
    pair_reader,
)
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row

WINNERS: dict[str, Winner] = {"response1": 0, "response2": 1, "tie": None}


@READERS.register("audio-alpaca")
def audio_alpaca(row: Row, *, task_instruction: Instruction | None = None) -> Row:
    """Read ``{prompt, chosen, rejected, strategy}``, where both sounds are bytes."""
    pair = Pair(row["prompt"], (row["chosen"], row["rejected"]), {"preference": 0})
    return judged(row, pair, "audio-alpaca", "text-to-audio", task_instruction=task_instruction)


@pair_reader("omnirewardbench-t2i", "text-to-image", ties=True)
def omnirewardbench_t2i(row: Row) -> Pair:
    """Read ``{prompt, response1, response2, criteria, criteria_preference, id, model1, model2}``.

    If the row has no ``response1``, the path ``response1_path`` is used.
    """
    return _pair(row)


@pair_reader("omnirewardbench-t2v", "text-to-video", ties=True)
def omnirewardbench_t2v(row: Row) -> Pair:
    """Read rows as ``omnirewardbench-t2i`` does, with videos."""
    return _pair(row)


@pair_reader("omnirewardbench-t2a", "text-to-audio", ties=True)
def omnirewardbench_t2a(row: Row) -> Pair:
    """Read rows as ``omnirewardbench-t2i`` does, with sounds."""
    return _pair(row)


def _pair(row: Row) -> Pair:
    said = row["criteria_preference"]
    if said not in WINNERS:
        raise ValueError(f"criteria_preference is {said!r}, not one of {', '.join(WINNERS)}")
    candidates = [
        row[f"{name}_path"] if row.get(name) is None else row[name]
        for name in ("response1", "response2")
    ]
    heads = {"preference": WINNERS[said]}
    return Pair(row["prompt"], candidates, heads, criteria=row["criteria"])
