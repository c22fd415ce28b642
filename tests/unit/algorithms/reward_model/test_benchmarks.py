"""Benchmarks of reward models equal the package ``rewardbench`` on the same scores.

``rewardbench_0.1.4.json`` has random scores and what functions of that package return for them:
``calculate_scores_per_section``, ``reroll_and_score_dataset`` and ``process_single_model``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.reward_model.benchmarks import (
    REWARD_BENCH_SECTIONS,
    RewardBench2Row,
    best_of_n,
    process_bench,
    reward_bench,
    reward_bench_2,
    ties_score,
)
from lightrft.utils.errors import DataError

RECORDED = json.loads((Path(__file__).parent / "rewardbench_0.1.4.json").read_text("utf-8"))


def ties_rows(rows: list[dict[str, Any]]) -> list[RewardBench2Row]:
    return [RewardBench2Row("Ties", r["scores"], r["id"], r["num_correct"]) for r in rows]


@pytest.mark.parametrize("case", RECORDED["reward_bench"], ids=lambda case: len(case["rows"]))
def test_rewardbench_has_the_accuracies_and_sections_of_the_package(case: dict[str, Any]) -> None:
    subsets, chosen, rejected = zip(*case["rows"], strict=True)
    found = reward_bench(subsets, chosen, rejected)
    assert found.subsets == case["subsets"]
    # the package counts a section without rows as 0
    assert {name: found.sections.get(name, 0) for name in case["sections"]} == case["sections"]
    assert found.score == pytest.approx(sum(found.sections.values()) / len(found.sections))


def test_the_weights_of_rewardbench_are_as_published() -> None:
    sizes = {name: sum(tests.values()) for name, tests in REWARD_BENCH_SECTIONS.items()}
    assert sizes == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 984 + 984}


def test_equal_scores_of_rewardbench_are_wrong() -> None:
    assert reward_bench(["donotanswer"], [1.0], [1.0]).sections == {"Safety": 0.0}


def test_best_of_4_has_the_results_of_the_package() -> None:
    rows = [row for case in RECORDED["best_of_4"] for row in case]
    assert [best_of_n(row["scores"]) for row in rows] == [row["result"] for row in rows]
    assert {row["result"] for row in rows} >= {0.0, 0.5, 1.0}


@pytest.mark.parametrize("case", RECORDED["ties"], ids=lambda case: f"{case['score']:.3f}")
def test_the_score_of_ties_is_that_of_the_package(case: dict[str, Any]) -> None:
    assert ties_score(ties_rows(case["rows"])) == pytest.approx(case["score"], rel=1e-14)


def test_rewardbench_2_is_the_mean_of_its_subsets() -> None:
    rows = [
        RewardBench2Row("Math", [1.0, 0.0, 0.0, 0.0]),
        RewardBench2Row("Math", [1.0, 1.0, 0.0, 0.0]),
        RewardBench2Row("Focus", [0.0, 0.0, 0.0, 1.0]),
        *ties_rows(RECORDED["ties"][0]["rows"]),
    ]
    found = reward_bench_2(rows)
    ties = RECORDED["ties"][0]["score"]
    assert found.subsets == {"Math": 0.75, "Focus": 0.0, "Ties": pytest.approx(ties)}
    assert found.score == pytest.approx((0.75 + ties) / 3)


def test_shares_of_ties_over_no_prompts_are_0_and_not_nan() -> None:
    rows = [RewardBench2Row("Ties", [1.0, 0.0], f"{kind}:0") for kind in ("ref", "tied")]
    assert ties_score(rows) == pytest.approx(0.6)
    assert ties_score(rows[:1]) == pytest.approx(0.3)


NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (RewardBench2Row("Math", [1.0, NAN], "7"), "row '7': a score is NaN"),
        (RewardBench2Row("Math", [1.0, 0.0], "7", 2), "2 of 2 responses are correct"),
        (RewardBench2Row("Math", [1.0, 0.0], "7", 0), "0 of 2 responses are correct"),
        (RewardBench2Row("Ties", [1.0, 0.0], "7"), "'7' is not ref:N or tied:N"),
        (RewardBench2Row("Ties", [1.0, 0.0], "tied:x"), "'tied:x' is not"),
    ],
)
def test_a_row_of_rewardbench_2_that_cannot_be_scored_is_refused(
    row: RewardBench2Row, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        reward_bench_2([row])


def test_rows_of_benchmarks_that_are_missing_repeated_or_unknown_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        reward_bench_2([])
    with pytest.raises(DataError, match="no rows"):
        reward_bench([], [], [])
    with pytest.raises(DataError, match="'tied:1' is there twice"):
        ties_score([RewardBench2Row("Ties", [1.0, 0.0], "tied:1")] * 2)
    with pytest.raises(DataError, match="no subset 'hep-pyton'; did you mean 'hep-python'"):
        reward_bench(["hep-pyton"], [1.0], [0.0])
    with pytest.raises(DataError, match="subset hep-cpp: a score is NaN"):
        reward_bench(["hep-cpp"], [1.0], [NAN])


def test_processbench_is_the_harmonic_mean_of_both_accuracies() -> None:
    found = process_bench([2, 0, 1, 3, -1, -1], [2, 0, 0, -1, -1, 4])
    assert (found.wrong, found.right) == (0.5, 0.5)
    assert found.f1 == 0.5
    uneven = process_bench([0, 1, 1, 1, -1], [0, 0, 0, 0, -1])
    assert uneven.f1 == pytest.approx(2 * 0.25 * 1 / 1.25)
    assert process_bench([0, -1], [1, 1]).f1 == 0


@pytest.mark.parametrize(("labels", "kind"), [([0], "without"), ([-1], "with"), ([], "with")])
def test_processbench_needs_solutions_of_both_kinds(labels: list[int], kind: str) -> None:
    with pytest.raises(DataError, match=f"no solution {kind} a wrong step"):
        process_bench(labels, labels)


def test_columns_of_different_lengths_are_an_error_and_a_row_has_one_right_answer() -> None:
    with pytest.raises(ValueError, match="zip"):
        reward_bench(["hep-cpp", "hep-cpp"], [1.0, 1.0], [0.0])
    with pytest.raises(ValueError, match="zip"):
        process_bench([0, -1, 2], [0, -1])
    assert RewardBench2Row("Math", [1.0, 0.0]).correct == 1
