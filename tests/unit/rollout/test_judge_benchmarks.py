"""Scores of RewardBench of a judge, against the package's rules by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightrft.algorithms.reward_model.benchmarks import RewardBench2Row, reward_bench_2
from lightrft.config.base import build
from lightrft.config.data import DataConfig
from lightrft.datasets.benchmarks import reward_bench as reader
from lightrft.datasets.judgement.judgement_rows import JudgementRows
from lightrft.datasets.row_tables import InMemoryRows, MalformedRow
from lightrft.rewards.success import Success
from lightrft.rollout.eval_results.judgements import benchmark_metrics, judgement_scores
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError

Row = dict[str, Any]
CHOICE = {"prompt": "q", "chosen": ["r"], "rejected": ["x", "y", "z"]}
TIED = {"prompt": "any?", "chosen": ["r", "s"], "rejected": ["x", "y"], "subset": "Ties"}


def questions(rows: Sequence[Row], **judgement: Any) -> list[Row]:
    config = build(DataConfig, {"sources": ["rows.jsonl"], "judgement": judgement})
    made = JudgementRows(InMemoryRows([reader.reward_bench_2(row) for row in rows], "r"), config)
    return [made[i] for i in range(len(made))]


def judged(question: Row, *texts: str) -> list[Rollout]:
    """Samples of a judge. The reward is the agreement with the label, as in an evaluation."""
    columns = {"judgement": question["judgement"]}
    prompt = Prompt("0", [1], data_source=question["data_source"], columns=columns)
    found = []
    for text in texts:
        one = Rollout(prompt, [2], [True], [0.0], [0], "stop", seed=0, text=text)
        one.reward = float(text == f"<answer>{question['label']}</answer>")
        found.append(one)
    return found


def letter(question: Row, place: int) -> str:
    """The verdict for the response at ``place`` of the row."""
    return f"<answer>{'ABCD'[question['judgement']['shown'].index(place)]}</answer>"


def test_four_way_choices_count_one_nothing_or_a_quarter_and_ties_are_rated():
    rows = [{**CHOICE, "prompt": f"{i}?", "subset": "Math", "id": str(i)} for i in range(3)]
    rows += [{**TIED, "id": "tied:3"}, {**TIED, "chosen": ["r"], "id": "ref:3"}]
    made = questions(rows, form="best", rate_best=True)
    choices = [q for q in made if q["judgement"]["form"] == "best"]
    ratings = [q for q in made if q["judgement"]["form"] == "rating"]
    # a row of Ties is rated, with one right response too
    assert len(choices) == 3
    assert [q["label"] for q in ratings] == [10.0, 10.0, 1.0, 1.0, 10.0, 1.0, 1.0]
    assert all("Rate it from 1 to 10" in q["prompt"] for q in ratings)
    said = [letter(choices[0], 0), letter(choices[1], 2), "I cannot say."]
    groups = [judged(question, text) for question, text in zip(choices, said)]
    for question, number in zip(ratings, ("9", "8", "3", "none", "7", "2", "5")):
        groups.append(judged(question, f"<answer>{number}</answer>"))
    found = benchmark_metrics(groups, Success())
    assert found["eval/reward_bench_2/Math"] == pytest.approx((1 + 0 + 0.25) / 3)
    expected = reward_bench_2(
        [
            RewardBench2Row("Ties", [9.0, 8.0, 3.0, -1.0], "tied:3", 2),
            RewardBench2Row("Ties", [7.0, 2.0, 5.0], "ref:3", 1),
        ]
    )
    assert found["eval/reward_bench_2/Ties"] == expected.score
    math, ties = found["eval/reward_bench_2/Math"], found["eval/reward_bench_2/Ties"]
    assert found["eval/reward_bench_2/score"] == pytest.approx((math + ties) / 2)
    assert judgement_scores(groups, Success())["best_rated"] == [1.0, 1.0]


def test_ratings_of_all_rows_share_the_point_among_the_highest():
    rows = [{**CHOICE, "prompt": f"{i}?", "subset": "Focus", "id": str(i)} for i in range(4)]
    made = questions(rows, form="rating", rate_best=True, verdict="number")
    assert len(made) == 16
    given = ["9 9 2 1", "3 9 1 1", "x x x x", "5 x x 4"]  # shared, wrong, none, right
    numbers = [number for line in given for number in line.split()]
    groups = [judged(question, number) for question, number in zip(made, numbers)]
    found = benchmark_metrics(groups, Success())
    assert found["eval/reward_bench_2/Focus"] == pytest.approx((0.5 + 0 + 0.25 + 1) / 4)
    assert judgement_scores(groups, Success())["best_rated"] == [0.5, 0.0, 0.25, 1.0]


def test_several_samples_of_a_rating_are_averaged_and_choices_count_one_by_one():
    tied = questions([{**TIED, "id": "tied:1"}], form="best", rate_best=True)
    texts = [("2", "10"), ("7", "x"), ("6", "6"), ("x", "x")]
    groups = [
        judged(question, *(f"<answer>{n}</answer>" for n in numbers))
        for question, numbers in zip(tied, texts)
    ]
    (choice,) = questions([{**CHOICE, "subset": "Math", "id": "1"}], form="best")
    groups.append(judged(choice, letter(choice, 0), letter(choice, 1)))
    found = benchmark_metrics(groups, Success())
    row = RewardBench2Row("Ties", [6.0, 7.0, 6.0, -1.0], "tied:1", 2)
    assert found["eval/reward_bench_2/Ties"] == reward_bench_2([row]).score
    assert found["eval/reward_bench_2/Math"] == 0.5


def test_a_pair_of_rewardbench_without_a_verdict_counts_one_half():
    pair = {"prompt": "q", "chosen": "r", "rejected": "x", "subset": "donotanswer", "id": 1}
    config = build(DataConfig, {"sources": ["r.jsonl"], "judgement": {"order": "both"}})
    made = JudgementRows(InMemoryRows([reader.reward_bench(pair)], "r"), config)
    first, second = made[0], made[1]
    groups = [judged(first, f"<answer>{first['label']}</answer>"), judged(second, "hm")]
    assert benchmark_metrics(groups, Success())["eval/reward_bench/score"] == 0.75


def test_incomplete_benchmarks_have_no_score_and_lose_nothing(caplog):
    (choice,) = questions([{**CHOICE, "subset": "Math", "id": "1"}], form="best")
    tied = questions([{**TIED, "id": "no number"}], form="best", rate_best=True)
    groups = [judged(choice, letter(choice, 0)), judged(tied[0], "<answer>3</answer>")]
    assert benchmark_metrics(groups, Success()) == {}
    assert "reward_bench_2 has no score" in caplog.text


def test_rows_with_several_best_responses_are_rated_only_where_that_is_asked_for():
    with pytest.raises(MalformedRow, match="2 responses are the best"):
        questions([{**TIED, "id": "tied:1"}], form="best")
    unrated = questions([{**CHOICE, "subset": "Math", "id": "1"}], form="rating")
    assert [q["label"] for q in unrated] == [None] * 4
    with pytest.raises(ConfigError, match="take best or rating"):
        questions([], form="pair", rate_best=True)
