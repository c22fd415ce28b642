"""The policies of the enumerable bandit are the minima of the expected losses."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from mpmath import mp

from tests.numbers import oracles_bandit as bandits
from tests.numbers import oracles_preference as losses
from tests.numbers.exact import gradient

REFERENCE = [0.5, 0.3, 0.2]
REWARDS = [0.0, 1.0, -0.5]
CYCLE = [[0.5, 0.9, 0.2], [0.1, 0.5, 0.7], [0.8, 0.3, 0.5]]
"""Arm 0 beats 1, 1 beats 2 and 2 beats 0: no rewards explain it."""


def log_ratios(policy: list[float], reference: list[float]) -> list[float]:
    return [math.log(p / r) for p, r in zip(policy, reference, strict=True)]


def softmax_slopes(slopes: list[float], policy: list[float]) -> list[float]:
    """d loss / d logits from d loss / d log pi."""
    total = sum(slopes)
    return [g - p * total for g, p in zip(slopes, policy, strict=True)]


def others(policy: list[float], seed: int, count: int = 20) -> list[list[float]]:
    """Policies near and far."""
    rng = random.Random(seed)
    widths = [0.05, 0.5, 2.0]
    return [
        bandits.tilted(policy, [rng.gauss(0, widths[i % 3]) for _ in policy]) for i in range(count)
    ]


@pytest.mark.parametrize("sampler", [None, [0.6, 0.3, 0.1]])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_dpo_is_least_at_the_reference_tilted_by_the_rewards(
    sampler: list[float] | None, beta: float
) -> None:
    bandit = bandits.bradley_terry(REFERENCE, REWARDS, sampler)
    best = bandits.dpo_optimum(REFERENCE, REWARDS, beta)

    def expected(x: list) -> object:
        return bandits.expected_pair_loss(losses.dpo, x, bandit, beta)

    at = log_ratios(best, REFERENCE)
    assert gradient(expected, [at])[0] == pytest.approx([0, 0, 0], abs=1e-14)
    for policy in others(best, 1):
        assert expected(log_ratios(policy, REFERENCE)) > expected(at)


def test_the_tilt_of_dpo_by_hand() -> None:
    # e^(r / beta) = 1, 4, 2 on 1/2, 1/4, 1/4: masses 1/2, 1, 1/2.
    found = bandits.dpo_optimum([0.5, 0.25, 0.25], [0.0, math.log(2), math.log(2) / 2], 0.5)
    assert found == pytest.approx([0.25, 0.5, 0.25])


@pytest.mark.parametrize("loss", [losses.ipo, losses.ipo_sum])
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_ipo_is_least_at_the_reference_tilted_by_the_win_rates(loss: object, tau: float) -> None:
    bandit = bandits.Bandit(REFERENCE, [0.2, 0.5, 0.3], CYCLE)
    best = bandits.ipo_optimum(bandit, tau)

    def expected(x: list) -> object:
        return bandits.expected_pair_loss(loss, x, bandit, tau)

    at = log_ratios(best, REFERENCE)
    assert gradient(expected, [at])[0] == pytest.approx([0, 0, 0], abs=1e-14)
    for policy in others(best, 2):
        assert expected(log_ratios(policy, REFERENCE)) > expected(at)


def test_the_tilt_of_ipo_by_hand() -> None:
    # Uniform data of two arms, 0 preferred with 3/4: win rates 5/8 and 3/8, tau 1/4: e^1 apart.
    bandit = bandits.Bandit([0.5, 0.5], [0.5, 0.5], [[0.5, 0.75], [0.25, 0.5]])
    found = bandits.ipo_optimum(bandit, 0.25)
    assert found == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])


def test_pairs_have_the_probabilities_of_two_samples() -> None:
    bandit = bandits.Bandit(REFERENCE, [0.2, 0.5, 0.3], CYCLE)
    found = {(a, b): p for a, b, p in bandits.pairs(bandit)}
    assert found[0, 1] == pytest.approx(2 * 0.2 * 0.5 * 0.9)
    assert sum(found.values()) == pytest.approx(1 - 0.04 - 0.25 - 0.09)


# KTO

DESIRABLE = [0.9, 0.7, 0.55]


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_kto_is_least_where_all_arms_have_one_price(beta: float) -> None:
    best = bandits.kto_optimum(REFERENCE, REFERENCE, DESIRABLE, beta)

    def expected(x: list) -> object:
        return bandits.expected_kto_loss(losses.kto, x, REFERENCE, DESIRABLE, beta)

    at = log_ratios(best, REFERENCE)
    (slopes,) = gradient(expected, [at])
    assert softmax_slopes(slopes, best) == pytest.approx([0, 0, 0], abs=1e-12)
    for policy in others(best, 3):
        assert expected(log_ratios(policy, REFERENCE)) > expected(at)


@pytest.mark.parametrize("desirable", [DESIRABLE, [0.9, 0.8, 0.3], [0.95, 0.55, 0.52]])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_a_search_over_the_simplex_finds_the_optimum_of_kto(
    desirable: list[float], beta: float
) -> None:
    lambdas = (1.0, 1.2)
    steps = 60

    def expected(policy: list[float]) -> float:
        ratios = [mp.log(p / r) for p, r in zip(policy, REFERENCE, strict=True)]
        loss = bandits.expected_kto_loss(losses.kto, ratios, REFERENCE, desirable, beta, lambdas)
        return float(loss)

    cells = [c for c in itertools.product(range(steps + 1), repeat=2) if sum(c) <= steps]
    grid = [[a / steps, b / steps, (steps - a - b) / steps] for a, b in cells]
    inside = [[max(x, 1e-9) for x in policy] for policy in grid]
    found = min(inside, key=expected)
    best = bandits.kto_optimum(REFERENCE, REFERENCE, desirable, beta, lambdas)
    assert bandits.total_variation(found, best) < 0.02


@pytest.mark.parametrize("desirable", [DESIRABLE, [0.9, 0.8, 0.3], [0.95, 0.55, 0.51]])
def test_the_search_of_kto_meets_the_closed_form_at_beta_one(desirable: list[float]) -> None:
    searched = bandits.kto_optimum(REFERENCE, REFERENCE, desirable, 1.0)
    closed = bandits.kto_optimum_at_beta_one(REFERENCE, desirable)
    assert sum(closed) == pytest.approx(1)
    assert searched == pytest.approx(closed, abs=1e-9)


def test_kto_by_hand() -> None:
    # Equal shares of desirable responses: the reference. One arm alone: everything.
    assert bandits.kto_optimum_at_beta_one(REFERENCE, [0.7] * 3) == pytest.approx(REFERENCE)
    assert bandits.kto_optimum_at_beta_one(REFERENCE, [0.7, 0.4, 0.2]) == pytest.approx([1, 0, 0])
    # Roots 1 and 1/2 on 1/2, 1/2: k = 2 / (3/4) = 8/3, masses 5/6 and 1/6.
    found = bandits.kto_optimum_at_beta_one([0.5, 0.5], [1.0, 0.625])
    assert found == pytest.approx([5 / 6, 1 / 6])


def test_the_expected_loss_of_kto_is_its_pulls() -> None:
    ratios, sampler, lambdas = [0.3, -0.2, 1.0], [0.2, 0.5, 0.3], (2.0, 1.5)
    found = bandits.expected_kto_loss(losses.kto, ratios, sampler, DESIRABLE, 0.5, lambdas)
    pulls = bandits.kto_pulls(sampler, DESIRABLE, lambdas)
    values = [1 / (1 + math.exp(-0.5 * x)) for x in ratios]
    liked = 2.0 * sum(m * g for m, g in zip(sampler, DESIRABLE, strict=True))
    pulled = sum(c * v for c, v in zip(pulls, values, strict=True))
    assert float(found) == pytest.approx(liked - pulled)


def test_data_of_the_reference_has_the_reference_point_zero() -> None:
    for policy in others(REFERENCE, 4):
        # As many responses as the reference's shares of 10, each with the next one's prompt.
        rows = [0] * 5 + [1] * 3 + [2] * 2
        mismatched = [rows[j] for j in losses.next_response(10)]
        p = [math.log(policy[a]) for a in mismatched]
        r = [math.log(REFERENCE[a]) for a in mismatched]
        assert float(losses.reference_point(p, r)) == 0.0


def test_kto_without_any_pull_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs"):
        bandits.kto_optimum(REFERENCE, REFERENCE, [0.4] * 3, 0.5)
    with pytest.raises(ValueError, match="needs"):
        bandits.kto_optimum(REFERENCE, REFERENCE, DESIRABLE, 1.5)


def test_total_variation_is_between_zero_and_one() -> None:
    assert bandits.total_variation([1.0, 0.0], [0.0, 1.0]) == 1.0
    assert bandits.total_variation([0.5, 0.5], [0.25, 0.75]) == 0.25
