"""``lightrft distill`` with a teacher that has another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import DistillVerbConfig, SFTConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import PRINTABLE, tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.distill.run import run_distill
from lightrft.trainer.sft import run_sft
from tests.e2e.command import assert_refused, command
from tests.e2e.finished import assert_a_kill_changes_nothing, steady, weights
from tests.model_helpers import byte_pairs

VOCABULARY = len(PRINTABLE) + 6
"""Tokens of the student's model: two more than its tokenizer has."""
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ROWS = [{"prompt": f"count to {k + 1}", "response": " ".join(NUMBERS[: k + 1])} for k in range(10)]
TEXTS = ["user\nassistant\ncount to", *(" ".join(NUMBERS) for _ in range(3))]
SAMPLED = {"distill": {"on_policy": 1.0}, "sampling": {"max_new_tokens": 8}}
MIXED = {
    "distill": {"on_policy": 0.5, "nll_coef": 0.1, "temperature": 1.3},
    "sampling": {"max_new_tokens": 8},
}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that reads letters, a teacher that reads words, and one that reads letters too."""
    folder = tmp_path_factory.mktemp("tokenizers")
    letters = tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=VOCABULARY).save_pretrained(
        folder / "student"
    )
    letters.save_pretrained(folder / "student")
    words = byte_pairs(TEXTS, 320)
    tiny_model("llama", seed=9, vocab_size=len(words)).save_pretrained(folder / "words")
    words.save_pretrained(folder / "words")
    teacher = tiny_model("llama", seed=8, vocab_size=VOCABULARY)
    for name, tokenizer in (("letters", letters), ("more", tiny_tokenizer(special=("<more>",)))):
        teacher.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write(folder / "rows.jsonl", ROWS)
    return folder


@pytest.fixture
def tree(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(folder / "student"), "dtype": "float32"},
        "teacher": {"path": str(folder / "words")},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}]},
        "distill": {"kind": "uld"},
        "batch_size": 4,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4},
        "log": {"tensorboard": False},
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


def fluent(folder: Path, name: str, steps: int) -> str:
    """The model ``name`` after supervised training: it writes such text."""
    tree = {
        "run": {"dir": str(folder), "name": f"fluent_{name}", "seed": 5},
        "model": {"path": str(folder / name), "dtype": "float32"},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}]},
        "batch_size": 10,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": steps},
        "log": {"tensorboard": False},
    }
    run_sft(build(SFTConfig, tree))
    return str(folder / f"fluent_{name}" / "model")


@pytest.fixture(scope="module")
def learned(folder: Path) -> dict[str, Any]:
    """A student that knows the text a little, and a teacher that knows it better."""
    return {
        "model": {"path": fluent(folder, "student", 15)},
        "teacher": {"path": fluent(folder, "words", 40)},
        "validation": {"sources": [{"path": str(folder / "rows.jsonl")}]},
        "batch_size": 10,
        "optimizer": {"lr": 5e-3},
        "train": {"steps": 12},
    }


@pytest.mark.parametrize(
    ("how", "share"), [({}, 0.5), (SAMPLED, 0.85)], ids=["given responses", "sampled responses"]
)
def test_a_student_comes_near_to_a_teacher_of_another_tokenizer(distill, learned, how, share):
    """By the divergence on held-out responses."""
    before, *rows = distill(learned, how)
    assert rows[-1]["eval/divergence"] < share * before["eval/divergence"]
    for row in rows:
        trained = row["distill/tokens"]
        assert row["distill/aligned_tokens"] + row["distill/unaligned_tokens"] == trained
        assert 0 < row["distill/spans"] <= row["distill/aligned_tokens"]
    if not how:
        # Every given response is aligned to its end, and words have several letters.
        assert {row["distill/unaligned_tokens"] for row in rows} == {0}
        assert all(row["distill/spans"] < row["distill/aligned_tokens"] for row in rows)


LIKELY = {"distill": {"nll_coef": 0.1, "temperature": 1.3}}


@pytest.mark.parametrize("how", [{}, LIKELY], ids=["alone", "with the likelihood"])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_tokens_that_are_the_same_are_compared_as_by_the_same_tokenizer(
    distill, folder, tmp_path, how, aggregation
):
    """One teacher's tokenizer has a token more, which no text has."""
    over = {"train": {"steps": 2}, "distill": {"aggregation": aggregation}}
    same = distill(how, over, teacher={"path": str(folder / "letters")}, run={"name": "same"})
    other = distill(how, over, teacher={"path": str(folder / "more")}, run={"name": "other"})
    assert "distill/spans" not in same[0]
    for one, two in zip(same, other, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-4)
        assert two["distill/aligned_tokens"] == two["distill/spans"] == two["distill/tokens"]


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
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "nth"), [("an answer", 6), ("checkpoint publishing", 2)])
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path, where, nth):
    assert_a_kill_changes_nothing(deep_merge(tree, MIXED), "distill", where, nth, tmp_path)


