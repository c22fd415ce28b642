"""Readers of multiple-choice questions about knowledge.

They cover MMLU (arXiv 2009.03300), MMLU-Pro (arXiv 2406.01574) and GPQA (arXiv 2311.12022).
"""

from __future__ import annotations

import hashlib

from lightrft.datasets.benchmarks.multiple_choice import format_choices, letter_of, shown
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row

INCORRECT = tuple(f"Incorrect Answer {i}" for i in (1, 2, 3))


@READERS.register("mmlu")
def mmlu(row: Row, *, by_subject: bool = False) -> Row:
    """Read ``{question, subject, choices, answer: position}``.

    The label is a letter. ``by_subject`` makes each subject a data source of its own, such as
    ``mmlu/anatomy``.
    """
    source = f"mmlu/{row['subject']}" if by_subject else "mmlu"
    return _question(row, row["question"], row["choices"], row["answer"], source)


@READERS.register("mmlu_pro")
def mmlu_pro(row: Row, *, by_category: bool = False) -> Row:
    """Read ``{question_id, question, options, answer: letter, answer_index, category}``.

    There are up to ten choices, so the reward ``multiple_choice`` needs ``choices: ABCDEFGHIJ``.
    ``by_category`` makes each category a data source of its own, such as ``mmlu_pro/law``. Raises
    ``ValueError`` if the letter and the index of the answer differ.
    """
    source = f"mmlu_pro/{row['category']}" if by_category else "mmlu_pro"
    answer, index = row["answer"], row.get("answer_index")
    made = _question(
        row, row["question"], row["options"], answer if index is None else index, source
    )
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
    order = sorted(range(len(texts)), key=lambda i: _random_key(seed, question, i))
    # By position: the letter A may be the text of another choice.
    made = _question(row, question, [texts[i] for i in order], order.index(0), name)
    record = row.get("Record ID")
    return made if record is None else {**made, "id": str(record)}


def _random_key(seed: int, question: str, choice: int) -> bytes:
    """Return a key that puts the choices of a question in a random order."""
    return hashlib.sha256(f"{seed}\0{question}\0{choice}".encode()).digest()


def _question(row: Row, question: str, options: object, answer: object, source: str) -> Row:
    """Return ``row`` with a prompt that shows its choices, and a letter as the label.

    Args:
        row: The row.
        question: The question without its choices.
        options: The choices in order.
        answer: Position, text or letter of the right choice.
        source: Name of the data source.
    """
    if not isinstance(options, list | tuple):
        raise ValueError(f"the choices are {type(options).__name__}, not a list")
    choices = format_choices(options)
    letter = letter_of(choices, answer)
    named = {
        "prompt": f"{question}{shown(choices)}",
        "label": letter,
        "response": letter,
        "reference": choices[letter],
        "data_source": source,
    }
    return {**row, **named}
