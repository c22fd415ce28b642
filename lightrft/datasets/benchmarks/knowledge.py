"""Readers of multiple-choice questions about knowledge or a sound.

They cover MMLU (arXiv 2009.03300), MMLU-Pro (arXiv 2406.01574) and GPQA (arXiv 2311.12022), and
with a sound AVQA as used by R1-AQA (arXiv 2503.11197) and MMAU (arXiv 2410.19168).
"""

from __future__ import annotations

import hashlib

from lightrft.datasets.benchmarks.multiple_choice import choice_row
from lightrft.datasets.benchmarks.preference_pairs import placed
from lightrft.datasets.row_tables import READERS, Row

INCORRECT = tuple(f"Incorrect Answer {i}" for i in (1, 2, 3))


@READERS.register("mmlu")
def mmlu(row: Row, *, by_subject: bool = False) -> Row:
    """Read ``{question, subject, choices, answer: position}``.

    The label is a letter. ``by_subject`` makes each subject a data source of its own, such as
    ``mmlu/anatomy``.
    """
    source = f"mmlu/{row['subject']}" if by_subject else "mmlu"
    return choice_row(row, row["question"], _listed(row["choices"]), row["answer"], source)


@READERS.register("mmlu_pro")
def mmlu_pro(row: Row, *, by_category: bool = False) -> Row:
    """Read ``{question_id, question, options, answer: letter, answer_index, category}``.

    There are up to ten choices, so the reward ``multiple_choice`` needs ``choices: ABCDEFGHIJ``.
    ``by_category`` makes each category a data source of its own, such as ``mmlu_pro/law``. Raises
    ``ValueError`` if the letter and the index of the answer differ.
    """
    source = f"mmlu_pro/{row['category']}" if by_category else "mmlu_pro"
    answer, index = row["answer"], row.get("answer_index")
    options, right = _listed(row["options"]), answer if index is None else index
    made = choice_row(row, row["question"], options, right, source)
    if made["label"] != answer:
        raise ValueError(f"the answer is {answer!r}, but answer_index {index!r} is {made['label']}")
    number = row.get("question_id")
    return made if number is None else {**made, "id": str(number)}


def gpqa_published(row: Row, name: str, seed: int) -> Row:
    """Read a row of GPQA, with its choices shuffled.

    Args:
        row: The row.
        name: Name of the data source.
        seed: Seed of the shuffle, together with the question.
    """
    question = str(row["Question"]).strip()
    texts = [str(row[column]).strip() for column in ("Correct Answer", *INCORRECT)]
    keys = [hashlib.sha256(f"{seed}\0{question}\0{i}".encode()).digest() for i in range(len(texts))]
    order = sorted(range(len(texts)), key=lambda i: keys[i])
    # By position: the letter A may be the text of another choice.
    made = choice_row(row, question, [texts[i] for i in order], order.index(0), name)
    record = row.get("Record ID")
    return made if record is None else {**made, "id": str(record)}


def _listed(options: object) -> list[object]:
    if not isinstance(options, list | tuple):
        raise ValueError(f"the choices are {type(options).__name__}, not a list")
    return list(options)


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
