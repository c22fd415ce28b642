"""Costs are limited as Safe RLHF says, to 1e-9 of plain floats; and a bandit ends at its limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.constrained.lagrangian import (
    UNEVEN_ADVANTAGES,
    LagrangianController,
    constrained_advantages,
    cost_view,
)
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.reward_shaping import token_rewards
from lightrft.config.algorithm import LagrangianConfig
from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.types import Batch, Segments
from lightrft.utils.state_io import load_state, save_state
from tests.advantage_helpers import with_advantages
from tests.numbers import oracles_constrained as oracle
from tests.numbers import test_explained_numbers
from tests.numbers.compare import tensor

FINITE = st.floats(-5, 5)


def batch() -> Batch:
    return test_explained_numbers.batch().replace(teacher_logprobs=None)


def config_of(**algorithm: Any) -> RLConfig:
    return build(RLConfig, {"algorithm": algorithm, "sampling": {"max_new_tokens": 8}})


def advantages_of(config: RLConfig, given: Batch) -> Batch:
    controls = Controllers.of(config.algorithm)
    return with_advantages(given, config, controls, Requirements.of(config.algorithm))


@pytest.mark.parametrize("bootstrap", [False, True])
def test_ppo_lag_is_safe_rlhf_by_hand(bootstrap: bool) -> None:
    config = config_of(
        preset="ppo_lag",
        lagrangian={"init": 0.7, "lr": 0.3},
        advantage={"bootstrap_truncated": bootstrap},
    )
    given = batch().replace(cost_final_values=tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    found = advantages_of(config, given)
    (multiplier,) = oracle.multipliers([given.costs[:, 0].tolist()], 0.0, 0.7, 0.3, 5.0, 0, 128)  # type: ignore[index]
    rows = given.lengths.tolist()
    kl = (given.old_logprobs - given.ref_logprobs).tolist()  # type: ignore[operator]
    start = 0
    for i, length in enumerate(rows):
        place = [t for t in range(start, start + length) if given.mask[t]]
        sides = []
        for sign, outcome, values, after in (
            (-1, given.rewards, given.values, given.final_values),
            (1, given.costs[:, 0], given.cost_values, given.cost_final_values),  # type: ignore[index]
        ):
            tokens = [sign * 0.01 * kl[t] for t in place]
            tokens[-1] += float(outcome[i])  # type: ignore[index]
            own = [float(values[t]) for t in place]  # type: ignore[index]
            final = float(after[i]) if bootstrap and given.truncated[i] else 0.0  # type: ignore[index]
            sides.append(oracle.gae(tokens, own, final, 1.0, 0.95))
        expected = oracle.combined(sides[0][0], [sides[1][0]], [multiplier])
        assert found.advantages[place].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)  # type: ignore[index]
        assert found.returns[place].tolist() == pytest.approx(sides[0][1], rel=1e-6, abs=1e-6)  # type: ignore[index]
        assert found.cost_returns[place].tolist() == pytest.approx(  # type: ignore[index]
            sides[1][1], rel=1e-6, abs=1e-6
        )
        start += length


def test_several_costs_of_grpo_are_standardised_alone_and_then_combined() -> None:
    costs = torch.tensor([[1.0, 9.0], [2.0, 1.0], [4.0, 0.0], [0.0, 3.0], [7.0, 2.0]]).double()
    limits = [{"name": "a", "threshold": 1.0}, {"name": "b", "threshold": 2.0}]
    config = config_of(preset="grpo_lag", lagrangian={"costs": limits, "max": 50.0})
    given = batch().replace(costs=costs)
    found = advantages_of(config, given)
    used = [
        oracle.multipliers([costs[:, k].tolist()], limits[k]["threshold"], 1.0, 0.1, 50.0, 0, 128)[
            0
        ]  # type: ignore[list-item]
        for k in range(2)
    ]

    def standardised(outcome: Tensor) -> list[float]:
        result = torch.zeros(5).double()
        for group in given.prompt_of.unique():
            own = outcome[given.prompt_of == group].double()
            result[given.prompt_of == group] = (own - own.mean()) / (own.std() + 1e-6)
        return result.tolist()

    sides = [standardised(costs[:, k]) for k in range(2)]
    expected = oracle.combined(standardised(given.rewards), sides, used)  # type: ignore[arg-type]
    whole = torch.where(given.mask, tensor(expected)[given.row_of], 0.0)
    torch.testing.assert_close(found.advantages.double(), whole, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


@given(
    reward=st.lists(FINITE, min_size=1, max_size=6),
    multipliers=st.lists(st.floats(0, 20), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_combined_advantages_are_the_formula(
    reward: list[float], multipliers: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = [torch.randn(len(reward), generator=generator).double() for _ in multipliers]
    found = constrained_advantages(tensor(reward), costs, multipliers).tolist()
    expected = oracle.combined(reward, [c.tolist() for c in costs], multipliers)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # a convex combination is never larger than its largest part
    largest = max(map(abs, reward + [x for c in costs for x in c.tolist()]))
    assert max(map(abs, found)) <= largest * (1 + 1e-12)


@given(
    batches=st.lists(st.lists(FINITE, min_size=1, max_size=7), min_size=1, max_size=6),
    threshold=FINITE,
    init=st.floats(0.01, 3),
    lr=st.floats(0, 0.2),
    largest=st.floats(3, 9),
    delay=st.integers(0, 3),
    window=st.integers(1, 9),
)
def test_multipliers_follow_the_oracle_through_every_setting(
    batches: list[list[float]],
    threshold: float,
    init: float,
    lr: float,
    largest: float,
    delay: int,
    window: int,
) -> None:
    config = LagrangianConfig.model_validate(
        {
            "costs": [{"name": "c", "threshold": threshold}],
            "init": init,
            "lr": lr,
            "max": largest,
            "delay_steps": delay,
            "window": window,
        }
    )
    controller = LagrangianController.of(config)
    expected = oracle.multipliers(batches, threshold, init, lr, largest, delay, window)
    for costs, value in zip(batches, expected, strict=True):
        column = tensor(costs)[:, None]
        before = controller.multipliers
        assert controller.moved(column)[0].value == pytest.approx(value, rel=1e-9)
        assert controller.multipliers == before
        controller.update(column)
        assert controller.multipliers[0].value == pytest.approx(value, rel=1e-9)


def test_a_multiplier_that_is_saved_goes_on_bit_for_bit(tmp_path: Any) -> None:
    algorithm = config_of(preset="grpo_lag", lagrangian={"window": 7}).algorithm
    generator = torch.Generator().manual_seed(0)
    costs = [torch.randn(5, 1, generator=generator).double() for _ in range(6)]
    whole, first, second = (Controllers.of(algorithm) for _ in range(3))
    for column in costs:
        whole.lagrangian.update(column)
    for column in costs[:3]:
        first.lagrangian.update(column)
    save_state(tmp_path / "state", {"controls": first.state_dict()})
    second.load_state_dict(load_state(tmp_path / "state")["controls"])
    for column in costs[3:]:
        second.lagrangian.update(column)
    assert second.state_dict() == whole.state_dict()


def test_costs_do_not_move_while_the_critics_learn_alone() -> None:
    algorithm = config_of(preset="grpo_lag").algorithm
    controls, given = Controllers.of(algorithm), batch()
    before = controls.state_dict()
    metrics = controls.update_from_batch(given, frozen=True).compute()
    assert controls.state_dict()["lagrangian"] == before["lagrangian"]
    assert metrics["lagrangian/cost"] == pytest.approx(float(given.costs.mean()))  # type: ignore[union-attr]


PLAIN = [
    name
    for name in sorted(ADVANTAGES)
    if not ADVANTAGES.about(name).needs & {"greedy", "prm", "teacher", "steps"}
]


@pytest.mark.parametrize("name", PLAIN)
def test_an_advantage_is_for_costs_if_it_turns_with_the_sign_of_the_reward(name: str) -> None:
    config = build(RLConfig, {"algorithm": {"preset": None, "advantage": {"name": name}}})
    given = batch().replace(values=torch.zeros(batch().tokens).double(), final_values=None)
    sides = []
    for sign in (1, -1):
        own = given.replace(rewards=sign * given.rewards, outcomes=sign * given.rewards)  # type: ignore[operator]
        settings = config.algorithm.advantage
        sides.append(ADVANTAGES[name](own, token_rewards(own, "k1", 0.0), settings)[0])
    turns = torch.allclose(sides[0], -sides[1], rtol=1e-12, atol=1e-12)
    assert turns == (name not in UNEVEN_ADVANTAGES)


REFERENCE = [0.25, 0.25, 0.25, 0.25]
REWARDS = [1.0, 0.6, 0.2, 0.0]
COSTS = [1.0, 0.5, 0.1, 0.0]
LIMIT, BETA = 0.3, 0.1
"""Limit of the mean cost, and coefficient of the KL to the uniform reference. Without a limit the best arm has cost 1."""


def pulls(policy: Tensor, count: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    """A group of ``count`` responses of one token each: arms of the bandit, with rewards and costs."""
    arms = torch.multinomial(policy, count, replacement=True, generator=generator)
    logprobs = policy.log()[arms]
    return Batch(
        Segments.of([[1]]),
        Segments.of([[a] for a in arms.tolist()]),
        torch.zeros(count, dtype=torch.long),
        sampled=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=tensor(REFERENCE).log()[arms],
        rewards=tensor(REWARDS)[arms],
        costs=tensor(COSTS)[arms][:, None],
    ), arms


def trained_bandit(advantage: str, **lagrangian: Any) -> tuple[Tensor, float]:
    """The policy after 600 steps of policy gradients, and its multiplier."""
    config = config_of(
        preset=None,
        advantage={"name": advantage},
        kl={"where": "reward", "estimator": "k1", "coef": BETA},
        lagrangian={
            "costs": [{"name": "cost", "threshold": LIMIT}],
            "lr": 0.2,
            "max": 100.0,
            **lagrangian,
        },
    )
    controls, generator = Controllers.of(config.algorithm), torch.Generator().manual_seed(0)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for step in range(600):
        given, arms = pulls(theta.detach().softmax(-1), 512, generator)
        given = with_advantages(given, config, controls, Requirements.of(config.algorithm))
        loss = -(given.advantages.double() * theta.log_softmax(-1)[arms]).mean()  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= (2.0 if step < 400 else 0.5) * gradient
        controls.update_from_batch(given)
    return theta.detach().softmax(-1), controls.lagrangian.multipliers[0].value


@pytest.mark.parametrize("advantage", ["group_mean", "rloo", "reinforce"])
def test_a_bandit_of_two_rewards_meets_its_threshold_within_five_percent(advantage: str) -> None:
    policy, multiplier = trained_bandit(advantage)
    best, optimum = oracle.limited_bandit(REFERENCE, REWARDS, COSTS, LIMIT, BETA)
    assert float(policy @ tensor(COSTS)) == pytest.approx(LIMIT, rel=0.05)
    assert float((policy - tensor(optimum)).abs().sum()) / 2 < 0.05
    assert multiplier == pytest.approx(best, rel=0.15)


def test_without_a_multiplier_that_moves_the_bandit_passes_its_threshold() -> None:
    policy, _ = trained_bandit("group_mean", lr=0.0, init=1e-3, costs=["cost"])
    assert float(policy @ tensor(COSTS)) > 2 * LIMIT
    assert math.isfinite(float(policy.sum()))


def test_the_view_of_a_cost_has_its_columns_in_place_of_those_of_the_reward() -> None:
    batch = Batch(
        Segments.of([[1]]),
        Segments.of([[2, 3], [4]]),
        torch.tensor([0, 0]),
        rewards=torch.zeros(2, dtype=torch.float64),
        outcomes=torch.zeros(2, dtype=torch.float64),
        values=torch.zeros(3),
        returns=torch.zeros(3),
        final_values=torch.zeros(2),
        costs=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        cost_values=torch.tensor([5.0, 6.0, 7.0]),
        cost_final_values=torch.tensor([8.0, 9.0]),
        cost_returns=torch.tensor([10.0, 11.0, 12.0]),
        final_returns=torch.zeros(2),
    )
    view = cost_view(batch, 1)
    for name in ("rewards", "outcomes", "final_returns"):
        assert getattr(view, name).tolist() == [2.0, 4.0]
        assert getattr(view, name).dtype == torch.float64
    assert view.values is batch.cost_values
    assert view.returns is batch.cost_returns
    assert view.final_values is batch.cost_final_values
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [0.0, 0.0]


def test_costs_multipliers_and_columns_of_different_numbers_are_an_error() -> None:
    one = torch.zeros(2)
    with pytest.raises(ValueError, match="zip"):
        constrained_advantages(one, [one, one], [1.0])
    controller = LagrangianController.of(
        LagrangianConfig.model_validate({"costs": [{"name": "cost", "threshold": 0.0}]})
    )
    with pytest.raises(ValueError, match="zip"):
        controller.moved(torch.zeros(2, 2))
