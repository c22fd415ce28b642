"""The objective with corrections, gates and pulls: what they do to loss and gradient of the global batch, from the slow loops."""

from __future__ import annotations

import pytest
import torch

from lightrft.config import AlgorithmConfig
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.update import Objective
from lightrft.types import Batch
from tests.numbers import oracles, oracles_corrections, oracles_gates, oracles_losses
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


def assert_objective(batch: Batch, case: Case, algorithm: AlgorithmConfig, slow: Case, rows: Rows) -> None:
    """The whole batch gives the aggregate of ``rows``, in value and gradient."""
    everything = [torch.arange(len(batch))]
    loss, found, _ = through(batch, everything, tensor_of(case.logprobs), Objective(algorithm, 0.0, 0.0))
    expected = oracles.aggregate(slow, rows, algorithm.aggregation, LIMIT)
    assert loss.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(found, gradients(expected, slow.logprobs))


def bits(mask: Mask) -> torch.Tensor:
    return torch.tensor([float(kept) for row in mask for kept in row], dtype=torch.float64)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_correction_multiplies_the_losses_of_tokens_and_carries_no_gradient(aggregation: str, case: Case, seed: int) -> None:
    algorithm = algorithm_of(aggregation, corrections=[{"name": "tis", "options": {"high": 2.0}}])
    slow, advantages = case.with_leaves("logprobs"), oracles.on_sampled(case, scores_for(case, seed))
    weights, plain = oracles_corrections.truncated(case, "token", 2.0), oracles.ppo(slow, advantages, 0.2, 0.28)
    expected = [[w * x for w, x in zip(*both, strict=True)] for both in zip(weights, plain, strict=True)]
    assert_objective(prepared(case, seed, algorithm), case, algorithm, slow, expected)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_gate_takes_loss_and_gradient_away_but_not_the_denominator(aggregation: str, case: Case, seed: int) -> None:
    algorithm = algorithm_of(aggregation)
    kept = oracles_gates.top_entropy(case, rows_for(case, seed)[0], 0.4)
    slow, advantages = case.with_leaves("logprobs"), oracles.on_sampled(case, scores_for(case, seed))
    expected = oracles_losses.gated(slow, oracles.ppo(slow, advantages, 0.2, 0.28), kept)
    assert_objective(prepared(case, seed, algorithm).replace(gate=bits(kept)), case, algorithm, slow, expected)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=25, max_gap=5.0)
def test_a_pull_is_the_distance_to_the_old_log_prob_on_the_chosen_tokens(aggregation: str, case: Case, seed: int) -> None:
    loss = {"name": "ppo_clip", "clip_low": 1e9, "clip_high": 1e9}  # no clip: the plain weighted gradient
    algorithm = algorithm_of(aggregation, loss=loss)
    slow, advantages = case.with_leaves("logprobs"), oracles.on_sampled(case, scores_for(case, seed))
    chosen = oracles_gates.kl_cov_chosen(case, advantages, 0.3)
    expected = oracles_losses.kl_cov(slow, advantages, 0.7, chosen)
    assert_objective(prepared(case, seed, algorithm).replace(pull=0.7 * bits(chosen)), case, algorithm, slow, expected)
