"""Every advantage, and whitening, against the slow loops, and the algebra that holds whatever the numbers."""

from __future__ import annotations

import random

import pytest
import torch

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.token_ops import TokenRows, whiten
from lightrft.config.algorithm import AdvantageConfig
from lightrft.types import Batch, Segments
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, rows_for
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, plain_case, tensor_of


def token_rewards_of(case: Case, rewards: list[float]) -> torch.Tensor:
    return tensor_of(oracles.token_rewards(case, rewards, 0.0, "k1"))


def grpo(case: Case, rewards: list[float], eps: float = 1e-6) -> list[float]:
    """The advantage of each response through the package; 0 for one without sampled tokens."""
    batch = batch_of(case).replace(rewards=torch.tensor(rewards, dtype=torch.float64))
    tokens, _ = ADVANTAGES["grpo"](
        batch, token_rewards_of(case, rewards), AdvantageConfig(name="grpo", eps=eps)
    )
    return TokenRows.of(batch).mean(tokens).tolist()


@every_case()
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_grpo_is_the_standardised_reward(eps: float, case: Case, seed: int) -> None:
    advantages, returns = ADVANTAGES["grpo"](
        batch_of(case), token_rewards_of(case, case.rewards), AdvantageConfig(name="grpo", eps=eps)
    )
    expected = oracles.on_sampled(case, oracles.grpo(case, case.rewards, eps))
    assert_equal(advantages, expected)
    assert_equal(returns, expected)


@every_case()
def test_grpo_with_a_kl_penalty_in_the_reward_standardises_the_penalised_reward(
    case: Case, seed: int
) -> None:
    token = oracles.token_rewards(case, case.rewards, 0.1, "k3")
    penalised = [sum(token[i]) if case.sampled(i) else case.rewards[i] for i in range(len(case))]
    found, _ = ADVANTAGES["grpo"](
        batch_of(case), tensor_of(token), AdvantageConfig(name="grpo", eps=1.0)
    )
    assert_equal(found, oracles.on_sampled(case, oracles.grpo(case, penalised, 1.0)))


@every_case()
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_is_the_discounted_return(gamma: float, case: Case, seed: int) -> None:
    (rewards,) = rows_for(case, seed)
    settings = AdvantageConfig(name="reinforce", gamma=gamma)
    advantages, returns = ADVANTAGES["reinforce"](batch_of(case), tensor_of(rewards), settings)
    assert_equal(advantages, oracles.returns(case, rewards, gamma))
    assert_equal(returns, oracles.returns(case, rewards, gamma))


@every_case()
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(
    ("gamma", "lam"),
    [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0), (0.97, 1.0), (0.5, 0.0), (0.0, 0.5)],
)
def test_gae_is_the_sum_of_discounted_errors(
    gamma: float, lam: float, bootstrap: bool, case: Case, seed: int
) -> None:
    (rewards,) = rows_for(case, seed)
    settings = AdvantageConfig(
        name="gae", gamma=gamma, gae_lambda=lam, bootstrap_truncated=bootstrap
    )
    advantages, returns = ADVANTAGES["gae"](batch_of(case), tensor_of(rewards), settings)
    expected = oracles.gae(case, rewards, gamma, lam, bootstrap)
    assert_equal(advantages, expected[0])
    assert_equal(returns, expected[1])


@every_case()
def test_gae_with_lambda_one_is_monte_carlo_less_the_value(case: Case, seed: int) -> None:
    (rewards,) = rows_for(case, seed)
    case.truncated = [False] * len(case)
    batch = batch_of(case)
    _, returns = ADVANTAGES["gae"](
        batch, tensor_of(rewards), AdvantageConfig(name="gae", gamma=0.9, gae_lambda=1.0)
    )
    monte_carlo, _ = ADVANTAGES["reinforce"](
        batch, tensor_of(rewards), AdvantageConfig(name="reinforce", gamma=0.9)
    )
    assert_equal(returns, monte_carlo.tolist())


