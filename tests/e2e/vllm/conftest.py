"""Runs with the real vLLM. ``make test-vllm`` makes an environment that has it; elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightrft.config.base import deep_merge
from lightrft.models.tiny import save_tiny_media
from tests.model_helpers import vllm_model

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    vllm_model(tmp_path / "model")
    rows = [{"prompt": f"{a} + {b} =", "label": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    reward = "def short(rollout):\n    return float(sum(t % 7 for t in rollout.token_ids)) / 7\n"
    (tmp_path / "reward.py").write_text(reward)
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {"sources": [str(tmp_path / "rows.jsonl")]},
        "reward": {"terms": [f"{tmp_path}/reward.py:short"]},
        "algorithm": {"preset": "grpo"},
        "rollout": {"prompts_per_step": 3, "group_size": 4},
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 3},
        "engine": {"kind": "vllm"},
        "run": {"dir": str(tmp_path / "runs")},
    }


@pytest.fixture
def picture_tree(tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Rows of pictures, for a tiny model that reads them."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    save_tiny_media("qwen2_vl", tmp_path / "pictures", max_position_embeddings=512, **sizes)
    rows = []
    for k in range(6):
        pixels = np.random.default_rng(k).integers(0, 256, size=(20 + k, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
        rows.append({"prompt": "<image> what?", "images": [f"{k}.png"], "label": str(k)})
    (tmp_path / "pictures.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return deep_merge(
        tree,
        {
            "model": {"path": str(tmp_path / "pictures")},
            "data": {"sources": [str(tmp_path / "pictures.jsonl")], "apply_chat_template": True},
        },
    )


@pytest.fixture
def audio_tree(tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Rows of clips, for a tiny model that hears them. Its audio tower alone is trained."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    save_tiny_media(
        "qwen2_audio",
        tmp_path / "audio",
        max_position_embeddings=512,
        # the only window that vLLM takes
        tower={"max_source_positions": 1500},
        processor={"chunk_length": 30},
        **sizes,
    )
    rows = []
    for k in range(6):
        samples = np.random.default_rng(k).normal(0, 3000, size=4000 + 999 * k).astype(np.int16)
        with wave.open(str(tmp_path / f"{k}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())
        rows.append({"prompt": "<audio> what?", "audios": [f"{k}.wav"], "label": str(k)})
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return deep_merge(
        tree,
        {
            "model": {"path": str(tmp_path / "audio"), "freeze": ["language", "projector"]},
            "data": {"sources": [str(tmp_path / "clips.jsonl")], "apply_chat_template": True},
            "train": {"steps": 2},
        },
    )
