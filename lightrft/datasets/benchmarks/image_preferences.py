"""Readers of preference datasets of images.

They cover HPDv3 (arXiv 2508.03789), ImageRewardDB (arXiv 2304.05977), ImageGen-CoT-Reward-5K (arXiv
2505.03318) and GenAI-Bench (arXiv 2406.13743).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations

from lightrft.datasets.benchmarks.preference_pairs import (
    Pair,
    PairBuilder,
    Winner,
    better,
    pair_reader,
    placed,
)
from lightrft.datasets.row_tables import READERS, Row, Rows

TASK = "text-to-image"
CAPTION = re.compile(r"Text Caption: \[(.*)\]", re.DOTALL)
VERDICT = re.compile(r"<answer>\s*Image ([12]) is better\s*</answer>")


@pair_reader("hpdv3", TASK)
def hpdv3(row: Row) -> Pair:
    """Read ``{prompt, path1, path2, model1, model2, confidence, choice_dist}``.

    ``path1`` is the preferred image.
    """
    return Pair(row["prompt"], (row["path1"], row["path2"]), {"preference": 0})


@pair_reader("imagerewarddb", TASK)
def imagerewarddb(row: Row) -> Pair:
    """Read pairs ``{prompt_id, prompt, image_path, rank, overall_rating, classification}``.

    Columns that differ between the two images have two values: see ``imagerewarddb_pairs``. Raises
    ``ValueError`` for a row with one image.
    """
    if isinstance(row["image_path"], str):
        raise ValueError(
            f"it has one picture; pairs come from the source {__name__}:imagerewarddb_pairs"
        )
    first, second = row["rank"]
    return Pair(row["prompt"], row["image_path"], {"preference": better(-first, -second)})


def imagerewarddb_pairs(path: str, split: str = "train") -> PairBuilder[tuple[int, int]]:
    """Return all pairs of images of one prompt that differ in rank (1 is best).

    This is a source function. The rows at ``path`` have one image each.
    """
    rows = _open(path, split)
    of_prompt: dict[str, list[tuple[int, object]]] = defaultdict(list)
    for i in range(len(rows)):
        row = rows[i]
        if row["rank"] is not None:
            of_prompt[row["prompt_id"]].append((i, row["rank"]))
    keys = []
    for found in of_prompt.values():
        for (i, best), (j, other) in combinations(found, 2):
            if best != other:
                keys.append((i, j))
    return PairBuilder(keys, partial(_beside, rows))


@READERS.register("imagegen-cot-reward-5k")
def imagegen_cot_reward_5k(row: Row, *, root: str = "") -> Row:
    """Read ``{images: [first, second], conversations: [{from, value}]}``.

    The first turn asks. The last turn reasons and ends in a verdict. The images keep their order
    and their names Image 1 and Image 2, because the reasoning refers to them. ``verdict`` is the
    sentence of the verdict, for a reward that compares text. ``request`` is the caption in the
    question (``Text Caption: [...]``), or else the question. Raises ``ValueError`` if there is no
    verdict.
    """
    asked, said = (row["conversations"][k]["value"] for k in (0, -1))
    found = VERDICT.findall(said)
    if not found:
        raise ValueError(
            "the last turn has no <answer>Image 1 is better</answer> or <answer>Image 2 is "
            "better</answer>"
        )
    best = int(found[-1]) - 1
    parts = [{"type": "image", "image": placed(image, root)} for image in row["images"]]
    # The markers of the images go: each image is a part, below its name.
    question = asked.replace("<image>", "").strip()
    content: list[dict[str, object]] = [{"type": "text", "text": question}]
    for k, part in enumerate(parts, start=1):
        content += [{"type": "text", "text": f"\n\nImage {k}:\n"}, part]
    named = {"prompt": [{"role": "user", "content": content}], "response": said}
    caption = CAPTION.search(question)
    letter = "AB"[best]
    labels = {
        "label": letter,
        "preference": letter,
        "verdict": f"Image {best + 1} is better",
        "shown": [0, 1],
        "request": question if caption is None else caption[1],
    }
    sides = {"chosen": parts[best], "rejected": parts[1 - best]}
    return {**row, **named, **labels, **sides, "data_source": "imagegen-cot-reward-5k"}


@pair_reader("genai_bench", TASK, ties=True)
def genai_bench(row: Row) -> Pair:
    """Read ``{Prompt, HumanRatings: {model: ratings}, Index}`` of two models.

    The row has one more column per model, with its image: see ``genai_bench_pairs``. The image with
    the higher mean rating is preferred. Raises ``ValueError`` unless the row has exactly two
    models.
    """
    (one, two), heads = rated(row["HumanRatings"], f"{__name__}:genai_bench_pairs")
    return Pair(row["Prompt"], (row[one], row[two]), heads, id=f"{row['Index']}/{one}/{two}")


def genai_bench_pairs(path: str, split: str = "train") -> PairBuilder[tuple[int, str, str]]:
    """Return all pairs of models that have ratings and an image, for each row at ``path``.

    This is a source function.
    """
    rows = _open(path, split)
    keys = []
    for i in range(len(rows)):
        row = rows[i]
        models = [m for m in with_ratings(row["HumanRatings"]) if row.get(m) is not None]
        keys += [(i, one, two) for one, two in combinations(models, 2)]
    return PairBuilder(keys, partial(_of_two, rows))


def with_ratings(ratings: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of the models that anyone has rated."""
    return [model for model, given in ratings.items() if given]


def rated(
    ratings: Mapping[str, Sequence[float]], source: str
) -> tuple[list[str], dict[str, Winner]]:
    """Return the names of the two models in ``ratings``, and the one with the higher mean rating.

    Raises ``ValueError`` with the source of pairs unless there are exactly two.
    """
    models = with_ratings(ratings)
    if len(models) != 2:
        raise ValueError(f"it rates {len(models)} models; pairs come from the source {source}")
    return models, {"preference": better(*(sum(ratings[m]) / len(ratings[m]) for m in models))}


def _open(path: str, split: str) -> Rows:
    # Imported here, because ``open_source`` imports this package.
    from lightrft.config.data import SourceConfig
    from lightrft.datasets.open_source import open_source

    return open_source(SourceConfig(path=path, split=split))


def _beside(rows: Rows, pair: tuple[int, int]) -> Row:
    first = rows[pair[0]]
    second = rows[pair[1]]
    same = ("prompt_id", "prompt", "classification")
    made = {}
    for name, value in first.items():
        made[name] = value if name in same else [value, second.get(name)]
    return made


def _of_two(rows: Rows, key: tuple[int, str, str]) -> Row:
    i, *two = key
    row = rows[i]
    ratings = row["HumanRatings"]
    # The columns of all models go, or the images of the others would be stored with each pair.
    made = {name: value for name, value in row.items() if name not in ratings}
    made["HumanRatings"] = {model: ratings[model] for model in two}
    for model in two:
        made[model] = row[model]
    return made
