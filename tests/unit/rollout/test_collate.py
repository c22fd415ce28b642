"""Scored groups as a batch."""

from __future__ import annotations

import math

import torch

from lightrft.rollout.collate import collate
from lightrft.types import Prompt, Rollout


def rollout(
    prompt: Prompt, reward: float, terms: dict[str, float], weights: dict[str, float]
) -> Rollout:
    return Rollout(
        prompt,
        [1, 2],
        [True, True],
        [-1.0, -1.0],
        [0, 0],
        "stop",
        0,
        reward=reward,
        terms=terms,
        weights=weights,
    )


def test_terms_are_columns_in_the_order_of_their_names_and_a_missing_one_is_absent() -> None:
    here, there = Prompt("a", [3]), Prompt("b", [4])
    groups = [
        [
            rollout(
                here, 2.5, {"style": 1.0, "style/a": 9.0, "math": 0.5}, {"style": 2.0, "math": 1.0}
            )
        ],
        [
            rollout(there, 4.0, {"math": 4.0}, {"math": 1.0}),
            rollout(there, 0.0, {"math": 0.0}, {"math": 1.0}),
        ],
    ]
    batch = collate(groups, torch.float64)
    assert batch.terms is not None
    assert batch.term_weights is not None
    assert batch.sample.tolist() == [0, 0, 0]  # type: ignore[union-attr]
    assert batch.terms[:, 0].tolist() == [0.5, 4.0, 0.0]
    assert batch.terms[0, 1] == 1.0
    assert all(math.isnan(x) for x in batch.terms[1:, 1].tolist())
    assert batch.term_weights.tolist() == [[1.0, 2.0], [1.0, 0.0], [1.0, 0.0]]
    kept = batch.select(torch.tensor([2, 0]))
    assert kept.terms is not None
    assert kept.terms[1].tolist() == [0.5, 1.0]


def test_rewards_without_terms_have_no_columns_for_them() -> None:
    batch = collate([[rollout(Prompt("a", [3]), 1.0, {}, {})]])
    assert batch.terms is None
    assert batch.term_weights is None
