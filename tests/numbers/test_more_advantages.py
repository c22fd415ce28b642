"""The advantages of the second circle of methods against the slow loops, and the algebra that ties them to one another."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.config.algorithm import AdvantageConfig
from lightrft.types import Batch
from tests.numbers import oracles, oracles_advantages
from tests.numbers.compare import assert_equal, every_case, rows_for
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, tensor_of

EPS = 0.01
Slow = Callable[[Case, list[float]], list[float]]
BY_RESPONSE: dict[str, tuple[str, dict[str, float], Slow]] = {
    "dr_grpo": ("group_mean", {}, oracles.dr_grpo),
    "rloo": ("rloo", {}, oracles.rloo),
    "opo": ("opo", {}, oracles.opo),
    "pass_at_k": ("pass_at_k", {}, oracles_advantages.pass_at_k),
    "pass_at_k over the deviation": (
        "pass_at_k",
        {"std_eps": 0.2},
        lambda c, r: oracles_advantages.pass_at_k(c, r, 0.2),
    ),
    "lite_ppo": ("lite_ppo", {}, lambda c, r: oracles_advantages.lite_ppo(c, r, True, EPS)),
    "gpg": ("gpg", {}, oracles_advantages.gpg),
    "gpg over the deviation": (
        "gpg",
        {"std_eps": 0.2},
        lambda c, r: oracles_advantages.gpg(c, r, 0.2),
    ),
    "raft": ("raft", {}, oracles_advantages.raft),
    "rft": ("rft", {"threshold": 0.5}, lambda c, r: oracles_advantages.rft(r, 0.5)),
}
CENTRED = ["dr_grpo", "rloo", "gpg", "lite_ppo"]


def advantages_of(
    case: Case, name: str, rewards: list[float] | None = None, **options: float
) -> Tensor:
    """What the package makes of outcome rewards; returns must be the same."""
    rewards = case.rewards if rewards is None else rewards
    batch = batch_of(case).replace(rewards=torch.tensor(rewards, dtype=torch.float64))
    token = tensor_of(oracles.token_rewards(case, rewards, 0.0, "k1"))
    settings = (
        AdvantageConfig(name=name, eps=EPS)
        if "eps" in ADVANTAGES.about(name).reads
        else AdvantageConfig(name=name)
    )
    advantages, returns = ADVANTAGES[name](batch, token, settings, **options)
    assert_equal(returns, advantages.tolist(), tolerance=0)
    return advantages


@every_case()
@pytest.mark.parametrize("method", list(BY_RESPONSE))
def test_advantages_of_responses(method: str, case: Case, seed: int) -> None:
    name, options, slow = BY_RESPONSE[method]
    assert_equal(
        advantages_of(case, name, **options), oracles.on_sampled(case, slow(case, case.rewards))
    )


@every_case()
@pytest.mark.parametrize("method", [m for m in BY_RESPONSE if m not in ("raft", "rft")])
def test_equal_rewards_of_a_group_and_groups_of_one_have_exactly_no_advantage(
    method: str, case: Case, seed: int
) -> None:
    name, options, _ = BY_RESPONSE[method]
    assert advantages_of(case, name, [0.1 * p for p in case.prompt_of], **options).eq(0).all()
    case.prompt_of = list(range(len(case)))
    assert advantages_of(case, name, **options).eq(0).all()


@every_case()
@pytest.mark.parametrize("method", CENTRED)
def test_advantages_of_a_group_sum_to_zero(method: str, case: Case, seed: int) -> None:
    case.mask = [[True]] * len(case)
    case.lengths = [1] * len(case)
    for name in ("logprobs", "old", "behavior", "ref", "values"):
        setattr(case, name, [[-1.0]] * len(case))
    found = advantages_of(case, BY_RESPONSE[method][0])
    for members in case.groups().values():
        assert float(found[members].sum()) == pytest.approx(0, abs=1e-9)


@every_case()
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_maxrl_of_rewards_that_are_not_negative(eps: float, case: Case, seed: int) -> None:
    rewards = [abs(r) for r in case.rewards]
    batch = batch_of(case).replace(rewards=torch.tensor(rewards, dtype=torch.float64))
    token = tensor_of(oracles.token_rewards(case, rewards, 0.0, "k1"))
    found, _ = ADVANTAGES["maxrl"](batch, token, AdvantageConfig(name="maxrl", eps=eps))
    assert_equal(found, oracles.on_sampled(case, oracles.maxrl(case, rewards, eps)))


@every_case()
def test_the_second_step_of_gdpo_standardises_over_responses(case: Case, seed: int) -> None:
    """One term that is alone and already standardised inside its group: what is left is the batch."""
    terms = [sum(row) for row in rows_for(case, seed)[0]], case.rewards
    weights = [1.0, -0.5]
    each = [oracles.grpo(case, term, EPS) for term in terms]
    summed = [sum(w * a[i] for w, a in zip(weights, each, strict=True)) for i in range(len(case))]
    expected = oracles_advantages.gdpo(case, terms, weights, True, EPS)
    assert_equal(advantages_of(case, "batch_standard", summed), oracles.on_sampled(case, expected))


@every_case()
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_remax_subtracts_the_reward_of_the_greedy_answer(
    gamma: float, case: Case, seed: int
) -> None:
    (token,) = rows_for(case, seed)
    rng = random.Random(seed)
    greedy = [rng.uniform(-2, 2) for _ in range(len(case))]
    batch = batch_of(case).replace(baselines=torch.tensor(greedy, dtype=torch.float64))
    found, returns = ADVANTAGES["remax"](
        batch, tensor_of(token), AdvantageConfig(name="remax", gamma=gamma)
    )
    assert_equal(found, oracles_advantages.remax(case, token, greedy, gamma))
    assert_equal(returns, oracles.returns(case, token, gamma))


@every_case()
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.05, 1.0), (0.5, 0.9), (1.0, 1.0), (40.0, 0.97)])
def test_vapo(alpha: float, gamma: float, bootstrap: bool, case: Case, seed: int) -> None:
    (token,) = rows_for(case, seed)
    found, targets = ADVANTAGES["vapo"](
        batch_of(case),
        tensor_of(token),
        AdvantageConfig(name="vapo", gamma=gamma, bootstrap_truncated=bootstrap),
        alpha=alpha,
        lam_critic=1.0,
    )
    slow, goals = oracles_advantages.vapo(case, token, gamma, alpha, bootstrap)
    assert_equal(found, slow)
    assert_equal(targets, goals)


@every_case()
@pytest.mark.parametrize("lam_critic", [0.0, 0.7, 1.0])
def test_gae_with_a_trace_of_its_own_for_the_critic(
    lam_critic: float, case: Case, seed: int
) -> None:
    (token,) = rows_for(case, seed)
    settings = AdvantageConfig(name="gae", gamma=0.9, gae_lambda=0.6)
    found, targets = ADVANTAGES["gae"](
        batch_of(case), tensor_of(token), settings, lam_critic=lam_critic
    )
    assert_equal(found, oracles.gae(case, token, 0.9, 0.6)[0])
    assert_equal(targets, oracles.gae(case, token, 0.9, lam_critic)[1])


@every_case()
def test_reinforce_pp_with_a_baseline_is_the_centred_reward_whitened_over_tokens(
    case: Case, seed: int
) -> None:
    found = WHITENINGS["batch"](advantages_of(case, "group_mean"), batch_of(case), 1e-6)
    assert_equal(found, oracles.reinforce_pp_baseline(case, case.rewards, unbiased=False, eps=1e-6))


# How they hang together


@every_case()
def test_opo_of_equal_lengths_is_the_mean_baseline(case: Case, seed: int) -> None:
    case.mask = [[True] + [False] * (n - 1) if n else [] for n in case.lengths]
    if all(case.lengths):
        assert_equal(advantages_of(case, "opo"), advantages_of(case, "group_mean").tolist())


@every_case()
def test_maxrl_is_grpo_times_deviation_over_mean(case: Case, seed: int) -> None:
    rewards = [abs(r) + 0.5 for r in case.rewards]
    batch = batch_of(case).replace(rewards=torch.tensor(rewards, dtype=torch.float64))
    token = tensor_of(oracles.token_rewards(case, rewards, 0.0, "k1"))
    found, _ = ADVANTAGES["maxrl"](batch, token, AdvantageConfig(name="maxrl", eps=0.0))
    grpo = oracles.grpo(case, rewards, 0.0)
    for members in case.groups().values():
        group = [rewards[j] for j in members]
        scale = oracles.deviation(group, True) / oracles.mean(group)
        for i in members:
            grpo[i] *= scale
    assert_equal(found, oracles.on_sampled(case, grpo))


@every_case()
def test_of_two_answers_all_group_methods_tell_the_same_difference(case: Case, seed: int) -> None:
    pair = {i: members for members in case.groups().values() if len(members) == 2 for i in members}
    row_of = batch_of(case).row_of
    keep = torch.tensor([int(i) in pair for i in row_of], dtype=torch.bool)
    centred = advantages_of(case, "group_mean")
    assert_equal(advantages_of(case, "rloo")[keep], (2 * centred)[keep].tolist())
    assert_equal(advantages_of(case, "pass_at_k")[keep], (2 * centred.clamp(min=0))[keep].tolist())


@every_case()
@pytest.mark.parametrize("method", list(BY_RESPONSE))
def test_the_order_of_responses_is_nothing(method: str, case: Case, seed: int) -> None:
    name, options, _ = BY_RESPONSE[method]
    order = torch.tensor(random.Random(seed).sample(range(len(case)), len(case)))
    settings = AdvantageConfig(name=name)

    def made(batch: Batch) -> Batch:
        found, _ = ADVANTAGES[name](batch, _need(batch.loss_weights), settings, **options)
        return batch.replace(advantages=found)

    batch = batch_of(case).replace(
        loss_weights=tensor_of(oracles.token_rewards(case, case.rewards, 0.0, "k1"))
    )
    before, after = made(batch).select(order), made(batch.select(order))
    assert_equal(_need(after.advantages), _need(before.advantages).tolist(), tolerance=1e-12)


def _need(column: Tensor | None) -> Tensor:
    assert column is not None
    return column
