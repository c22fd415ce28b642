"""Each published set of preferences, as a local copy in its layout, through the command that uses it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.processors import load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from tests.e2e.command import command
from tests.unit.datasets.media_files import clip, encoded, picture, pixels, sound
from tests.unit.datasets.test_process_dataset import PRM800K, SHEPHERD, VISUAL, VISUAL_RAW

Row = dict[str, Any]
Rows = list[Row]
COUNT = 4
PAIRS = "lightrft.datasets.benchmarks"


# Writers of files: the forms in which the sets are published.


def lines(rows: Rows, path: Path) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def zipped(rows: Rows, path: Path) -> Path:
    path = path.with_suffix(".jsonl.gz")
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def array(rows: Any, path: Path) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def parquet(rows: Rows, path: Path) -> Path:
    path = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def table(rows: Rows, path: Path) -> Path:
    path = path.with_suffix(".csv")
    pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), path)
    return path


# Media.


def image_file(folder: Path, name: str, seed: int) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    picture(folder / name, 28, 28, seed)
    return name


def video_file(folder: Path, name: str, seed: int) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    clip(folder / name, frames=4 + seed % 3)
    return name


def sound_file(folder: Path, name: str, seed: int) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    sound(folder / name, 0.1 + 0.01 * seed)
    return name


def image_bytes(seed: int) -> Row:
    return {"bytes": encoded(pixels(28, 28, seed)), "path": None}


def sound_bytes(folder: Path, seed: int) -> Row:
    return {"bytes": (folder / sound_file(folder, f"{seed}.wav", seed)).read_bytes(), "path": None}


# The sets. Each function writes a local copy into a folder and returns its source.


def hpdv3(folder: Path) -> Row:
    rows = [
        {
            "prompt": f"boat {i}",
            "path1": image_file(folder, f"images/{i}a.png", 2 * i),
            "path2": image_file(folder, f"images/{i}b.png", 2 * i + 1),
            "model1": "real",
            "model2": "sd2",
            "confidence": 0.9,
            "choice_dist": [12, 1],
        }
        for i in range(COUNT)
    ]
    path = array(rows, folder / "train")
    return {"path": str(path), "reader": "hpdv3", "reader_options": {"root": str(folder)}}


def imagerewarddb(folder: Path) -> Row:
    rows = [
        {
            "image_path": image_file(folder, f"images/{i}-{rank}.png", 2 * i + rank),
            "prompt_id": f"p{i}",
            "prompt": f"boat {i}",
            "classification": "Artworks",
            "image_amount_in_total": 2,
            "rank": rank,
            "overall_rating": 7 - rank,
            "image_text_alignment_rating": 6,
            "fidelity_rating": 5,
        }
        for i in range(COUNT)
        for rank in (1, 2)
    ]
    return {
        "path": f"{PAIRS}.image_preferences:imagerewarddb_pairs",
        "options": {"path": str(array(rows, folder / "metadata-train"))},
        "reader": "imagerewarddb",
        "reader_options": {"root": str(folder)},
    }


def genai_bench(folder: Path) -> Row:
    rows = [
        {
            "Index": i,
            "Prompt": f"boat {i}",
            "Tags": "{}",
            "HumanRatings": {"DALLE_3": [5, 4, 5], "SDXL_Base": [2, 3, 1]},
            "DALLE_3": image_bytes(2 * i),
            "SDXL_Base": image_bytes(2 * i + 1),
        }
        for i in range(COUNT)
    ]
    return {
        "path": f"{PAIRS}.image_preferences:genai_bench_pairs",
        "options": {"path": str(parquet(rows, folder / "train"))},
        "reader": "genai_bench",
    }


def genai_bench_video(folder: Path) -> Row:
    rows = {}
    for i in range(COUNT):
        for k, model in enumerate(("Pika_v1", "Gen2")):
            video_file(folder, f"{model}/{i:05d}.mp4", k)
        ratings = {"Pika_v1": [4, 4, 5], "Gen2": [2, 3, 1]}
        rows[f"{i:05d}"] = {"prompt": f"boat {i}", "models": ratings}
    return {
        "path": f"{PAIRS}.media_preferences:genai_bench_video_pairs",
        "options": {"path": str(array(rows, folder / "genai_video"))},
        "reader": "genai_bench_video",
        "reader_options": {"root": str(folder)},
    }


def imagegen_cot(folder: Path) -> Row:
    said = "<think>\n1. Semantic consistency: ...\n</think>\n<answer>Image {} is better</answer>"
    rows = [
        {
            "images": [
                image_file(folder, f"{i}a.png", 2 * i),
                image_file(folder, f"{i}b.png", 2 * i + 1),
            ],
            "conversations": [
                {"from": "human", "value": f"<image>\n<image>\nWhich?\nText Caption: [boat {i}]"},
                {"from": "gpt", "value": said.format(1 + i % 2)},
            ],
        }
        for i in range(COUNT)
    ]
    path = array(rows, folder / "train_data")
    return {
        "path": str(path),
        "reader": "imagegen-cot-reward-5k",
        "reader_options": {"root": str(folder)},
    }


def rapidata(folder: Path, reader: str) -> Row:
    rows = []
    for i in range(COUNT):
        row: Row = {"prompt": f"boat {i}"}
        if reader == "rapidata-i2v":
            row["prompt_asset"] = image_bytes(i)
        for k in (1, 2):
            row[f"file_name{k}"] = video_file(folder, f"videos/{i}-{k}.mp4", k)
            row[f"model{k}"] = f"m{k}"
            for head in ("Preference", "Coherence", "Alignment"):
                row[f"weighted_results{k}_{head}"] = 0.8 if k == 1 else 0.2
        rows.append(row)
    path = parquet(rows, folder / "train")
    return {"path": str(path), "reader": reader, "reader_options": {"root": str(folder)}}


def videodpo(folder: Path) -> Row:
    rows = []
    for i in range(COUNT):
        for k, kind in enumerate(("win", "lose")):
            video_file(folder, f"{kind}videos/{i:06d}.mp4", k)
        rows.append({"video1": 2 * i, "video2": 2 * i + 1, "frame_caption": f"boat {i}"})
    path = array(rows, folder / "pair")
    return {"path": str(path), "reader": "videodpo", "reader_options": {"root": str(folder)}}


def videogen(folder: Path) -> Row:
    rows = [
        {
            "path_A": video_file(folder, f"videos/{i}A.mp4", 0),
            "path_B": video_file(folder, f"videos/{i}B.mp4", 1),
            "prompt": f"boat {i}",
            "A_model": "x",
            "B_model": "y",
            "VQ": "A",
            "MQ": "same",
            "TA": "B",
            "Overall": "AB"[i % 2],
        }
        for i in range(COUNT)
    ]
    path = table(rows, folder / "videogen-rewardbench")
    options = {"root": str(folder)}
    return {"path": str(path), "reader": "videogen-rewardbench", "reader_options": options}


def omni(folder: Path, reader: str, make: Callable[[Path, str, int], str], suffix: str) -> Row:
    rows = [
        {
            "id": f"{i}",
            "prompt": f"boat {i}",
            "criteria": "calm water",
            "criteria_preference": "response1" if i % 2 else "response2",
            "response1_path": make(folder, f"media/{i}a{suffix}", 2 * i),
            "response2_path": make(folder, f"media/{i}b{suffix}", 2 * i + 1),
            "model1": "x",
            "model2": "y",
        }
        for i in range(COUNT)
    ]
    path = parquet(rows, folder / "test")
    return {"path": str(path), "reader": reader, "reader_options": {"root": str(folder)}}


def audio_alpaca(folder: Path) -> Row:
    rows = [
        {
            "prompt": f"rain {i}",
            "chosen": sound_bytes(folder, 2 * i),
            "rejected": sound_bytes(folder, 2 * i + 1),
            "strategy": "x",
        }
        for i in range(COUNT)
    ]
    return {"path": str(parquet(rows, folder / "train")), "reader": "audio-alpaca"}


def vl_rewardbench(folder: Path) -> Row:
    rows = [
        {
            "id": f"RLAIF-V-{i}",
            "query": "What is it?",
            "response": ["A dog.", f"A cat {i}."],
            "image": image_bytes(i),
            "human_ranking": [i % 2, 1 - i % 2],
            "models": ["x", "y"],
            "judge": "human",
            "rationale": "",
            "query_source": "RLAIF-V",
            "ground_truth": "",
        }
        for i in range(COUNT)
    ]
    return {"path": str(parquet(rows, folder / "test")), "reader": "vl_rewardbench"}


def hh(folder: Path) -> Row:
    turn = "\n\nHuman: What is {}+1?\n\nAssistant: {}"
    rows = [
        {"chosen": turn.format(i, i + 1), "rejected": turn.format(i, "x")} for i in range(COUNT)
    ]
    return {"path": str(zipped(rows, folder / "train"))}


def ultrafeedback(folder: Path) -> Row:
    def completion(text: str, rating: int) -> Row:
        aspects = ("helpfulness", "honesty", "instruction_following", "truthfulness")
        notes = {name: {"Rating": str(rating), "Rationale": "..."} for name in aspects}
        score = {"overall_score": float(rating), "fine-grained_score": float(rating)}
        return {"model": "x", "response": text, "annotations": notes, **score}

    rows = [
        {
            "source": "sharegpt",
            "instruction": f"{i}+1=",
            "models": ["x", "y", "z"],
            "completions": [completion(f"{i + 1}", 5), completion("x", 1), completion("xx", 2)],
            "correct_answers": ["None"],
            "incorrect_answers": ["None"],
        }
        for i in range(COUNT)
    ]
    return {"path": str(lines(rows, folder / "sharegpt"))}


def helpsteer2(folder: Path) -> Row:
    aspects = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
    rows = [
        {"prompt": f"{i}+1=", "response": text, **dict.fromkeys(aspects, rating)}
        for i in range(COUNT)
        for text, rating in ((f"{i + 1}", 4), ("x", 0))
    ]
    return {"path": str(zipped(rows, folder / "train"))}


def helpsteer3(folder: Path) -> Row:
    rows = [
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": f"{i}+1="}],
            "response1": "x",
            "response2": f"{i + 1}",
            "overall_preference": 2,
            "individual_preference": [{"score": 2, "reasoning": "...", "feedback1": "..."}],
        }
        for i in range(COUNT)
    ]
    return {"path": str(zipped(rows, folder / "train"))}


def saferlhf(folder: Path) -> Row:
    rows = [
        {
            "prompt": f"{i}+1=",
            "response_0": "x",
            "response_1": f"{i + 1}",
            "is_response_0_safe": False,
            "is_response_1_safe": True,
            "better_response_id": 1,
            "safer_response_id": 1,
        }
        for i in range(COUNT)
    ]
    return {"path": str(lines(rows, folder / "train"))}


RM = {
    "hpdv3": (hpdv3, "qwen2_5_vl"),
    "imagerewarddb": (imagerewarddb, "qwen2_5_vl"),
    "genai_bench": (genai_bench, "qwen2_5_vl"),
    "genai_bench_video": (genai_bench_video, "qwen2_5_vl"),
    "imagegen-cot-reward-5k": (imagegen_cot, "qwen2_5_vl"),
    "rapidata-t2v": (partial(rapidata, reader="rapidata-t2v"), "qwen2_5_vl"),
    "rapidata-i2v": (partial(rapidata, reader="rapidata-i2v"), "qwen2_5_vl"),
    "videodpo": (videodpo, "qwen2_5_vl"),
    "videogen-rewardbench": (videogen, "qwen2_5_vl"),
    "audio-alpaca": (audio_alpaca, "qwen2_audio"),
    "hh-rlhf": (hh, "text"),
    "ultrafeedback": (ultrafeedback, "text"),
    "helpsteer3": (helpsteer3, "text"),
    "pku-saferlhf": (saferlhf, "text"),
}
BENCHMARKS = {
    "omnirewardbench-t2i": (
        partial(omni, reader="omnirewardbench-t2i", make=image_file, suffix=".png"),
        "qwen2_5_vl",
    ),
    "omnirewardbench-t2v": (
        partial(omni, reader="omnirewardbench-t2v", make=video_file, suffix=".mp4"),
        "qwen2_5_vl",
    ),
    "omnirewardbench-t2a": (
        partial(omni, reader="omnirewardbench-t2a", make=sound_file, suffix=".wav"),
        "qwen2_audio",
    ),
    "vl_rewardbench": (vl_rewardbench, "qwen2_5_vl"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The start model and an untrained reward model of each family."""
    folder = tmp_path_factory.mktemp("models")
    save_model(tiny_model("qwen2"), tiny_tokenizer(), folder / "text")
    for family in ("qwen2_5_vl", "qwen2_audio"):
        save_tiny_media(family, folder / family)
        config = ModelConfig(path=str(folder / family), dtype="float32")
        model = RewardModel.load(config, RewardModelConfig(), seed=1)
        tokenizer = load_tokenizer(config)
        model.save(tokenizer, folder / f"{family}-rm", load_processor(config, tokenizer))
    return {path.name: path for path in folder.iterdir()}


