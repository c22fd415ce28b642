"""A run with compiled decoding on a CPU: the same responses and updates as without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl

REWARD = "def reward(rollout):\n    return sum(rollout.token_ids) % 7 / 7\n"


def run(
    folder: Path, into: Path, *, compiled: bool
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    tree = {
        "run": {"dir": str(into), "name": "run", "progress": False},
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "data": {
            "sources": [{"path": str(folder / "rows.jsonl")}],
            "apply_chat_template": False,
        },
        "rollout": {"prompts_per_step": 2, "group_size": 4},
        "sampling": {"max_new_tokens": 8, "min_new_tokens": 8},
        "reward": {"terms": [str(folder / "reward.py") + ":reward"]},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 3},
        "engine": {"compile": compiled},
        "log": {"tensorboard": False},
    }
    run_rl(build(RLConfig, tree))
    files = sorted((into / "run" / "rollouts").glob("*.jsonl"))
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [r["token_ids"] for r in rollouts], read_rows(into / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_run_samples_and_learns_the_same(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": text} for text in ("abc", "de", "fghij", "k")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, before = run(tmp_path, tmp_path / "plain", compiled=False)
    found, after = run(tmp_path, tmp_path / "compiled", compiled=True)
    assert found == plain
    last = after[-1]
    assert last["rollout/compiled_graphs"] > 0
    assert last["rollout/compiled_steps"] > 0
    assert last["rollout/compile_failed"] == 0
    for name in ("policy/loss", "policy/grad_norm"):
        assert last[name] == pytest.approx(before[-1][name], rel=1e-3, abs=1e-5)
