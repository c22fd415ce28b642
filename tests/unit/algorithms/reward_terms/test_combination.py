"""Weights of the terms of a reward, by hand."""

from __future__ import annotations

import math

import pytest

from lightrft.algorithms.reward_terms.combination import gated, worst

WEIGHTS = {"right": 1.0, "length": 0.5}


@pytest.mark.parametrize(
    ("gate", "weight"), [(1.0, 0.5), (0.9, 0.5), (0.899, 0.0), (-1.0, 0.0), (math.nan, 0.0)]
)
def test_a_gate_is_open_from_its_threshold(gate, weight):
    terms = {"right": gate, "length": 3.0}
    found = gated(terms, WEIGHTS, {"length": "right"}, 0.9)
    assert found == {"right": 1.0, "length": weight}


def test_a_gate_that_the_response_lacks_is_closed_at_any_threshold():
    assert gated({"length": 3.0}, {"length": 0.5}, {"length": "right"}, -1e300) == {"length": 0.0}


def test_a_gated_term_that_the_response_lacks_gets_no_weight():
    assert gated({"right": 0.0}, {"right": 1.0}, {"length": "right"}, 1.0) == {"right": 1.0}


def test_weights_that_are_given_are_not_changed():
    given = dict(WEIGHTS)
    gated({"right": 0.0, "length": 1.0}, given, {"length": "right"}, 1.0)
    worst({"right": 0.0, "length": 1.0}, given)
    assert given == WEIGHTS


@pytest.mark.parametrize(
    ("terms", "lowest"),
    [
        ({"right": 0.2, "length": 0.5}, "right"),
        ({"right": 0.2, "length": 0.3}, "length"),  # 0.15 < 0.2: the products are compared
        ({"right": 0.25, "length": 0.5}, "right"),  # equal: the first
        ({"right": -1.0, "length": -2.5}, "length"),
    ],
)
def test_the_worst_term_is_the_one_with_the_smallest_weighted_value(terms, lowest):
    found = worst(terms, WEIGHTS)
    assert found == {name: WEIGHTS[name] if name == lowest else 0.0 for name in WEIGHTS}


def test_a_term_of_weight_zero_is_never_the_worst():
    weights = {"shown": 0.0, "right": 1.0}
    assert worst({"shown": -9.0, "right": 3.0}, weights) == weights
    assert worst({"shown": -9.0}, {"shown": 0.0}) == {"shown": 0.0}
    assert worst({}, {}) == {}
