"""KL estimators against the slow loops, their expected gradients by enumeration, and the adaptive coefficient."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.kl import KL_ESTIMATORS, KLController
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.reward_shaping import token_rewards
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AdvantageConfig, KLConfig, LossConfig
from tests.numbers import distributions as dist
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, gradient, tensor
from tests.numbers.oracles import Case
from tests.numbers.scalars import gradients
from tests.numbers.strategies import SEEDS, batch_of, plain_case, tensor_of


@every_case()
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_in_value_and_gradient(kind: str, case: Case, seed: int) -> None:
    mask = batch_of(case).mask
    logprobs = tensor_of(case.logprobs).requires_grad_()
    found = KL_ESTIMATORS[kind](logprobs, tensor_of(case.ref))
    slow = case.with_leaves("logprobs")
    expected = oracles.kl_rows(slow, kind)
    assert_equal(found, expected, mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(found[mask].sum(), logprobs), gradients(total, slow.logprobs))


def test_estimators_by_hand() -> None:
    # d = ln 2: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2
    d = tensor([2.0]).log()
    assert KL_ESTIMATORS["k1"](d, torch.zeros_like(d)).item() == pytest.approx(
        0.6931471805599453, rel=1e-15
    )
    assert KL_ESTIMATORS["k2"](d, torch.zeros_like(d)).item() == pytest.approx(
        0.2402265069591007, rel=1e-15
    )
    assert KL_ESTIMATORS["k3"](d, torch.zeros_like(d)).item() == pytest.approx(
        0.1931471805599453, rel=1e-14
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_distance_of_a_policy_to_itself_is_exactly_zero(kind: str) -> None:
    logprobs = torch.tensor([-0.1, -7.3, -20.0, 0.0])
    assert KL_ESTIMATORS[kind](logprobs, logprobs).tolist() == [0.0] * 4


def test_k3_is_never_negative_and_keeps_small_distances() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 1e-8, 20.0, -20.0])
    found = KL_ESTIMATORS["k3"](d, torch.zeros_like(d))
    assert (found >= 0).all()
    assert KL_ESTIMATORS["k3"](d.double(), torch.zeros_like(d).double())[
        :4
    ].tolist() == pytest.approx([5e-7, 5e-7, 5e-9, 5e-9], rel=1e-3)


def two_policies(seed: int, size: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    return [rng.uniform(-2, 2) for _ in range(size)], [rng.uniform(-2, 2) for _ in range(size)]


def expected_gradient(logits: list[float], losses: object) -> Tensor:
    """sum_y pi(y) d losses(log pi)_y / d logits, ``pi`` in front held fixed: what sampling gives on average."""
    theta = tensor(logits).requires_grad_()
    logprobs = torch.log_softmax(theta, 0)
    return gradient((logprobs.detach().exp() * losses(logprobs)).sum(), theta)  # type: ignore[operator]


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 6))
def test_expected_gradients_of_the_kl_in_the_loss(seed: int, size: int) -> None:
    logits, ref_logits = two_policies(seed, size)
    ref = torch.log_softmax(tensor(ref_logits), 0)
    for kind in ("k1", "k2", "k3"):
        found = expected_gradient(
            logits, lambda logprobs, kind=kind: KL_ESTIMATORS[kind](logprobs, ref)
        )
        assert_equal(
            found, dist.EXPECTED_KL_GRADIENT[f"{kind}_in_loss"](logits, ref_logits), tolerance=1e-12
        )


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 6))
def test_the_expected_gradient_of_k1_in_the_reward_is_that_of_the_reverse_kl(
    seed: int, size: int
) -> None:
    """All the way: token rewards, returns, the clipped surrogate on policy, over one answer of each token."""
    logits, ref_logits = two_policies(seed, size)
    batch = batch_of(plain_case([[True]] * size, [0] * size, [0.0] * size))
    batch = batch.replace(
        old_logprobs=torch.log_softmax(tensor(logits), 0),
        ref_logprobs=torch.log_softmax(tensor(ref_logits), 0),
        rewards=torch.zeros(size, dtype=torch.float64),
    )
    rewards = token_rewards(batch, "k1", 0.3)
    advantages, _ = ADVANTAGES["reinforce"](batch, rewards, AdvantageConfig(name="reinforce"))
    found = expected_gradient(
        logits,
        lambda lp: POLICY_LOSSES["ppo_clip"](
            lp, batch.old_logprobs, advantages, TokenRows.of(batch), LossConfig()
        )[0],
    )
    exact = [0.3 * g for g in dist.EXPECTED_KL_GRADIENT["k1_in_reward"](logits, ref_logits)]
    assert_equal(found, exact, tolerance=1e-12)


@settings(deadline=None)
@given(
    st.floats(0, 1),
    st.floats(-5, 50),
    st.floats(0.1, 10),
    st.integers(0, 5000),
    st.integers(1, 20_000),
)
def test_the_adaptive_coefficient(
    coef: float, current: float, target: float, samples: int, horizon: int
) -> None:
    controller = KLController.of(
        KLConfig(where="reward", coef=coef, controller="adaptive", target=target, horizon=horizon)
    )
    expected = coef
    for _ in range(3):
        controller.update(current, samples)
        expected = oracles.adaptive_kl(expected, current, target, samples, horizon)
        assert controller.coef == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_adaptive_coefficient_by_hand() -> None:
    # KL 9 against 6: error 1/2, clipped to 0.2; 100 of 1000 samples: 0.1 * 1.02. Then 5.4: error -0.1: * 0.99
    controller = KLController.of(
        KLConfig(where="reward", coef=0.1, controller="adaptive", target=6.0, horizon=1000)
    )
    controller.update(9.0, 100)
    assert controller.coef == pytest.approx(0.102, rel=1e-12)
    controller.update(5.4, 100)
    assert controller.coef == pytest.approx(0.10098, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    controller = KLController.of(KLConfig(where="loss", coef=0.1))
    controller.update(99.0, 100)
    assert controller.coef == 0.1
