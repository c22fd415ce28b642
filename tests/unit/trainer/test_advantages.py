"""Advantages by hand, and what they say when a column is missing."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.config import AdvantageConfig
from lightrft.trainer.advantages import ADVANTAGES, discounted, whiten
from lightrft.types import Batch
from tests.numbers.strategies import batch_of, plain_case


def batch(rewards: list[float], prompt_of: list[int]) -> tuple[Batch, torch.Tensor]:
    """One sampled token per response."""
    made = batch_of(plain_case([[True]] * len(rewards), prompt_of, rewards))
    return made, torch.tensor(rewards, dtype=torch.float64)


def test_grpo_standardises_inside_the_group() -> None:
    # group of 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    made, token = batch([1.0, 5.0, 2.0, 6.0], [1, 0, 1, 1])
    found, returns = ADVANTAGES["grpo"](made, token, AdvantageConfig(eps=1.0))
    s = math.sqrt(7) + 1
    assert found.tolist() == pytest.approx([-2 / s, 0, -1 / s, 3 / s], rel=1e-15)
    assert torch.equal(returns, found)


def test_grpo_counts_an_answer_without_sampled_tokens_in_its_group() -> None:
    # rewards 0 and 1 of two answers, the second of which has no token to carry an advantage
    made = batch_of(plain_case([[True], []], [0, 0], [0.0, 1.0]))
    found, _ = ADVANTAGES["grpo"](made, torch.zeros(1, dtype=torch.float64), AdvantageConfig(eps=0.0))
    assert found.tolist() == pytest.approx([-0.5 / math.sqrt(0.5)], rel=1e-15)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_have_exactly_no_advantage(reward: float, eps: float) -> None:
    made, token = batch([reward] * 7, [0] * 7)
    assert ADVANTAGES["grpo"](made, token, AdvantageConfig(eps=eps))[0].tolist() == [0.0] * 7


def test_returns_are_discounted_over_sampled_tokens_only() -> None:
    made = batch_of(plain_case([[True, False, True, True]], [0]))
    token = torch.tensor([1.0, 99.0, 2.0, 4.0], dtype=torch.float64)
    found, _ = ADVANTAGES["reinforce"](made, token, AdvantageConfig(name="reinforce", gamma=0.5))
    assert found.tolist() == [3.0, 0.0, 4.0, 4.0]
    found, _ = ADVANTAGES["reinforce"](made, token, AdvantageConfig(name="reinforce", gamma=1.0))
    assert found.tolist() == [7.0, 0.0, 6.0, 4.0]


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_discounted_sums_of_rows_of_any_width(decay: float) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]])
    expected = {
        0.0: x,
        0.5: torch.tensor([[3.0, 4.0, 4.0], [2.0, 4.0, 8.0]]),
        1.0: torch.tensor([[7.0, 6.0, 4.0], [8.0, 8.0, 8.0]]),
    }
    assert torch.equal(discounted(x, decay), expected[decay])
    assert discounted(x[:, :0], decay).shape == (2, 0)
    assert discounted(x[:0], decay).shape == (0, 3)


def test_a_truncated_answer_is_bootstrapped_and_a_finished_one_is_not() -> None:
    case = plain_case([[True], [True]], [0, 0])
    case.values, case.final_values, case.truncated = [[1.0], [1.0]], [5.0, 5.0], [True, False]
    token = torch.zeros(2, dtype=torch.float64)
    found, returns = ADVANTAGES["gae"](batch_of(case), token, AdvantageConfig(name="gae", gamma=0.5))
    assert found.tolist() == [1.5, -1.0]
    assert returns.tolist() == [2.5, 0.0]
    without = batch_of(case).replace(final_values=None)
    assert ADVANTAGES["gae"](without, token, AdvantageConfig(name="gae", gamma=0.5))[0].tolist() == [-1.0, -1.0]


def test_columns_that_are_missing_are_named() -> None:
    made, token = batch([0.0, 1.0], [0, 0])
    with pytest.raises(ValueError, match=r"gae needs batch\.values"):
        ADVANTAGES["gae"](made.replace(values=None), token, AdvantageConfig(name="gae"))
    with pytest.raises(ValueError, match=r"advantages need batch\.rewards"):
        ADVANTAGES["grpo"](made.replace(rewards=None), token, AdvantageConfig())


def test_whitening_leaves_what_is_masked_out_of_it() -> None:
    x = torch.tensor([2.0, float("nan"), 6.0, float("inf")], dtype=torch.float64)
    mask = torch.tensor([True, False, True, False])
    assert whiten(x, mask, 0.0).tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert whiten(x, torch.zeros(4, dtype=torch.bool), 0.0).tolist() == [0.0] * 4
