"""``lightrft sft``: whole runs of supervised fine-tuning on a tiny real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import SFTConfig
from lightrft.observability.trackers import read_rows
from lightrft.trainer.sft import run_sft
from tests.e2e.command import assert_refused, command
from tests.e2e.finished import steady, weights


@pytest.fixture
def sft(model_folder: Path, data_folder: Path, tmp_path: Path):
    """``sft(overrides...)``: the rows of a run of ten short sums."""
    tree = {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 4,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4},
        "log": {"tensorboard": False},
    }

    def run(**over: Any) -> list[dict[str, Any]]:
        config = build(SFTConfig, deep_merge(tree, over))
        run_sft(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


def test_a_run_leaves_a_whole_folder_and_a_model_that_loads(sft, tmp_path):
    rows = sft()
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert {"config.yaml", "metrics.jsonl", "summary.json", "log.txt", "checkpoints", "model"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.slow
def test_what_is_repeated_is_learned_by_heart(sft, data_folder):
    held = {
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}], "shuffle": False},
        "sampling": {"max_new_tokens": 6},
    }
    held["sampling"]["temperature"] = 0.0
    rows = sft(train={"steps": 150}, batch_size=10, eval=held, reward={"terms": ["exact_match"]})
    assert rows[0]["step"] == 0 and rows[0]["eval/accuracy"] < 0.2
    assert rows[-1]["loss"] < 0.05 and rows[-1]["eval/accuracy"] == 1.0


def test_only_the_answers_tokens_are_counted_and_trained(sft, data_folder):
    asked = [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    (row,) = sft(batch_size=10, train={"steps": 1})
    assert row["sft/tokens"] == sum(len(r["response"]) + 1 for r in asked)
    assert row["sft/conversations"] == 10


def test_micro_batches_change_nothing(sft, tmp_path):
    above = {"eps": 1e-4}  # rounding, which Adam would make as large as a gradient
    whole = sft(run={"name": "whole"}, optimizer=above)
    split = sft(run={"name": "split"}, optimizer=above, train={"max_tokens_per_micro_batch": 40})
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in split], abs=1e-5)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


def test_two_steps_and_two_more_are_four_bit_for_bit(sft, tmp_path):
    whole = sft(run={"name": "whole"})
    sft(run={"name": "halves"}, train={"steps": 2})
    halves = sft(run={"name": "halves"})
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_noise_on_embeddings_is_the_same_after_a_resume_and_in_any_micro_batch(sft, tmp_path):
    above = {"eps": 1e-4}
    noisy = {"neftune_alpha": 5.0, "optimizer": above}
    whole = sft(run={"name": "whole"}, **noisy)
    sft(run={"name": "halves"}, **noisy, train={"steps": 2})
    halves = sft(run={"name": "halves"}, **noisy)
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    small = {"max_tokens_per_micro_batch": 40}
    split = sft(run={"name": "split"}, **noisy, train=small)
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in split], abs=1e-5)
    plain = sft(run={"name": "plain"}, optimizer=above)
    assert all(a["loss"] != b["loss"] for a, b in zip(plain, whole, strict=True))


def test_the_weight_of_a_row_and_of_a_turn_reach_the_loss(sft, tmp_path):
    def losses(name: str, rows: list[dict[str, Any]]) -> float:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        data = {"sources": [{"path": str(file)}], "shuffle": False}
        size = {"batch_size": len(rows), "train": {"steps": 1}}
        return sft(run={"name": name}, data=data, **size)[0]["loss"]

    one, other = {"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": "4"}
    both = [losses("one", [one]), losses("other", [other])]
    rows = [{**one, "example_weight": 3.0}, other]
    assert losses("rows", rows) == pytest.approx((3 * both[0] + both[1]) / 4, abs=1e-6)
    masked = [{"role": "assistant", "content": "2", "weight": 0.25}]
    turns = [{"messages": [{"role": "user", "content": "1+1="}, *masked]}, other]
    assert losses("turns", turns) == pytest.approx((both[0] / 4 + both[1]) / 1.25, abs=1e-6)


def test_each_data_source_has_its_own_loss(sft, tmp_path):
    rows = {"a": [{"prompt": "1+1=", "response": "2"}], "b": [{"prompt": "2+2=", "response": "4"}]}
    sources = []
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
        sources.append({"path": str(tmp_path / f"{name}.jsonl")})
    size = {"batch_size": 2, "train": {"steps": 1, "max_tokens_per_micro_batch": 40}}
    (row,) = sft(data={"sources": sources}, **size)
    # both have two trained tokens
    assert row["loss"] == pytest.approx((row["sft/a/nll"] + row["sft/b/nll"]) / 2, abs=1e-6)
    assert row["sft/a/nll"] != row["sft/b/nll"]
    one = {"batch_size": 1, "train": {"steps": 1}}
    (alone,) = sft(run={"name": "alone"}, data={"sources": sources[:1]}, **one)
    assert alone["loss"] == pytest.approx(row["sft/a/nll"], abs=1e-6)
    assert not any(key.endswith("/nll") for key in alone)


def test_adapters_are_trained_alone_and_merged_into_the_export(sft, model_folder, tmp_path):
    sft(model={"lora": {"rank": 4, "alpha": 8}})
    state = load_file(
        next((tmp_path / "run" / "checkpoints").glob("step_*")) / "policy" / "state.safetensors"
    )
    assert all("lora" in key for key in state if key.startswith("weights/"))
    before, after = load_file(model_folder / "model.safetensors"), weights(tmp_path / "run")
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert before.keys() == after.keys()
    assert changed and all("proj" in k for k in changed)


def test_epochs_decide_where_steps_do_not(sft):
    assert [r["step"] for r in sft(train={"steps": None, "epochs": 2.0})][-1] == 5


def test_conversations_of_several_turns_train_every_answer(sft, tmp_path):
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    rows = [{"messages": [{"role": r, "content": c} for r, c in turns]}] * 2
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (row,) = sft(data={"sources": [{"path": str(file)}]}, batch_size=2, train={"steps": 1})
    assert row["sft/tokens"] == 2 * 2 * 2  # conversations, answers, a digit and the end of the turn


def test_the_command_reports_and_refuses(capsys, model_folder, data_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        f"model={model_folder}",
        f"data.sources={data_folder / 'train.jsonl'}",
        "batch_size=4",
        "train.steps=2",
    ]
    outcome = command(capsys, "sft", *words, "log.tensorboard=false")
    assert outcome.status == 0, outcome.err
    assert (
        outcome.out.startswith("finished at step 2")
        and "lightrft chat model=runs/run/model" in outcome.out
    )
    assert "sft 2/2 · loss" in outcome.err
    assert_refused(command(capsys, "sft", *words, "data.sources=[]"), "data.sources is empty")
    held = f"eval.data.sources={data_folder / 'train.jsonl'}"
    assert_refused(
        command(capsys, "sft", *words, held), "reward.terms is empty", "reward.terms=[math]"
    )
