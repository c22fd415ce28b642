"""What runs and verbs write loads in plain transformers 4.57, with the same logits and its own tokenizer."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.models.families import FAMILIES
from lightrft.models.loading.export_check import folder_logits
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, save_tiny_media, tiny_media_tokenizer
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import save_checked
from lightrft.trainer.sft import run_sft
from tests.e2e.command import command
from tests.media_helpers import random_media, rig, rig_in
from tests.unit.models.multimodal.test_saved_processors import OF_GEMMA

MARK = "results: "
READER = Path(__file__).with_name("read_folders.py")
TEXT = [name for name in TEXT_FAMILIES if not FAMILIES[name].refused]
ABSENT = frozenset(
    (
        *("afmoe", "audioflamingo3", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe"),
        *("cosmos3_edge", "fast_vlm", "fun_asr_nano", "granite4_vision", "granite_speech_plus"),
        *("cosmos3_omni", "cwm", "deepseek_v32", "deepseek_v4", "dots3_note_text"),
        *("ernie4_5_vl_moe", "exaone4_5", "exaone_moe", "flint", "gemma4", "gemma4_text"),
        *("gemma4_unified_text", "glm46v", "glm4_moe_lite", "glm_moe_dsa", "glm_ocr"),
        *("glmasr", "glmga", "granite_swa", "granitemoe_swa", "hrm_text", "hy_v3", "hy_v4"),
        *("hunyuan_vl", "hyperclovax", "hyperclovax_vision_v2", "inkling2_text", "inkling_text"),
        *("jais2", "paddleocr_vl"),
        *("kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "lfm3", "lfm3_vl"),
        *("lighton_ocr", "mellum", "mimo_v2_flash", "minicpm3", "minicpmv4_6"),
        *("minicpmv4_7", "minimax_m2", "minimax_m3_vl_text", "ministral3", "molmo2"),
        *("moss_transcribe_diarize", "musicflamingo", "nanochat", "nemotron_h", "olmo_hybrid"),
        *("qianfan_ocr", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_asr", "qwen4_exp_text", "solar_open", "video_llama_3", "zaya"),
    )
)
"""Families that 4.57 has no class for: they came with 5."""
SHORT = frozenset(
    ("axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4")
)
"""Families of which ``rl`` refuses rows as long as a prompt with its chat template."""
OF_FIVE = frozenset(("gemma3n_text", "lfm2_vl", "longcat_flash", "zamba2"))
"""Families that the base is written for by 5: 4.57 cannot save it, or writes another name or shape than it reads."""
REWARD = "def length(rollout):\n    return float(len(rollout.text))\n"
DIFFERENT = {
    "dbrx": "4.57 refuses the fields that 5 adds to its nested configs",
    "gemma3n": "5 saves no keys for layers that share those of another, and 4.57 needs none",
    "gemma3n_text": "5 saves no keys for layers that share those of another, and 4.57 needs none",
    "longcat_flash": "4.57 has no weights for experts that do nothing, and needs none",
}
"""Families whose folders 4.57 reads with other keys or not at all, with the reason."""
SHARING = frozenset(("zamba", "zamba2"))
"""Families whose layers share weights. 4.57 reads one of those that adapters made different, as a warning says."""


def keep_expected(folder: Path) -> Path:
    expected = folder_logits(folder)
    assert expected is not None
    torch.save(expected.float(), folder / "expected.pt")
    return folder


def write_base(family: str, folder: Path) -> None:
    """Write a tiny model of ``family`` with its tokenizer, as transformers 4.57 does if it can."""
    if family in ALL_MEDIA_FAMILIES:
        save_tiny_media(family, folder)
        if family == "lfm2_vl":
            name_as_published(folder / "model.safetensors")
    else:
        # A rotary base that is not the default of the config.
        rope = dict(family_model(family).config.to_dict().get("rope_parameters") or {})
        more = {"rope_parameters": {**rope, "rope_theta": 300.0}} if "rope_theta" in rope else {}
        tokenizer = tiny_tokenizer()
        save_model(family_model(family, vocab_size=len(tokenizer), **more), tokenizer, folder)
    if family not in OF_FIVE:
        read([folder], kind="rewrite")


def name_as_published(file: Path) -> None:
    """Name the weights of LFM2-VL's tower as published folders do. 5 reads them, and saves the names that it read."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {name.replace(old, new): value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def row_of(family: str, folder: Path) -> dict[str, Any]:
    """Return a row with an item of the first kind that the family reads."""
    row: dict[str, Any] = {"prompt": "1+1=", "response": "2", "label": "2"}
    kinds = rig_in(folder / "base").kinds if family in ALL_MEDIA_FAMILIES else set()
    value, _ = random_media("image", (20, 30, 3), np.random.default_rng(0))
    if "image" in kinds:
        Image.fromarray(value).save(folder / "item.png")
        return {**row, "images": [str(folder / "item.png")]}
    if "audio" in kinds:
        with wave.open(str(folder / "item.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(value.tobytes() * 4)
        return {**row, "audios": [str(folder / "item.wav")]}
    assert not kinds
    return row


def trained(family: str, folder: Path, run: Callable[..., Any]) -> dict[str, Path]:
    """Return folders that runs of ``sft`` and ``rl`` wrote, and those of ``export``, ``merge`` and ``convert``."""
    base = folder / "base"
    write_base(family, base)
    (folder / "rows.jsonl").write_text(json.dumps(row_of(family, folder)) + "\n")
    (folder / "rewards.py").write_text(REWARD)
    tree = {
        "run": {"dir": str(folder)},
        "model": {"path": str(base), "dtype": "float32"},
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-2},
        "log": {"tensorboard": False},
    }
    sft = {"run": {"name": "sft"}, "model": {"lora": {"rank": 2}}, "batch_size": 1}
    run_sft(build(SFTConfig, deep_merge(tree, sft)))
    rl = {
        "run": {"name": "rl"},
        "rollout": {"prompts_per_step": 1, "group_size": 4},
        "sampling": {"max_new_tokens": 4},
        "reward": {"terms": [f"{folder / 'rewards.py'}:length"]},
        "algorithm": {"preset": "grpo"},
    }
    verbs = {
        "exported": ("export", folder / "sft"),
        "kept": ("export", folder / "sft", "adapters=keep"),
        "merged": ("merge", folder / "kept"),
        "converted": ("convert", folder / "exported"),
        "exported_rl": ("export", folder / "rl"),
    }
    if family in SHORT:
        del verbs["exported_rl"]
    else:
        run_rl(build(RLConfig, deep_merge(tree, rl)))
    for name, words in verbs.items():
        outcome = run(*words, f"output={folder / name}")
        assert outcome.status == 0, (words[0], outcome.err)
    names = ("sft/model", "exported", "merged", "converted", "rl/model", "exported_rl")
    return {name: keep_expected(folder / name) for name in names if (folder / name).exists()}


@cache
def reader(version: str) -> subprocess.Popen[str]:
    """Start a process that reads folders by one version of transformers, until this process ends."""
    python = os.environ["OLDER_PYTHON"] if version == "4.57" else sys.executable
    pipe = subprocess.PIPE
    process = subprocess.Popen([python, str(READER)], stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def read(folders: list[Path], version: str = "4.57", kind: str = "read") -> dict[str, Any]:
    process = reader(version)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([kind, [str(folder) for folder in folders]]) + "\n")
    process.stdin.flush()
    line = next(line for line in process.stdout if line.startswith(MARK))
    results = json.loads(line.removeprefix(MARK))
    assert results.pop("version").startswith(version)
    return results


SHAPES = {"image": ((20, 30, 3), (64, 40, 3)), "audio": ((4000,), (15000,))}
"""Shapes of items by kind."""
OMNI = {"image": "IMAGE", "video": "VIDEO", "audio": "AUDIO"}
OMNI |= {f"{kind}_{end}": f"{kind}_{end}" for kind in ("vision", "audio") for end in ("bos", "eos")}
OF_OMNI = {f"{name}_token": f"<|{text}|>" for name, text in OMNI.items()}
IMAGE = {"image_token": "<image>"}
TOKENS = {
    **dict.fromkeys(("aria", "deepseek_vl", "deepseek_vl_hybrid", "ovis2"), IMAGE),
    "janus": {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    "gemma3": OF_GEMMA,
    "gemma3n": {
        **OF_GEMMA,
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
        "audio_token": "<audio_soft_token>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<pad>",
    },
    "phi4_multimodal": {f"{name}_token": f"<|{name}|>" for name in ("image", "audio")},
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        OF_OMNI,
    ),
}
"""Tokens that the published tokenizers name, and tiny ones do not."""
WRITTEN_OTHERWISE = {
    "paligemma": "its processor puts the pictures before a text without a template",
    "smolvlm": "its processor needs num2words",
    "voxtral": "its processor writes no placeholders: the package mistral-common does",
}
"""Families whose own processors cannot be compared here, with the reason."""
OTHER_PROCESSOR = {
    "cohere2_vision": "5 has another name for its picture processor",
    "granite_speech": "its processor needs torchaudio, which is beside 5 alone",
    "idefics2": "5 writes a space between a picture and the word behind it",
    "perception_lm": "5 has another name for its picture processor",
    "llama4": "5 has another name for its picture processor",
    "lfm2_vl": "4.57 exchanges rows and columns of tiles",
    "janus": "4.57 writes as many placeholders for each model, whatever its size",
}
"""Families whose processor of 4.57 cannot be compared, with the reason."""


@pytest.mark.parametrize(
    "family", [name for name in ALL_MEDIA_FAMILIES if name not in WRITTEN_OTHERWISE]
)
def test_processors_of_both_versions_write_the_placeholders_that_are_trained(family, tmp_path):
    made = rig(family, tmp_path)
    folder = tmp_path / "out"
    save_checked(made.actor, folder, made.tokenizer, made.processor)
    if family in TOKENS:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["extra_special_tokens"] = TOKENS[family]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    items = [(kind, shape) for kind in sorted(made.kinds - {"video"}) for shape in SHAPES[kind]]
    assert items
    alone = family in ABSENT or family in OTHER_PROCESSOR
    for kind, shape in items:
        prompt = made.prompt("one", (kind, shape), "what?")
        value, _ = random_media(kind, shape, np.random.default_rng(0))
        parts = [{"type": kind}, {"type": "text", "text": "what?"}]
        text = made.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        item = {"kind": kind, "text": text, "expanded": prompt.text, "value": value.tolist()}
        (folder / "item.json").write_text(json.dumps(item))
        token = made.processor.tokens[kind]
        inputs = {name: rows.values for name, rows in prompt.media.items()}
        assert prompt.token_ids.count(token) == made.processor.parts[kind].count(inputs) > 0
        for version in ("5.",) if alone else ("4.57", "5."):
            result = read([folder], version)[str(folder)]
            assert result.get("ids"), (version, kind, shape, result)
            assert result["ids"] == result["expected"], (version, kind, shape)
            assert result["ids"].count(token) == prompt.token_ids.count(token)


@pytest.mark.parametrize("family", [*TEXT, *ALL_MEDIA_FAMILIES])
def test_every_verb_writes_what_both_versions_read(family, tmp_path, capsys):
    folders = trained(family, tmp_path, lambda *words: command(capsys, *words))
    expected = {name: torch.load(folder / "expected.pt") for name, folder in folders.items()}
    size = float(expected["sft/model"].abs().max())
    for name, found in expected.items():
        of = "rl/model" if "rl" in name else "sft/model"
        assert float((found - expected[of]).abs().max()) < 1e-4 * size, name
    ids = tiny_media_tokenizer(family) if family in ALL_MEDIA_FAMILIES else tiny_tokenizer()
    good = {"gap": pytest.approx(0, abs=1e-3), "wrong": {}, "ids": ids("1+1=")["input_ids"]}
    results = read([*folders.values()])
    for name, folder in folders.items():
        result = results[str(folder)]
        assert ("unknown" in result) == (family in ABSENT), result
        if family in ABSENT:
            continue
        if family in DIFFERENT:
            assert result.get("gap", 0.0) < 1e-3, name
        elif family in SHARING and "rl" not in name:
            assert result == {**good, "gap": result["gap"]} and result["gap"] > 1e-3, name
        else:
            assert result == good, name
    if family in DIFFERENT:
        assert any(results[str(folder)] != good for folder in folders.values()), (
            "no longer different"
        )
