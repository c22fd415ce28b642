"""The controller of the KL coefficient, and estimators at the edges of their range."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.kl import KL_ESTIMATORS, KLController
from lightrft.config.algorithm import KLConfig


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (7.2, 1.02), (600.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_samples_over_horizon(
    kl: float, factor: float
) -> None:
    controller = KLController.of(
        KLConfig(where="reward", coef=0.1, controller="adaptive", target=6.0, horizon=1000)
    )
    controller.update(kl, 100)
    assert controller.coef == pytest.approx(0.1 * factor, rel=1e-12)


def test_the_configured_coefficient_stays_what_it_was() -> None:
    config = KLConfig(where="reward", coef=0.1, controller="adaptive")
    controller = KLController.of(config)
    controller.update(60.0, 5000)
    assert controller.coef > 0.1
    assert config.coef == 0.1


def test_signs_of_the_estimators() -> None:
    d = torch.tensor([-20.0, -1.0, 1.0, 20.0])
    zero = torch.zeros_like(d)
    assert (KL_ESTIMATORS["k1"](d, zero) < 0).tolist() == [True, True, False, False]
    assert (KL_ESTIMATORS["k2"](d, zero) > 0).all()
    assert (KL_ESTIMATORS["k3"](d, zero) > 0).all()


def test_estimators_differentiate_the_policy_alone() -> None:
    for name in KL_ESTIMATORS:
        policy, reference = torch.zeros(1, requires_grad=True), torch.tensor([-0.5])
        KL_ESTIMATORS[name](policy, reference).sum().backward()
        assert policy.grad is not None
        assert policy.grad.item() > 0
