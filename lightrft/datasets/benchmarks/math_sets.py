"""Readers of mathematics benchmarks.

The files are JSON lists of ``{"prompt": [{"from", "value"}], "final_answer", "choices"?}``.
"""

from __future__ import annotations

from collections.abc import Callable

from lightrft.datasets.benchmarks.multiple_choice import format_choices, with_choices
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row


def _reader(name: str) -> Callable[..., Row]:
    def read(row: Row) -> Row:
        """Read ``{prompt, final_answer, choices?}``.

        Choices are shown with letters, and the label is then a letter.
        """
        prompt, label = row["prompt"], row["final_answer"]
        if row.get("choices"):
            choices = format_choices(row["choices"])
            prompt = with_choices(prompt, choices)
            label = next((letter for letter, text in choices.items() if text == label), label)
        return {**row, "prompt": prompt, "label": label, "data_source": name}

    return READERS.register(name)(read)


math500 = _reader("math500")
aime2024 = _reader("aime2024")
aime2025 = _reader("aime2025")
gpqa = _reader("gpqa")
gpqa_diamond = _reader("gpqa_diamond")
