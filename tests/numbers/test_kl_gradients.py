"""What a KL term does to a policy small enough to enumerate: the expected gradient of the whole objective, one answer per token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config import AlgorithmConfig, RLConfig
from lightrft.models.actor import Scores
from lightrft.trainer.controls import Controls
from lightrft.trainer.ppo import with_advantages
from lightrft.trainer.update import Objective
from lightrft.types import Batch
from tests.numbers import distributions as dist
from tests.numbers.compare import assert_equal, gradient, tensor
from tests.numbers.strategies import SEEDS, batch_of, plain_case

COEF = 0.3
ROWS = [("loss", "k2", "k2_in_loss"), ("loss", "k3", "k3_in_loss"), ("reward", "k1", "k1_in_reward")]


def policies(seed: int, size: int) -> tuple[list[float], list[float], list[float]]:
    """Logits of the policy, of the reference and of another sampler."""
    rng = random.Random(seed)
    now, ref, sampler = ([rng.uniform(-2, 2) for _ in range(size)] for _ in range(3))
    return now, ref, sampler


def algorithm_of(where: str, estimator: str) -> AlgorithmConfig:
    kl = {"where": where, "estimator": estimator, "coef": COEF}
    return AlgorithmConfig.model_validate({"preset": None, "advantage": {"name": "reinforce"}, "kl": kl, "aggregation": "token"})


def expected_gradient(algorithm: AlgorithmConfig, logits: list[float], ref_logits: list[float], old: list[float]) -> torch.Tensor:
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
    batch = with_advantages(batch, config, Controls.of(algorithm))
    objective = Objective.of(algorithm, Controls.of(algorithm))
    return gradient(objective(batch, Scores(torch.log_softmax(theta, 0), None))[0], theta)


@pytest.mark.parametrize(("where", "estimator", "row"), ROWS, ids=[row for *_, row in ROWS])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, size=st.integers(2, 6))
def test_the_objective_pulls_where_the_table_says(where: str, estimator: str, row: str, seed: int, size: int) -> None:
    logits, ref, _ = policies(seed, size)
    found = expected_gradient(algorithm_of(where, estimator), logits, ref, old=logits)
    exact = [COEF * g for g in dist.EXPECTED_KL_GRADIENT[row](logits, ref)]
    # advantages are stored in float32
    assert_equal(found, exact, tolerance=1e-6 if where == "reward" else 1e-12)
