"""However far apart two policies are, loss and gradient are numbers, in the precision of training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_ops import LIMIT, clamp_log_ratio, ratio_of
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.learner.policy_update import Objective
from lightrft.models.actor import TokenScores
from lightrft.types import Batch, Segments
from tests.numbers.compare import gradient

GAPS = [-1e4, -200.0, -89.0, -60.0, -39.0, 0.0, 39.0, 60.0, 89.0, 200.0, 1e4]
WHERE = [(a, b) for a in GAPS for b in (-1e4, -50.0, 0.0, 50.0, 1e4)]
"""How far the policy is from the old one, and that from the sampler; the reference is as far on the other side."""
LEVELS = ["token", "sequence", "geometric"]
CORRECTED = [
    *(("importance", {}), ("opsm", {"delta": 0.1}), ("icepop", {})),
    *(
        ("divergence_reject", {"limit": 1.0, "level": level})
        for level in ("token", "sum", "mean", "max")
    ),
    *(("tis_normalized", {"level": level}) for level in LEVELS),
    *(
        (name, {"level": level})
        for name in ("tis", "mis", "sequence_mask", "sequence_reject")
        for level in LEVELS
    ),
    *(
        (name, {"level": level, "high": float("inf")})
        for name in ("tis", "mis", "sequence_mask")
        for level in LEVELS
    ),
]
OF_A_BATCH = ("tis_normalized",)
"""Corrections in which rows depend on one another."""
LOSSES = [
    *({"name": name} for name in POLICY_LOSSES),
    *({"ratio": r} for r in ("sequence", "sequence_token")),
    {"dual_clip": 3.0},
]
TERMS: list[dict[str, Any]] = [
    {"kl": {"where": "loss", "coef": 0.1, "estimator": e, "weighted": w}}
    for e, w in (("k2", False), ("k3", False), ("k3", True))
]
TERMS += [
    {"kl": {"where": "loss", "coef": 0.1, "estimator": "k1", "weighted": True}},
    {"policy_drift": {"coef": 0.1, "cap": 5.0}},
]
TERMS += [{"policy_drift": {"coef": 0.1, "estimator": e}} for e in ("k1", "k2", "k3")]


def far(
    policy: float, sampler: float, advantages: tuple[float, ...] = (2.0, -2.0, 0.0, 2.0, -2.0, 1.0)
) -> tuple[Batch, Tensor]:
    """Answers of three, two and one tokens in float32, and the policy's log-probs; the last answer agrees with all policies."""
    apart = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    logprobs = torch.full((6,), -1.0)
    batch = Batch(
        Segments.of([[0]]),
        Segments.of([[1, 2, 3], [4, 5], [6]]),
        torch.tensor([0, 0, 0]),
        sampled=torch.ones(6, dtype=torch.bool),
        old_logprobs=logprobs - policy * apart,
        behavior_logprobs=logprobs - (policy + sampler) * apart,
        ref_logprobs=logprobs + policy * apart,
        advantages=torch.tensor(advantages),
        loss_weights=torch.full((6,), 1 / 6, dtype=torch.float64),
    )
    return batch, logprobs


