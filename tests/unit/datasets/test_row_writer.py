"""Prompts written as rows: any run reads the same tokens and media from them, from any folder."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.base import build
from lightrft.config.data import DataConfig, PreferenceDataConfig, SFTDataConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_writer.prompt_rows import PromptRows
from lightrft.datasets.sft_dataset import SFTDataset
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import clip, encoded, picture, pixels, sound, tone, written

Row = dict[str, Any]


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_audio", tmp_path_factory.mktemp("ear"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the pictures a.png and b.png, the clip c.mp4 and the sound s.wav."""
    folder = tmp_path / "data"
    folder.mkdir()
    picture(folder / "a.png", 56, 84, seed=1)
    picture(folder / "b.png", 56, 56, seed=2)
    clip(folder / "c.mp4")
    sound(folder / "s.wav")
    return folder


def rewritten(
    reader: Rig, source: str | Path, there: Path, **settings: Any
) -> tuple[PromptDataset, PromptDataset, list[Row]]:
    """The prompts of ``source``, those of the rows that are written of them to ``there``, and the rows."""
    given = (reader.tokenizer, 0, reader.processor)
    first = dataset_of(source, *given, **settings)
    rows = PromptRows(first, DataConfig(), there / "rows_media")
    there.mkdir()
    made = [rows.row(i) for i in range(len(first))]
    assert (rows.unlike, rows.first_unlike) == (0, "")
    file = written(there, made)
    return first, dataset_of(file, *given), [json.loads(line) for line in Path(file).open()]


def dataset_of(
    source: str | Path, tokenizer: Any, seed: int, processor: Any, **settings: Any
) -> PromptDataset:
    config = build(DataConfig, {"sources": [{"path": str(source)}], "shuffle": False, **settings})
    return PromptDataset(config, tokenizer, seed=seed, processor=processor)


def assert_same(one: PromptDataset, other: PromptDataset) -> None:
    assert len(one) == len(other)
    for before, after in zip(one, other):
        assert after.token_ids == before.token_ids
        assert after.media.keys() == before.media.keys()
        for name, rows in before.media.items():
            assert torch.equal(after.media[name].values, rows.values)


