"""``lightrft prm``: whole runs of process reward models on a tiny real model."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import PRMVerbConfig
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.observability.trackers import read_rows
from lightrft.trainer.process_model.run import run_process_model
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ConfigError
from lightrft.viewer.report import write_report
from tests import warm

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums in steps, one or none of which is wrong: hard labels, soft labels, and the first error."""
    folder = tmp_path_factory.mktemp("steps")
    hard, soft, bench = [], [], []
    for i in range(24):
        prompt = f"{i % 4}+1="
        wrong = i % 4 - 1
        steps = ["xx" if k == wrong else f"{k}" for k in range(3)]
        labels = [k != wrong for k in range(3)]
        hard.append({"prompt": prompt, "completions": steps, "labels": labels})
        chances = [0.9 if label else 0.2 for label in labels]
        soft.append({"prompt": prompt, "completions": steps, "labels": chances})
        bench.append({"problem": prompt, "steps": steps, "label": wrong})
    for name, rows in {"hard": hard, "soft": soft, "bench": bench}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def tree(model_folder: Path, files: Path, tmp_path: Path) -> Row:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(files / "hard.jsonl")}]},
        "batch_size": 8,
        # eps is above rounding, which Adam would make as large as a gradient.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "train": {"steps": 3},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def prm(tree: Row) -> Run:
    """``prm(changes...)``: the rows of a run."""

    def run(*changes: Row, **over: Any) -> list[Row]:
        full = tree
        for change in (*changes, over):
            full = deep_merge(full, change)
        config = build(PRMVerbConfig, full)
        run_process_model(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


def steady(row: Row) -> Row:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "seconds", "tokens_per"))}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "model").glob("*.safetensors"))
    return {k: v for file in files for k, v in load_file(file).items()}


def test_a_run_learns_to_find_wrong_steps_and_leaves_a_model_that_scores(prm, tmp_path, files):
    held = {"sources": [{"path": str(files / "bench.jsonl"), "limit": 12}]}
    rows = prm(validation=held, train={"steps": 14}, eval={"every": 7}, optimizer={"lr": 1e-2})
    # before training, scores are near one half
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=0.15)
    last = rows[-1]
    assert last["eval/step_accuracy"] == 1 > rows[0]["eval/step_accuracy"]
    assert last["eval/response_accuracy"] == last["eval/process_bench_f1"] == 1
    assert last["eval/loss"] < rows[0]["eval/loss"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_before"] == rows[0]["eval/step_accuracy"]
    shown = json.loads((tmp_path / "run" / "reward_scores.json").read_text())
    assert (shown["responses"], shown["worst"]) == (12, [])
    assert "Scores of steps" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert summary["heldout_after"] == 1
    model = ProcessRewardModel.open(tmp_path / "run" / "model")
    assert model.separator is not None
    assert (model.separator.text, model.separator.special_tokens) == ("\n", "text")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"head": "tokens"}, "soft"),
        ({"head": "mlp", "losses": ["mse"]}, "soft"),
        ({"head": "linear", "losses": ["pqm"]}, "hard"),
        ({"head": "regression", "losses": ["mse"]}, "soft"),
        ({"last_step_only": True}, "hard"),
    ],
)
def test_every_head_and_loss_learns(prm, files, model, name):
    data = {"sources": [{"path": str(files / f"{name}.jsonl")}]}
    # every step has all rows, so that losses of steps compare
    how = {"data": data, "train": {"steps": 6}, "batch_size": 24, "optimizer": {"lr": 3e-3}}
    rows = prm(how, process_model=model)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.01


def test_micro_batches_change_nothing(prm, tmp_path):
    how = {"process_model": {"losses": ["cross_entropy", "pqm"]}}
    whole = prm(how, run={"name": "whole"})
    parts = prm(how, run={"name": "parts"}, train={"max_tokens_per_micro_batch": 12})
    assert [r["loss"] for r in parts] == pytest.approx([r["loss"] for r in whole], rel=3e-6)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


def test_adapters_are_merged_into_the_saved_model(prm, tmp_path):
    prm(model={"lora": {"rank": 4}}, optimizer={"lr": 1e-2})
    model = ProcessRewardModel.open(tmp_path / "run" / "model")
    assert model.separator is not None
    (token,) = model.separator.ids
    row = Batch(Segments.of([[5, 6]]), Segments.of([[8, token, 9, token]]), torch.tensor([0]))
    assert len(model.score_steps(row).scores) == 2


@pytest.mark.parametrize("where", ["backward", "checkpoint publishing"])
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, files, tmp_path, where):
    often = {
        "checkpoint": {"every": 1},
        "run": {"threads": 1},
        "validation": {"sources": [{"path": str(files / "bench.jsonl"), "limit": 4}]},
        "eval": {"every": 2},
    }

    def start(name: str, place: str) -> int:
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(deep_merge(deep_merge(tree, often), {"run": {"name": name}})))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return warm.run([KILLING, file, place, "2", "0", "kill", "prm"], env=env).returncode

    assert start("whole", "never") == 0
    assert start("killed", where) == -signal.SIGKILL
    assert start("killed", "never") == 0
    whole, killed = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed"))
    assert [steady(r) for r in killed] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"checkpoint": {"best": "eval/accuracy"}}, "is not a metric"),
        ({"eval": {"every": 2}}, r"validation\.sources is empty"),
        ({"process_model": {"head": "tokens", "right": "good"}}, "not one"),
        ({"model": {"load_in_4bit": True}}, "lora"),
        ({"validation": {"separator": "\n\n"}}, "the model scores one separator"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(prm, over, said):
    with pytest.raises(ConfigError, match=said):
        prm(over)


def test_sources_have_metrics_of_their_own(prm, files):
    both = [{"path": str(files / f"{name}.jsonl"), "name": name} for name in ("hard", "soft")]
    held = [{"path": str(files / "bench.jsonl")}, *both]
    rows = prm(data={"sources": both}, validation={"sources": held}, train={"steps": 2})
    assert "process_model/hard/step_accuracy" in rows[-1]
