"""Weights per token, by hand, and what each sums to."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.token_ops import TokenRows
from tests.numbers.compare import every_case
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, plain_case

CASE = plain_case([[True, False, True], [True], [], [False], [True]], [0, 1, 0, 2, 0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", [1 / 4, 0, 1 / 4, 1 / 4, 0, 1 / 4]),
        ("sequence", [1 / 6, 0, 1 / 6, 1 / 3, 0, 1 / 3]),
        ("sequence_sum", [1 / 3, 0, 1 / 3, 1 / 3, 0, 1 / 3]),
        ("constant", [1 / 40, 0, 1 / 40, 1 / 40, 0, 1 / 40]),
        ("prompt", [1 / 6, 0, 1 / 6, 1 / 2, 0, 1 / 6]),
    ],
)
def test_the_weight_of_every_token(name: str, expected: list[float]) -> None:
    found = AGGREGATIONS[name](TokenRows.of(batch_of(CASE)), 8)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("name", ["token", "sequence", "prompt"])
@every_case()
def test_the_weights_of_a_mean_sum_to_one(name: str, case: Case, seed: int) -> None:
    found = AGGREGATIONS[name](TokenRows.of(batch_of(case)), 8)
    any_token = any(case.sampled(i) for i in range(len(case)))
    assert float(found.sum()) == pytest.approx(1.0 if any_token else 0.0, abs=1e-12)


def test_the_constant_is_the_divisor() -> None:
    rows = TokenRows.of(batch_of(CASE))
    assert torch.equal(AGGREGATIONS["constant"](rows, 4), 2 * AGGREGATIONS["constant"](rows, 8))
    for name in set(AGGREGATIONS) - {"constant"}:
        assert torch.equal(AGGREGATIONS[name](rows, 4), AGGREGATIONS[name](rows, 8))
