"""The terms of the objective beside the policy loss, and which rows they reach."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.requirements import Requirements
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import Objective, old_logprobs, with_loss_weights
from lightrft.models.actor import TokenScores
from lightrft.types import Batch
from tests.numbers.strategies import batch_of, plain_case

# Seven tokens, the fourth of them not sampled.
SHAPE = [
    [True, True],
    [True, False],
    [True, True, True],
]
OLD = math.log(0.25)


def algorithm_of(**tree: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": None, "loss": {"name": "importance"}, **tree})


def batch_for(algorithm: AlgorithmConfig, advantage: float = 0.0, **columns: Any) -> Batch:
    """Old probabilities of a quarter, one advantage for every token."""
    batch = batch_of(plain_case(SHAPE, [0, 0, 1])).replace(ref_logprobs=None)
    old = torch.full((7,), OLD, dtype=torch.float64)
    fixed = {
        "old_logprobs": old,
        "behavior_logprobs": old,
        "advantages": torch.full((7,), advantage, dtype=torch.float64),
    }
    return with_loss_weights(
        batch.replace(**{**fixed, **columns}), algorithm, RLConfig().sampling.max_new_tokens
    )


def slopes(
    algorithm: AlgorithmConfig, batch: Batch, ratio: float = 1.0, objective: Objective | None = None
) -> list[float]:
    """d loss / d log-prob of each token, the policy's ratio to the old one being ``ratio`` everywhere."""
    logprobs = torch.full((7,), OLD + math.log(ratio), dtype=torch.float64, requires_grad=True)
    objective = objective or Objective(
        algorithm, Requirements.of(algorithm), algorithm.kl.coef, 0.0
    )
    loss, _ = objective(batch, TokenScores(logprobs))
    (found,) = torch.autograd.grad(loss, logprobs)
    return found.tolist()


def test_the_likelihood_of_positive_answers_is_a_mean_over_their_tokens() -> None:
    algorithm = algorithm_of(positive_nll={"coef": 0.4, "threshold": 1.0})
    batch = batch_for(algorithm, outcomes=torch.tensor([0.9, 1.0, 2.0]))
    assert slopes(algorithm, batch) == pytest.approx([0, 0, -0.1, 0, -0.1, -0.1, -0.1])


def test_the_outcome_counts_and_not_what_shaping_made_of_it() -> None:
    algorithm = algorithm_of(positive_nll={"coef": 1.0})
    batch = batch_for(
        algorithm, outcomes=torch.tensor([1.0, 0.0, 0.0]), rewards=torch.tensor([0.0, 5.0, 5.0])
    )
    assert batch.positive_weights is not None
    assert batch.positive_weights.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]


def test_without_positive_answers_there_is_no_likelihood_and_no_nan() -> None:
    algorithm = algorithm_of(positive_nll={"coef": 1.0})
    batch = batch_for(algorithm, outcomes=torch.zeros(3))
    assert slopes(algorithm, batch) == [0.0] * 7
    assert Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0).active(batch).tolist() == []


def test_positive_answers_are_run_though_their_advantage_is_zero() -> None:
    algorithm = algorithm_of(positive_nll={"coef": 1.0})
    batch = batch_for(algorithm, outcomes=torch.tensor([0.0, 1.0, 0.0]))
    assert Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0).active(batch).tolist() == [1]


@pytest.mark.parametrize(
    ("drift", "ratio", "slope"),
    [
        ({"coef": 0.6}, 3.0, 2.0),
        ({"coef": 0.6}, 0.5, -0.5),
        ({"coef": 0.6, "cap": 0.5}, 3.0, 0.5),
        ({"coef": 0.6, "cap": 0.5}, 0.5, -0.5),
        ({"coef": 0.6, "estimator": "k2"}, math.e, 1.0),
        ({"coef": 0.6}, 1.0, 0.0),
    ],
)
def test_the_drift_pulls_back_to_the_old_policy(
    drift: dict[str, Any], ratio: float, slope: float
) -> None:
    algorithm = algorithm_of(policy_drift=drift)
    expected = [0.1 * slope] * 7
    expected[3] = 0.0
    assert slopes(algorithm, batch_for(algorithm), ratio) == pytest.approx(expected, abs=1e-15)


def test_a_drift_reaches_rows_without_advantage_once_there_is_an_old_policy() -> None:
    algorithm = algorithm_of(policy_drift={"coef": 0.1})
    objective = Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0)
    assert objective.active(batch_for(algorithm)).tolist() == [0, 1, 2]
    assert objective.active(batch_for(algorithm, old_logprobs=None)).tolist() == []


