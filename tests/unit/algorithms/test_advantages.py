"""Advantages by hand, and what they say when a column is missing."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.algorithms.contracts.cases import plain_batch
from lightrft.algorithms.token_ops import discounted, whiten
from lightrft.config.algorithm import AdvantageConfig
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
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
    found, _ = ADVANTAGES["grpo"](
        made, torch.zeros(1, dtype=torch.float64), AdvantageConfig(eps=0.0)
    )
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
    settings = AdvantageConfig(name="gae", gamma=0.5, bootstrap_truncated=True)
    found, returns = ADVANTAGES["gae"](batch_of(case), token, settings)
    assert found.tolist() == [1.5, -1.0]
    assert returns.tolist() == [2.5, 0.0]
    without = batch_of(case).replace(final_values=None)
    with pytest.raises(ValueError, match=r"needs batch\.final_values"):
        ADVANTAGES["gae"](without, token, settings)


@pytest.mark.parametrize("name", ["gae", "vapo"])
def test_the_value_after_the_end_of_every_answer_is_0_by_default(name: str) -> None:
    case = plain_case([[True], [True]], [0, 0])
    case.values, case.final_values, case.truncated = [[1.0], [1.0]], [5.0, 5.0], [True, False]
    token = torch.full((2,), 0.25, dtype=torch.float64)
    found, returns = ADVANTAGES[name](batch_of(case), token, AdvantageConfig(name=name))
    assert found.tolist() == [-0.75, -0.75]
    assert returns.tolist() == [0.25, 0.25]


def test_columns_that_are_missing_are_named() -> None:
    made, token = batch([0.0, 1.0], [0, 0])
    with pytest.raises(ValueError, match=r"needs batch\.values"):
        ADVANTAGES["gae"](made.replace(values=None), token, AdvantageConfig(name="gae"))
    with pytest.raises(ValueError, match=r"advantages need batch\.rewards"):
        ADVANTAGES["grpo"](made.replace(rewards=None), token, AdvantageConfig())


def test_whitening_leaves_what_is_masked_out_of_it() -> None:
    x = torch.tensor([2.0, float("nan"), 6.0, float("inf")], dtype=torch.float64)
    mask = torch.tensor([True, False, True, False])
    assert whiten(x, mask, 0.0).tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert whiten(x, torch.zeros(4, dtype=torch.bool), 0.0).tolist() == [0.0] * 4


def advantages(
    name: str, rewards: list[float], prompt_of: list[int], eps: float = 0.0, **options: float
) -> list[float]:
    made, token = batch(rewards, prompt_of)
    found, returns = ADVANTAGES[name](made, token, AdvantageConfig(name=name, eps=eps), **options)
    assert torch.equal(found, returns)
    return found.tolist()


# rewards 0, 0, 1, 3: mean 1; unbiased variance (1 + 1 + 0 + 4) / 3 = 2; each beside a group of one, of reward 8
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("group_mean", {}, [-1, -1, 0, 2]),
        ("rloo", {}, [-4 / 3, -4 / 3, 0, 8 / 3]),
        ("opo", {}, [-1, -1, 0, 2]),
        ("pass_at_k", {}, [0, 0, 0, 2]),
        ("pass_at_k", {"std_eps": 0.0}, [0, 0, 0, math.sqrt(2)]),
        ("maxrl", {}, [-1, -1, 0, 2]),
        ("gpg", {}, [-5 / 4, -5 / 4, 0, 10 / 4]),
        ("gpg", {"std_eps": 1.0}, [-1.25 / (math.sqrt(2) + 1)] * 2 + [0, 2.5 / (math.sqrt(2) + 1)]),
        ("raft", {}, [0, 0, 0, 1]),
    ],
)
def test_rules_of_groups(name: str, options: dict[str, float], expected: list[float]) -> None:
    alone = 1.0 if name == "raft" else 0.0
    found = advantages(name, [0, 0, 8, 1, 3], [0, 0, 1, 0, 0], **options)
    assert found == pytest.approx([*expected[:2], alone, *expected[2:]], rel=1e-14)


@pytest.mark.parametrize(
    "name", ["group_mean", "rloo", "opo", "pass_at_k", "maxrl", "gpg", "lite_ppo", "batch_standard"]
)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 0.0])
def test_rewards_that_are_all_equal_have_exactly_no_advantage(name: str, reward: float) -> None:
    assert advantages(name, [reward] * 7, [0, 0, 0, 1, 1, 1, 2]) == [0.0] * 7
    assert advantages(name, [reward], [0]) == [0.0]


def test_an_optimal_baseline_weighs_rewards_by_sampled_tokens() -> None:
    # lengths 3, 1, 0: baseline (3 * 1 + 1 * 5) / 4 = 2; a tool's token has no length
    made = batch_of(
        plain_case([[True, True, False, True], [True], [False]], [0, 0, 0], [1.0, 5.0, 9.0])
    )
    token = torch.tensor([0, 0, 0, 1, 5, 0], dtype=torch.float64)
    assert ADVANTAGES["opo"](made, token, AdvantageConfig(name="opo"))[0].tolist() == [
        -1,
        -1,
        0,
        -1,
        3,
        0,
    ]


def test_two_equal_best_answers_add_nothing_to_pass_at_k() -> None:
    assert advantages("pass_at_k", [1, 1, 0, 5, 2], [0, 0, 0, 1, 1]) == [0, 0, 0, 3, 0]
    assert advantages("pass_at_k", [1, 1, 0], [0, 0, 0], std_eps=0.0) == [0, 0, 0]


def test_groups_without_success_have_no_maximum_likelihood_gradient() -> None:
    assert advantages("maxrl", [0, 0, 1, 0], [0, 0, 1, 1]) == [0, 0, 1, -1]
    assert advantages("maxrl", [-1, 1, -3, 1], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_deviations_over_the_batch_see_every_group() -> None:
    # all rewards 0, 2, 4, 6: mean 3, variance (9 + 1 + 1 + 9) / 3 = 20 / 3
    std = math.sqrt(20 / 3) + 1
    assert advantages("lite_ppo", [0, 2, 4, 6], [0, 0, 1, 1], eps=1.0) == pytest.approx(
        [x / std for x in (-1, 1, -1, 1)]
    )
    assert advantages("batch_standard", [0, 2, 4, 6], [0, 0, 1, 1], eps=1.0) == pytest.approx(
        [x / std for x in (-3, -1, 1, 3)]
    )


def test_the_gradient_of_groups_without_one_is_given_to_the_others() -> None:
    assert advantages("gpg", [1, 1, 0, 2], [0, 0, 1, 1]) == [0, 0, -2, 2]
    third = advantages("gpg", [0, 0, 0, 1], [0, 1, 1, 1])
    assert third == pytest.approx([0, -4 / 9, -4 / 9, 8 / 9], rel=1e-14)


def test_imitation_takes_the_first_of_the_best_wherever_it_stands() -> None:
    made, token = batch([1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1])
    settings = AdvantageConfig(name="raft")
    assert ADVANTAGES["raft"](made, token, settings)[0].tolist() == [1, 0, 0, 1, 0]
    order = torch.tensor([4, 2, 3, 0, 1])
    assert ADVANTAGES["raft"](made.select(order), token[order], settings)[0].tolist() == [
        0,
        0,
        1,
        1,
        0,
    ]
    with pytest.raises(ValueError, match=r"raft needs batch\.sample"):
        ADVANTAGES["raft"](made.replace(sample=None), token, settings)


def test_imitation_takes_all_that_are_good_enough() -> None:
    assert advantages("rft", [1, 0.5, 2, 0, 0], [0, 0, 0, 1, 1]) == [1, 0, 1, 0, 0]
    assert advantages("rft", [1, 0.5, 2, 0, 0], [0, 0, 0, 1, 1], threshold=0.5) == [1, 1, 1, 0, 0]


def test_the_greedy_answer_is_the_baseline_of_later_rewards() -> None:
    made = batch_of(plain_case([[True, False, True], [True], []], [0, 0, 0])).replace(
        baselines=torch.tensor([2.0, 0.5, 0.5], dtype=torch.float64)
    )
    token = torch.tensor([1.0, 99.0, 4.0, 1.0], dtype=torch.float64)
    found, returns = ADVANTAGES["remax"](made, token, AdvantageConfig(name="remax"))
    assert found.tolist() == [3.0, 0.0, 2.0, 0.5]
    assert returns.tolist() == [5.0, 0.0, 4.0, 1.0]
    with pytest.raises(ValueError, match=r"remax needs batch\.baselines"):
        ADVANTAGES["remax"](made.replace(baselines=None), token, AdvantageConfig(name="remax"))


def test_the_critic_may_have_a_trace_of_its_own() -> None:
    # delta = 0 + 2 - 1, 3 - 2 = 1, 1
    case = plain_case([[True, True]], [0])
    case.values, case.truncated = [[1.0, 2.0]], [False]
    token = torch.tensor([0.0, 3.0], dtype=torch.float64)
    settings = AdvantageConfig(name="gae", gamma=1.0, gae_lambda=0.5)
    advantage, returns = ADVANTAGES["gae"](batch_of(case), token, settings, lam_critic=1.0)
    assert advantage.tolist() == [1.5, 1.0]
    assert returns.tolist() == [3.0, 3.0]
    assert torch.equal(
        ADVANTAGES["gae"](batch_of(case), token, settings, lam_critic=0.5)[1],
        advantage + batch_of(case).values,
    )


def test_a_long_answer_has_a_longer_trace() -> None:
    # alpha 1/2: lam = 1 - 2 / l is 1/2 for four tokens, 0 for two and, where it would be negative, for one
    case = plain_case([[True] * 4, [True, True], [True], []], [0] * 4)
    case.values, case.truncated = [[0.0] * 4, [0.0] * 2, [0.0], []], [False] * 4
    token = torch.tensor([0, 0, 0, 8, 0, 8, 8], dtype=torch.float64)
    found, returns = ADVANTAGES["vapo"](
        batch_of(case), token, AdvantageConfig(name="vapo"), alpha=0.5
    )
    assert found.tolist() == [1, 2, 4, 8, 0, 8, 8]
    assert returns.tolist() == [8.0] * 7
    assert ADVANTAGES["vapo"](
        batch_of(case), token, AdvantageConfig(name="vapo"), alpha=0.5, lam_critic=0.0
    )[1].tolist() == [
        *(0, 0, 0, 8),
        *(0, 8, 8),
    ]
    with pytest.raises(ConfigError, match=r"options\.alpha is 0"):
        ADVANTAGES["vapo"](batch_of(case), token, AdvantageConfig(name="vapo"), alpha=0.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("prime", [-4.0, -1.0, -2.0, 4.0]), ("prime_released", [-4.0, -0.5, -2.0, 4.0])],
)
def test_process_rewards_of_three_answers_by_hand(name: str, expected: list[float]) -> None:
    # means 2, 2 and 6 of the answers' token rewards; equal outcomes, so that nothing else is left
    made = batch_of(plain_case([[True, True], [True], [True]], [0, 0, 0], [1.0, 1.0, 1.0]))
    made = made.replace(process_rewards=torch.tensor([1.0, 3.0, 2.0, 6.0], dtype=torch.float64))
    found, _ = ADVANTAGES[name](
        made, torch.zeros(4, dtype=torch.float64), AdvantageConfig(name=name)
    )
    assert found.tolist() == pytest.approx(expected)


def test_whitening_inside_groups_by_hand() -> None:
    # group 0: 1 and 3 (the 50 between them was not sampled), of two answers; group 1: equal; group 2: one token alone
    made = batch_of(plain_case([[True, False], [True], [True, True], [True]], [0, 0, 1, 2]))
    found = WHITENINGS["group"](
        torch.tensor([1.0, 50.0, 3.0, 7.0, 7.0, 9.0], dtype=torch.float64), made, 1.0
    )
    assert found.tolist() == [-0.5, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_whitening_inside_groups_of_an_empty_batch_is_empty() -> None:
    assert WHITENINGS["group"](torch.zeros(0), plain_batch([], []), 1.0).tolist() == []
