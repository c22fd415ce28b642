"""Coefficients that move from step to step against the slow loops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.kl import EntropyController, KLController
from lightrft.config.algorithm import EntropyConfig, KLConfig
from tests.numbers import oracles_rewards
from tests.numbers.strategies import SEEDS


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 12))
def test_a_linear_coefficient_goes_to_its_end_and_stays(
    start: float, end: float, steps: int
) -> None:
    config = KLConfig.model_validate(
        {"where": "loss", "coef": start, "controller": "linear", "final": end, "steps": steps}
    )
    controller = KLController.of(config)
    for step in range(steps + 3):
        assert controller.coef == pytest.approx(
            oracles_rewards.linear_kl(step, start, end, steps), rel=1e-12, abs=1e-12
        )
        controller.advance()


@settings(deadline=None)
@given(SEEDS, st.floats(0, 0.1), st.sampled_from([0.0, 0.001, 0.02]))
def test_the_entropy_coefficient_holds_a_target_from_below(
    seed: int, start: float, spread: float
) -> None:
    rng = random.Random(seed)
    config = EntropyConfig.model_validate({"coef": start, "target": 0.2, "rate": 0.005})
    controller, slow = EntropyController.of(config), start
    for _ in range(12):
        entropy = 0.2 + rng.choice([-1, 0, 1]) * spread
        weight, slow = oracles_rewards.entropy_step(slow, entropy, 0.2, 0.005)
        assert controller.current_coef(entropy) == pytest.approx(weight, rel=1e-12, abs=1e-15)
        controller.update(entropy)
        assert controller.coef == pytest.approx(slow, rel=1e-12, abs=1e-15)


def test_without_a_target_the_entropy_coefficient_is_fixed() -> None:
    controller = EntropyController.of(EntropyConfig(coef=0.3))
    controller.update(5.0)
    assert (controller.coef, controller.current_coef(5.0), controller.current_coef(None)) == (
        0.3,
        0.3,
        0.3,
    )
