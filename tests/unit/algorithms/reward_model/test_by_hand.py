"""Losses of reward models at points where their value is known."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.utils.errors import DataError
from tests.unit.algorithms.preference import examples as preference
from tests.unit.algorithms.reward_model.examples import loss_of, scored

LN2 = math.log(2)


@pytest.mark.parametrize("name", ["bradley_terry", "log_exp", "hps", "plackett_luce", "thurstone"])
def test_equal_scores_of_a_pair_have_the_loss_ln_2(name: str) -> None:
    data = scored([3.0, 3.0], rank=[0, 1], outputs=[[3.0, 0.7], [3.0, -0.7]])
    assert loss_of(name, data) == pytest.approx([LN2], rel=1e-14)


def test_pairs_and_ties_of_equal_scores_have_the_likelihood_of_their_parameter() -> None:
    data = scored([1.0, 1.0, 1.0], rank=[0, 1, 1])
    third = math.log(3)
    assert loss_of("rao_kupper", data, theta=2.0) == pytest.approx([third] * 3, rel=1e-14)
    assert loss_of("davidson", data, nu=1.0) == pytest.approx([third] * 3, rel=1e-14)
    assert loss_of("davidson", data, nu=2.0)[2] == pytest.approx(LN2, rel=1e-14)


@pytest.mark.parametrize("name", ["rao_kupper", "davidson"])
def test_win_loss_and_tie_have_probabilities_that_add_up_to_1(name: str) -> None:
    scores = [0.3, 1.9]
    outcomes = [scored(scores, rank=rank) for rank in ([0, 1], [1, 0], [0, 0])]
    total = sum(math.exp(-loss_of(name, outcome)[0]) for outcome in outcomes)
    assert total == pytest.approx(1, rel=1e-14)


def test_log_exp_is_bradley_terry_and_so_is_davidson_without_ties() -> None:
    data = scored([0.2, -1.0, 4.0], rank=[1, 0, 2])
    expected = loss_of("bradley_terry", data)
    assert loss_of("log_exp", data) == expected
    assert loss_of("davidson", data, nu=1e-300) == pytest.approx(expected, rel=1e-12)
    assert loss_of("rao_kupper", data, theta=1 + 1e-15) == pytest.approx(expected, rel=1e-12)


def test_a_margin_as_large_as_the_gap_has_the_loss_ln_2() -> None:
    data = scored([2.5, 1.0], rank=[0, 1], margin=[1.5, 0.0])
    assert loss_of("bradley_terry", data, margin=True) == pytest.approx([LN2])


def test_a_weight_by_margin_multiplies_the_loss() -> None:
    data = scored([1.0, 1.0], rank=[0, 1], margin=[3.0, 0.0])
    assert loss_of("bradley_terry", data, weight="margin") == pytest.approx([3 * LN2])
    assert loss_of("bradley_terry", data, weight="none") == pytest.approx([LN2])


def test_a_smoothed_label_has_its_minimum_at_the_log_odds_of_the_share() -> None:
    best = math.log(0.9 / 0.1)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    for name in ("bradley_terry", "hps"):
        at = {}
        for gap in (best - 0.1, best, best + 0.1):
            at[gap] = loss_of(name, scored([gap, 0.0], rank=[0, 1]), label_smoothing=0.1)[0]
        assert min(at, key=lambda gap: at[gap]) == best
        assert at[best] == pytest.approx(entropy)


def test_a_tie_costs_hps_least_at_equal_scores() -> None:
    assert loss_of("hps", scored([1.0, 1.0], rank=[0, 0])) == pytest.approx([LN2])
    assert loss_of("hps", scored([1.0, 2.0], rank=[0, 0]))[0] > LN2


def test_a_tie_distance_is_0_for_pairs_and_the_difference_of_scores_for_ties() -> None:
    data = scored([1.0, 3.0, -2.0], rank=[0, 0, 1])
    assert loss_of("tie_distance", data) == [0.0, 0.0, 2.0]


def test_the_regularisers_are_their_formulas() -> None:
    data = scored([1.0, 3.0], rank=[1, 0])
    assert loss_of("centre", data) == [16.0]
    assert loss_of("l2", data) == [5.0]
    assert loss_of("centre", scored([-2.0, 2.0], rank=[1, 0])) == [0.0]


def test_plackett_luce_is_the_one_of_preference_learning_on_the_same_scores() -> None:
    log_ratios, ranks, group_of = [1.0, -3.0, 2.0, 0.5], [0, 1, 0, 1], [0, 1, 1, 0]
    ranked = preference.ranked(log_ratios, ranks, group_of)
    expected = PREFERENCE_LOSSES["plackett_luce"](ranked, preference.settings(beta=0.5)).tolist()
    data = scored([0.5 * x for x in log_ratios], rank=ranks, group_of=group_of)
    assert loss_of("plackett_luce", data) == pytest.approx(expected, rel=1e-14)


def test_plackett_luce_leaves_out_a_response_without_a_rank_even_if_its_score_is_nan() -> None:
    data = scored([1.0, float("nan"), 0.0], rank=[0, -1, 1])
    expected = loss_of("bradley_terry", scored([1.0, 0.0], rank=[0, 1]))
    assert loss_of("plackett_luce", data) == pytest.approx(expected)
    assert loss_of("bradley_terry", data) == pytest.approx(expected)
    assert loss_of("plackett_luce", scored([1.0, 2.0])) == [0.0]


def test_thurstone_is_nearer_to_ln_2_where_the_scores_are_less_certain() -> None:
    sure = scored([1.0, 0.0], rank=[0, 1], outputs=[[1.0, -4.0], [0.0, -4.0]])
    unsure = scored([1.0, 0.0], rank=[0, 1], outputs=[[1.0, 4.0], [0.0, 4.0]])
    assert loss_of("thurstone", sure)[0] < loss_of("thurstone", unsure)[0] < LN2
    # one standard deviation: the sum of two variances of 1/2
    one = scored([1.0, 0.0], rank=[0, 1], outputs=[[1.0, -LN2], [0.0, -LN2]])
    assert loss_of("thurstone", one) == pytest.approx([-math.log(0.8413447460685429)])


def test_losses_of_ratings_are_their_formulas() -> None:
    nan = float("nan")
    assert loss_of("mse", scored([1.0, 5.0, 2.0], rating=[3.0, nan, 2.0])) == [4.0, 0.0]
    even = scored([0.0], rating=[2.0], outputs=[[0.0] * 4])
    assert loss_of("cross_entropy", even) == pytest.approx([math.log(4)])
    assert loss_of("ordinal", scored([0.0], rating=[1.0], outputs=[[0.0] * 3])) == pytest.approx(
        [3 * LN2]
    )
    gaussian = scored([1.0], rating=[3.0], outputs=[[1.0, math.log(4)]])
    assert loss_of("gaussian_nll", gaussian) == pytest.approx([LN2 + 0.5])


def test_a_rating_between_two_classes_is_learned_as_their_mixture() -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    data = scored([0.0], rating=[1.25], outputs=[[0.0] * 3])
    optimizer = torch.optim.LBFGS([logits], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        moved = type(data)(logits, data.scores, data.group_of, rating=data.rating)
        loss = REWARD_LOSSES["cross_entropy"](moved).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    mean = (logits.softmax(1) @ torch.arange(3, dtype=torch.float64)).item()
    assert mean == pytest.approx(1.25, abs=1e-3)
    split = scored([0.0], rating=[1.25], outputs=[[0.4, -1.0, 0.7]])
    whole = [scored([0.0], rating=[y], outputs=[[0.4, -1.0, 0.7]]) for y in (1.0, 2.0)]
    for name in ("cross_entropy", "ordinal"):
        low, high = (loss_of(name, one)[0] for one in whole)
        assert loss_of(name, split) == pytest.approx([0.75 * low + 0.25 * high])


def test_the_sign_terms_push_unsafe_responses_above_0_and_safe_ones_below() -> None:
    data = scored([2.0, 2.0, -2.0, 0.0], rating=[1.0, 0.0, 0.0, 1.0])
    near, far = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert loss_of("cost_sign", data) == pytest.approx([near, far, near, LN2])


@pytest.mark.parametrize(
    ("name", "rating", "said"),
    [
        ("cross_entropy", 4.0, "a rating is 4; it must be from 0 to 3"),
        ("cross_entropy", -1.0, "a rating is -1"),
        ("ordinal", 4.5, "a rating is 4.5; it must be from 0 to 4"),
        ("cost_sign", 2.0, "a rating is 2; it must be from 0 to 1.*set options.unsafe_from"),
    ],
)
def test_a_rating_out_of_range_is_refused_with_the_range(
    name: str, rating: float, said: str
) -> None:
    data = scored([0.0, 0.0], rating=[0.0, rating], outputs=[[0.0] * 4, [0.0] * 4])
    with pytest.raises(DataError, match=f"{name}: {said}"):
        loss_of(name, data)
