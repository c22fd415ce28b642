"""Reader of Audio-Alpaca, a preference dataset of sounds (arXiv 2404.09956)."""

from __future__ import annotations

from lightrft.datasets.benchmarks.preference_pairs import Instruction, preference_label
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row


@READERS.register("audio-alpaca")
def audio_alpaca(row: Row, *, task_instruction: Instruction | None = None) -> Row:
    """Read ``{prompt, chosen, rejected, strategy}``, where both sounds are bytes."""
    return preference_label(
        row,
        source="audio-alpaca",
        task="text-to-audio",
        request=row["prompt"],
        candidates=(row["chosen"], row["rejected"]),
        heads={"preference": 0},
        task_instruction=task_instruction,
    )
