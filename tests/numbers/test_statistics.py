"""Metrics of repeated samples, intervals and paired tests equal their definitions, and intervals cover what they promise."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.utils.statistics.intervals import (
    Estimate,
    estimate,
    holm,
    minimum_effect,
    paired_difference,
    sign_flip_test,
    standard_error,
    student,
    t_quantile,
    wilson,
)
from lightrft.utils.statistics.repeated_samples import (
    _distribution,
    maj_at_k,
    pass_at_k,
    pass_hat_k,
    powers_of_two,
)
from tests.numbers import oracles_statistics as oracles

Z95 = NormalDist().inv_cdf(0.975)


@st.composite
def answers(draw: st.DrawFn) -> list[str]:
    """Up to nine answers: right, wrong in several ways, or none."""
    return draw(st.lists(st.sampled_from(["right", "a", "b", "c", ""]), min_size=1, max_size=9))


@settings(max_examples=60)
@given(answers=answers(), data=st.data())
def test_pass_at_k_and_pass_hat_k_are_means_over_all_subsets(
    answers: list[str], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    counts = len(answers), answers.count("right"), k
    any_right = oracles.mean_over_subsets(answers, k, oracles.any_right)
    all_right = oracles.mean_over_subsets(answers, k, oracles.all_right)
    assert pass_at_k(*counts) == pytest.approx(float(any_right), abs=1e-15)
    assert pass_hat_k(*counts) == pytest.approx(float(all_right), abs=1e-15)


@settings(max_examples=120)
@given(answers=answers(), data=st.data())
def test_the_majority_is_the_mean_vote_of_all_subsets_with_ties_broken_at_random(
    answers: list[str], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    wrong = [answers.count(answer) for answer in "abc" if answer in answers]
    found = maj_at_k(answers.count("right"), wrong, answers.count(""), k)
    expected = oracles.mean_over_subsets(answers, k, oracles.majority_right)
    assert found == pytest.approx(float(expected), abs=1e-12)


def test_metrics_of_a_thousand_samples_neither_overflow_nor_lose_digits() -> None:
    assert pass_at_k(2000, 1, 1000) == 0.5
    assert pass_at_k(10**6, 1, 1) == 1e-6
    assert pass_hat_k(2000, 1999, 1000) == 0.5
    assert maj_at_k(1000, [999], 1, 2000) == 1.0
    assert maj_at_k(1000, [1000], 0, 1000) == pytest.approx(0.5, abs=1e-9)


def test_the_values_of_k_are_powers_of_two_up_to_the_number_of_samples() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (0, 30), (7, 30), (15, 30), (30, 30), (1, 2)])
def test_wilsons_interval_ends_where_its_equation_says(hits: int, count: int) -> None:
    low, high = wilson(hits / count, count)
    assert low == pytest.approx(oracles.wilson_end(hits, count, Z95, lower=True), abs=1e-9)
    assert high == pytest.approx(oracles.wilson_end(hits, count, Z95, lower=False), abs=1e-9)
    assert estimate([1.0] * hits + [0.0] * (count - hits)).low == low
    assert (low == 0) == (hits == 0) and (high == 1) == (hits == count)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 29, 30, 199, 200, 1319])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_students_quantile_has_its_coverage(freedom: int, confidence: float) -> None:
    assert oracles.t_coverage(t_quantile(confidence, freedom), freedom) == pytest.approx(
        confidence, abs=1e-8
    )


def test_an_interval_of_fractions_is_students_and_stays_within_its_bounds() -> None:
    values = [0.0, 0.5, 1.0, 1.0]
    deviation = math.sqrt(sum((v - 0.625) ** 2 for v in values) / 3)
    found = estimate(values)
    assert found.stderr == pytest.approx(deviation / 2, abs=1e-15) == standard_error(values)
    assert found.high - found.mean == pytest.approx(t_quantile(0.95, 3) * deviation / 2, abs=1e-12)
    assert estimate(values, bounds=(0.0, 1.0)).high == 1.0
    single = estimate([0.5], bounds=(0.0, 1.0))
    assert math.isnan(single.stderr) and (single.low, single.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


@settings(max_examples=60)
@given(differences=st.lists(st.integers(-3, 3), max_size=9))
def test_the_sign_flip_test_counts_all_signs(differences: list[int]) -> None:
    expected = float(oracles.all_signs(differences))
    assert sign_flip_test(differences) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60)
@given(first=st.integers(0, 40), second=st.integers(0, 40))
def test_with_one_sample_the_sign_flip_test_is_mcnemars_exact_test(first: int, second: int) -> None:
    found = sign_flip_test([-1] * first + [1] * second + [0] * 5)
    assert found == pytest.approx(float(oracles.mcnemar(first, second)), abs=1e-12)


def test_a_test_that_is_too_large_to_be_exact_is_normal_with_the_variance_of_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = random.Random(3)
    differences = [draws.randint(-8, 9) for _ in range(400)]
    exact = sign_flip_test(differences)
    monkeypatch.setattr("lightrft.utils.statistics.intervals.MOST_STEPS", 0)
    normal = sign_flip_test(differences)
    assert normal != exact and normal == pytest.approx(exact, rel=0.02)
    assert sign_flip_test([]) == sign_flip_test([2, -2]) == 1.0


@settings(max_examples=60)
@given(cells=st.tuples(*[st.integers(0, 20)] * 4).filter(any))
def test_the_interval_of_paired_single_samples_is_that_of_agresti_and_min(
    cells: tuple[int, int, int, int],
) -> None:
    first: list[float] = []
    second: list[float] = []
    for count, (a, b) in zip(cells, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        first += [a] * count
        second += [b] * count
    found = paired_difference(first, second)
    low, high = oracles.agresti_min([cells[:2], cells[2:]], Z95)
    assert found.low == pytest.approx(max(low, -1), abs=1e-12)
    assert found.high == pytest.approx(min(high, 1), abs=1e-12)
    assert found.mean == pytest.approx((cells[1] - cells[2]) / sum(cells), abs=1e-15)


def test_a_vote_of_all_responses_keeps_one_row_and_no_square_matrix() -> None:
    row = _distribution(512, 1.0)
    # A view would keep the whole matrix in the cache: gigabytes with a thousand responses.
    assert row.base is None
    assert row[-1] == row.sum() == 1.0


def test_paired_fractions_have_students_interval_of_their_differences() -> None:
    first, second = [0.0, 0.5, 1.0], [0.5, 0.75, 1.0]
    assert paired_difference(first, second) == student([0.5, 0.25, 0.0])
    with pytest.raises(ValueError, match="longer"):
        paired_difference([0.0], [0.0, 1.0])


@settings(max_examples=60)
@given(p_values=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holms_adjustment_is_its_definition(p_values: list[float]) -> None:
    names = [f"set {i}" for i in range(len(p_values))]
    found = holm(dict(zip(names, p_values, strict=True)))
    assert list(found) == names
    assert list(found.values()) == pytest.approx(oracles.holm(p_values), abs=1e-12)


def test_a_difference_of_the_minimum_effect_is_found_with_its_power() -> None:
    effect = minimum_effect(0.01)
    assert 1 - NormalDist(effect, 0.01).cdf(Z95 * 0.01) == pytest.approx(0.8, abs=1e-9)
    assert minimum_effect(0.01, power=0.9) > effect


def coverage(prompts: int, samples: int, rounds: int, estimates: str) -> float:
    """The share of simulated evaluations whose interval holds the true mean, or the true difference of two models."""
    draws = random.Random(prompts * 1000 + samples)
    inside = 0
    for _ in range(rounds):
        # Prompts are drawn too: their difficulties differ, and two models agree in part.
        skills = [draws.betavariate(0.7, 0.5) for _ in range(prompts)]
        better = [min(1.0, skill + 0.1 * draws.random()) for skill in skills]
        one, two = (
            [sum(draws.random() < p for _ in range(samples)) / samples for p in model]
            for model in (skills, better)
        )
        if estimates == "mean":
            found, truth = estimate(one, bounds=(0.0, 1.0)), 0.7 / 1.2
        else:
            found, truth = paired_difference(one, two), GAIN
        inside += found.low <= truth <= found.high
    return inside / rounds


def mean_gain() -> float:
    """E[min(1, p + 0.1 u)] - E[p], with p from Beta(0.7, 0.5) and u uniform, on a grid of both."""
    total = weight = 0.0
    cells = 4000
    for i in range(cells):
        p = (i + 0.5) / cells
        density = p**-0.3 * (1 - p) ** -0.5
        room = 1 - p
        # E[min(0.1 u, room)]
        share = min(1.0, room / 0.1)
        gain = 0.05 * share**2 + (1 - share) * room
        total += density * gain
        weight += density
    return total / weight


GAIN = mean_gain()


@pytest.mark.parametrize("estimates", ["mean", "difference"])
@pytest.mark.parametrize(("prompts", "samples"), [(30, 1), (30, 4), (200, 1), (200, 4)])
def test_an_interval_of_95_percent_covers_the_truth_in_95_percent_of_evaluations(
    prompts: int, samples: int, estimates: str
) -> None:
    rounds = 400 if prompts == 200 else 1000
    found = coverage(prompts, samples, rounds, estimates)
    # Three standard errors of the simulation.
    slack = 3 * math.sqrt(0.95 * 0.05 / rounds)
    assert 0.95 - slack <= found <= 0.95 + slack


def test_an_interval_that_takes_samples_for_prompts_covers_too_little() -> None:
    """The unit matters: eight samples of each of 30 prompts are not 240 prompts."""
    draws = random.Random(5)
    inside = 0
    for _ in range(300):
        skills = [draws.betavariate(0.7, 0.5) for _ in range(30)]
        values = [float(draws.random() < p) for p in skills for _ in range(8)]
        found: Estimate = estimate(values)
        inside += found.low <= 0.7 / 1.2 <= found.high
    assert inside / 300 < 0.8
