"""Weights of tokens and of responses: LD-DPO, SamPO and WPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightrft.algorithms.preference.inputs import responses_of
from lightrft.algorithms.preference.objective import token_weights, wpo_weights
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.preference.sections import PreferenceConfig
from tests.unit.algorithms.preference.examples import numbers


def rows_of(masks: list[list[int]]) -> TokenRows:
    """Rows of tokens, two rows a pair; 1 marks a trained token."""
    lengths = torch.tensor([len(mask) for mask in masks], dtype=torch.long)
    row_of = torch.repeat_interleave(torch.arange(len(masks)), lengths)
    flat = torch.tensor([bit for mask in masks for bit in mask], dtype=torch.bool)
    return TokenRows(row_of, lengths, torch.arange(len(masks)) // 2, flat)


def partners(count: int) -> torch.Tensor:
    """The row of the other response of each pair of neighbours."""
    return torch.arange(count) ^ 1


def weights(masks: list[list[int]], seeds: list[int] | None = None, **tree: Any) -> list[float]:
    settings = PreferenceConfig.model_validate(tree)
    rows = rows_of(masks)
    seeds = list(range(len(masks))) if seeds is None else seeds
    return token_weights(rows, partners(len(masks)), settings, seeds).tolist()


def test_without_a_modifier_every_trained_token_counts_once() -> None:
    assert weights([[1, 0, 1], [1]]) == [1, 0, 1, 1]


def test_ld_dpo_weighs_the_tokens_past_the_shorter_response() -> None:
    found = weights([[1, 1, 1, 1], [1, 1], [1], [1, 1, 1]], ld_alpha=0.25)
    assert found == [1, 1, 0.25, 0.25, 1, 1, 1, 1, 0.25, 0.25]


def test_ld_dpo_counts_trained_tokens_only() -> None:
    found = weights([[0, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0]], ld_alpha=0.5)
    assert found == [0, 1, 0, 1, 0.5, 0, 1, 0, 0, 1, 0]


def test_ld_dpo_with_alpha_0_drops_the_tail_whatever_its_log_probs() -> None:
    rows = rows_of([[1, 1, 1], [1, 1]])
    settings = PreferenceConfig(ld_alpha=0.0)
    found = token_weights(rows, partners(2), settings, [0, 1])
    logprobs = numbers(-1.0, -2.0, -math.inf, -3.0, -4.0).requires_grad_()
    summed = responses_of(rows, logprobs, numbers(-1.0, -1.0, -math.inf, -1.0, -1.0), found)
    assert summed.logprobs.tolist() == [-3, -7]
    assert summed.ref_logprobs.tolist() == [-2, -2]
    (slope,) = torch.autograd.grad(summed.logprobs.sum(), logprobs)
    assert slope.tolist() == [1, 1, 0, 1, 1]


LONG = [[1] * 40, [1, 1, 1], [1, 0, 1], [1, 1] + [0, 1] * 20]


def test_sampo_samples_as_many_trained_tokens_as_the_shorter_response_has() -> None:
    rows = rows_of(LONG)
    found = token_weights(rows, partners(4), PreferenceConfig(sampo=True), [1, 2, 3, 4])
    assert rows.sum(found).tolist() == [3, 3, 2, 2]
    assert set(found.tolist()) == {0.0, 1.0}
    assert not found[~rows.mask].any()
    assert found[40:43].tolist() == [1, 1, 1]


def test_sampo_samples_the_same_tokens_from_the_same_seed_in_any_place_of_the_batch() -> None:
    here = weights(LONG, seeds=[1, 2, 3, 4], sampo=True)
    there = weights([*LONG[2:], *LONG[:2]], seeds=[3, 4, 1, 2], sampo=True)
    assert there == here[43:] + here[:43]
    other = weights(LONG, seeds=[5, 2, 3, 4], sampo=True)
    assert other[:40] != here[:40]
    assert other[40:] == here[40:]


def test_sampo_reaches_every_token_of_the_longer_response() -> None:
    masks = [[1] * 6, [1, 1, 1]]
    total = torch.zeros(9, dtype=torch.float64)
    for seed in range(200):
        total += torch.tensor(weights(masks, seeds=[seed, 0], sampo=True), dtype=torch.float64)
    assert total[6:].tolist() == [200] * 3
    # each of six tokens is expected 100 times, with a deviation of 7
    assert bool((total[:6] > 65).all())
    assert bool((total[:6] < 135).all())


def test_a_batch_without_responses_has_no_weights() -> None:
    assert weights([], sampo=True, ld_alpha=0.5) == []


def test_sums_over_tokens_are_in_float64_and_count_the_weights() -> None:
    rows = rows_of([[1, 1, 0], [1]])
    logprobs = torch.tensor([-1.0, -2.0, -9.0, -3.0])
    kl = torch.tensor([0.5, 0.25, 9.0, 1.0])
    found = responses_of(rows, logprobs, token_kl=kl, weights=numbers(1.0, 0.5, 0.0, 1.0))
    assert found.logprobs.dtype == torch.float64
    assert found.logprobs.tolist() == [-2, -3]
    assert found.ref_logprobs.tolist() == [0, 0]
    assert found.tokens.tolist() == [1.5, 1]
    assert found.sequence_kl is not None
    assert found.sequence_kl.tolist() == [0.625, 1]
    assert responses_of(rows, logprobs).tokens.tolist() == [2, 1]


def test_wpo_is_the_geometric_mean_of_aligned_probabilities_over_trained_tokens() -> None:
    rows = rows_of([[1, 0, 1], [1]])
    logprobs = numbers(0.5, 0.9, 0.25, 0.5).log().requires_grad_()
    collision = numbers(0.25, 0.1, 0.75, 0.5).log().requires_grad_()
    found = wpo_weights(rows, logprobs, collision)
    assert found.tolist() == pytest.approx([math.sqrt(0.5 / 0.25 * 0.25 / 0.75), 1.0])
    assert not found.requires_grad
    assert not wpo_weights(rows, logprobs.detach(), collision).requires_grad


def test_wpo_of_a_uniform_policy_is_one() -> None:
    rows = rows_of([[1, 1, 1]])
    logprobs = torch.full((3,), math.log(1 / 8), dtype=torch.float64)
    # the sum of eight squares of 1/8
    assert wpo_weights(rows, logprobs, logprobs).tolist() == pytest.approx([1.0])
