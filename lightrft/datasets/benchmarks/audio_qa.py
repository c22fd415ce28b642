"""Readers of multiple-choice questions about a sound.

They cover AVQA as used by R1-AQA (arXiv 2503.11197) and MMAU (arXiv 2410.19168).
"""

from __future__ import annotations

from lightrft.datasets.benchmarks.multiple_choice import choice_row
from lightrft.datasets.benchmarks.preference_pairs import placed
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row


@READERS.register("aqa")
def aqa(row: Row, *, root: str = "") -> Row:
    """Read ``{id, question_text, multi_choice, answer: position, audio_path}``.

    The label is a letter. LightRFT's layout ``{prompt: messages, audio_path, reference, label}`` is
    read too. Its label is the text of ``reference``, because its column ``label`` names a rule.
    ``root`` is the folder of relative paths.
    """
    if "question_text" not in row:
        named = {"prompt": [_message(m, root) for m in row["prompt"]], "label": row["reference"]}
        return {**row, **named, "data_source": "aqa"}
    return choice_row(
        row,
        row["question_text"],
        row["multi_choice"],
        row["answer"],
        "aqa",
        audios=[placed(row["audio_path"], root)],
    )


@READERS.register("mmau")
def mmau(row: Row, *, root: str = "") -> Row:
    """Read ``{id, audio_id, question, choices, answer: text}``.

    The label is a letter. ``root`` is the folder of relative paths.
    """
    return choice_row(
        row,
        options=row["choices"],
        question=row["question"],
        answer=row["answer"],
        source="mmau",
        audios=[placed(row["audio_id"], root)],
    )


def _message(message: Row, root: str) -> Row:
    """Return ``message`` with ``audio_url`` parts renamed to ``audio``."""
    if isinstance(message["content"], str):
        return message
    content = []
    for part in message["content"]:
        # parquet has the columns of all types in each part, with null for those of other types.
        if part.get("audio_url") is not None:
            part = {"type": "audio", "audio": placed(part["audio_url"], root)}
        content.append(part)
    return {**message, "content": content}
