"""What runs and verbs write loads in plain transformers 4.57, with the same logits and its own tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import SFTConfig
from lightrft.models.actor import Actor
from lightrft.models.families import FAMILIES
from lightrft.models.loading.export_check import folder_logits
from lightrft.models.tiny import MEDIA_FAMILIES, save_tiny_media, tiny_media_tokenizer
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.trainer.saved_policy import save_checked
from lightrft.trainer.sft import run_sft
from tests.e2e.command import command
from tests.media_helpers import random_media, rig
from tests.unit.models.multimodal.test_saved_processors import OF_GEMMA
from tests.unit.models.test_lora import KINDS, check_written_adapters

READER = Path(__file__).with_name("read_folders.py")
TEXT = [name for name in TEXT_FAMILIES if not FAMILIES[name].refused]
TRAINED = ["qwen2", "llama", "mixtral", "qwen3_moe", "gemma3_text", "gpt2"]
DIFFERENT = {
    "dbrx": "4.57 refuses the fields that 5 adds to its nested configs",
    "gemma3": "a model that was loaded from no folder is saved with the names of 5",
    "gemma3n_text": "5 saves no keys and values for layers that share those of another",
    "granitemoehybrid": "4.57 has other names for its kinds of layers",
    "jamba": "4.57 needs the kernels of mamba",
    "llava_onevision": "a model that was loaded from no folder is saved with the names of 5",
    "longcat_flash": "4.57 has no weights for experts that do nothing",
    "qwen3_vl_moe": "5 saves experts transposed where they come from no folder",
    "zamba": "4.57 cannot load it with shared layers of this size",
    "zamba2": "4.57 cannot load it with shared layers of this size",
}
"""Families whose folders 4.57 cannot read, with the reason."""


def keep_expected(folder: Path) -> Path:
    expected = folder_logits(folder)
    assert expected is not None
    torch.save(expected.float(), folder / "expected.pt")
    return folder


def written(family: str, folder: Path) -> Path:
    """Write a tiny model of ``family`` whose rotary base is not the default of its config."""
    if family in MEDIA_FAMILIES:
        save_tiny_media(family, folder / "base")
        tokenizer: Any = tiny_media_tokenizer(family)
    else:
        rope = dict(family_model(family).config.to_dict().get("rope_parameters") or {})
        more = {"rope_parameters": {**rope, "rope_theta": 300.0}} if "rope_theta" in rope else {}
        family_model(family, **more).save_pretrained(folder / "base")
        tokenizer = tiny_tokenizer()
    actor = Actor.load(ModelConfig(path=str(folder / "base")))
    save_checked(actor, folder / "out", tokenizer, None)
    return keep_expected(folder / "out")


def trained(family: str, folder: Path, run: Callable[..., Any]) -> list[Path]:
    """Train adapters, and return the folders of the run, of ``export``, ``merge`` and ``convert``."""
    base = folder / "base"
    family_model(family, vocab_size=len(tiny_tokenizer())).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    tree = {
        "run": {"dir": str(folder), "name": "run"},
        "model": {"path": str(base), "lora": {"rank": 2}},
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "batch_size": 1,
        "train": {"steps": 1},
        "log": {"tensorboard": False},
    }
    run_sft(build(SFTConfig, deep_merge(tree, {"optimizer": {"lr": 1e-2}})))
    for words in (
        ("export", folder / "run", "adapters=keep", f"output={folder / 'kept'}"),
        ("export", folder / "run", f"output={folder / 'exported'}"),
        ("merge", folder / "kept", f"output={folder / 'merged'}"),
        ("convert", folder / "exported", f"output={folder / 'converted'}"),
    ):
        outcome = run(*words)
        assert outcome.status == 0, outcome.err
    names = ("run/model", "exported", "merged", "converted")
    return [keep_expected(folder / name) for name in names]


def read(folders: list[Path], version: str = "4.57") -> dict[str, Any]:
    python = os.environ["OLDER_PYTHON"] if version == "4.57" else sys.executable
    done = subprocess.run(
        [python, str(READER), *map(str, folders)], capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.pop("version").startswith(version)
    return results


@pytest.mark.parametrize("family", [*TEXT, *MEDIA_FAMILIES])
def test_a_written_folder_has_the_same_logits_in_transformers_4(family, tmp_path):
    folder = written(family, tmp_path)
    (result,) = read([folder]).values()
    if "unknown" in result:
        pytest.skip(f"transformers 4.57 has no {result['unknown']}")
    if family in DIFFERENT:
        assert result.get("error") or result["wrong"] or result["gap"] > 1e-3, "no longer different"
        pytest.xfail(DIFFERENT[family])
    assert result == {"gap": pytest.approx(0, abs=1e-3), "wrong": {}, "ids": result["ids"]}
    assert result["ids"] == tiny_tokenizer()("1+1=")["input_ids"] or family in MEDIA_FAMILIES


PICTURES, SOUNDS = ((20, 30, 3), (64, 40, 3)), ((4000,), (15000,))
"""Shapes of items."""


@pytest.mark.parametrize("shape", PICTURES)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_picture_processors_of_both_versions_make_the_patches_that_are_trained(
    family, shape, tmp_path
):
    """The whole processors of these families need torchvision. They write a placeholder for each square of patches."""
    made = rig(family, tmp_path)
    save_checked(made.actor, tmp_path / "out", made.tokenizer, made.processor)
    value, _ = random_media("image", shape, np.random.default_rng(0))
    item = {"kind": "patches", "value": value.tolist()}
    (tmp_path / "out" / "item.json").write_text(json.dumps(item))
    prompt = made.prompt("one", ("image", shape), "what?")
    grid = prompt.media["image_grid_thw"].values
    for version in ("4.57", "5."):
        expected = {str(tmp_path / "out"): {"grid": grid.tolist()}}
        assert read([tmp_path / "out"], version) == expected, version
    side = made.actor.base.config.vision_config.spatial_merge_size
    count = prompt.token_ids.count(made.processor.tokens["image"])
    assert count == int(grid.prod()) // side**2 > 0


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *[(family, shape) for family in ("idefics3", "gemma3") for shape in PICTURES],
        *[("qwen2_audio", shape) for shape in SOUNDS],
    ],
)
def test_processors_of_both_versions_write_the_placeholders_that_are_trained(
    family, shape, tmp_path
):
    kind = "image" if len(shape) == 3 else "audio"
    made = rig(family, tmp_path)
    folder = tmp_path / "out"
    save_checked(made.actor, folder, made.tokenizer, made.processor)
    if family == "gemma3":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        # The published tokenizers name these tokens.
        settings["extra_special_tokens"] = OF_GEMMA
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    prompt = made.prompt("one", (kind, shape), "what?")
    value, _ = random_media(kind, shape, np.random.default_rng(0))
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "what?"}]}]
    text = made.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    item = {"kind": kind, "text": text, "value": value.tolist()}
    (folder / "item.json").write_text(json.dumps(item))
    for version in ("4.57", "5."):
        assert read([folder], version) == {str(folder): {"ids": prompt.token_ids}}, version
    token = made.processor.tokens[kind]
    inputs = {name: rows.values for name, rows in prompt.media.items()}
    assert prompt.token_ids.count(token) == made.processor.parts[kind].count(inputs) > 0


@pytest.mark.parametrize("family", TRAINED)
def test_every_verb_writes_what_transformers_4_reads(family, tmp_path, capsys):
    folders = trained(family, tmp_path, lambda *words: command(capsys, *words))
    for folder, result in read(folders).items():
        assert not result.get("error") and not result["wrong"], (folder, result)
        assert result["gap"] < 1e-3, (folder, result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [name for name in TEXT if name != "hrm_text"])
def test_adapters_of_every_kind_and_family_are_written(family, kind, tmp_path):
    check_written_adapters(family, kind, tmp_path)
