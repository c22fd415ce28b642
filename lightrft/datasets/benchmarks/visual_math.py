"""Readers of questions with images.

They cover Geometry3K (arXiv 2105.04165), MathVista (arXiv 2310.02255) and MMMU (arXiv 2311.16502).
"""

from __future__ import annotations

import ast
import re

from lightrft.datasets.benchmarks.multiple_choice import format_choices, letter_of, shown
from lightrft.datasets.benchmarks.training_layouts import verl
from lightrft.datasets.row_tables import READERS, Row

PLACE = re.compile(r"<image (\d)>")
"""Mention of an image by its number in MMMU."""
IMAGES = tuple(f"image_{number}" for number in range(1, 8))


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
        "response": label,
        "reference": row["answer"],
        "id": row.get("pid"),
    }
    return {**row, **named, "data_source": f"mathvista/{row['question_type']}"}


@READERS.register("mmmu")
def mmmu(row: Row) -> Row:
    """Read ``{id, question, options: "[...]", answer, question_type, image_1, ..., image_7}``.

    The label of a multiple-choice question is a letter. The data source ends in the question type,
    ``mmmu/multiple-choice`` or ``mmmu/open``, so that each type can have its own reward. An image
    is placed where it is mentioned first. Raises ``ValueError`` if an image that is mentioned is
    missing.
    """
    options = _literal_list(row["options"])
    prompt = str(row["question"])
    label: object = row["answer"]
    if options:
        choices = format_choices(options)
        prompt += shown(choices)
        # A letter first: a choice may itself be the text "A".
        label = label if label in choices else letter_of(choices, label)
    elif str(label).startswith("["):
        label = _literal_list(label)
    text, images = _with_places(prompt, row)
    named = {
        # Or the row would keep each picture among its columns.
        **dict.fromkeys(IMAGES),
        "images": images,
        "prompt": text,
        "label": label,
        "reference": row["answer"],
    }
    return {**row, **named, "data_source": f"mmmu/{row['question_type']}"}


def _literal_list(value: object) -> list[object]:
    """Return a list that may be written as a Python literal. Raises ``ValueError`` otherwise."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"{value!r} is not a list of choices") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list of choices")
    return list(value)


def _with_places(text: str, row: Row) -> tuple[str, list[object]]:
    """Return ``text`` with a place for each image, and the images in that order."""
    numbers = list(dict.fromkeys(PLACE.findall(text)))
    missing = [number for number in numbers if row.get(f"image_{number}") is None]
    if missing:
        raise ValueError(f"the question shows image {missing[0]}, but image_{missing[0]} is empty")
    parts = PLACE.split(text)
    made, seen = [parts[0]], set()
    for number, after in zip(parts[1::2], parts[2::2], strict=True):
        # A later mention refers to the same picture.
        made += [f"image {number}" if number in seen else "<image>", after]
        seen.add(number)
    mentioned = [row[f"image_{number}"] for number in numbers]
    others = [row[c] for c in IMAGES if row.get(c) is not None and c[-1] not in seen]
    front = "<image>\n" * len(others)
    return front + "".join(made), [*others, *mentioned]