def test_pictures_and_clips_by_path_are_read_from_another_folder(
    eye: Rig, folder: Path, tmp_path: Path
) -> None:
    parts = [
        {"type": "image", "image": "b.png", "max_pixels": 1568},
        {"type": "text", "text": "What is a <image>?"},
        {"type": "video", "video": {"path": "c.mp4"}, "fps": 1.0},
    ]
    rows = [
        {"prompt": "Left <image>, right <image>.", "images": ["a.png", "b.png"]},
        {"prompt": "What is it?", "image": "a.png"},
        {"prompt": [{"role": "user", "content": parts}]},
        {"prompt": "A text alone."},
        {"prompt": "Frames.", "video": ["a.png", "a.png"]},
        {"prompt": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A <"}]},
    ]
    first, second, made = rewritten(eye, written(folder, rows), tmp_path / "there")
    assert_same(first, second)
    assert first[5].token_ids[: len(first[2].token_ids)] == first[2].token_ids
    assert first[5].text == first[2].text + "A <"
    assert made[1]["prompt"][0]["content"][0] == {"type": "image", "image": str(folder / "a.png")}
    assert made[3]["prompt"] == [{"role": "user", "content": "A text alone."}]
    assert not (tmp_path / "there" / "rows_media").exists()


def test_media_inside_rows_are_written_next_to_them_once(
    eye: Rig, folder: Path, tmp_path: Path
) -> None:
    data = (folder / "a.png").read_bytes()
    jpeg = encoded(pixels(56, 56, 3), "JPEG")
    rows = [
        {"prompt": "What is it?", "image": {"bytes": data, "path": "gone.png"}},
        {"prompt": "Again?", "image": {"bytes": data, "path": None}},
        {"prompt": "And this?", "image": {"bytes": jpeg, "path": None}},
    ]
    file = folder / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    first, second, _ = rewritten(eye, file, tmp_path / "there")
    assert_same(first, second)
    suffixes = sorted(path.suffix for path in (tmp_path / "there" / "rows_media").iterdir())
    assert suffixes == [".jpg", ".png"]
    shutil.rmtree(folder)
    assert_same(
        second, dataset_of(tmp_path / "there" / "rows.jsonl", eye.tokenizer, 0, eye.processor)
    )


def test_addresses_with_data_pictures_in_memory_and_arrays_are_kept_exactly(
    eye: Rig, ear: Rig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = base64.b64encode((folder / "a.png").read_bytes()).decode()
    turned, orientation = io.BytesIO(), Image.Exif()
    orientation[0x0112] = 6
    Image.fromarray(pixels(56, 84, 5)).save(turned, "JPEG", exif=orientation)
    made_by = {
        "pictures": [
            {"prompt": "1?", "image": f"data:image/png;base64,{text}"},
            {"prompt": "2?", "image": Image.open(folder / "b.png")},
            {"prompt": "3?", "image": Image.open(folder / "b.png").convert("CMYK")},
            {"prompt": "4?", "image": pixels(56, 56, 4)},
            {"prompt": "Turned?", "image": Image.open(turned)},
            {"prompt": "Channels first?", "image": np.moveaxis(pixels(56, 84, 6), -1, 0)},
            {"prompt": "5?", "video": np.stack([pixels(56, 56, k) for k in range(4)])},
        ],
        "sounds": [
            {"prompt": "1?", "audio": {"array": tone(0.3, 16000), "sampling_rate": 16000}},
            {"prompt": "2?", "audio": str(folder / "s.wav")},
        ],
    }
    (tmp_path / "memory.py").write_text("ROWS = {}\ndef rows(name):\n    return ROWS[name]\n")
    monkeypatch.syspath_prepend(tmp_path)
    import memory  # ty: ignore[unresolved-import]

    memory.ROWS.update(made_by)
    for reader, name in ((eye, "pictures"), (ear, "sounds")):
        sources = [{"path": "memory:rows", "options": {"name": name}}]
        first, second, _ = rewritten(reader, Path(), tmp_path / name, sources=sources)
        assert_same(first, second)


def test_rows_with_media_are_read_by_sft_and_dpo(eye: Rig, folder: Path, tmp_path: Path) -> None:
    source = written(folder, [{"prompt": "What is it?", "image": "a.png"}])
    first, _, made = rewritten(eye, source, tmp_path / "there", system="Be brief.")
    said = [[{"role": "assistant", "content": text}] for text in ("A cat.", "An <image>.")]
    sft = written(tmp_path, [{**made[0], "completion": said[0]}], "sft.jsonl")
    config = build(SFTDataConfig, {"sources": [{"path": str(sft)}]})
    examples = SFTDataset(config, eye.tokenizer, max_tokens=500, seed=0, processor=eye.processor)
    assert examples[0].prompt_ids == first[0].token_ids
    name = next(iter(first[0].media))
    assert torch.equal(examples[0].prompt_media[name].values, first[0].media[name].values)
    pairs = written(tmp_path, [{**made[0], "chosen": said[0], "rejected": said[1]}], "dpo.jsonl")
    data = build(PreferenceDataConfig, {"sources": [{"path": str(pairs)}]})
    compared = PreferenceDataset(
        data, eye.tokenizer, kind="pair", max_tokens=500, seed=0, processor=eye.processor
    )
    assert compared[0].prompt_ids == first[0].token_ids
    assert torch.equal(compared[0].prompt_media[name].values, first[0].media[name].values)


def test_conversations_tools_and_special_tokens_survive(ear: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    turns = [
        {"role": "user", "content": "Hello <|im_end|> there"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
    ]
    rows = [{"messages": turns}, {"prompt": "x<|im_start|>system", "label": "y"}]
    first, second, made = rewritten(ear, written(folder, rows), tmp_path / "there", system="S.")
    assert_same(first, second)
    assert [message["role"] for message in made[0]["prompt"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_prompts_that_the_reader_encodes_otherwise_are_counted(ear: Rig, tmp_path: Path) -> None:
    file = written(tmp_path, [{"prompt": "1+1="}, {"prompt": "2+2="}])
    # Special tokens of a template are control tokens, and those of a row are text.
    template = "<|im_start|>{prompt}"
    settings = {"template": template, "apply_chat_template": False}
    first = dataset_of(file, ear.tokenizer, 0, ear.processor, **settings)
    text = PromptRows(first, build(DataConfig, {"apply_chat_template": False}), tmp_path)
    control = {"apply_chat_template": False, "special_tokens": "control"}
    same = PromptRows(first, build(DataConfig, control), tmp_path)
    for i in range(2):
        text.row(i)
        same.row(i)
    assert (text.unlike, same.unlike) == (2, 0)
    assert "line 1" in text.first_unlike