def trained(
    capsys: Any, folder: Path, verb: str, model: Path, source: Row, *more: str, method: str = ""
) -> Row:
    """Train for a step on ``source``. Return the last metrics."""
    words = [
        *filter(None, [method]),
        f"model.path={model}",
        "model.dtype=float32",
        f"data.sources=[{json.dumps(source)}]",
        f"run.dir={folder}",
        "run.name=run",
        "run.progress=false",
        f"batch_size={COUNT}",
        "train.steps=1",
        "log.tensorboard=false",
    ]
    found = command(capsys, verb, *words, *more)
    assert found.status == 0, found
    return read_rows(folder / "run" / "metrics.jsonl")[-1]


@pytest.mark.parametrize("name", RM)
def test_rm_trains_on_a_local_copy_of_each_published_set_of_preferences(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, family = RM[name]
    # its rows have an order by help and one by safety
    more = ["data.columns.layout=pku_better"] if name == "pku-saferlhf" else []
    row = trained(capsys, tmp_path, "rm", models[family], make(tmp_path), *more)
    assert row["step"] == 1
    assert 0.3 < row["loss"] < 1.5
    assert row["reward_model/grad_norm"] > 0


def test_rm_trains_heads_on_the_ratings_of_helpsteer2(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aspects = "[helpfulness, correctness, coherence]"
    loss = f"reward_model.heads={aspects}", "reward_model.losses=[mse]"
    row = trained(capsys, tmp_path, "rm", models["text"], helpsteer2(tmp_path), *loss)
    assert row["loss"] > 0


@pytest.mark.parametrize("name", BENCHMARKS)
def test_eval_rm_scores_a_local_copy_of_each_benchmark(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, family = BENCHMARKS[name]
    source = f"data.sources=[{json.dumps(make(tmp_path))}]"
    words = (source, f"run.dir={tmp_path}", "run.name=eval", "run.progress=false")
    found = command(capsys, "eval-rm", str(models[f"{family}-rm"]), *words)
    assert found.status == 0, found
    metrics = json.loads(found.out)
    assert metrics["eval/prompts"] == COUNT
    assert 0 <= metrics["eval/pair_accuracy"] <= 1


@pytest.mark.parametrize(
    ("name", "row", "family"),
    [
        ("prm800k", PRM800K, "text"),
        ("math-shepherd", SHEPHERD, "text"),
        ("visualprm400k", VISUAL, "qwen2_5_vl"),
        ("visualprm400k-raw", VISUAL_RAW, "qwen2_5_vl"),
    ],
)
def test_prm_trains_on_a_local_copy_of_each_published_set_of_steps(
    name: str,
    row: Row,
    family: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = dict(row)
    if "image" in row:
        image_file(tmp_path, row["image"], 1)
        row["image"] = str(tmp_path / row["image"])
    path = lines([row] * COUNT, tmp_path / name)
    found = trained(capsys, tmp_path, "prm", models[family], {"path": str(path)})
    assert found["step"] == 1
    assert found["loss"] > 0


@pytest.mark.parametrize(
    "name", ["hpdv3", "imagegen-cot-reward-5k", "videogen-rewardbench", "audio-alpaca"]
)
def test_grm_trains_a_judge_on_a_local_copy_of_sets_of_media(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, family = RM[name]
    row = trained(capsys, tmp_path, "grm", models[family], make(tmp_path), method="sft")
    assert row["step"] == 1
    assert row["loss"] > 0
