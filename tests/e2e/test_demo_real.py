"""``lightrft demo real``: rounds of rejection sampling, then reinforcement learning, from a given model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft.cli.demo import preset
from lightrft.config.base import build, deep_merge
from lightrft.config.demo import DemoConfig
from lightrft.trainer.demo import run_demo
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import parse_yaml

Tree = dict[str, Any]


@pytest.fixture
def tree(model_folder: Path, data_folder: Path, tmp_path: Path) -> Tree:
    """The settings of the demo on a tiny model, in few steps."""
    terms = {"terms": [f"{data_folder / 'rewards.py'}:varied"]}
    sampling = {"max_new_tokens": 6}
    whole = parse_yaml(preset("real").read_text(encoding="utf-8"))
    for phase in ("iterate", "rl"):
        whole[phase]["eval"]["data"]["sources"][0]["options"]["count"] = 4
    small = {"reward": terms, "sampling": sampling, "eval": {"sampling": sampling}}
    few = {"prompts_per_round": 4, "samples": 3, "select": {"keep": "best", "keep_truncated": True}}
    changed: Tree = {
        "run": {"dir": str(tmp_path), "name": "demo"},
        "start": str(model_folder),
        "iterate": {**small, **few, "sft": {"batch_size": 2}},
        "rl": {
            **small,
            "rollout": {"prompts_per_step": 2, "group_size": 2},
            "train": {"steps": 2},
        },
    }
    return deep_merge(whole, changed)


def summary_in(folder: Path) -> Tree:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def samples_in(folder: Path) -> Tree:
    return json.loads((folder / "samples.json").read_text(encoding="utf-8"))


def test_reinforcement_learning_starts_where_the_rounds_end(tree, model_folder, tmp_path):
    summary = run_demo(build(DemoConfig, tree))
    base = tmp_path / "demo"
    rounds = summary_in(base / "iterate")
    trained = yaml.safe_load((base / "rl" / "config.yaml").read_text(encoding="utf-8"))
    assert trained["model"]["path"] == rounds["model"]
    assert not (base / "start").exists()
    first = yaml.safe_load((base / "iterate" / "config.yaml").read_text(encoding="utf-8"))
    assert first["model"]["path"] == str(model_folder)
    after = summary_in(base / "rl")
    assert summary["verb"] == "demo" and summary["finished"]
    assert summary["heldout_before"] == rounds["heldout_before"]
    assert summary["heldout_after"] == after["heldout_after"]
    assert summary["seconds"] == pytest.approx(rounds["seconds"] + after["seconds"])
    assert samples_in(base)["before"] == samples_in(base / "iterate")["before"]
    assert samples_in(base)["after"] == samples_in(base / "rl")["after"]
    again = run_demo(build(DemoConfig, tree))
    assert again == summary


def test_sizes_of_a_random_model_are_refused_where_a_model_is_given(tree):
    with pytest.raises(ConfigError, match="family changes nothing with start"):
        build(DemoConfig, {**tree, "family": "llama"})
