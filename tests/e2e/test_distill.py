"""``lightrft distill``: whole runs of distillation on tiny real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import rows_of_pictures
from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import DistillVerbConfig, SFTConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.distill.run import is_sampled, run_distill
from lightrft.trainer.sft import run_sft
from tests.e2e.command import assert_refused, command
from tests.e2e.finished import assert_a_kill_changes_nothing, steady, weights

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family and width, with the tokenizer of the student."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 24, "intermediate_size": 32, "vocab_size": len(tokenizer) + 5}
    tiny_model("llama", seed=9, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tree(model_folder: Path, data_folder: Path, teacher_folder: Path, tmp_path: Path) -> dict:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "teacher": {"path": str(teacher_folder)},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 4,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4},
        "log": {"tensorboard": False},
    }


SAMPLED = {"distill": {"on_policy": 1.0}, "sampling": {"max_new_tokens": 6}}
MIXED = {
    "distill": {"kind": "jsd", "on_policy": 0.5, "top_k": 8, "nll_coef": 0.1},
    "sampling": {"max_new_tokens": 6},
}


@pytest.fixture
def distill(tree):
    """``distill(overrides...)``: the rows of a run."""

    def run(*overs: dict[str, Any], **over: Any) -> list[dict[str, Any]]:
        found = tree
        for more in (*overs, over):
            found = deep_merge(found, more)
        config = build(DistillVerbConfig, found)
        run_distill(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


@pytest.mark.parametrize("how", [{}, SAMPLED, MIXED], ids=["given", "sampled", "mixed"])
def test_a_student_comes_near_to_its_teacher(distill, how):
    rows = distill(how, train={"steps": 24}, distill={"nll_coef": 0.0})
    found = [row["distill/divergence"] for row in rows]
    assert sum(found[-6:]) < 0.6 * sum(found[:6])
    assert all(row["distill/nonfinite_tokens"] == 0 for row in rows)


def test_steps_sample_or_take_given_responses_by_the_share_that_is_set(distill, tree, tmp_path):
    rows = distill(MIXED, train={"steps": 8})
    config = build(DistillVerbConfig, deep_merge(tree, MIXED))
    chosen = [is_sampled(config, step) for step in range(8)]
    assert [row["distill/on_policy"] for row in rows] == [float(x) for x in chosen]
    assert len(set(chosen)) == 2
    # Responses are written, and their length counted, only where they are sampled.
    assert [("response/length" in row) for row in rows] == chosen
    written = {p.name for p in (tmp_path / "run" / "rollouts").glob("step_*.jsonl")}
    assert written == {f"step_{i + 1:06d}.jsonl" for i, x in enumerate(chosen) if x}
    share = sum(is_sampled(config, step) for step in range(2000)) / 2000
    assert abs(share - 0.5) < 0.05


def test_without_a_teacher_that_differs_nothing_is_lost_and_nothing_moves(
    distill, model_folder, tmp_path
):
    for kind in ("forward_kl", "reverse_kl"):
        rows = distill(
            distill={"kind": kind},
            teacher={"path": str(model_folder)},
            run={"name": kind},
            train={"steps": 1},
        )
        assert abs(rows[0]["loss"]) < 1e-6
        assert rows[0]["policy/grad_norm"] < 1e-5


def test_the_likelihood_alone_is_what_supervised_training_learns(distill, tree, model_folder):
    """With the student as its own teacher only -logp is left in the first step."""
    plain = build(SFTConfig, {**without(tree, "teacher"), "run": {**tree["run"], "name": "sft"}})
    run_sft(plain)
    expected = read_rows(Path(plain.run.dir) / "sft" / "metrics.jsonl")[0]
    found = distill(teacher={"path": str(model_folder)}, distill={"nll_coef": 1.0})[0]
    assert found["distill/nll"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-4)


def without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != name}


def test_prompts_without_responses_are_enough_where_every_response_is_sampled(distill, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(6)))
    rows = distill(SAMPLED, data={"sources": [{"path": str(file)}]}, train={"steps": 2})
    assert [row["distill/responses"] for row in rows] == [4, 4]
    assert all(0 < row["distill/tokens"] <= 24 for row in rows)


def test_the_students_own_weights_sample_after_each_step(distill, tmp_path):
    """A high learning rate changes the greedy responses at once."""
    greedy = {"sampling": {"max_new_tokens": 8, "temperature": 0.0}, "batch_size": 10}
    distill(SAMPLED, greedy, train={"steps": 2}, optimizer={"lr": 0.1})
    first, second = (
        [
            json.loads(line)
            for line in (tmp_path / "run" / "rollouts" / name).read_text().split("\n")
            if line
        ]
        for name in ("step_000001.jsonl", "step_000002.jsonl")
    )
    by_prompt = {row["prompt"]["id"]: row["token_ids"] for row in first}
    assert any(by_prompt[row["prompt"]["id"]] != row["token_ids"] for row in second)
    assert {row["versions"][0] for row in first} == {0}
    assert {row["versions"][0] for row in second} == {1}


def test_micro_batches_change_nothing(distill, tmp_path):
    above = {"eps": 1e-4}  # rounding, which Adam would make as large as a gradient
    whole = distill(MIXED, run={"name": "whole"}, optimizer=above)
    split = distill(
        MIXED,
        run={"name": "split"},
        optimizer=above,
        train={"max_tokens_per_micro_batch": 40},
    )
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in split], abs=1e-5)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


def test_two_steps_and_two_more_are_four_bit_for_bit(distill, tmp_path):
    whole = distill(MIXED, run={"name": "whole"})
    distill(MIXED, run={"name": "halves"}, train={"steps": 2})
    halves = distill(MIXED, run={"name": "halves"})
    assert {r["distill/on_policy"] for r in whole[2:]} <= {0.0, 1.0}
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_a_mean_over_responses_weights_short_ones_as_much_as_long_ones(distill, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [("1+1=", "2"), ("9+9=", "1" * 30)]
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows))
    over = {"data": {"sources": [{"path": str(file)}]}, "batch_size": 2, "train": {"steps": 1}}
    by_token = distill(over, run={"name": "token"})[0]
    by_response = distill(over, run={"name": "sequence"}, distill={"aggregation": "sequence"})[0]
    assert by_token["loss"] == pytest.approx(by_token["distill/divergence"], rel=1e-6)
    assert by_response["distill/divergence"] == by_token["distill/divergence"]
    assert abs(by_response["loss"] / by_token["loss"] - 1) > 1e-3


@pytest.mark.parametrize(
    ("over", "parts"),
    [
        ({"teacher": {"path": ""}}, ["teacher.path is empty"]),
        ({"data": {"sources": []}}, ["data.sources is empty"]),
        ({"sampling": {"max_new_tokens": 6}}, ["sampling.max_new_tokens = 6 changes nothing"]),
        ({"distill": {"beta": 0.2}}, ["distill.beta = 0.2", "only kind jsd"]),
        ({"distill": {"tail": "renormalised"}}, ["distill.tail", "set distill.top_k"]),
        ({"distill": {"top_k": 1, "tail": "renormalised"}}, ["always 0", "raise distill.top_k"]),
        ({"distill": {"on_policy": 1.0, "nll_coef": 1.0}}, ["distill.nll_coef = 1.0"]),
        (
            {"distill": {"on_policy": 1.0}, "sampling": {"max_new_tokens": 4000}},
            ["max_position_embeddings", "sampling.max_new_tokens"],
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(capsys, tree, tmp_path, monkeypatch, over, parts):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, over)))
    assert_refused(command(capsys, "distill", str(file)), *parts)


def test_a_teacher_of_another_tokenizer_is_refused(capsys, tree, tmp_path, teacher_folder):
    other = tmp_path / "other"
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, {"teacher": {"path": str(other)}})))
    assert_refused(command(capsys, "distill", str(file)), "teacher.path", "same tokenizer")


def test_the_command_reports(capsys, tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        f"model={tree['model']['path']}",
        f"teacher={tree['teacher']['path']}",
        f"data.sources={tree['data']['sources'][0]['path']}",
        "distill=jsd",
        "batch_size=4",
        "train.steps=2",
        "log.tensorboard=false",
    ]
    outcome = command(capsys, "distill", *words)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("finished at step 2")
    assert "lightrft chat model=runs/run/model" in outcome.out
    assert "distill 2/2 · loss" in outcome.err
    assert (tmp_path / "runs" / "run" / "report.html").exists()


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["given", "sampled"])
def test_rows_with_pictures_are_distilled(distill, tmp_path, how):
    """The teacher is the student itself, so it sees the same pictures exactly if nothing is lost."""
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    save_tiny_media("qwen2_5_vl", tmp_path / "teacher", hidden_size=32, seed=3)
    rows = [{**row, "response": "1"} for row in rows_of_pictures(tmp_path)]
    rows += [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(2)]
    file = tmp_path / "pictures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"path": str(tmp_path / "reader")},
        "data": {"sources": [{"path": str(file)}]},
        "train": {"steps": 1},
    }
    (same,) = distill(how, over, teacher={"path": str(tmp_path / "reader")}, run={"name": "same"})
    assert abs(same["loss"]) < 1e-6
    (other,) = distill(
        how, over, teacher={"path": str(tmp_path / "teacher")}, run={"name": "other"}
    )
    assert other["loss"] > 1e-5 and other["distill/responses"] == 4


def test_the_objective_is_explained_with_its_numbers_and_papers(capsys):
    outcome = command(capsys, "explain", "distill=jsd", "distill.top_k=20", "distill.on_policy=0.5")
    assert outcome.status == 0, outcome.err
    assert "D_t = beta KL(pi_teacher, m)" in outcome.out
    assert "distill.top_k" in outcome.out and "20" in outcome.out
    assert "2306.13649" in outcome.out and "command line" in outcome.out
    assert "NLL" not in outcome.out and "distill.nll_coef" in outcome.out
    assert "the model that training starts from" in outcome.out
    named = ["teacher.path=big", "teachers.math=other", "teachers.math.url=http://h/v1"]
    teachers = command(capsys, "explain", "distill=jsd", *named).out
    assert "frozen; big" in teachers and "served at http://h/v1" in teachers
    follows = command(capsys, "explain", "distill.refresh_every=2", "distill.refresh_decay=0.9").out
    assert "every 2 steps teacher <- 0.9 teacher + 0.1 student" in follows
    given = command(capsys, "explain", "distill.nll_coef=0.5").out
    assert "D_t + 0.5 NLL_t" in given and "distill.beta" not in given
    assert "\\frac" in command(capsys, "explain", "explain.verb=distill", "--latex").out


def test_a_config_is_examined_before_it_runs(capsys, tree, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, MIXED)))
    outcome = command(capsys, "doctor", str(file))
    assert outcome.status == 0, outcome.out
    assert "teacher" in outcome.out and "generation" in outcome.out
    assert "longest response 6 tokens" in outcome.out
    bad = command(capsys, "doctor", str(file), "distill.on_policy=0")
    assert bad.status == 2 and "sampling.max_new_tokens = 6 changes nothing" in bad.out
    file.write_text(json.dumps(deep_merge(tree, SAMPLED)))
    assert "prompts" in command(capsys, "doctor", str(file)).out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth"),
    [
        ("an answer", 6),
        pytest.param("backward", 3, marks=pytest.mark.thorough),
        pytest.param("update", 3, marks=pytest.mark.thorough),
        ("checkpoint writing", 2),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path, where, nth):
    how = deep_merge(MIXED, {"checkpoint": {"every": 1}, "run": {"threads": 1}})
    how = deep_merge(tree, how)
    assert_a_kill_changes_nothing(how, "distill", where, nth, tmp_path)
