"""Runs with the real vLLM. ``make test-vllm`` makes an environment that has it; elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

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
