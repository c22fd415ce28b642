"""The files of a saved processor: transformers reads the same from them, and limits stay."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageFont
from transformers.utils import is_torchvision_available

from lightrft.config.base import build
from lightrft.config.data import DataConfig, MediaConfig
from lightrft.config.model import (
    ConvertConfig,
    LoRAConfig,
    MergeConfig,
    MergeInput,
    ModelConfig,
)
from lightrft.config.verbs import ExportConfig, SFTConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.models.actor import Actor
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.merging.stored_model import copy_small_files
from lightrft.models.processors import Processor, load_processor
from lightrft.models.processors.written import check_processor
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, save_tiny_media, tiny_tokenizer
from lightrft.trainer import merge as merge_module
from lightrft.trainer.merge import run_convert, run_merge
from lightrft.trainer.saved_policy import run_export, save_checked
from lightrft.trainer.sft import run_sft
from lightrft.types import Extent
from lightrft.utils.errors import ModelError
from tests.media_helpers import Rig, random_media, rig
from tests.unit.datasets.media_files import picture

SIZE = (40, 60, 3)
PICTURES, CLIPS = "preprocessor_config.json", "video_preprocessor_config.json"
WHOLE = "processor_config.json"
SMALL = {"shortest_edge": 784, "longest_edge": 1568}
OF_GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def saved(r: Rig, folder: Path) -> Path:
    save_model(r.actor, r.tokenizer, folder, processor=r.processor)
    return folder


def edit(file: Path, **fields: Any) -> None:
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**before, **fields}))


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_transformers_makes_the_same_of_a_saved_folder(family: str, tmp_path: Path) -> None:
    r = rig(family, tmp_path)
    folder = saved(r, tmp_path / "saved")
    if family == "gemma3":
        # the published tokenizers name these tokens
        edit(folder / "tokenizer_config.json", extra_special_tokens=OF_GEMMA)
    own = transformers.AutoProcessor.from_pretrained(folder)
    value, _ = random_media("image", SIZE, np.random.default_rng(0))
    prompt = r.prompt("one", ("image", SIZE), "what?", seed=0)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = r.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    made = own(text=[text], images=[[Image.fromarray(value)]], return_tensors="pt")
    pixels = prompt.media["pixel_values"].values
    assert made["input_ids"][0].tolist() == prompt.token_ids
    torch.testing.assert_close(
        made["pixel_values"].reshape(pixels.shape), pixels, atol=0.02, rtol=0
    )
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        assert torch.isfinite(model(**made).logits).all()


def test_a_saved_smolvlm_says_how_many_tokens_a_crop_has(tmp_path: Path) -> None:
    r = rig("smolvlm", tmp_path)
    folder = saved(r, tmp_path / "saved")
    fields = json.loads((folder / "processor_config.json").read_text())
    assert fields == {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}
    pictures = json.loads((folder / "preprocessor_config.json").read_text())
    assert pictures["image_processor_type"] == "SmolVLMImageProcessor"


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_settings_that_no_part_reads_are_kept(family: str, tmp_path: Path) -> None:
    save_tiny_media(family, tmp_path / family)
    edit(tmp_path / family / "processor_config.json", of_the_publisher={"a": 1})
    edit(tmp_path / family / "preprocessor_config.json", video_sampling={"fps": 3})
    config = ModelConfig(path=str(tmp_path / family))
    processor = load_processor(config, load_tokenizer(config))
    assert processor is not None
    folder = tmp_path / "saved"
    folder.mkdir()
    processor.save(folder)
    whole = json.loads((folder / "processor_config.json").read_text())
    assert whole["of_the_publisher"] == {"a": 1}
    first = json.loads((folder / "preprocessor_config.json").read_text())
    assert first["video_sampling"] == {"fps": 3}


def test_sections_of_one_file_are_kept_as_files_of_their_own(tmp_path: Path) -> None:
    """Releases from 5 on save every processor in one file."""
    save_tiny_media("idefics3", tmp_path / "one")
    file = tmp_path / "one" / "preprocessor_config.json"
    pictures = {**json.loads(file.read_text()), "size": {"longest_edge": 48}}
    file.unlink()
    edit(tmp_path / "one" / "processor_config.json", image_processor=pictures, image_seq_len=4)
    config = ModelConfig(path=str(tmp_path / "one"))
    processor = load_processor(config, load_tokenizer(config))
    assert processor is not None
    processor.save(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"] == {
        "longest_edge": 48
    }
    assert "image_processor" not in json.loads((tmp_path / "processor_config.json").read_text())


@pytest.mark.parametrize("family", [name for name in ALL_MEDIA_FAMILIES if name != "gemma3"])
def test_limits_of_pixels_are_saved_with_the_model(family: str, tmp_path: Path) -> None:
    save_tiny_media(family, tmp_path / family)
    config = ModelConfig(path=str(tmp_path / family))
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, tokenizer, MediaConfig(max_pixels=400))
    free = load_processor(config, tokenizer)
    assert processor is not None and free is not None
    processor.save(tmp_path / family)
    again = load_processor(config, tokenizer)
    other = load_processor(config, tokenizer, MediaConfig(max_pixels=800))
    assert again is not None and other is not None
    extents = {
        "image": Extent((90, 60, 3)),
        "video": Extent((5, 90, 60, 3), (0.0, 0.5, 1.0, 1.5, 2.0)),
    }
    for kind in processor.parts.keys() & extents.keys():
        written = [
            one.parts[kind].placeholder_text(extents[kind])
            for one in (free, processor, again, other)
        ]
        assert written[1] == written[2]
        # A feature of the tiny Qwen3-Omni has more pixels than these limits.
        if kind == "image" and "qwen" in family and family != "qwen3_omni_moe_thinker":
            assert len({*written}) == 3


def test_a_run_and_its_export_have_the_limits_that_its_rows_had(tmp_path: Path) -> None:
    """Before, a later evaluation of the model read images of more tokens."""
    save_tiny_media("idefics3", tmp_path / "start", hidden_size=32)
    picture(tmp_path / "a.png", 40, 60)
    row = {"prompt": "what?", "image": "a.png", "response": "4"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run = {
        "run": {"dir": str(tmp_path), "name": "run"},
        "model": {"path": str(tmp_path / "start"), "dtype": "float32"},
        "data": {"sources": [str(tmp_path / "rows.jsonl")], "media": {"max_pixels": 256}},
        "batch_size": 1,
        "train": {"steps": 1},
        "log": {"tensorboard": False},
    }
    run_sft(build(SFTConfig, run))
    exported, _ = run_export(ExportConfig(path=str(tmp_path / "run")))
    lengths = {}
    for folder in (tmp_path / "start", tmp_path / "run" / "model", exported):
        config = ModelConfig(path=str(folder))
        tokenizer = load_tokenizer(config)
        data = DataConfig(sources=[str(tmp_path / "rows.jsonl")], token_cache=None)  # type: ignore[arg-type]
        (prompt,) = PromptDataset(
            data, tokenizer, seed=0, processor=load_processor(config, tokenizer)
        )
        if folder.name == "model":
            own = transformers.AutoProcessor.from_pretrained(folder)
            parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
            image = Image.open(tmp_path / "a.png")
            made = own(text=[text], images=[[image]], return_tensors="pt")
            assert made["input_ids"][0].tolist() == prompt.token_ids
        lengths[folder.name] = len(prompt.token_ids)
    assert lengths["model"] == lengths[exported.name] < lengths["start"]


def test_an_unknown_family_that_reads_images_is_no_text_model(tmp_path: Path) -> None:
    """Before, rows with images were refused first, since the model "reads text alone"."""
    transformers.FuyuConfig(text_config={"model_type": "persimmon"}).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    with pytest.raises(ModelError, match=r"the family 'fuyu' is not known.*besides a language"):
        load_processor(ModelConfig(path=str(tmp_path)), tokenizer)


def base_with_font(folder: Path) -> bytes:
    """Write a model whose processor writes times on the frames of clips. Return its font."""
    save_tiny_media("ernie4_5_vl_moe", folder)
    # PIL has the bytes of one font, and no file.
    font = ImageFont.load_default(12)
    assert isinstance(font, ImageFont.FreeTypeFont)
    (folder / "Times.ttf").write_bytes(font.font_bytes)
    edit(folder / "video_preprocessor_config.json", draw_on_frames=True, font="Times.ttf")
    for name in ("unnamed.ttf", "../outside.ttf"):
        (folder / name).write_bytes(b"font")
    (folder / "words").mkdir()
    (folder / "words" / "list.txt").write_text("one")
    names = {"words": ["words/list.txt", "missing.ttf", "../outside.ttf"]}
    edit(folder / "processor_config.json", of_the_publisher=names)
    return font.font_bytes


@pytest.fixture(scope="module")
def folders_with_font(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Path]]:
    """A font, and the folders of a run and of all verbs that write a model."""
    place = tmp_path_factory.mktemp("font")
    font = base_with_font(place / "base")
    picture(place / "a.png", 40, 60)
    row = {"prompt": "what?", "image": "a.png", "response": "4"}
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tree = {
        "run": {"dir": str(place), "name": "run"},
        "model": {"path": str(place / "base"), "dtype": "float32", "lora": {"rank": 2}},
        "data": {"sources": [str(place / "rows.jsonl")]},
        "batch_size": 1,
        "train": {"steps": 1},
        "log": {"tensorboard": False},
    }
    run_sft(build(SFTConfig, tree))
    exported, _ = run_export(ExportConfig(path=str(place / "run")))
    kept = str(place / "kept")
    run_export(ExportConfig(path=str(place / "run"), adapters="keep", output=kept))
    models = (MergeInput(model=kept),)
    run_merge(MergeConfig(models=models, output=str(place / "merged")))
    run_convert(ConvertConfig(path=str(exported), output=str(place / "converted")))
    made = {name: place / name for name in ("kept", "merged", "converted")}
    return font, {"run": place / "run" / "model", "exported": exported, **made}


@pytest.mark.parametrize("verb", ["run", "exported", "kept", "merged", "converted"])
def test_a_saved_folder_has_the_files_that_its_processor_names(
    verb: str, folders_with_font: tuple[bytes, dict[str, Path]]
) -> None:
    font, folders = folders_with_font
    folder = folders[verb]
    assert (folder / "Times.ttf").read_bytes() == font
    assert (folder / "words" / "list.txt").read_text() == "one"
    assert not (folder / "unnamed.ttf").exists()
    assert not (folders["run"].parent / "outside.ttf").exists()
    assert [path.name for path in folder.rglob("*.ttf")] == ["Times.ttf"]


@pytest.mark.torchvision
@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
@pytest.mark.parametrize("verb", ["run", "exported", "merged", "converted"])
def test_transformers_writes_times_on_frames_by_the_font_of_a_saved_folder(
    verb: str, folders_with_font: tuple[bytes, dict[str, Path]], tmp_path: Path
) -> None:
    # without the folders that it was made from
    folder = shutil.copytree(folders_with_font[1][verb], tmp_path / "moved")
    frames: Any = transformers.AutoProcessor.from_pretrained(folder).video_processor
    assert frames.draw_on_frames and Path(frames.font).parent == folder
    about = [{"fps": 2.0, "total_num_frames": 4, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}]
    colors = []
    for draws in (True, False):
        frames.draw_on_frames = draws
        clip = torch.zeros(4, 3, 112, 112, dtype=torch.uint8)
        made = frames(videos=[clip], video_metadata=about, do_sample_frames=False)
        colors.append(len(torch.as_tensor(made["pixel_values_videos"]).unique()))
    # A black clip has one value in each channel.
    assert colors[0] > colors[1] == 3


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_a_saved_folder_reads_items_of_each_kind_as_the_run_did(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(family, tmp_path)
    start = saved(r, tmp_path / "start")
    check_processor(saved(r, tmp_path / "saved"), r.processor, r.tokenizer, str(start))
    own = [one for one in caplog.records if one.name.startswith("lightrft")]
    assert not [one for one in own if one.levelno >= logging.WARNING]


DAMAGES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "crops of another size": ("idefics3", PICTURES, {"size": {"longest_edge": 48}}, "placeholders"),
    "colours of another mean": ("llava", PICTURES, {"image_mean": [0, 0, 0]}, "pixel_values"),
    "pictures of another size": ("qwen2_vl", PICTURES, {"max_pixels": 784}, "placeholders"),
    "clips of another size": ("qwen2_5_vl", CLIPS, {"size": SMALL}, "placeholders"),
    "another number of features": ("idefics3", WHOLE, {"image_seq_len": 7}, "in transformers"),
    "an unknown class": ("idefics3", WHOLE, {"processor_class": "Missing"}, "in transformers"),
    "a sound of another rate": ("qwen2_audio", PICTURES, {"hop_length": 80}, "audio"),
    "other patches": ("gemma3", PICTURES, {"do_normalize": False}, "pixel_values"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_saved_folder_that_reads_an_item_otherwise_is_found(damage: str, tmp_path: Path) -> None:
    family, file, fields, words = DAMAGES[damage]
    r = rig(family, tmp_path)
    start = saved(r, tmp_path / "start")
    folder = saved(r, tmp_path / "saved")
    edit(folder / file, **fields)
    with pytest.raises(ModelError, match=words):
        check_processor(folder, r.processor, r.tokenizer, str(start))


def test_a_model_is_not_written_without_the_limits_of_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig("idefics3", tmp_path)
    limited = r.processor.limited(None, 256)
    monkeypatch.setattr(Processor, "save", lambda self, path: r.processor.parts["image"].save(path))
    with pytest.raises(ModelError, match="other placeholders than the processor of the run"):
        save_checked(r.actor, tmp_path / "out", r.tokenizer, limited)
    assert not (tmp_path / "out").exists()


def test_convert_and_merge_compare_how_the_written_model_reads_media(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_media("idefics3", tmp_path / "start")
    run_convert(ConvertConfig(path=str(tmp_path / "start"), output=str(tmp_path / "fine")))

    def lossy(config: Path, tokenizer: Path, folder: Path) -> None:
        copy_small_files(config, tokenizer, folder)
        edit(folder / "preprocessor_config.json", size={"longest_edge": 48})

    monkeypatch.setattr(merge_module, "copy_small_files", lossy)
    model = MergeInput(model=str(tmp_path / "start"))
    for verb in (
        lambda: run_convert(ConvertConfig(path=model.model, output=str(tmp_path / "out"))),
        lambda: run_merge(MergeConfig(models=(model, model), output=str(tmp_path / "out"))),
    ):
        with pytest.raises(ModelError, match="other placeholders than the processor"):
            verb()
        assert not (tmp_path / "out").exists()


def test_a_folder_of_adapters_reads_every_kind_of_its_base(tmp_path: Path) -> None:
    """Before, sounds of Gemma 4 were lost: no file names the class of their processor."""
    config = ModelConfig(path=str(rig("gemma4", tmp_path).path), lora=LoRAConfig(rank=2))
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, tokenizer)
    assert processor is not None and {"image", "audio"} <= processor.parts.keys()
    save_checked(Actor.load(config), tmp_path / "kept", tokenizer, processor, merge=False)
    kept = ModelConfig(path=str(tmp_path / "kept"))
    again = load_processor(kept, load_tokenizer(kept))
    assert again is not None and again.parts.keys() == processor.parts.keys()
