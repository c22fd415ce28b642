"""What is carried from step to step: coefficients of KL and entropy."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.algorithms.kl import EntropyController, KLController
from lightrft.config.algorithm import AlgorithmConfig, EntropyConfig, KLConfig
from lightrft.learner.controllers import Controllers, mean_entropy
from lightrft.types import Batch
from tests.numbers.strategies import batch_of, plain_case


def batch_with(entropy: float | None) -> Batch:
    """The token that was not sampled has another entropy."""
    batch = batch_of(plain_case([[True, False], [True]], [0, 0])).replace(ref_logprobs=None)
    if entropy is None:
        return batch
    return batch.replace(entropy=torch.tensor([entropy - 0.1, 99.0, entropy + 0.1]))


def controls_of(**tree: object) -> Controllers:
    return Controllers.of(AlgorithmConfig.model_validate({"preset": None, **tree}))


@pytest.mark.parametrize(
    ("controller", "coefs"),
    [
        ("linear", [0.3, 0.2, 0.1, 0.1, 0.1]),
        ("cosine", [0.4 - 0.15 * (1 - math.cos(math.pi / 3)), None, 0.1, 0.1, 0.1]),
    ],
)
def test_a_scheduled_coefficient_goes_from_coef_to_final_and_stays(
    controller: str, coefs: list[float | None]
) -> None:
    config = KLConfig.model_validate(
        {"where": "loss", "coef": 0.4, "controller": controller, "final": 0.1, "steps": 3}
    )
    found = KLController.of(config)
    assert found.coef == 0.4
    for expected in coefs:
        found.advance()
        if expected is not None:
            assert found.coef == pytest.approx(expected, rel=1e-12)


def test_a_cosine_is_half_way_in_the_middle() -> None:
    found = KLController.of(
        KLConfig(where="loss", coef=1.0, controller="cosine", final=0.0, steps=4)
    )
    coefs = []
    for _ in range(4):
        found.advance()
        coefs.append(found.coef)
    assert coefs == pytest.approx([(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0], abs=1e-12)


def test_a_coefficient_may_start_at_zero_and_rise() -> None:
    config = KLConfig(where="loss", coef=0.0, controller="linear", final=0.2, steps=2)
    assert config.used
    found = KLController.of(config)
    found.advance()
    assert found.coef == pytest.approx(0.1)


def test_a_fixed_coefficient_stays() -> None:
    controls = controls_of(kl={"where": "loss", "coef": 0.3})
    controls.update_from_batch(batch_with(None))
    assert controls.kl.coef == 0.3


@pytest.mark.parametrize(
    ("entropy", "next_coef", "in_force"), [(0.1, 0.015, 0.01), (0.2, 0.01, 0.01), (0.3, 0.005, 0.0)]
)
def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_where_it_does_not_act(
    entropy: float, next_coef: float, in_force: float
) -> None:
    found = EntropyController.of(EntropyConfig(coef=0.01, target=0.2, rate=0.005))
    assert found.current_coef(entropy) == in_force
    found.update(entropy)
    assert found.coef == pytest.approx(next_coef)


def test_the_entropy_coefficient_never_falls_below_zero() -> None:
    found = EntropyController.of(EntropyConfig(coef=0.001, target=0.2, rate=0.005))
    found.update(5.0)
    assert found.coef == 0.0
    found.update(0.1)
    assert found.coef == pytest.approx(0.005)


def test_without_a_target_the_entropy_coefficient_is_what_was_set() -> None:
    found = EntropyController.of(EntropyConfig(coef=-0.02))
    assert found.current_coef(None) == found.current_coef(9.0) == -0.02
    found.update(9.0)
    assert found.coef == -0.02


def test_a_batch_without_entropy_moves_nothing() -> None:
    found = EntropyController.of(EntropyConfig(coef=0.01, target=0.2))
    assert found.current_coef(None) == 0.0
    found.update(None)
    assert found.coef == 0.01


def test_the_mean_entropy_is_over_the_tokens_that_were_sampled() -> None:
    assert mean_entropy(batch_with(0.5)) == pytest.approx(0.5, rel=1e-6)
    assert mean_entropy(batch_with(None)) is None
    unsampled = batch_of(plain_case([[False]], [0])).replace(entropy=torch.ones(1))
    assert mean_entropy(unsampled) is None


def test_a_step_reports_what_was_in_force_and_moves_it() -> None:
    controls = controls_of(
        entropy={"coef": 0.01, "target": 0.6, "rate": 0.002}, kl={"where": "loss", "coef": 0.3}
    )
    metrics = controls.update_from_batch(batch_with(0.5)).compute()
    assert metrics["policy/entropy_coef"] == 0.01
    assert metrics["policy/kl_coef"] == 0.3
    assert controls.entropy.coef == pytest.approx(0.012)


def test_what_a_frozen_policy_does_moves_no_coefficient() -> None:
    controls = controls_of(
        entropy={"coef": 0.01, "target": 0.6},
        kl={"where": "loss", "coef": 0.3, "controller": "adaptive", "horizon": 100},
    )
    logprobs = torch.zeros(3)
    batch = batch_with(0.5).replace(old_logprobs=logprobs, ref_logprobs=logprobs)
    assert controls.update_from_batch(batch, frozen=True).compute()["policy/entropy_coef"] == 0.01
    assert (controls.entropy.coef, controls.kl.coef) == (0.01, 0.3)
    controls.update_from_batch(batch)
    assert controls.entropy.coef > 0.01
    assert controls.kl.coef < 0.3


def test_coefficients_are_taken_up_where_they_were_left() -> None:
    tree = {
        "kl": {"where": "loss", "coef": 0.4, "controller": "linear", "final": 0.0, "steps": 4},
        "entropy": {"coef": 0.0, "target": 0.6},
    }
    through, first, second = controls_of(**tree), controls_of(**tree), controls_of(**tree)
    for entropy in (0.5, 0.4, 0.9, 0.1):
        through.update_from_batch(batch_with(entropy))
    for entropy in (0.5, 0.4):
        first.update_from_batch(batch_with(entropy))
    second.load_state_dict(first.state_dict())
    for entropy in (0.9, 0.1):
        second.update_from_batch(batch_with(entropy))
    assert second.state_dict() == through.state_dict()
    assert through.kl.coef == 0.0
    assert through.entropy.coef == pytest.approx(0.01)
