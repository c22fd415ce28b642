"""``lightrft generate``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightrft.models.tiny.text import PAD, START, UNK
from tests.e2e.command import assert_refused, command


@pytest.fixture
def generate(capsys, monkeypatch, model_folder, data_folder, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words: str, output: str = "answers.jsonl"):
        given = [
            f"model={model_folder}",
            f"data.sources={data_folder / 'train.jsonl'}",
            "sampling.max_new_tokens=6",
        ]
        return command(capsys, "generate", *given, f"output={output}", *words)

    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_come_in_the_order_of_the_prompts_whatever_the_order_they_end_in(
    generate, data_folder, tmp_path
):
    outcome = generate("samples=3", "engine.max_num_seqs=4")
    assert outcome.status == 0, outcome.err
    assert outcome.out == "30 responses in answers.jsonl\n" and outcome.err == ""
    rows = lines(tmp_path / "answers.jsonl")
    asked = [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    assert [r["label"] for r in rows] == [row["label"] for row in asked for _ in range(3)]
    assert all(
        row["prompt"] in r["prompt"]
        for row, r in zip([a for a in asked for _ in range(3)], rows, strict=True)
    )
    assert [r["sample"] for r in rows] == [0, 1, 2] * 10
    assert all(r["finish_reason"] in ("stop", "length") and "reward" not in r for r in rows)


def test_with_a_reward_every_answer_has_its_score_and_terms(generate, data_folder, tmp_path):
    assert (
        generate(
            f"reward.terms=[{{function: {data_folder / 'rewards.py'}:ones, weight: 2.0}}]"
        ).status
        == 0
    )
    for row in lines(tmp_path / "answers.jsonl"):
        share = row["response"].count("1") / max(1, len(row["response"]))
        assert row["terms"] == {"ones": pytest.approx(share, abs=1e-9)}
        assert row["reward"] == pytest.approx(2 * share, abs=1e-9)


def test_the_same_seed_gives_the_same_answers_and_another_gives_others(generate, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert generate(f"run.seed={seed}", output=f"{name}.jsonl").status == 0
    a, b, c = (lines(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b and a != c


def test_an_answer_does_not_depend_on_how_many_are_drawn_beside_it(generate, tmp_path):
    assert generate("samples=2", "engine.max_num_seqs=1", output="alone.jsonl").status == 0
    assert generate("samples=2", output="together.jsonl").status == 0
    assert lines(tmp_path / "alone.jsonl") == lines(tmp_path / "together.jsonl")


def test_a_file_that_exists_is_kept_unless_it_may_be_overwritten(generate, tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text("mine\n")
    assert_refused(generate(), "answers.jsonl exists", "run.overwrite=true")
    assert file.read_text() == "mine\n"
    assert generate("run.overwrite=true").status == 0
    assert len(lines(file)) == 10


def test_the_folder_of_the_output_is_made(generate, tmp_path):
    assert generate(output="deep/er/answers.jsonl").status == 0
    assert len(lines(tmp_path / "deep" / "er" / "answers.jsonl")) == 10
    assert [p.name for p in (tmp_path / "deep" / "er").iterdir()] == ["answers.jsonl"]


def test_stop_strings_are_cut_from_the_text(generate, tmp_path):
    assert generate("sampling.max_new_tokens=40", "sampling.stop=[a,e,i,o,u]").status == 0
    rows = lines(tmp_path / "answers.jsonl")
    # The spellings of special tokens are no text that a stop string is looked for in.
    texts = [re.sub("|".join(map(re.escape, (PAD, UNK, START))), "", r["response"]) for r in rows]
    assert not any(set("aeiou") & set(text) for text in texts)
    assert any(r["finish_reason"] == "stop" for r in rows)


def test_answers_that_could_not_be_scored_are_written_and_told(generate, data_folder, tmp_path):
    outcome = generate(f"reward.terms=[{data_folder / 'rewards.py'}:sometimes_fails]", "samples=4")
    rows = lines(tmp_path / "answers.jsonl")
    failed = [r for r in rows if r["failed"]]
    assert 0 < len(failed) < len(rows) == 40
    assert (
        f"{len(failed)} of 40 responses were not scored" in outcome.err
        and "no score today" in outcome.err
    )
