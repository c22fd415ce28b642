"""Weights per token, made once for the global batch, give the loss of the slow loops."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.token_ops import TokenRows
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for
from tests.numbers.oracles import Case
from tests.numbers.scalars import gradients, number
from tests.numbers.strategies import batch_of, plain_case, tensor_of

MODES = ("token", "sequence", "sequence_sum", "constant", "prompt")


def test_every_registered_aggregation_is_held_to_its_oracle() -> None:
    assert tuple(AGGREGATIONS) == tuple(sorted(MODES))


@every_case()
@pytest.mark.parametrize("mode", MODES)
def test_the_weighted_sum_is_the_loss_of_the_global_batch(mode: str, case: Case, seed: int) -> None:
    (rows,) = rows_for(case, seed)
    weights = AGGREGATIONS[mode](TokenRows.of(batch_of(case)), 7)
    losses = tensor_of(rows).requires_grad_()
    total = (weights * losses).sum()
    case.logprobs = rows
    slow = case.with_leaves("logprobs")
    expected = oracles.aggregate(slow, slow.logprobs, mode, max_length=7)
    assert float(total.detach()) == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(gradient(total, losses), gradients(expected, slow.logprobs))


# losses 1, 3 | 8 | - | 5 (not sampled) | 2 in prompts 0, 1, 0, 2, 0
LITERAL = [
    ("token", 14 / 4),
    ("sequence", 4.0),  # (2 + 8 + 2) / 3
    ("sequence_sum", 14 / 3),
    ("constant", 0.28),  # 14 / (5 * 10)
    ("prompt", 5.0),  # (6/3 + 8) / 2
]


@pytest.mark.parametrize(("mode", "expected"), LITERAL)
def test_by_hand(mode: str, expected: float) -> None:
    case = plain_case([[True, False, True], [True], [], [False], [True]], [0, 1, 0, 2, 0])
    weights = AGGREGATIONS[mode](TokenRows.of(batch_of(case)), 10)
    losses = torch.tensor([1.0, 99.0, 3.0, 8.0, 5.0, 2.0], dtype=torch.float64)
    assert float((weights * losses).sum()) == pytest.approx(expected, rel=1e-12)
