"""Which tokens of a mini-batch are left out or pulled back, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.token_masks import TOKEN_MASKS, TokenMask, with_token_masks
from lightrft.config.algorithm import LossConfig
from lightrft.config.base import ComponentConfig
from lightrft.types import Batch, rows_of
from tests.numbers.strategies import batch_of, plain_case

SHAPE = [[True, True, False], [True], [], [True, True]]  # six tokens, the third of them not sampled


def batch_with(**columns: list[float]) -> Batch:
    batch = batch_of(plain_case(SHAPE, [0, 0, 1, 1]))
    return batch.replace(**{k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()})


def gate(
    name: str, batch: Batch, seed: int = 0, settings: LossConfig | None = None, **options: Any
) -> TokenMask:
    return TOKEN_MASKS[name](
        batch, settings or LossConfig(), torch.Generator().manual_seed(seed), **options
    )


def bits(x: Tensor) -> list[int]:
    return x.int().tolist()


def test_the_most_uncertain_share_of_the_batch_is_kept() -> None:
    batch = batch_with(entropy=[0.1, 0.5, 99.0, 0.4, 0.2, 0.3])
    assert bits(gate("high_entropy", batch).weight) == [0, 1, 0, 0, 0, 0]
    assert bits(gate("high_entropy", batch, rho=0.5).weight) == [0, 1, 0, 1, 0, 1]
    assert bits(gate("high_entropy", batch, rho=1.0).weight) == [1, 1, 0, 1, 1, 1]


def test_the_most_uncertain_share_of_each_answer_is_kept() -> None:
    batch = batch_with(entropy=[0.1, 0.5, 99.0, 0.4, 0.2, 0.3])
    assert bits(gate("high_entropy_per_answer", batch).weight) == [0, 1, 0, 1, 0, 1]


def test_equal_entropies_at_the_threshold_are_all_kept() -> None:
    batch = batch_with(entropy=[0.7, 0.1, 0.0, 0.7, 0.2, 0.7])
    assert bits(gate("high_entropy", batch, rho=0.2).weight) == [1, 0, 0, 1, 0, 1]
    flat = batch_with(entropy=[0.5] * 6)
    assert bits(gate("high_entropy", flat).weight) == [1, 1, 0, 1, 1, 1]


# A - mean A = 2, -1, -1, 0, 0 and logp - mean = 1, 1, -2, 1, -1: covariances 2, -1, 2, 0, 0
COVARIANT = {
    "advantages": [2.0, -1.0, 50.0, -1.0, 0.0, 0.0],
    "logprobs": [-2.0, -2.0, 9.0, -5.0, -2.0, -4.0],
}


def test_the_largest_covariances_are_pulled_back_and_everything_is_kept() -> None:
    found = gate("kl_cov", batch_with(**COVARIANT), share=0.4, coef=0.5)
    assert found.kl_pull_coef is not None
    assert found.kl_pull_coef.tolist() == [0.5, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert bits(found.weight) == [1, 1, 0, 1, 1, 1]


def test_at_least_one_token_is_pulled_back() -> None:
    found = gate("kl_cov", batch_with(**COVARIANT))
    assert found.kl_pull_coef is not None
    assert int((found.kl_pull_coef > 0).sum()) == 1
    nothing = batch_of(plain_case([[False], []], [0, 0])).replace(
        advantages=torch.zeros(1), logprobs=torch.zeros(1)
    )
    empty = gate("kl_cov", nothing)
    assert empty.kl_pull_coef is not None
    assert empty.kl_pull_coef.tolist() == [0.0]


def test_tokens_of_high_covariance_are_left_out_but_not_those_that_the_clip_holds() -> None:
    batch = batch_with(**COVARIANT, old_logprobs=COVARIANT["logprobs"])
    assert bits(gate("clip_cov", batch, share=1.0).weight) == [0, 1, 0, 0, 1, 1]
    assert bits(gate("clip_cov", batch, share=1.0, low=2.0).weight) == [1, 1, 0, 1, 1, 1]
    # Ratio e^0.5 with A > 0.
    held = batch_with(**COVARIANT, old_logprobs=[-2.5, -2.0, 9.0, -5.0, -2.0, -4.0])
    assert bits(gate("clip_cov", held, share=1.0).weight) == [1, 1, 0, 0, 1, 1]
    assert bits(gate("clip_cov", held, share=1.0, settings=LossConfig(clip_high=1.0)).weight) == [
        0,
        1,
        0,
        0,
        1,
        1,
    ]
    # Ratio e^-0.5 with A < 0.
    below = batch_with(**COVARIANT, old_logprobs=[-2.0, -2.0, 9.0, -4.5, -2.0, -4.0])
    assert bits(gate("clip_cov", below, share=1.0).weight) == [0, 1, 0, 1, 1, 1]


def test_the_generator_decides_which_are_left_out() -> None:
    batch = batch_with(**COVARIANT, old_logprobs=COVARIANT["logprobs"])
    choices = {
        tuple(bits(gate("clip_cov", batch, seed=seed, share=0.2).weight)) for seed in range(20)
    }
    assert choices == {(0, 1, 0, 1, 1, 1), (1, 1, 0, 0, 1, 1)}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_choice_among_equals_does_not_depend_on_the_order_of_rows(name: str) -> None:
    shape = [[True] * n for n in (3, 4, 2, 5)]
    batch = batch_of(plain_case(shape, [0, 0, 1, 1]))
    logprobs = torch.tensor(
        [-1.0, -2.0, -3.0, -4.0, -1.0, -2.0, -3.0, -4.0, -1.0, -2.0, -3.0, -4.0, -1.0, -2.0]
    )
    advantages = torch.tensor([1.0, -1.0] * 7)
    batch = batch.replace(
        logprobs=logprobs.double(), old_logprobs=logprobs.double(), advantages=advantages.double()
    )
    options = {"share": 0.3, **({"low": -9.0, "high": 9.0} if name == "clip_cov" else {})}
    whole = gate(name, batch, 5, **options)
    order = torch.tensor([2, 0, 3, 1])
    moved = gate(name, batch.select(order), 5, **options)
    places = rows_of(batch.lengths, order)
    assert bits(moved.weight) == bits(whole.weight[places])
    assert (moved.kl_pull_coef is None) == (whole.kl_pull_coef is None)
    if moved.kl_pull_coef is not None and whole.kl_pull_coef is not None:
        assert moved.kl_pull_coef.tolist() == whole.kl_pull_coef[places].tolist()


def test_the_largest_second_moments_are_left_out_until_the_mean_of_the_rest_fits() -> None:
    # squares 1, 9, -, 4, 0, 1: sorted 0, 1, 1, 4, 9 with means 0, 1/2, 2/3, 3/2, 3
    batch = batch_with(logprobs=[1.0, 3.0, 7.0, 2.0, 0.0, -1.0], behavior_logprobs=[0.0] * 6)
    assert bits(gate("m2po", batch, tau=3.0).weight) == [1, 1, 0, 1, 1, 1]
    assert bits(gate("m2po", batch, tau=1.5).weight) == [1, 0, 0, 1, 1, 1]
    assert bits(gate("m2po", batch, tau=0.7).weight) == [1, 0, 0, 0, 1, 1]
    assert bits(gate("m2po", batch).weight) == [0, 0, 0, 0, 1, 0]


def test_equal_second_moments_are_left_out_together() -> None:
    batch = batch_with(logprobs=[1.0, 1.0, 7.0, 1.0, 0.0, 0.0], behavior_logprobs=[0.0] * 6)
    assert bits(gate("m2po", batch, tau=0.5).weight) == [0, 0, 0, 0, 1, 1]


def test_token_masks_multiply_and_pulls_add_up() -> None:
    batch = batch_with(
        **COVARIANT,
        entropy=[0.1, 0.5, 99.0, 0.4, 0.2, 0.3],
        behavior_logprobs=[-2.0, -2.0, 0.0, -2.0, -2.0, -4.0],
    )
    kl_cov = ComponentConfig(name="kl_cov", options={"share": 0.4, "coef": 0.5})
    parts = [
        ComponentConfig(name="m2po"),
        ComponentConfig(name="high_entropy", options={"rho": 0.5}),
        kl_cov,
        kl_cov,
    ]
    found = with_token_masks(batch, parts, LossConfig(), torch.Generator())
    assert found.token_mask is not None
    assert found.pull is not None
    assert found.token_mask.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert found.pull.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    untouched = with_token_masks(batch, [], LossConfig(), torch.Generator())
    assert untouched.token_mask is None
    assert untouched.pull is None


def test_a_column_that_is_missing_is_named() -> None:
    batch = batch_of(plain_case(SHAPE, [0, 0, 1, 1]))
    with pytest.raises(ValueError, match="a column that this phase reads"):
        gate("high_entropy", batch)