@every_case()
def test_gae_with_lambda_zero_is_the_temporal_difference(case: Case, seed: int) -> None:
    (rewards,) = rows_for(case, seed)
    advantages, _ = ADVANTAGES["gae"](
        batch_of(case), tensor_of(rewards), AdvantageConfig(name="gae", gamma=0.9, gae_lambda=0.0)
    )
    flat = iter(advantages.tolist())
    for i in range(len(case)):
        found = [next(flat) for _ in range(case.lengths[i])]
        steps = case.sampled(i)
        for k, t in enumerate(steps):
            following = case.values[i][steps[k + 1]] if k + 1 < len(steps) else 0.0
            assert found[t] == pytest.approx(
                rewards[i][t] + 0.9 * following - case.values[i][t], abs=1e-12
            )


@every_case()
@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_tokens_that_were_not_sampled_are_no_steps(name: str, case: Case, seed: int) -> None:
    (rewards,) = rows_for(case, seed)
    settings = AdvantageConfig(name=name, gamma=0.9, gae_lambda=0.8)
    batch = batch_of(case)
    with_holes = ADVANTAGES[name](batch, tensor_of(rewards), settings)
    kept = batch.mask
    responses = Segments(batch.responses.tokens[kept], TokenRows.of(batch).count())
    compacted = batch.replace(responses=responses, values=batch.values[kept], sampled=None)  # type: ignore[index]
    without = ADVANTAGES[name](compacted, tensor_of(rewards)[kept], settings)
    for a, b in zip(with_holes, without, strict=True):
        assert_equal(a[kept], b.tolist(), tolerance=1e-12)


@every_case()
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_whitening_is_over_all_sampled_tokens(eps: float, case: Case, seed: int) -> None:
    (rows,) = rows_for(case, seed)
    assert_equal(
        whiten(tensor_of(rows), batch_of(case).mask, eps),
        oracles.whiten(case, rows, unbiased=False, eps=eps),
    )


