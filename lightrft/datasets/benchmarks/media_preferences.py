"""Readers of preference datasets of images, videos and sounds.

* Images: HPDv3 (arXiv 2508.03789), ImageRewardDB (arXiv 2304.05977), ImageGen-CoT-Reward-5K (arXiv
  2505.03318) and GenAI-Bench (arXiv 2406.13743).
* Videos: the datasets of Rapidata, VideoDPO (arXiv 2412.14167), VideoGen-RewardBench (arXiv
  2501.13918) and GenAI-Bench.
* Sounds: Audio-Alpaca (arXiv 2404.09956). Several media: Omni-RewardBench (arXiv 2510.23451), whose
  rows have two candidates and a criterion to compare them by.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

from lightrft.datasets.benchmarks.preference_pairs import (
    Instruction,
    Pair,
    PairBuilder,
    Winner,
    better,
    judged,
    pair_reader,
    placed,
)
from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row, Rows
from lightrft.utils.errors import DataError

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


@pair_reader("rapidata-t2v", "text-to-video", ties=True)
def rapidata_t2v(row: Row) -> Pair:
    """Read ``{prompt, file_name1, file_name2, weighted_results1_Preference, ...}``.

    The video with the higher score is preferred. The same holds for coherence and alignment.
    """
    return _rapidata(row)


@pair_reader("rapidata-i2v", "image-to-video", ties=True)
def rapidata_i2v(row: Row) -> Pair:
    """Read rows as ``rapidata-t2v`` does.

    ``prompt_asset`` is the image that both videos start from.
    """
    return _rapidata(row, row["prompt_asset"])


def _rapidata(row: Row, given: object = None) -> Pair:
    heads: dict[str, Winner] = {
        head.lower(): better(*(row[f"weighted_results{k}_{head}"] for k in (1, 2)))
        for head in ("Preference", "Coherence", "Alignment")
    }
    return Pair(row["prompt"], (row["file_name1"], row["file_name2"]), heads, given)


@pair_reader("videodpo", "text-to-video")
def videodpo(row: Row) -> Pair:
    """Read ``{video1, video2, frame_caption}`` of ``pair.json``, where ``video1`` is preferred.

    The columns are numbers of videos. Video 2n is ``winvideos/n.mp4`` and video 2n + 1 is
    ``losevideos/n.mp4``, with six digits.
    """
    candidates = [
        f"{'lose' if n % 2 else 'win'}videos/{n // 2:06d}.mp4"
        for n in (int(row["video1"]), int(row["video2"]))
    ]
    return Pair(row["frame_caption"], candidates, {"preference": 0})


@pair_reader("videogen-rewardbench", "text-to-video", ties=True)
def videogen_rewardbench(row: Row) -> Pair:
    """Read ``{path_A, path_B, prompt, Overall, VQ, MQ, TA}``, where the last four are A, B or same.

    They become ``preference``, ``visual_quality``, ``motion_quality`` and ``text_alignment``. Their
    letters are the letters of the candidates in the prompt.
    """
    names = {
        "preference": "Overall",
        "visual_quality": "VQ",
        "motion_quality": "MQ",
        "text_alignment": "TA",
    }
    heads = {head: _side(row[name], name) for head, name in names.items()}
    return Pair(row["prompt"], (row["path_A"], row["path_B"]), heads)


def _side(letter: str, column: str) -> Winner:
    sides: dict[str, Winner] = {"A": 0, "B": 1, "same": None}
    if letter not in sides:
        raise ValueError(f"the column {column!r} is {letter!r}, not one of {', '.join(sides)}")
    return sides[letter]


@pair_reader("genai_bench_video", "text-to-video", ties=True)
def genai_bench_video(row: Row) -> Pair:
    """Read ``{id, prompt, models: {model: ratings}}`` of two models.

    See ``genai_bench_video_pairs``. The videos are ``<model>/<id>.mp4``. The video with the higher
    mean rating is preferred. Raises ``ValueError`` unless the row has exactly two models.
    """
    models, heads = rated(row["models"], f"{__name__}:genai_bench_video_pairs")
    candidates = [f"{model}/{row['id']}.mp4" for model in models]
    return Pair(row["prompt"], candidates, heads, id="/".join([str(row["id"]), *models]))


def genai_bench_video_pairs(path: str) -> list[dict[str, object]]:
    """Return all pairs of models in the JSON file ``{id: {prompt, models: {model: ratings}}}``.

    This is a source function. Raises ``DataError`` if ``path`` cannot be read as JSON.
    """
    try:
        rows = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"data.sources: {path} cannot be read as JSON: {error}") from error
    pairs = []
    for name, row in rows.items():
        ratings = row["models"]
        for two in combinations(with_ratings(ratings), 2):
            pairs.append({**row, "id": name, "models": {model: ratings[model] for model in two}})
    return pairs
