"""Readers of preference datasets of videos, of sounds, and of several media.

* Videos: the datasets of Rapidata, VideoDPO (arXiv 2412.14167), VideoGen-RewardBench (arXiv
  2501.13918) and the videos of GenAI-Bench (arXiv 2406.13743).
* Sounds: Audio-Alpaca (arXiv 2404.09956).
* Several media: Omni-RewardBench (arXiv 2510.23451). A row has two candidates and a criterion to
  compare them by.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

from lightrft.datasets.benchmarks.image_preferences import rated, with_ratings
from lightrft.datasets.benchmarks.preference_pairs import (
    Instruction,
    Pair,
    Winner,
    better,
    judged,
    pair_reader,
)
from lightrft.datasets.row_tables import READERS, Row
from lightrft.utils.errors import DataError


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