@every_case()
def test_whitened_advantages_have_mean_zero_and_deviation_one(case: Case, seed: int) -> None:
    (rows,) = rows_for(case, seed)
    mask = batch_of(case).mask
    found = whiten(tensor_of(rows), mask, 0.0)[mask]
    if len(found) > 1:
        assert float(found.mean()) == pytest.approx(0, abs=1e-9)
        assert float(found.square().mean()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("value", [0.1, -0.7, 1 / 3, 3.0])
@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_equal_advantages_are_whitened_to_exactly_zero(
    value: float, count: int, eps: float
) -> None:
    x = torch.full((count,), value, dtype=torch.float64)
    assert whiten(x, torch.ones(count, dtype=torch.bool), eps).tolist() == [0.0] * count


@every_case()
def test_reinforce_whitened_is_reinforce_plus_plus(case: Case, seed: int) -> None:
    token = oracles.token_rewards(case, case.rewards, 0.01, "k1")
    batch = batch_of(case)
    advantages, _ = ADVANTAGES["reinforce"](
        batch, tensor_of(token), AdvantageConfig(name="reinforce", gamma=1.0)
    )
    found = whiten(advantages, batch.mask, 0.1)
    assert_equal(found, oracles.reinforce_pp(case, token, 1.0, unbiased=False, eps=0.1))


# Algebra


@every_case()
def test_advantages_of_a_group_sum_to_zero(case: Case, seed: int) -> None:
    case.mask = [[True] * n for n in case.lengths]
    case.lengths, case.mask = [max(1, n) for n in case.lengths], [m or [True] for m in case.mask]
    for name in ("logprobs", "old", "behavior", "ref", "values"):
        setattr(case, name, [row or [-1.0] for row in getattr(case, name)])
    found = grpo(case, case.rewards)
    for members in case.groups().values():
        assert sum(found[i] for i in members) == pytest.approx(0, abs=1e-9)


@every_case()
def test_a_constant_on_all_rewards_of_a_group_changes_nothing(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    shift = [rng.choice([-1.0, 0.5, 4.0]) for _ in range(len(case))]
    moved = [r + shift[p] for r, p in zip(case.rewards, case.prompt_of, strict=True)]
    assert grpo(case, moved) == pytest.approx(grpo(case, case.rewards), abs=1e-9)


@every_case()
def test_a_positive_scale_changes_nothing_without_eps_and_a_negative_one_turns_the_sign(
    case: Case, seed: int
) -> None:
    plain = grpo(case, case.rewards, eps=0.0)
    assert grpo(case, [4 * r for r in case.rewards], eps=0.0) == pytest.approx(plain, abs=1e-9)
    assert grpo(case, [-0.5 * r for r in case.rewards], eps=0.0) == pytest.approx(
        [-a for a in plain], abs=1e-9
    )


@every_case()
def test_equal_rewards_and_groups_of_one_have_exactly_zero_advantage(case: Case, seed: int) -> None:
    assert grpo(case, [0.1 * p for p in case.prompt_of], eps=0.0) == [0.0] * len(case)
    case.prompt_of = list(range(len(case)))
    assert grpo(case, case.rewards, eps=0.0) == [0.0] * len(case)


@every_case()
@pytest.mark.parametrize("name", ["grpo", "reinforce", "gae"])
def test_groups_are_by_identity_whatever_the_order(name: str, case: Case, seed: int) -> None:
    batch = batch_of(case)
    order = torch.tensor(random.Random(seed).sample(range(len(case)), len(case)))
    (rewards,) = rows_for(case, seed)
    token = tensor_of(rewards)
    settings = AdvantageConfig(name=name, gamma=0.9)

    def columns(b: Batch, r: torch.Tensor) -> Batch:
        advantages, returns = ADVANTAGES[name](b, r, settings)
        return b.replace(advantages=advantages, returns=returns)

    before = columns(batch, token).select(order)
    shuffled = batch.replace(loss_weights=token).select(order)
    after = columns(shuffled, shuffled.loss_weights)  # type: ignore[arg-type]
    assert_equal(after.advantages, before.advantages.tolist(), tolerance=1e-12)  # type: ignore[union-attr, arg-type]
    assert_equal(after.returns, before.returns.tolist(), tolerance=1e-12)  # type: ignore[union-attr, arg-type]


# By hand


def test_gae_by_hand() -> None:
    # r = 0, 0, 1; V = 1, 2, 4; gamma 1/2, lam 1/2. delta = 0+1-1, 0+2-2, 1+0-4 = 0, 0, -3; A = -3/16, -3/4, -3
    case = plain_case([[True, True, True]], [0])
    case.values, case.truncated = [[1.0, 2.0, 4.0]], [False]
    settings = AdvantageConfig(name="gae", gamma=0.5, gae_lambda=0.5)
    rewards = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    advantages, returns = ADVANTAGES["gae"](batch_of(case), rewards, settings)
    assert advantages.tolist() == [-0.1875, -0.75, -3.0]
    assert returns.tolist() == [0.8125, 1.25, 1.0]
    # A cut response ends too, whatever the critic says of the state after it.
    case.truncated, case.final_values = [True], [6.0]
    assert ADVANTAGES["gae"](batch_of(case), rewards, settings)[0].tolist() == [-0.1875, -0.75, -3]
    # cut off in a state of value 6: delta_3 = 1 + 3 - 4 = 0
    settings = settings.model_copy(update={"bootstrap_truncated": True})
    assert ADVANTAGES["gae"](batch_of(case), rewards, settings)[0].tolist() == [0.0, 0.0, 0.0]


def test_gae_passes_tool_tokens_through() -> None:
    # the same three steps with a tool's tokens between and behind them
    case = plain_case([[True, False, False, True, True, False]], [0])
    case.values, case.truncated = [[1.0, 99.0, 98.0, 2.0, 4.0, 97.0]], [False]
    rewards = torch.tensor([0.0, 9.0, 9.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    found = ADVANTAGES["gae"](
        batch_of(case), rewards, AdvantageConfig(name="gae", gamma=0.5, gae_lambda=0.5)
    )
    assert found[0].tolist() == [-0.1875, 0, 0, -0.75, -3.0, 0]
    assert found[1].tolist() == [0.8125, 0, 0, 1.25, 1.0, 0]


def test_whiten_by_hand() -> None:
    # 1, 3 | masked 100: mean 2, deviation 1
    found = whiten(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]), 1.0)
    assert found.tolist() == [-0.5, 0.0, 0.5]
