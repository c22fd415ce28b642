"""Folders of runs and exports of models with images: transformers alone reads them, placeholders as many as features."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm

from lightrft.config.base import build, deep_merge
from lightrft.config.data import DataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import ExportConfig, RLConfig, SFTConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import run_export
from lightrft.trainer.sft import run_sft
from tests.unit.datasets.media_files import picture
from tests.unit.models.multimodal.test_saved_processors import OF_GEMMA, edit

FIELDS = {
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 9},
}
"""The content of ``processor_config.json``, without which transformers takes another length."""
FOLDERS = ("sft/model", "rl/model", "exported_sft", "exported_rl")
REWARD = "def even(rollout):\n    return float(sum(rollout.token_ids) % 2)\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of the folder that has the runs and exports of a family."""

    @cache
    def of(family: str) -> Path:
        place = tmp_path_factory.mktemp(family)
        save_tiny_media(family, place / "base")
        picture(place / "a.png", 40, 60)
        row = {"prompt": "what?", "image": "a.png", "response": "4", "label": "4"}
        (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
        (place / "rewards.py").write_text(REWARD)
        tree = {
            "run": {"dir": str(place)},
            "model": {"path": str(place / "base"), "dtype": "float32"},
            "data": {"sources": [str(place / "rows.jsonl")]},
            "train": {"steps": 1},
            "log": {"tensorboard": False},
        }
        sft = {"run": {"name": "sft"}, "model": {"lora": {"rank": 2}}, "batch_size": 1}
        run_sft(build(SFTConfig, deep_merge(tree, sft)))
        rl = {
            "run": {"name": "rl"},
            "rollout": {"prompts_per_step": 1, "group_size": 8},
            "sampling": {"max_new_tokens": 4},
            "reward": {"terms": [f"{place / 'rewards.py'}:even"]},
        }
        run_rl(build(RLConfig, deep_merge(tree, rl)))
        for name in ("sft", "rl"):
            output = str(place / f"exported_{name}")
            run_export(ExportConfig(path=str(place / name), output=output))
        return place

    return of


def own_processor(family: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return the processor that transformers reads from ``folder``."""
    if family != "smolvlm":
        return transformers.AutoProcessor.from_pretrained(folder)
    # Two packages that its videos alone need are not installed.
    patch.setattr(processing_smolvlm, "num2words", str)
    fields = json.loads((folder / "processor_config.json").read_text())
    pictures = transformers.AutoImageProcessor.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    own = processing_smolvlm.SmolVLMProcessor
    patch.setattr(own, "get_attributes", lambda *_: ["image_processor", "tokenizer"])
    return own(pictures, words, None, image_seq_len=fields["image_seq_len"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("family", FIELDS)
def test_a_saved_folder_has_as_many_placeholders_as_features_in_transformers(
    family: str, name: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``processor_config.json`` there were 507 placeholders for 12 features."""
    place = folders(family)
    folder = place / name
    assert json.loads((folder / "processor_config.json").read_text()) == FIELDS[family]
    config = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, tokenizer)
    assert processor is not None
    data = DataConfig(sources=(str(place / "rows.jsonl"),))  # type: ignore[arg-type]
    (prompt,) = PromptDataset(data, tokenizer, seed=0, processor=processor)
    if family == "gemma3":
        # the published tokenizers name these tokens
        edit(folder / "tokenizer_config.json", extra_special_tokens=OF_GEMMA)
    own = own_processor(family, folder, monkeypatch)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    made = own(text=[text], images=[[Image.open(place / "a.png")]], return_tensors="pt")
    assert made["input_ids"][0].tolist() == prompt.token_ids
    token = processor.tokens["image"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    given = {key: value for key, value in made.items() if "pixel" in key}
    with torch.no_grad():
        features = model.model.get_image_features(**given, return_dict=True).pooler_output
        count = sum(one.shape[:-1].numel() for one in features)
        assert prompt.token_ids.count(token) == count > 0
        assert torch.isfinite(model(**made).logits).all()
