"""Accuracy, calibration and length bias of scores, against sums written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.reward_model.quality import (
    JudgedPair,
    ScoredPrompt,
    best_of_n_curve,
    calibration_bins,
    calibration_error,
    expected_best,
    head_agreement,
    judged_pairs,
    length_bias,
    pair_accuracy,
)

SCORES = st.floats(-50, 50, allow_nan=False)


def test_the_accuracy_is_a_mean_over_prompts_whatever_number_of_pairs_each_has() -> None:
    right, wrong, equal = (1.0, 0.0), (0.0, 1.0), (2.0, 2.0)
    pairs = [JudgedPair(0, *right), JudgedPair(1, *right), JudgedPair(1, *wrong)]
    pairs += [JudgedPair(2, *equal)]
    found = pair_accuracy(pairs)
    assert found.mean == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.count == 3
    assert found.low < found.mean < found.high


def test_scores_that_are_log_odds_of_their_accuracy_are_calibrated() -> None:
    generator = np.random.default_rng(0)
    gaps = generator.normal(size=20_000)
    is_right = generator.random(20_000) < 1 / (1 + pow(math.e, -abs(gaps)))
    calibrated, confident = [], []
    for group, (gap, right) in enumerate(zip(abs(gaps), is_right, strict=True)):
        better, worse = (gap, 0.0) if right else (0.0, gap)
        calibrated.append(JudgedPair(group, better, worse))
        confident.append(JudgedPair(group, 5 * better, 5 * worse))
    assert calibration_error(calibrated) < 0.015
    assert calibration_error(confident) > 0.1


def test_a_single_certain_and_wrong_pair_is_as_wrong_as_can_be() -> None:
    assert calibration_error([JudgedPair(0, -1000.0, 1000.0)]) == pytest.approx(1)
    assert calibration_error([JudgedPair(0, 1000.0, -1000.0)]) == pytest.approx(0)


@given(st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=30))
def test_the_calibration_error_is_that_of_bins_written_out(
    scores: list[tuple[float, float]],
) -> None:
    pairs = [JudgedPair(i, *pair) for i, pair in enumerate(scores)]
    total = 0.0
    for k in range(10):
        inside = []
        for better, worse in scores:
            confidence = 1 / (1 + math.exp(-abs(better - worse)))
            last = k == 9 and confidence == 1
            if 0.5 + k / 20 <= confidence < 0.55 + k / 20 or last:
                right = 0.5 if better == worse else float(better > worse)
                inside.append((confidence, right))
        if inside:
            accuracy = sum(right for _, right in inside) / len(inside)
            confidence = sum(c for c, _ in inside) / len(inside)
            total += len(inside) / len(scores) * abs(accuracy - confidence)
    # a confidence within rounding of an edge may come to either bin
    edges = [abs((1 / (1 + math.exp(-abs(b - w))) - 0.5) * 20 % 1 - 0.5) for b, w in scores]
    if max(edges) < 0.5 - 1e-9:
        assert calibration_error(pairs) == pytest.approx(total, abs=1e-9)


def test_the_length_bias_tells_a_model_that_prefers_what_is_long() -> None:
    # the better response is longer in one pair of two
    fair = [JudgedPair(0, 1, 0, longer=3), JudgedPair(1, 1, 0, longer=-3)]
    biased = [JudgedPair(0, 1, 0, longer=3), JudgedPair(1, 0, 1, longer=-3)]
    assert length_bias(fair) == 0
    assert length_bias(biased) == 0.5
    assert math.isnan(length_bias([JudgedPair(0, 1, 0)]))


def prompt(scores, labels, index=0, **other) -> ScoredPrompt:
    every = {"a": scores, **other}
    return ScoredPrompt(index, f"{index}", "", every, {"a": labels}, list(range(len(scores))))


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9)), min_size=1, max_size=7))
def test_the_expected_best_of_n_is_the_mean_over_all_subsets(
    responses: list[tuple[int, float]],
) -> None:
    scores = [float(score) for score, _ in responses]
    gold = [rating for _, rating in responses]
    for n in range(1, len(responses) + 1):
        means = []
        for subset in itertools.combinations(range(len(scores)), n):
            highest = max(scores[k] for k in subset)
            best = [gold[k] for k in subset if scores[k] == highest]
            means.append(sum(best) / len(best))
        expected = sum(means) / len(means)
        assert expected_best(scores, gold, n) == pytest.approx(expected, abs=1e-9)


def test_the_curve_has_the_same_prompts_at_all_n() -> None:
    prompts = [prompt([3.0, 1.0, 2.0], [1.0, 0.0, 0.0]), prompt([1.0, 2.0], [1.0, 0.0])]
    both = best_of_n_curve(prompts, "a")
    assert [(point.n, point.chosen.count) for point in both] == [(1, 2), (2, 2)]
    assert both[1].chosen.mean == pytest.approx((2 / 3 + 0) / 2)
    assert both[1].best.mean == pytest.approx((2 / 3 + 1) / 2)
    first = best_of_n_curve(prompts, "a", 3)
    assert [(point.n, point.chosen.count) for point in first] == [(1, 1), (2, 1), (3, 1)]
    assert first[2].chosen.mean == 1
    # a response without a finite score or a label is not chosen from
    some = best_of_n_curve([prompt([math.nan, 1.0, 2.0], [9.0, 1.0, math.nan])], "a")
    assert [(point.n, point.chosen.mean) for point in some] == [(1, 1.0)]
    assert best_of_n_curve([prompt([1.0], [math.nan])], "a") == []


def test_pairs_are_those_of_different_labels_and_finite_scores() -> None:
    found = judged_pairs([prompt([3.0, 1.0, math.inf, 2.0], [0.0, 2.0, 5.0, 0.0])], "a")
    assert [(pair.better, pair.worse, pair.longer) for pair in found] == [
        (1.0, 3.0, 1),
        (1.0, 2.0, -2),
    ]


def test_heads_agree_where_they_order_two_responses_alike() -> None:
    one = prompt([1.0, 2.0, 3.0], [0.0] * 3, b=[1.0, 3.0, 2.0])
    # of three pairs, two have the same order
    assert head_agreement([one], "a", "b").mean == pytest.approx(2 / 3)
    assert head_agreement([one], "a", "a").mean == 1
    # equal scores of one head count half, and prompts count alike
    equal = prompt([1.0, 2.0], [0.0] * 2, b=[4.0, 4.0])
    assert head_agreement([one, equal], "a", "b").mean == pytest.approx((2 / 3 + 1 / 2) / 2)
    lost = prompt([1.0, math.nan], [0.0] * 2, b=[1.0, 2.0])
    assert head_agreement([lost], "a", "b") is None


def test_bins_of_calibration_hold_all_pairs_and_their_means() -> None:
    sure, unsure = JudgedPair(0, 9.0, 0.0), JudgedPair(1, 0.0, 0.1)
    low, high = calibration_bins([sure, unsure])
    assert (low.count, low.accuracy) == (1, 0.0)
    assert low.confidence == pytest.approx(1 / (1 + math.exp(-0.1)))
    assert (high.count, high.accuracy) == (1, 1.0)


def judged(probability: float, right: bool) -> JudgedPair:
    """A pair whose more probable order has ``probability``, and is right or not."""
    gap = math.log(probability / (1 - probability))
    return JudgedPair(0, gap, 0.0) if right else JudgedPair(0, 0.0, gap)


def test_bins_divide_the_range_from_one_half_to_one_in_ten() -> None:
    pairs = [judged(0.502, True), judged(0.548, False), judged(0.553, True), judged(0.97, True)]
    pairs += [judged(0.999, False)]
    bins = calibration_bins(pairs)
    assert [one.count for one in bins] == [2, 1, 2]
    assert [one.confidence for one in bins] == pytest.approx([0.525, 0.553, 0.9845])
    assert [one.accuracy for one in bins] == [0.5, 1.0, 0.5]
    assert calibration_error(pairs) == pytest.approx((2 * 0.025 + 0.447 + 2 * 0.4845) / 5)
    assert [one.count for one in calibration_bins(pairs, 2)] == [3, 2]
    # a certain pair is in the last bin, not beyond it
    assert [one.count for one in calibration_bins([judged(0.96, True), *pairs[3:4]])] == [2]
    certain = [JudgedPair(0, 1000.0, 0.0), judged(0.96, True)]
    assert [one.count for one in calibration_bins(certain)] == [2]
    assert JudgedPair(0, -1000.0, 0.0).probability == 0.0
    equal = [JudgedPair(0, 1.0, 1.0), judged(0.52, True)]
    assert [one.count for one in calibration_bins(equal)] == [2]


def test_intervals_of_shares_stay_between_0_and_1() -> None:
    halves = [JudgedPair(0, 1.0, 0.0), JudgedPair(1, 1.0, 1.0)]
    found = pair_accuracy(halves)
    assert (found.low, found.mean, found.high) == (0.0, 0.75, 1.0)
    prompts = []
    for k, other in enumerate(([1.0, 2.0], [3.0, 3.0])):
        scores = {"a": [1.0, 2.0], "b": other}
        prompts.append(ScoredPrompt(k, str(k), "", scores, {"a": [0, 0], "b": [0, 0]}, [1, 1]))
    agreement = head_agreement(prompts, "a", "b")
    assert agreement is not None
    # equal scores of one head count half
    assert (agreement.low, agreement.mean, agreement.high) == (0.0, 0.75, 1.0)
    assert head_agreement(prompts, "b", "a") == agreement


def test_one_token_more_is_longer() -> None:
    assert length_bias([JudgedPair(0, 1.0, 0.0, 1)]) == 0.0
    assert length_bias([JudgedPair(0, 0.0, 1.0, -1), JudgedPair(0, 1.0, 0.0, 0)]) == 1.0
    assert length_bias([JudgedPair(0, 0.0, 1.0, 1)]) == -1.0


def test_means_of_ratings_that_happen_to_be_0_or_1_have_the_interval_of_ratings() -> None:
    scores = [4.0, 3.0, 2.0, 1.0]
    rated = [prompt(scores, [3.0, 1.0, 0.0, 0.0])] * 40
    (first, *_) = best_of_n_curve(rated, "a")
    assert (first.chosen.low, first.chosen.mean, first.chosen.high) == (1, 1, 1)
    # the mean of 0 and 1 is a share, whose interval is Wilson's
    right = [prompt(scores, [1.0] * 4)] * 40
    (first, *_) = best_of_n_curve(right, "a")
    assert (first.chosen.low, first.chosen.high) == pytest.approx((0.912, 1), abs=1e-3)


def test_a_curve_beyond_every_prompt_is_empty() -> None:
    prompt = ScoredPrompt(0, "0", "", {"a": [1.0, 2.0]}, {"a": [1.0, 0.0]}, [1, 1])
    assert best_of_n_curve([prompt], "a", 3) == []
    assert best_of_n_curve([], "a") == []
    assert len(best_of_n_curve([prompt], "a", 2)) == 2