@pytest.mark.parametrize(("estimator", "reached"), [("k1", [0, 1, 2]), ("k2", []), ("k3", [])])
def test_a_drift_leaves_no_row_out_whose_gradient_it_has(
    estimator: str, reached: list[int]
) -> None:
    algorithm = algorithm_of(policy_drift={"coef": 0.6, "estimator": estimator})
    batch = batch_for(algorithm, old_logprobs=None)
    assert (
        Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0).active(batch).tolist() == reached
    )
    assert (slopes(algorithm, batch) != [0.0] * 7) == bool(reached)


def test_rows_that_a_gate_leaves_out_are_not_run() -> None:
    algorithm = algorithm_of()
    batch = batch_for(algorithm, advantage=1.0).replace(
        token_mask=torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    )
    assert Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0).active(batch).tolist() == [1]
    assert slopes(algorithm, batch) == pytest.approx([0, 0, -1 / 6, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("estimator", "weighted_by_ratio", "slope"),
    # ratio 2, reference 1/2 of the policy: d = ln 2; r k, derivative r (k + k')
    [
        ("k3", False, 0.5),
        ("k3", True, 2 * (0.5 - 1 + math.log(2) + 0.5)),
        ("k1", True, 2 * (math.log(2) + 1)),
    ],
)
def test_the_kl_is_weighted_by_the_ratio_and_its_gradient(
    estimator: str, weighted_by_ratio: bool, slope: float
) -> None:
    algorithm = algorithm_of(
        kl={"where": "loss", "estimator": estimator, "coef": 0.6, "weighted": weighted_by_ratio}
    )
    batch = batch_for(algorithm, ref_logprobs=torch.full((7,), OLD, dtype=torch.float64))
    expected = [0.1 * slope] * 7
    expected[3] = 0.0
    assert slopes(algorithm, batch, 2.0) == pytest.approx(expected)


def old_of(proximal: str, **columns: Any) -> Tensor:
    algorithm = algorithm_of(old_logprobs=proximal)
    batch = batch_for(
        algorithm, old_logprobs=None, versions=torch.tensor([3, 3, 2, 2, 0, 0, 0]), **columns
    )
    return old_logprobs(batch, torch.full((7,), OLD + 4, requires_grad=True), proximal, 3)


def test_between_sampler_and_policy_by_the_version_of_each_token() -> None:
    found = old_of("interpolated")
    assert found.tolist() == pytest.approx([OLD + x for x in (0, 0, 2, 2, 3, 3, 3)], rel=1e-6)
    assert not found.requires_grad
    assert old_of("policy").tolist() == pytest.approx([OLD + 4] * 7, rel=1e-6)


def test_the_interpolated_policy_is_weighed_against_the_sampler() -> None:
    """Decoupled: pi / pi_prox * pi_prox / mu = pi / mu, whatever lies between, as long as nothing is clipped."""
    algorithm = algorithm_of(old_logprobs="interpolated", importance_sampling=["importance"])
    versions = torch.tensor([3, 3, 2, 2, 0, 0, 0])
    batch = batch_for(algorithm, advantage=1.0, old_logprobs=None, versions=versions)
    expected = [-3.0 / 6] * 7
    expected[3] = 0.0
    found = slopes(
        algorithm, batch, 3.0, Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0, version=3)
    )
    assert found == pytest.approx(expected)


def test_the_entropy_bonus_is_that_of_the_batch_at_hand() -> None:
    algorithm = algorithm_of(entropy={"coef": 0.01, "target": 0.5})
    controls, batch = Controllers.of(algorithm), batch_for(algorithm)
    low, high = (batch.replace(entropy=torch.full((7,), h)) for h in (0.4, 0.6))
    assert Objective.of(algorithm, Requirements.of(algorithm), controls, low).entropy_coef == 0.01
    assert Objective.of(algorithm, Requirements.of(algorithm), controls, high).entropy_coef == 0.0
    assert Objective.of(algorithm, Requirements.of(algorithm), controls, batch).entropy_coef == 0.0


def test_an_objective_takes_the_coefficient_of_the_step() -> None:
    algorithm = algorithm_of(kl={"where": "loss", "coef": 0.4, "controller": "linear", "steps": 2})
    controls = Controllers.of(algorithm)
    controls.kl.advance()
    objective = Objective.of(algorithm, Requirements.of(algorithm), controls, None, 7)
    assert (objective.kl_coef, objective.version) == (0.2, 7)
    controls.kl.advance()
    assert not Objective.of(algorithm, Requirements.of(algorithm), controls).wants_kl
