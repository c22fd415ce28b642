"""``lightrft export``, and the verbs that take a run folder or a checkpoint for a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import ChatConfig, RLConfig
from lightrft.observability.metrics import Metrics, Sum
from lightrft.observability.trackers import read_rows
from lightrft.trainer.inference import Chat
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import resolved
from tests.e2e.command import assert_refused, command
from tests.e2e.several import train

LORA = {"lora": {"rank": 2, "alpha": 4.0}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    """Tell if two model folders hold the same weights, bit for bit."""
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(left[k].equal(right[k]) for k in left)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, data_folder) -> Path:
    """Three runs of three steps with a checkpoint each: ``whole`` weights, ``adapted``, and ``best`` by a metric."""
    folder = tmp_path_factory.mktemp("runs")
    tree: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "model": {"path": str(model_folder)},
        "data": {"sources": [str(data_folder / "train.jsonl")]},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "sampling": {"max_new_tokens": 4},
        "reward": {"terms": [f"{data_folder / 'rewards.py'}:varied"]},
        "algorithm": "grpo",
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 3},
        "checkpoint": {"every": 1, "keep": 9},
        "log": {"tensorboard": False},
    }
    more = {
        "whole": {"model": {"dtype": "bfloat16"}},
        "adapted": {"model": LORA},
        "best": {"checkpoint": {"best": "rollout/step_is_one"}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightrft.trainer.policy_run.all_reduce_metrics", lambda metrics, ranks: metrics
        )
        for name, over in more.items():
            if name == "best":
                patch.setattr("lightrft.trainer.policy_run.all_reduce_metrics", best_at_one())
            run_rl(build(RLConfig, deep_merge(tree, deep_merge(over, {"run": {"name": name}}))))
    return folder


def best_at_one() -> Any:
    """In place of what counts events: a metric that is best after the first step."""
    values = iter([3.0, 1.0, 2.0])
    return lambda metrics, ranks: Metrics({"rollout/step_is_one": Sum(next(values))})


@pytest.fixture
def export(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(capsys, "export", *words)


def test_the_last_checkpoint_gives_the_folder_that_the_run_itself_wrote(export, runs, tmp_path):
    outcome = export(runs / "whole", "output=out")
    assert outcome.status == 0, outcome.err
    assert (
        outcome.out
        == f"step 3 of {runs}/whole/checkpoints/step_000003: out\n  lightrft chat model=out\n"
    )
    assert same(tmp_path / "out", runs / "whole" / "model")
    assert {p.name for p in Path("out").iterdir()} == {
        p.name for p in (runs / "whole" / "model").iterdir()
    }
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and model.dtype == torch.bfloat16


def test_an_earlier_step_and_a_checkpoint_that_was_moved_away_are_exported(export, runs, tmp_path):
    shutil.copytree(runs / "whole" / "checkpoints" / "step_000001", tmp_path / "kept")
    assert export("kept").status == export(runs / "whole", "step=1", "output=one").status == 0
    assert same(tmp_path / "export" / "kept", tmp_path / "one")
    assert not same(tmp_path / "one", runs / "whole" / "model")
    assert_refused(export(runs / "whole", "step=7"), "no checkpoint of step 7; it has 1, 2, 3")


def test_adapters_are_merged_or_kept_for_peft(export, runs, model_folder, tmp_path):
    assert (
        export(runs / "adapted", "output=merged").status
        == export(runs / "adapted", "output=kept", "adapters=keep").status
        == 0
    )
    assert same(tmp_path / "merged", runs / "adapted" / "model")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with_adapter = (
        PeftModel.from_pretrained(base, tmp_path / "kept").merge_and_unload().state_dict()
    )
    found = weights(tmp_path / "merged")
    assert all(torch.allclose(found[k], with_adapter[k], atol=1e-6) for k in found)
    assert any(not found[k].equal(weights(model_folder)[k]) for k in found)
    assert_refused(export(runs / "whole", "output=nothing", "adapters=keep"), "trained no adapters")
    assert not (tmp_path / "none").exists()


def test_what_is_there_is_not_replaced_unless_it_is_a_model_and_that_is_asked_for(
    export, runs, tmp_path
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    assert_refused(export(runs / "whole", "output=mine", "overwrite=true"), "is no model folder")
    assert export(runs / "whole", "output=out", "step=1").status == 0
    assert_refused(export(runs / "whole", "output=out"), "set overwrite=true")
    assert export(runs / "whole", "output=out", "overwrite=true").status == 0
    assert same(tmp_path / "out", runs / "whole" / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]


def test_an_export_that_fails_leaves_the_folder_as_it_was(export, runs, tmp_path, monkeypatch):
    assert export(runs / "whole", "output=out", "step=1").status == 0
    before = weights(tmp_path / "out")

    def full(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightrft.trainer.saved_policy.save_model", full)
    assert export(runs / "whole", "output=out", "overwrite=true").status == 130
    assert all(before[k].equal(v) for k, v in weights(tmp_path / "out").items())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_damaged_checkpoint_is_skipped_and_stays_where_it_is(export, runs, tmp_path):
    run = shutil.copytree(runs / "whole", tmp_path / "run")
    newest = run / "checkpoints" / "step_000003"
    (newest / "trainer.pt").write_text("{}")
    outcome = export(run)
    assert outcome.out.startswith("step 2 of") and "step_000003 is damaged" in outcome.err
    assert newest.is_dir()
    assert_refused(export(newest, "output=out"), "step_000003 is damaged")
    assert_refused(export(run, "step=3", "output=out"), "step_000003 is damaged")


def test_the_best_decides_what_model_holds_and_what_is_exported(export, runs, tmp_path):
    summary = json.loads((runs / "best" / "summary.json").read_text())
    assert (summary["steps"], summary["model_step"]) == (3, 1)
    assert export(runs / "best", "output=best").out.startswith("step 1 of")
    assert export(runs / "best", "output=last", "which=last").out.startswith("step 3 of")
    assert same(tmp_path / "best", runs / "best" / "model") and not same(
        tmp_path / "last", runs / "best" / "model"
    )
    assert_refused(export(runs / "whole", "which=best"), "has no checkpoint.best")


def test_what_is_no_run_is_refused(export, runs, model_folder, tmp_path):
    assert_refused(export(), "path is empty")
    assert_refused(export(model_folder), "neither a run folder")
    assert_refused(export("path=nowhere"), "neither a run folder")
    run = shutil.copytree(runs / "whole", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert_refused(export(run), "has no intact checkpoint")


def test_generate_takes_a_run_folder_or_a_checkpoint(
    capsys, runs, data_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    places = {
        "run": [runs / "best"],
        "step": [runs / "best/checkpoints/step_000001"],
        "model": [f"model={runs / 'best/model'}"],
    }
    places["last"] = [f"model={runs / 'best/checkpoints/step_000003'}"]
    texts = {}
    for name, words in places.items():
        given = [
            f"data.sources={data_folder / 'train.jsonl'}",
            f"output={name}",
            "sampling.temperature=0.5",
        ]
        outcome = command(capsys, "generate", *words, *given, "sampling.max_new_tokens=6")
        assert outcome.status == 0, outcome.err
        texts[name] = Path(name).read_text()
    assert texts["run"] == texts["step"] == texts["model"] != texts["last"]


def test_chat_takes_a_run_folder_or_a_checkpoint(runs):
    places = {
        "run": runs / "best",
        "model": runs / "best" / "model",
        "last": runs / "best" / "checkpoints" / "step_000003",
    }
    said = {}
    for name, path in places.items():
        chat = Chat(
            build(
                ChatConfig,
                {
                    "model": {"path": str(path)},
                    "sampling": {"temperature": 1.0, "max_new_tokens": 12},
                },
            )
        )
        said[name] = chat.say("1+1=").logprobs
    assert said["run"] == said["model"] != said["last"]


def test_settings_of_the_model_that_are_given_win_over_those_of_the_run(runs):
    model, saved = resolved(build(ModelConfig, {"path": str(runs / "whole"), "logits_mb": 7}))
    assert (model.logits_mb, model.dtype, saved.step) == (7, "bfloat16", 3)
    run = build(ModelConfig, {"path": "some/name"})
    assert resolved(run) == (run, None)


@pytest.mark.slow
def test_what_two_processes_have_sharded_is_exported_and_the_best_of_it_is_in_model(
    export, uneven_tree, tmp_path
):
    more = {
        "checkpoint": {"every": 1, "best": "-eval/reward", "keep": 9},
        "eval": {"every": 1},
        "model": {"dtype": "bfloat16"},
    }
    run = train(deep_merge(uneven_tree, more), tmp_path, "sharded", 2)
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"]]
    best = min(rows, key=lambda row: (row["eval/reward"], row["step"]))["step"]
    assert json.loads((run / "summary.json").read_text())["model_step"] == best
    assert export(run, "output=best").status == export(run, "which=last", "output=last").status == 0
    assert same(tmp_path / "best", run / "model")
    (run / "summary.json").unlink()
    again = train(
        deep_merge(uneven_tree, deep_merge(more, {"checkpoint": {"best": None}})),
        tmp_path,
        "sharded",
        2,
    )
    assert same(tmp_path / "last", again / "model")


def test_a_second_eval_in_the_folder_of_another_model_is_refused(
    capsys, runs, data_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def evaluate(*words: str | Path) -> Any:
        given = [
            f"eval.data.sources={data_folder / 'train.jsonl'}",
            "eval.sampling.max_new_tokens=2",
            "reward.terms=[math]",
        ]
        return command(capsys, "eval", *words, *given)

    assert evaluate(runs / "best").status == 0
    summary = (tmp_path / "runs" / "eval" / "summary.json").read_text()
    assert json.loads(summary)["model"] == str(runs / "best" / "checkpoints" / "step_000001")
    refused = evaluate(runs / "best" / "checkpoints" / "step_000003")
    assert_refused(refused, "another config", "model.path", "run.overwrite=true")
    assert (tmp_path / "runs" / "eval" / "summary.json").read_text() == summary
    assert evaluate(runs / "best").status == 0
