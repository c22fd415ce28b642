"""What the tests of formulas share: the cases that they run on, and what equal means."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from tests.numbers.oracles import Case, flat
from tests.numbers.scalars import Rows
from tests.numbers.strategies import SEEDS, cases, corner_cases, random_rows

Test = Callable[..., None]


def every_case(examples: int = 60, **limits: float) -> Callable[[Test], Test]:
    """Run ``test(case, seed)`` on random ragged batches and on every corner case."""

    def decorate(test: Test) -> Test:
        test = given(case=cases(**limits), seed=SEEDS)(test)  # type: ignore[arg-type]
        for corner in corner_cases():
            test = example(case=corner, seed=0)(test)
        return settings(deadline=None, max_examples=examples)(test)

    return decorate


def rows_for(case: Case, seed: int, count: int = 1) -> list[Rows]:
    """``count`` ragged lists of numbers in [-3, 3]."""
    rng = random.Random(seed)
    return [random_rows(case, rng) for _ in range(count)]


def scores_for(case: Case, seed: int) -> list[float]:
    """One advantage per response, about a third of them 0."""
    rng = random.Random(seed)
    return [rng.choice([0.0, 1.0, 1.0]) * rng.uniform(-3, 3) for _ in range(len(case))]


def assert_equal(
    found: Tensor,
    expected: Rows | Sequence[float],
    mask: Tensor | None = None,
    tolerance: float = 1e-9,
) -> None:
    """``found`` in float64 is ``expected``, to ``tolerance`` relative or absolute; only where ``mask`` is true if given."""
    assert found.dtype == torch.float64
    numbers = (
        flat(expected)
        if expected and isinstance(expected[0], list)
        else [float(x) for x in expected]
    )
    got = found.detach().tolist()
    assert len(got) == len(numbers)
    keep = [True] * len(got) if mask is None else mask.tolist()
    pairs = [(a, b) for a, b, k in zip(got, numbers, keep, strict=True) if k]
    assert [a for a, _ in pairs] == pytest.approx(
        [b for _, b in pairs], rel=tolerance, abs=tolerance
    )


def gradient(total: Tensor, leaf: Tensor) -> Tensor:
    """d total / d leaf, zeros where ``total`` does not depend on it."""
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def tensor(values: Any) -> Tensor:
    """Numbers as float64."""
    return torch.tensor(values, dtype=torch.float64)