def through(tree: dict[str, Any], batch: Batch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the objective that ``tree`` describes."""
    algorithm = AlgorithmConfig.model_validate({"preset": None, **tree})
    leaf = logprobs.clone().requires_grad_()
    loss, _ = Objective(algorithm, Requirements.of(algorithm), algorithm.kl.coef, 0.0)(
        batch, TokenScores(leaf, None)
    )
    return loss, gradient(loss, leaf)


@functools.cache
def everywhere() -> tuple[Batch, Tensor]:
    """Return the batches of all of ``WHERE`` in one, and the policy's log-probs."""
    batches, logprobs = zip(*(far(policy, sampler) for policy, sampler in WHERE))
    return Batch.cat(batches), torch.cat(logprobs)


def assert_numbers(tree: dict[str, Any], **columns: Tensor) -> None:
    """Fail unless loss and gradient are finite at each of ``WHERE``.

    One batch holds them all: a loss that is not finite at one of them is not finite in the sum, and each token has a gradient of its own.
    """
    batch, logprobs = everywhere()
    loss, slope = through(
        tree,
        batch.replace(**{name: column.repeat(len(WHERE)) for name, column in columns.items()}),
        logprobs,
    )
    lost = [WHERE[int(token) // 6] for token in (~torch.isfinite(slope)).nonzero()]
    assert not lost, f"{tree}: the gradient is not finite at {lost}"
    assert torch.isfinite(loss), f"{tree}: loss {loss}"


def assert_numbers_apart(tree: dict[str, Any]) -> None:
    """Fail unless loss and gradient are finite in a batch for each of ``WHERE``."""
    for policy, sampler in WHERE:
        loss, slope = through(tree, *far(policy, sampler))
        assert torch.isfinite(loss), f"{tree}: loss {loss} at {policy, sampler}"
        assert torch.isfinite(slope).all(), f"{tree}: gradient {slope} at {policy, sampler}"


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_policy_loss_is_finite_however_far_the_policy_went(loss: dict[str, Any]) -> None:
    assert_numbers({"loss": loss})


@pytest.mark.parametrize("name", [*POLICY_LOSSES])
@pytest.mark.parametrize(("correction", "options"), CORRECTED, ids=str)
def test_every_correction_of_every_loss_is_finite_however_far_the_sampler_is(
    name: str, correction: str, options: dict[str, Any]
) -> None:
    tree = {
        "loss": {"name": name},
        "importance_sampling": [{"name": correction, "options": options}],
    }
    assert_numbers(tree)
    if correction in OF_A_BATCH and name == "importance":
        assert_numbers_apart(tree)


def test_several_corrections_that_are_all_large_are_finite_together() -> None:
    assert_numbers(
        {
            "loss": {"name": "importance"},
            "importance_sampling": ["importance", "importance", "importance"],
        }
    )


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_every_term_beside_the_policy_loss_is_finite(terms: dict[str, Any]) -> None:
    assert_numbers({"loss": {"name": "importance"}, **terms})


@pytest.mark.parametrize("name", [*POLICY_LOSSES])
def test_a_gate_of_0_leaves_nothing_of_a_token_however_far_it_is(name: str) -> None:
    shut = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    assert_numbers({"loss": {"name": name}}, token_mask=shut)
    batch, logprobs = everywhere()
    _, slope = through(
        {"loss": {"name": name}}, batch.replace(token_mask=shut.repeat(len(WHERE))), logprobs
    )
    assert not slope.view(len(WHERE), 6)[:, :5].any()


@pytest.mark.parametrize("name", [*POLICY_LOSSES])
def test_an_advantage_of_0_has_no_gradient_however_far_the_token_is(name: str) -> None:
    batch, logprobs = everywhere()
    _, slope = through(
        {"loss": {"name": name}}, batch.replace(advantages=torch.zeros_like(logprobs)), logprobs
    )
    assert not slope.any()


@pytest.mark.parametrize("gap", [41.0, 60.0, 89.0, 200.0, 1e4])
@pytest.mark.parametrize("name", ["ppo_clip", "dppo", "sapo"])
def test_a_good_token_that_has_become_far_too_likely_has_no_gradient(name: str, gap: float) -> None:
    batch, logprobs = far(gap, 0.0, (2.0,) * 6)
    assert through({"loss": {"name": name}}, batch, logprobs + 0.5)[1][:5].tolist() == [0.0] * 5


@pytest.mark.parametrize("gap", [41.0, 200.0, 1e4])
def test_what_is_too_far_from_the_reference_is_still_pulled_back(gap: float) -> None:
    below = torch.tensor([-gap], requires_grad=True)
    assert float(gradient(KL_ESTIMATORS["k3"](below, torch.zeros(1)).sum(), below)) < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_changes_inside_the_limit(dtype: torch.dtype) -> None:
    gap = torch.linspace(-LIMIT, LIMIT, 4001, dtype=dtype).requires_grad_()
    assert torch.equal(clamp_log_ratio(gap), gap)
    ratio = ratio_of(gap, torch.zeros_like(gap))
    assert torch.equal(ratio, gap.exp())
    assert torch.equal(gradient(ratio.sum(), gap), gap.exp())


def test_every_correction_is_among_those_tried() -> None:
    assert {name for name, _ in CORRECTED} == set(IS_CORRECTIONS)
