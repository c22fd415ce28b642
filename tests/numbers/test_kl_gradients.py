"""What a KL term does to a policy small enough to enumerate: the expected gradient of the whole objective, one answer per token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import Objective
from lightrft.models.actor import TokenScores
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from tests.advantage_helpers import with_advantages
from tests.numbers import distributions as dist
from tests.numbers.compare import assert_equal, gradient, tensor
from tests.numbers.strategies import SEEDS, batch_of, plain_case

COEF = 0.3
ROWS = [
    ("loss", "k2", "k2_in_loss"),
    ("loss", "k3", "k3_in_loss"),
    ("reward", "k1", "k1_in_reward"),
]


def policies(seed: int, size: int) -> tuple[list[float], list[float], list[float]]:
    """Logits of the policy, of the reference and of another sampler."""
    rng = random.Random(seed)
    now, ref, sampler = ([rng.uniform(-2, 2) for _ in range(size)] for _ in range(3))
    return now, ref, sampler


def algorithm_of(where: str, estimator: str, weighted: bool = False) -> AlgorithmConfig:
    kl = {"where": where, "estimator": estimator, "coef": COEF} | (
        {"weighted": True} if weighted else {}
    )
    return AlgorithmConfig.model_validate(
        {"preset": None, "advantage": {"name": "reinforce"}, "kl": kl, "aggregation": "token"}
    )


def expected_gradient(
    algorithm: AlgorithmConfig, logits: list[float], ref_logits: list[float], old: list[float]
) -> torch.Tensor:
    """d/d logits of the objective with all rewards 0, every outcome weighed by the probability of drawing it from ``old``."""
    size, theta = len(logits), tensor(logits).requires_grad_()
    old_logprobs = torch.log_softmax(tensor(old), 0)
    batch: Batch = batch_of(plain_case([[True]] * size, [0] * size, [0.0] * size)).replace(
        old_logprobs=old_logprobs,
        ref_logprobs=torch.log_softmax(tensor(ref_logits), 0),
        rewards=torch.zeros(size, dtype=torch.float64),
        loss_weights=old_logprobs.exp(),
    )
    config = RLConfig(algorithm=algorithm)
    batch = with_advantages(
        batch, config, Controllers.of(algorithm), Requirements.of(config.algorithm)
    )
    objective = Objective(algorithm, Requirements.of(algorithm), COEF, 0.0)
    return gradient(objective(batch, TokenScores(torch.log_softmax(theta, 0), None))[0], theta)


@pytest.mark.parametrize(("where", "estimator", "row"), ROWS, ids=[row for *_, row in ROWS])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, size=st.integers(2, 6))
def test_the_objective_pulls_where_the_table_says(
    where: str, estimator: str, row: str, seed: int, size: int
) -> None:
    logits, ref, _ = policies(seed, size)
    found = expected_gradient(algorithm_of(where, estimator), logits, ref, old=logits)
    exact = [COEF * g for g in dist.EXPECTED_KL_GRADIENT[row](logits, ref)]
    # advantages are stored in float32
    assert_equal(found, exact, tolerance=1e-6 if where == "reward" else 1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, size=st.integers(2, 6))
def test_weighed_by_the_ratio_the_estimate_pulls_along_the_reverse_kl_whoever_sampled(
    estimator: str, off_policy: bool, seed: int, size: int
) -> None:
    logits, ref, sampler = policies(seed, size)
    found = expected_gradient(
        algorithm_of("loss", estimator, True), logits, ref, old=sampler if off_policy else logits
    )
    exact = [COEF * g for g in dist.EXPECTED_KL_GRADIENT["weighted_k3_in_loss"](logits, ref)]
    assert_equal(found, exact, tolerance=1e-11)


def test_weighed_by_the_ratio_k2_pulls_along_no_kl_and_is_refused() -> None:
    logits, ref, sampler = policies(1, 4)
    found = expected_gradient(algorithm_of("loss", "k2", True), logits, ref, old=sampler)
    assert found.tolist() != pytest.approx(
        [COEF * g for g in dist.reverse_kl_gradient(logits, ref)], abs=1e-2
    )
    with pytest.raises(
        ConfigError, match="estimator k2: the ratio times k2 is an estimate of no KL"
    ):
        check_parts(algorithm_of("loss", "k2", True))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, size=st.integers(2, 6))
def test_the_drift_pulls_along_the_kl_of_old_and_new(estimator: str, seed: int, size: int) -> None:
    """On tokens of the old policy; k1 has the same expectation as k3, and more noise."""
    logits, ref, old = policies(seed, size)
    algorithm = AlgorithmConfig.model_validate(
        {
            "preset": None,
            "advantage": {"name": "reinforce"},
            "policy_drift": {"coef": COEF, "estimator": estimator},
        }
    )
    check_parts(algorithm)
    found = expected_gradient(algorithm, logits, ref, old)
    assert_equal(found, [COEF * g for g in dist.forward_kl_gradient(logits, old)], tolerance=1e-11)
