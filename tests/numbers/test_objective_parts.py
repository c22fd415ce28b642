"""The objective with corrections, token masks and pulls: what they do to loss and gradient of the global batch, from the slow loops."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.requirements import Requirements
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.learner.policy_update import Objective
from lightrft.types import Batch
from tests.numbers import oracles, oracles_corrections, oracles_losses, oracles_token_masks
from tests.numbers.compare import assert_equal, every_case, rows_for, scores_for
from tests.numbers.oracles import Case, Mask
from tests.numbers.scalars import Rows, gradients, number
from tests.numbers.strategies import tensor_of
from tests.numbers.test_objective import prepared, through

LIMIT = 7


def algorithm_of(aggregation: str, **parts: object) -> AlgorithmConfig:
    loss = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
    tree = {"preset": None, "loss": loss, "aggregation": aggregation, "constant_length": LIMIT}
    return AlgorithmConfig.model_validate({**tree, **parts})


def assert_objective(
    batch: Batch,
    case: Case,
    algorithm: AlgorithmConfig,
    slow: Case,
    rows: Rows,
    kl_coef: float = 0.0,
) -> None:
    """The whole batch gives the aggregate of ``rows``, in value and gradient."""
    everything = [torch.arange(len(batch))]
    loss, found, _ = through(
        batch,
        everything,
        tensor_of(case.logprobs),
        Objective(algorithm, Requirements.of(algorithm), kl_coef, 0.0),
    )
    expected = oracles.aggregate(slow, rows, algorithm.aggregation, LIMIT)
    assert loss.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(found, gradients(expected, slow.logprobs))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("cap", [None, 0.5, 4.0])
@every_case(examples=25, max_gap=5.0)
def test_cpgd_with_its_drift(cap: float | None, aggregation: str, case: Case, seed: int) -> None:
    loss, drift = {"name": "cpgd", "clip_low": 0.2, "clip_high": 0.3}, {"coef": 0.6, "cap": cap}
    algorithm = algorithm_of(aggregation, loss=loss, policy_drift=drift)
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    expected = oracles_losses.cpgd_with_drift(slow, advantages, 0.2, 0.3, 0.6, cap)
    assert_objective(prepared(case, seed, algorithm), case, algorithm, slow, expected)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_kl_weighed_by_the_ratio(aggregation: str, kind: str, case: Case, seed: int) -> None:
    kl = {"where": "loss", "estimator": kind, "coef": 0.3, "weighted": True}
    algorithm = algorithm_of(aggregation, kl=kl)
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    plain, distance = (
        oracles.ppo(slow, advantages, 0.2, 0.28),
        oracles.kl_rows(slow, kind, weighted=True),
    )
    expected = [
        [a + 0.3 * b for a, b in zip(*both, strict=True)]
        for both in zip(plain, distance, strict=True)
    ]
    assert_objective(prepared(case, seed, algorithm), case, algorithm, slow, expected, kl_coef=0.3)


@pytest.mark.parametrize("threshold", [0.5, 1.0])
@every_case(examples=40, max_gap=5.0)
def test_vapo_adds_the_likelihood_of_right_answers(threshold: float, case: Case, seed: int) -> None:
    algorithm = algorithm_of("token", positive_nll={"coef": 0.1, "threshold": threshold})
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    outcomes = torch.tensor(case.rewards, dtype=torch.float64)
    batch = prepared(case, seed, algorithm, outcomes=outcomes)
    loss, found, _ = through(
        batch,
        [torch.arange(len(batch))],
        tensor_of(case.logprobs),
        Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0),
    )
    right = [r >= threshold for r in case.rewards]
    expected = oracles_losses.whole_loss(slow, oracles.ppo(slow, advantages, 0.2, 0.28), right, 0.1)
    assert loss.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(found, gradients(expected, slow.logprobs))


def bits(mask: Mask) -> torch.Tensor:
    return torch.tensor([float(kept) for row in mask for kept in row], dtype=torch.float64)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_correction_multiplies_the_losses_of_tokens_and_carries_no_gradient(
    aggregation: str, case: Case, seed: int
) -> None:
    algorithm = algorithm_of(
        aggregation, importance_sampling=[{"name": "tis", "options": {"high": 2.0}}]
    )
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    weights, plain = (
        oracles_corrections.truncated(case, "token", 2.0),
        oracles.ppo(slow, advantages, 0.2, 0.28),
    )
    expected = [
        [w * x for w, x in zip(*both, strict=True)] for both in zip(weights, plain, strict=True)
    ]
    assert_objective(prepared(case, seed, algorithm), case, algorithm, slow, expected)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_gate_takes_loss_and_gradient_away_but_not_the_denominator(
    aggregation: str, case: Case, seed: int
) -> None:
    algorithm = algorithm_of(aggregation)
    kept = oracles_token_masks.top_entropy(case, rows_for(case, seed)[0], 0.4)
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    expected = oracles_losses.gated(slow, oracles.ppo(slow, advantages, 0.2, 0.28), kept)
    assert_objective(
        prepared(case, seed, algorithm).replace(token_mask=bits(kept)),
        case,
        algorithm,
        slow,
        expected,
    )


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_pull_is_the_distance_to_the_old_log_prob_on_the_chosen_tokens(
    aggregation: str, case: Case, seed: int
) -> None:
    # No clip: the plain weighted gradient.
    loss = {
        "name": "ppo_clip",
        "clip_low": 1e9,
        "clip_high": 1e9,
    }
    algorithm = algorithm_of(aggregation, loss=loss)
    slow, advantages = (
        case.with_leaves("logprobs"),
        oracles.on_sampled(case, scores_for(case, seed)),
    )
    chosen = oracles_token_masks.kl_cov_chosen(case, advantages, 0.3)
    expected = oracles_losses.kl_cov(slow, advantages, 0.7, chosen)
    assert_objective(
        prepared(case, seed, algorithm).replace(pull=0.7 * bits(chosen)),
        case,
        algorithm,
        slow,
        expected,
    )
