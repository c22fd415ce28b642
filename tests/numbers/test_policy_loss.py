"""The clipped surrogate and the value loss against the slow loops, in value and gradient; where clipping acts and where not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.policy_losses import POLICY_LOSSES, value_loss
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for, tensor
from tests.numbers.oracles import Case
from tests.numbers.scalars import gradients
from tests.numbers.strategies import batch_of, tensor_of

CLIPS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 3.0), (0.0, 0.0, None), (0.9, 5.0, 1.5)]


def clip_loss(
    case: Case, logprobs: Tensor, advantages: Tensor, **clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    return POLICY_LOSSES["ppo_clip"](
        logprobs,
        tensor_of(case.old),
        advantages,
        TokenRows.of(batch_of(case)),
        LossConfig(name="ppo_clip", **clip),
    )


@every_case()
@pytest.mark.parametrize(("low", "high", "dual"), CLIPS)
def test_the_clipped_surrogate(
    low: float, high: float, dual: float | None, case: Case, seed: int
) -> None:
    (advantages,) = rows_for(case, seed)
    mask = batch_of(case).mask
    logprobs = tensor_of(case.logprobs).requires_grad_()
    losses, _ = clip_loss(
        case, logprobs, tensor_of(advantages), clip_low=low, clip_high=high, dual_clip=dual
    )
    slow = case.with_leaves("logprobs")
    expected = oracles.ppo(slow, advantages, low, high, dual)
    assert_equal(losses, expected, mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(losses[mask].sum(), logprobs), gradients(total, slow.logprobs))


@every_case()
@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_value_loss(clip: float | None, case: Case, seed: int) -> None:
    old, returns = rows_for(case, seed, 2)
    mask = batch_of(case).mask
    values = tensor_of(case.values).requires_grad_()
    losses = value_loss(values, tensor_of(old), tensor_of(returns), clip)
    slow = case.with_leaves("values")
    expected = oracles.value_loss(slow, old, returns, clip)
    assert_equal(losses, expected, mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(losses[mask].sum(), values), gradients(total, slow.values))


@every_case()
@pytest.mark.parametrize(("low", "high", "dual"), CLIPS)
def test_on_policy_the_ratio_is_one_nothing_is_clipped_and_the_gradient_is_minus_the_advantage(
    low: float, high: float, dual: float | None, case: Case, seed: int
) -> None:
    (advantages,) = rows_for(case, seed)
    case.old = case.logprobs
    logprobs = tensor_of(case.logprobs).requires_grad_()
    losses, stats = clip_loss(
        case, logprobs, tensor_of(advantages), clip_low=low, clip_high=high, dual_clip=dual
    )
    assert stats["ratio"].tolist() == [1.0] * len(losses)
    assert stats["clip_fraction"].tolist() == [0.0] * len(losses)
    assert gradient(losses.sum(), logprobs).tolist() == [-a for row in advantages for a in row]


def test_on_policy_the_gradient_is_the_policy_gradient_of_a_softmax_bandit() -> None:
    # d/d logit_j of -A log pi_y = A (pi_j - [j = y])
    logits = tensor([0.3, -1.2, 0.7]).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    advantages = tensor([2.0, -1.0, 0.5])
    rows = TokenRows(
        torch.arange(3),
        torch.ones(3, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.ones(3, dtype=torch.bool),
    )
    losses, _ = POLICY_LOSSES["ppo_clip"](
        logprobs, logprobs.detach(), advantages, rows, LossConfig()
    )
    pi = logprobs.detach().exp().tolist()
    expected = [
        sum(a * (pi[j] - (j == y)) for y, a in enumerate([2.0, -1.0, 0.5])) for j in range(3)
    ]
    assert_equal(gradient(losses.sum(), logits), expected, tolerance=1e-12)


# ratio, advantage, gradient with respect to the log-prob (0 where clipping acts), clip 0.2 / 0.3, dual clip 3
REGIONS = [
    (1.5, 2.0, 0.0),  # up, pushed up: held
    (1.5, -2.0, 3.0),  # up, pushed down: r |A|
    (0.5, 2.0, -1.0),  # down, pushed up: -r A
    (0.5, -2.0, 0.0),  # down, pushed down: held
    (1.25, 2.0, -2.5),  # inside the upper bound
    (1.25, -2.0, 2.5),
    (0.85, -2.0, 1.7),  # inside the lower bound
    (4.0, -2.0, 0.0),  # beyond the dual bound
    (4.0, 2.0, 0.0),
    (2.9, -2.0, 5.8),  # just inside the dual bound
    (4.0, 0.0, 0.0),
]


def surrogate(logprob: float, advantage: float, dual: float | None) -> tuple[float, float, float]:
    """Loss, gradient, whether held, at an old probability of 1."""
    x = tensor([logprob]).requires_grad_()
    rows = TokenRows(
        torch.zeros(1, dtype=torch.long),
        torch.ones(1, dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
        torch.tensor([True]),
    )
    settings = LossConfig(clip_low=0.2, clip_high=0.3, dual_clip=dual)
    losses, stats = POLICY_LOSSES["ppo_clip"](x, tensor([0.0]), tensor([advantage]), rows, settings)
    return losses.item(), gradient(losses.sum(), x).item(), stats["clip_fraction"].item()


@pytest.mark.parametrize(("ratio", "advantage", "expected"), REGIONS)
def test_the_gradient_is_zero_exactly_where_clipping_acts(
    ratio: float, advantage: float, expected: float
) -> None:
    _, found, held = surrogate(math.log(ratio), advantage, dual=3.0)
    assert found == pytest.approx(expected, abs=1e-12)
    assert (found == 0.0) == (expected == 0.0)
    assert held == float(expected == 0.0 and advantage != 0)


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("ratio", "advantage", "expected"), REGIONS)
def test_the_gradient_is_that_of_finite_differences(
    ratio: float, advantage: float, expected: float, dual: float | None
) -> None:
    x, h = math.log(ratio), 1e-6
    slope = (surrogate(x + h, advantage, dual)[0] - surrogate(x - h, advantage, dual)[0]) / (2 * h)
    assert surrogate(x, advantage, dual)[1] == pytest.approx(slope, abs=1e-6)


def test_without_a_dual_bound_a_large_ratio_keeps_its_gradient() -> None:
    assert surrogate(math.log(4.0), -2.0, None)[1] == pytest.approx(8.0)
    assert surrogate(math.log(4.0), -2.0, None)[0] == pytest.approx(8.0)
    assert surrogate(math.log(4.0), -2.0, 3.0)[0] == 6.0
