"""Sums and means over rows of any length, the empty ones included."""

from __future__ import annotations

import torch

from lightrft.algorithms.token_ops import TokenRows, compact, group_sum, scatter
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, plain_case, tensor_of


@every_case()
def test_sum_count_and_mean_are_over_the_tokens_that_count(case: Case, seed: int) -> None:
    (numbers,) = rows_for(case, seed)
    rows = TokenRows.of(batch_of(case))
    kept = [[numbers[i][t] for t in case.sampled(i)] for i in range(len(case))]
    assert_equal(rows.sum(tensor_of(numbers)), [sum(k) for k in kept], tolerance=1e-12)
    assert_equal(
        rows.mean(tensor_of(numbers)), [sum(k) / max(1, len(k)) for k in kept], tolerance=1e-12
    )
    assert rows.count().tolist() == [len(k) for k in kept]
    assert rows.spread(torch.arange(len(case))).tolist() == [
        i for i in range(len(case)) for _ in range(case.lengths[i])
    ]


@every_case()
def test_compact_left_aligns_and_scatter_puts_back(case: Case, seed: int) -> None:
    (numbers,) = rows_for(case, seed)
    rows = TokenRows.of(batch_of(case))
    padded, row, column = compact(tensor_of(numbers), rows)
    longest = max(len(case.sampled(i)) for i in range(len(case)))
    lines = [[numbers[i][t] for t in case.sampled(i)] for i in range(len(case))]
    assert padded.tolist() == [line + [0.0] * (longest - len(line)) for line in lines]
    back = scatter(padded, rows, row, column)
    assert back.tolist() == torch.where(rows.mask, tensor_of(numbers), 0.0).tolist()


@every_case(examples=20)
def test_the_gradient_of_a_sum_reaches_the_tokens_that_count_alone(case: Case, seed: int) -> None:
    rows = TokenRows.of(batch_of(case))
    x = (
        torch.full((rows.mask.numel(),), float("inf"), dtype=torch.float64)
        .masked_fill(rows.mask, 1.0)
        .requires_grad_()
    )
    assert gradient(rows.sum(x).sum(), x).tolist() == rows.mask.double().tolist()


def test_by_hand() -> None:
    rows = TokenRows.of(
        batch_of(plain_case([[True, False, True], [], [False], [True]], [1, 0, 0, 1]))
    )
    x = torch.tensor([1.0, 50.0, 3.0, 70.0, 5.0])
    assert rows.sum(x).tolist() == [4.0, 0.0, 0.0, 5.0]
    assert rows.mean(x).tolist() == [2.0, 0.0, 0.0, 5.0]
    assert group_sum(rows.sum(x), rows.prompt_of, 3).tolist() == [0.0, 9.0, 0.0]
    assert len(rows) == 4
