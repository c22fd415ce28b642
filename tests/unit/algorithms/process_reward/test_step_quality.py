"""How well steps are judged, against counts by hand."""

from __future__ import annotations

import math
import random

import pytest

from lightrft.algorithms.process_reward.quality import (
    NONE,
    ScoredSteps,
    step_calibration,
    step_quality,
    worst_judged,
)
from lightrft.utils.statistics.intervals import estimate

NAN = math.nan


def scored(scores, labels, index=0, logits=None, source=""):
    """A response whose logits are finite unless they are given."""
    logits = [0.0] * len(scores) if logits is None else logits
    return ScoredSteps(index, f"r{index}", source, logits, scores, labels)


@pytest.mark.parametrize(
    ("labels", "first"),
    [
        ([1.0, 0.5, 1.0], NONE),  # a label of 0.5 is right
        ([1.0, 0.49, 0.0], 1),
        ([0.0, NAN], 0),  # what follows the first wrong step does not matter
        ([1.0, NAN, 0.0], None),
        ([1.0, NAN], None),
        ([], NONE),
    ],
)
def test_the_first_wrong_step_is_unknown_without_the_labels_before_it(labels, first):
    assert scored([0.5] * len(labels), labels).first_wrong() == first


def test_a_step_is_found_right_from_the_threshold_and_a_lost_score_finds_none():
    one = scored([0.9, 0.7, 0.69, 0.1], [1.0] * 4)
    assert one.first_predicted(0.7) == 2
    assert one.first_predicted(0.05) == NONE
    assert scored([1.0, 1.0], [1.0] * 2, logits=[3.0, math.inf]).first_predicted(0.5) == 1
    assert scored([NAN], [1.0], logits=[NAN]).first_predicted(0.5) == 0


def test_steps_without_a_label_or_a_finite_score_are_not_judged():
    one = scored([0.9, 0.9, 0.1, 0.2], [1.0, NAN, 1.0, 0.0], logits=[1.0, 1.0, NAN, -1.0])
    assert one.judged() == [0, 3]
    assert one.misjudged(0.5) == []
    assert one.misjudged(0.15) == [3]
    assert one.misjudged(0.95) == [0]


def test_quality_is_the_counts_of_a_plain_loop():
    draw = random.Random(3)
    responses = []
    for i in range(60):
        count = draw.randint(1, 4)
        labels = [draw.choice([1.0, 1.0, 0.0]) for _ in range(count)]
        responses.append(scored([draw.random() for _ in range(count)], labels, i))
    steps, hits = [], {True: [], False: []}
    for one in responses:
        steps += [(s >= 0.4) == (y >= 0.5) for s, y in zip(one.scores, one.labels)]
        wrong = [k for k, y in enumerate(one.labels) if y < 0.5]
        found = [k for k, s in enumerate(one.scores) if s < 0.4]
        hits[bool(wrong)].append((wrong[:1] or [-1]) == (found[:1] or [-1]))
    got = step_quality(responses, 0.4)
    assert list(got.steps) == steps
    assert got.responses == estimate([float(h) for own in (True, False) for h in hits[own]])
    wrong, right = (sum(hits[kind]) / len(hits[kind]) for kind in (True, False))
    assert got.f1 is not None
    assert (got.f1.wrong, got.f1.right) == (wrong, right)
    assert got.f1.f1 == pytest.approx(2 * wrong * right / (wrong + right), abs=1e-15)


def test_quality_reports_what_there_is():
    nothing = step_quality([scored([0.5], [NAN])], 0.5)
    assert (list(nothing.steps), nothing.responses, nothing.f1) == ([], None, None)
    for label in (0.0, 1.0):
        alike = step_quality([scored([0.9], [label])], 0.5)
        assert alike.responses is not None
        assert alike.responses.mean == label
        assert alike.f1 is None
    partly = step_quality([scored([0.9, 0.9], [1.0, NAN])], 0.5)
    assert (list(partly.steps), partly.responses) == ([True], None)


def test_bins_of_calibration_hold_mean_score_and_mean_label():
    scores, labels = [0.0, 0.04, 0.25, 0.29, 0.2, 1.0], [0.0, 1.0, 0.5, 0.25, 0.0, 1.0]
    ones = [scored(scores[:3], labels[:3]), scored(scores[3:], labels[3:])]
    bins = step_calibration(ones, bins=10)
    assert [one.count for one in bins] == [2, 3, 1]
    assert [one.confidence for one in bins] == pytest.approx([0.02, 0.74 / 3, 1.0])
    assert [one.accuracy for one in bins] == pytest.approx([0.5, 0.25, 1.0])
    assert len(step_calibration([scored([0.05, 0.11, 0.95], [1.0, 1.0, 1.0])])) == 3


def test_scores_that_are_no_probabilities_are_in_no_bin():
    assert step_calibration([scored([-0.1, 1.1, 0.5], [0.0, 1.0, NAN])]) == []


def test_the_worst_response_has_the_largest_error_of_a_misjudged_step():
    ones = [
        scored([0.9, 0.2], [0.0, 1.0], 0),  # errors 0.9 and 0.8
        scored([0.95, 0.99], [1.0, 0.0], 1),  # 0.99
        scored([0.6, 0.4], [1.0, 0.0], 2),  # judged right, although 0.4 away
        scored([0.1, 0.1], [1.0, 1.0], 3),  # 0.9 twice: the first step
    ]
    assert [(one.index, k) for one, k in worst_judged(ones, 0.5, 9)] == [(1, 1), (0, 0), (3, 0)]
    assert [one.index for one, _ in worst_judged(ones, 0.5, 1)] == [1]
    assert worst_judged(ones, 0.5, 0) == []


def test_a_score_at_the_threshold_and_a_label_of_one_half_are_right():
    one = scored([0.5, 0.5, 0.4], [0.5, 0.0, 0.5])
    assert one.misjudged(0.5) == [1, 2]
    assert one.weight == 1.0


def test_f1_needs_responses_of_both_kinds_and_counts_a_first_step():
    right, wrong = scored([0.9], [1.0]), scored([0.1], [0.0])
    found = step_quality([right, wrong], 0.5)
    assert found.f1 is not None
    assert (found.f1.wrong, found.f1.right) == (1.0, 1.0)
    assert step_quality([wrong, wrong], 0.5).f1 is None
    assert step_quality([right, right], 0.5).f1 is None


def test_a_certain_step_is_in_the_last_bin_with_the_scores_below_it():
    bins = step_calibration([scored([1.0, 0.95], [1.0, 0.0])], bins=10)
    assert [one.count for one in bins] == [2]
    assert [one.count for one in step_calibration([scored([0.95, 0.85], [1.0, 0.0])])] == [1, 1]
