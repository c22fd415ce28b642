"""Several real processes: the same numbers as one, whatever they shard, and checkpoints that either takes up from the other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightrft.models.tiny_media import save_tiny_media
from lightrft.utils.settings import deep_merge
from lightrft.utils.trackers import read_rows

ROUNDING = ("time", "seconds", "tokens_per_second", "policy/sampler_gap")
"""What depends on the clock, or measures rounding itself."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo"}},
    "ppo": {"algorithm": {"preset": "ppo", "kl": {"coef": 0.01}}},
    "lora": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.01}}, "model": {"lora": {"rank": 4}}},
}

DEEPSPEED = [
    pytest.mark.slow,
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"),
]


def zero(stage: int) -> tuple[str, str]:
    """The arguments that ask for a stage of ZeRO."""
    return "strategy.kind=deepspeed", f"strategy.stage={stage}"


def rows_with_pictures(folder: Path) -> list[dict[str, Any]]:
    """Most rows have none, so that some rank has none in its part."""
    rows: list[dict[str, Any]] = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)]
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (12 + 8 * i, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append({"prompt": "which?", "images": [f"{i}.png"], "label": "1"})
    return rows


def config_file(tree: dict[str, Any], folder: Path, name: str) -> Path:
    """``tree`` as a file, for a run of that name."""
    run = {"run": {"dir": str(folder), "name": name, "threads": 1, "progress": False}, "strategy": {"device": "cpu"}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(deep_merge(tree, run)))
    return file


def train(tree: dict[str, Any], folder: Path, name: str, processes: int, *more: str) -> Path:
    """``lightrft rl`` with ``tree`` in as many processes; the run's folder."""
    file = config_file(tree, folder, name)
    command = [sys.executable, "-m", "lightrft", "rl", str(file), f"launch.processes={processes}", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def check_equal(found: Path, expected: Path, loader: Any = AutoModelForCausalLM, known: float = 2e-7) -> None:
    """The metrics of two runs, but for rounding, and their weights. Numbers near 0 are ``known`` to so much."""
    rows, wanted = (read_rows(path / "metrics.jsonl") for path in (found, expected))
    assert [r["step"] for r in rows] == [r["step"] for r in wanted]
    for row, want in zip(rows, wanted):
        row, want = ({k: v for k, v in r.items() if not k.startswith(ROUNDING)} for r in (row, want))
        assert row.keys() == want.keys()
        for key, value in want.items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=known)
            assert row[key] == near, (row["step"], key)
    models = [loader.from_pretrained(path / "model").state_dict() for path in (found, expected)]
    for key, tensor in models[1].items():
        torch.testing.assert_close(models[0][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Five groups of three, which do not divide by two or three ranks, in micro-batches of a few rows; held-out answers too."""
    sources = rl_tree["data"]["sources"]
    more = {
        "rollout": {"prompts": 5, "samples": 3},
        "train": {"micro_batch_tokens": 60},
        "eval": {"data": {"sources": sources}, "every": 2, "sampling": {"max_new_tokens": 4}},
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-3},
    }
    return deep_merge(rl_tree, more)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_of_several_processes_gives_the_numbers_of_one(tree, tmp_path, preset, processes):
    tree = deep_merge(tree, PRESETS[preset])
    check_equal(train(tree, tmp_path, "several", processes), train(tree, tmp_path, "one", 1))


@pytest.mark.slow
def test_more_ranks_than_groups_leave_some_without_rows_and_change_nothing(tree, tmp_path):
    tree = deep_merge(tree, {"rollout": {"prompts": 2, "samples": 2}, "train": {"steps": 2}})
    check_equal(train(tree, tmp_path, "several", 3), train(tree, tmp_path, "one", 1))


@pytest.mark.slow
def test_pictures_that_some_ranks_have_none_of_give_the_numbers_of_one_process(tree, tmp_path):
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path)))
    sources = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    over = {"model": {"path": str(tmp_path / "reader")}, "data": sources, "eval": {"data": sources}, "train": {"steps": 2}}
    tree = deep_merge(tree, over)
    check_equal(train(tree, tmp_path, "several", 2), train(tree, tmp_path, "one", 1), AutoModelForImageTextToText)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tree, tmp_path):
    tree = deep_merge(tree, {**PRESETS["ppo"], "eval": {"every": 1}, "train": {"steps": 3}})
    whole = train(tree, tmp_path, "whole", 1)
    train(tree, tmp_path, "moved", 1, "train.steps=1")
    train(tree, tmp_path, "moved", 3, "train.steps=2")
    check_equal(train(tree, tmp_path, "moved", 2), whole)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_on_all_and_the_same_command_goes_on(tree, tmp_path):
    tree = deep_merge(tree, {"train": {"steps": 6}, "checkpoint": {"every": 1}, "eval": {"every": 1}})
    whole = train(tree, tmp_path, "whole", 1)
    command = [sys.executable, "-m", "lightrft", "rl", str(config_file(tree, tmp_path, "killed")), "launch.processes=2"]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        workers = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
        next(p for p in workers if "lightrft" in p.cmdline() and "rl" in p.cmdline()).kill()
        process.wait(timeout=60)
    assert process.returncode != 0
    check_equal(train(tree, tmp_path, "killed", 2), whole)


class TestZero:
    """The same by DeepSpeed, in each of its stages."""

    pytestmark = DEEPSPEED

    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_stage_gives_the_numbers_of_one_process(self, tree, tmp_path, preset):
        tree = deep_merge(tree, PRESETS[preset])
        one = train(tree, tmp_path, "one", 1)
        for stage in (1, 2, 3):
            check_equal(train(tree, tmp_path, f"stage{stage}", 2, *zero(stage)), one)

    def test_three_processes_that_nothing_divides_by_and_too_few_rows_change_nothing(self, tree, tmp_path):
        few = deep_merge(tree, {"rollout": {"prompts": 2, "samples": 2}, "train": {"steps": 2}})
        one = train(few, tmp_path, "one", 1)
        for stage in (1, 2, 3):
            check_equal(train(few, tmp_path, f"stage{stage}", 3, *zero(stage)), one)

    @pytest.mark.parametrize("preset", ["grpo", "lora"])
    def test_clipping_decay_schedule_and_recomputed_layers_are_those_of_one_process(self, tree, tmp_path, preset):
        optimizer = {"max_grad_norm": 0.05, "weight_decay": 0.1, "schedule": "cosine", "warmup": 2, "lr_of": {"language": 2e-3}}
        tree = deep_merge(tree, {**PRESETS[preset], "optimizer": optimizer})
        tree = deep_merge(tree, {"model": {"gradient_checkpointing": True}})
        one = train(tree, tmp_path, "one", 1)
        for stage in (1, 2, 3):
            check_equal(train(tree, tmp_path, f"stage{stage}", 2, *zero(stage)), one)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_what_lies_in_the_hosts_memory_changes_nothing(self, tree, tmp_path, stage):
        offload = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
        with_offload = deep_merge(tree, {"strategy": {"kind": "deepspeed", "deepspeed": {"zero_optimization": offload}}})
        check_equal(train(with_offload, tmp_path, "several", 2, *zero(stage)), train(tree, tmp_path, "one", 1))

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_pictures_that_a_rank_has_none_of_change_nothing(self, tree, tmp_path, stage):
        save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path)))
        sources = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
        over = {"model": {"path": str(tmp_path / "reader")}, "data": sources, "eval": {"data": sources}, "train": {"steps": 2}}
        tree = deep_merge(tree, over)
        one = train(tree, tmp_path, "one", 1)
        check_equal(train(tree, tmp_path, "several", 2, *zero(stage)), one, AutoModelForImageTextToText)

    def test_a_run_goes_on_from_any_strategy_to_any_other(self, tree, tmp_path):
        tree = deep_merge(tree, {**PRESETS["ppo"], "eval": {"every": 1}, "train": {"steps": 7}})
        whole = train(tree, tmp_path, "whole", 1)
        ways = [(2, zero(1)), (1, ()), (3, zero(2)), (2, ()), (3, zero(3)), (1, ()), (2, zero(3))]
        for step, (processes, kind) in enumerate(ways, start=1):
            train(tree, tmp_path, "moved", processes, f"train.steps={step}", *kind)
        check_equal(tmp_path / "moved", whole)