def test_teachers_of_two_tokenizers_teach_their_own_rows(distill, folder, tmp_path):
    """The loss is the mean over the spans of both."""
    first, second = ROWS[:4], ROWS[4:]
    files = {
        "first": write(tmp_path / "first.jsonl", first),
        "second": write(tmp_path / "second.jsonl", second),
    }
    teachers = {
        "first": {"path": str(folder / "words")},
        "second": {"path": str(folder / "letters")},
    }
    alone: dict[str, dict[str, Any]] = {}
    for name, count in (("first", 4), ("second", 6)):
        (alone[name],) = distill(
            run={"name": name},
            data={"sources": [{"path": str(files[name])}]},
            teacher=teachers[name],
            batch_size=count,
            train={"steps": 1},
        )
    sources = [{"path": str(path), "name": name} for name, path in files.items()]
    (both,) = distill(
        run={"name": "both"},
        data={"sources": sources},
        teacher={"path": ""},
        teachers=teachers,
        batch_size=10,
        train={"steps": 1},
    )
    spans = alone["first"]["distill/spans"]
    tokens = alone["second"]["distill/tokens"]
    assert both["distill/spans"] == spans + tokens
    total = spans * alone["first"]["loss"] + tokens * alone["second"]["loss"]
    assert both["loss"] == pytest.approx(total / (spans + tokens), rel=1e-5)


def test_the_teacher_sees_its_own_prompt_in_its_own_tokens(distill, tmp_path):
    """Another prompt of the teacher changes the divergence, and nothing of the alignment."""
    (plain,) = distill(run={"name": "plain"}, train={"steps": 1})
    more = {"teacher_system": "count in words"}
    (told,) = distill(run={"name": "told"}, train={"steps": 1}, distill=more)
    assert told["distill/spans"] == plain["distill/spans"]
    assert abs(told["loss"] - plain["loss"]) > 1e-4


def test_a_batch_without_an_aligned_token_is_reported(distill, tmp_path, caplog):
    """The student's tokenizer has no such letters, so what it says is unknown."""
    file = write(tmp_path / "unknown.jsonl", [{"prompt": "a" * 400, "response": "éü"}] * 4)
    (row,) = distill(data={"sources": [{"path": str(file)}]}, train={"steps": 1})
    assert row["distill/aligned_tokens"] == row["distill/spans"] == row["loss"] == 0
    assert row["distill/unaligned_tokens"] == row["distill/tokens"] == 12
    assert "100% of trained tokens" in caplog.text and "tokenizer" in caplog.text


CONVERSATION = {
    "messages": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
}


@pytest.mark.parametrize(
    ("over", "parts"),
    [
        ({"distill": {"kind": "jsd"}}, ["same tokenizer", "set distill.kind=uld"]),
        ({"distill": {"top_k": 4}}, ["distill.top_k = 4", "distill.kind = uld"]),
        ({"distill": {"beta": 0.3}}, ["distill.beta", "only kind jsd"]),
        ({"data": {"loss_on": "all"}}, ["data.loss_on = all", "loss_on=assistant"]),
        ({"teacher": {"url": "http://h/v1"}}, ["teacher.url", "uld", "loads the teacher"]),
        ({"data": {"max_prompt_tokens": 4}}, ["prompts of the teacher", "max_prompt_tokens"]),
    ],
)
def test_settings_that_cannot_work_are_refused(capsys, tree, tmp_path, over, parts):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, over)))
    assert_refused(command(capsys, "distill", str(file)), *parts)


@pytest.mark.parametrize("how", ["another tokenizer", "another prompt"])
def test_conversations_of_several_trained_turns_are_refused(
    capsys, distill, tree, tmp_path, folder, how
):
    file = write(tmp_path / "turns.jsonl", [CONVERSATION] * 4)
    over = {"data": {"sources": [{"path": str(file)}]}}
    if how == "another prompt":
        over |= {
            "teacher": {"path": str(folder / "letters")},
            "distill": {"kind": "jsd", "teacher_system": "count"},
        }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(deep_merge(tree, over)))
    refused = command(capsys, "distill", str(config))
    assert_refused(refused, "several trained turns", "data.turns=last")
    (row,) = distill(over, data={"turns": "last"}, train={"steps": 1}, run={"name": "last"})
    assert row["distill/responses"] == 4


def test_a_model_that_reads_media_is_refused(capsys, tree, tmp_path):
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, {"model": {"path": str(tmp_path / "reader")}})))
    assert_refused(command(capsys, "distill", str(file)), "teacher.path", "reads media")


def test_the_objective_is_explained(capsys):
    outcome = command(capsys, "explain", "distill=uld", "teacher.path=big")
    assert outcome.status == 0, outcome.err
    assert "pi_(i) - pi_teacher_(i)" in outcome.out and "2402.12030" in outcome.out
    assert "spans of text" in outcome.out


def test_doctor_tells_how_many_tokens_are_aligned(capsys, tree, tmp_path, folder):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(tree))
    outcome = command(capsys, "doctor", str(file))
    assert outcome.status == 0, outcome.out
    assert "100% of the tokens" in outcome.out
    wrong = command(capsys, "doctor", str(file), "distill=jsd")
    assert wrong.status == 2 and "set distill.kind=uld" in wrong.out
    same = command(capsys, "doctor", str(file), f"teacher={folder / 'letters'}")
    assert "tokenizer of the student" in same.out
