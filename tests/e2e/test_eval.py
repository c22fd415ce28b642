"""``lightrft eval``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from tests.e2e.command import assert_refused, command

PAIRS = ((0, 1), (0, 2), (1, 2))


@pytest.fixture
def evaluate(capsys, monkeypatch, model_folder, data_folder, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words: str, terms: str = "[math]"):
        given = [
            f"model={model_folder}",
            f"eval.data.sources={data_folder / 'train.jsonl'}",
            "eval.sampling.max_new_tokens=4",
        ]
        return command(capsys, "eval", *given, f"reward.terms={terms}", *words)

    return run


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answers(folder: Path) -> list[dict]:
    return lines_of(folder / "rollouts" / "eval_000000.jsonl")


def test_the_metrics_are_what_the_answers_say(evaluate, data_folder, tmp_path):
    outcome = evaluate("eval.threshold=0.2", terms=f"[{data_folder / 'rewards.py'}:ones]")
    assert outcome.status == 0, outcome.err
    lines = outcome.err.splitlines()  # the model never ends by itself
    equal, cut, table = lines[:4], lines[4:8], lines[8:]
    assert "rewards.py:ones' is 0 for all 10 responses" in equal[0]
    assert cut[0].startswith("WARNING: 100% of eval responses were cut")
    for example in (equal, cut):
        assert [row.split()[0] for row in example[1:]] == ["prompt", "response", "result"]
    metrics, rows = json.loads(outcome.out), answers(tmp_path / "runs" / "eval")
    assert len(rows) == 10
    assert metrics["eval/accuracy"] == sum(r["reward"] >= 0.2 for r in rows) / 10
    assert metrics["eval/reward"] == pytest.approx(sum(r["reward"] for r in rows) / 10, abs=1e-12)
    summary = json.loads((tmp_path / "runs" / "eval" / "summary.json").read_text())
    assert summary["prompts"] == 10 and summary["eval/accuracy"] == metrics["eval/accuracy"]
    interval = summary["intervals"]["eval/accuracy"]
    assert interval["low"] == metrics["eval/accuracy_low"] <= metrics["eval/accuracy"]
    assert interval["high"] == metrics["eval/accuracy_high"]
    assert table[1].split()[:2] == ["eval/accuracy", f"{metrics['eval/accuracy']:.1%}"]
    conditions = summary["conditions"]
    assert conditions["sampling"]["max_new_tokens"] == 4 and conditions["prompts"] == 10


def test_several_answers_give_the_share_with_one_that_is_right(evaluate, data_folder, tmp_path):
    sampling = ["eval.samples=3", "eval.sampling.temperature=1.0", "eval.threshold=0.01"]
    metrics = json.loads(evaluate(*sampling, terms=f"[{data_folder / 'rewards.py'}:ones]").out)
    rows = answers(tmp_path / "runs" / "eval")
    by_prompt: dict[str, list[bool]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"]["id"], []).append(row["reward"] >= 0.01)
    assert len(rows) == 30 and all(len(right) == 3 for right in by_prompt.values())
    assert metrics["eval/accuracy"] == pytest.approx(
        sum(map(sum, by_prompt.values())) / 30, abs=1e-12
    )
    assert metrics["eval/pass"] == pytest.approx(sum(map(any, by_prompt.values())) / 10, abs=1e-12)
    pairs = [right[i] or right[j] for right in by_prompt.values() for i, j in PAIRS]
    assert metrics["eval/pass@2"] == pytest.approx(sum(pairs) / 30, abs=1e-12)
    pairs = [right[i] and right[j] for right in by_prompt.values() for i, j in PAIRS]
    assert metrics["eval/pass^2"] == pytest.approx(sum(pairs) / 30, abs=1e-12)


def test_votes_are_counted_where_the_reward_compares_an_answer(evaluate):
    sampling = ["eval.samples=4", "eval.sampling.temperature=1.0"]
    metrics = json.loads(evaluate(*sampling).out)
    assert {"eval/maj@2", "eval/maj@4", "eval/no_answer"} <= metrics.keys()
    assert 0 <= metrics["eval/maj@4"] <= metrics["eval/pass@4"]
    assert metrics["eval/no_answer"] > 0


def test_two_evaluations_are_compared_prompt_by_prompt(evaluate, capsys, data_folder, tmp_path):
    ones = f"[{data_folder / 'rewards.py'}:ones]"
    for name, threshold in (("low", 0.01), ("high", 0.3)):
        assert evaluate(f"run.name={name}", f"eval.threshold={threshold}", terms=ones).status == 0
    outcome = command(capsys, "compare", "low", "runs/high")
    assert outcome.status == 0 and "output=FILE.json" in outcome.out, outcome.err
    assert not list(tmp_path.glob("*.json"))
    assert command(capsys, "compare", "low", "high", "output=compare.json").status == 0
    found = json.loads((tmp_path / "compare.json").read_text())
    rewards = [row["reward"] for row in answers(tmp_path / "runs" / "low")]
    lost = sum(0.01 <= reward < 0.3 for reward in rewards)
    assert len(found["regressions"]) == lost and not found["improvements"]
    assert found["settings"] == {"eval.threshold": [0.01, 0.3]}
    assert found["accuracy"]["all"]["difference"]["mean"] == pytest.approx(-lost / 10)
    again = command(capsys, "compare", "low", "high", "threshold=0.01")
    assert "The difference of +0.0% is within noise" in again.out


def test_the_first_prompts_only(evaluate, tmp_path):
    assert evaluate("eval.limit=3").status == 0
    assert [r["prompt"]["text"].count("+") for r in answers(tmp_path / "runs" / "eval")] == [
        1,
        1,
        1,
    ]


def test_a_second_evaluation_in_the_same_folder_takes_the_place_of_the_first(evaluate, tmp_path):
    assert evaluate("eval.limit=3").status == 0
    assert evaluate("eval.limit=5").status == 0
    assert len(answers(tmp_path / "runs" / "eval")) == 5


def test_every_source_has_an_accuracy_of_its_own(evaluate, data_folder):
    both = (
        f"[{{path: {data_folder / 'train.jsonl'}, name: one, limit: 4}}, {{path: "
        f"{data_folder / 'train.jsonl'}, name: two}}]"
    )
    metrics = json.loads(evaluate(f"eval.data.sources={both}").out)
    assert {"eval/one/accuracy", "eval/two/accuracy", "eval/accuracy"} <= metrics.keys()


def test_nothing_to_answer_or_no_reward_is_refused(evaluate):
    assert_refused(evaluate("eval.data.sources=[]"), "eval.data.sources is empty")
    assert_refused(evaluate(terms="[]"), "reward.terms is empty")


def test_a_source_without_a_reward_is_refused(evaluate):
    assert_refused(
        evaluate("reward.per_source={other: [math]}", terms="[]"),
        "no reward for data source",
        "other",
    )


def test_a_reward_whose_outcome_is_unclear_is_refused_before_anything_loads(evaluate, data_folder):
    rewards = data_folder / "rewards.py"
    two = f"[{{function: '{rewards}:ones', name: a}}, {{function: '{rewards}:ones', name: b}}]"
    assert_refused(evaluate(terms=two), "reward.terms has 2 terms", "reward.success=a")
    assert_refused(evaluate("reward.success=c", terms=two), "reward.success = 'c'")
    assert evaluate("reward.success=b", terms=two).status == 0


def test_evaluations_go_on_over_a_resume_and_samples_span_the_whole_run(
    rl_config, data_folder, tmp_path
):
    held = {
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}], "shuffle": False},
        "every": 2,
        "threshold": 0.5,
    }
    held["sampling"] = {"max_new_tokens": 6, "temperature": 0.0}
    run_rl(rl_config(eval=held, train={"steps": 2}))
    folder = tmp_path / "run"
    (folder / "rollouts" / "eval_000004.jsonl").write_text(
        "left by a later step that is taken again\n"
    )
    summary = run_rl(rl_config(eval=held, train={"steps": 4}))
    names = ["eval_000000.jsonl", "eval_000002.jsonl", "eval_000004.jsonl"]
    files = {name: lines_of(folder / "rollouts" / name) for name in names}
    assert sorted(p.name for p in (folder / "rollouts").glob("eval_*")) == names
    assert all(len(rows) == 10 for rows in files.values())
    accuracy = [
        r["eval/accuracy"] for r in read_rows(folder / "metrics.jsonl") if "eval/accuracy" in r
    ]
    assert accuracy == [sum(r["reward"] >= 0.5 for r in rows) / 10 for rows in files.values()]
    assert (summary["heldout_before"], summary["heldout_after"]) == (accuracy[0], accuracy[-1])
    shown = json.loads((folder / "samples.json").read_text())
    assert len(shown["before"]) == len(shown["after"]) == 5
    for side, name in (("before", names[0]), ("after", names[-1])):
        for sample in shown[side]:
            assert any(
                sample["prompt"] in r["prompt"]["text"] and sample["text"] == r["text"]
                for r in files[name]
            )
