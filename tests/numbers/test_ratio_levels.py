"""The clipped surrogate with ratios of whole responses, and with a cap on the ratio, against the slow loops of their papers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for, scores_for
from tests.numbers.oracles import Case
from tests.numbers.oracles_losses import luspo
from tests.numbers.scalars import Rows as Ragged
from tests.numbers.scalars import gradients, number
from tests.numbers.strategies import batch_of, tensor_of

BOUNDS = [(0.2, 0.28), (3e-4, 4e-4), (0.0, 0.0), (0.9, 5.0)]


def surrogate(case: Case, advantages: Ragged, **settings: object) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, the log-probs that they hang on, and what is sampled."""
    logprobs, batch = tensor_of(case.logprobs).requires_grad_(), batch_of(case)
    config = LossConfig.model_validate({"name": "ppo_clip", **settings})
    losses, _ = POLICY_LOSSES["ppo_clip"](
        logprobs, tensor_of(case.old), tensor_of(advantages), TokenRows.of(batch), config
    )
    return losses, logprobs, batch.mask


def assert_rows(found: tuple[Tensor, Tensor, Tensor], slow: Case, expected: Ragged) -> None:
    """Equal at every sampled token, and in the gradient of the sum over them."""
    losses, logprobs, mask = found
    assert_equal(losses, expected, mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(losses[mask].sum(), logprobs), gradients(total, slow.logprobs))


@every_case()
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_gspo(low: float, high: float, case: Case, seed: int) -> None:
    scores, slow = scores_for(case, seed), case.with_leaves("logprobs")
    found = surrogate(
        case, oracles.on_sampled(case, scores), ratio="sequence", clip_low=low, clip_high=high
    )
    assert_rows(found, slow, oracles.gspo(slow, scores, low, high))


@every_case()
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_gspo_by_token_with_advantages_of_tokens(
    low: float, high: float, case: Case, seed: int
) -> None:
    (advantages,), slow = rows_for(case, seed), case.with_leaves("logprobs")
    found = surrogate(case, advantages, ratio="sequence_token", clip_low=low, clip_high=high)
    assert_rows(found, slow, oracles.gspo_token(slow, advantages, low, high))


@every_case()
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_both_forms_of_gspo_have_one_gradient_when_a_response_has_one_advantage(
    low: float, high: float, case: Case, seed: int
) -> None:
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    weights = AGGREGATIONS["sequence"](TokenRows.of(batch_of(case)), 1)
    found = []
    for ratio in ("sequence", "sequence_token"):
        losses, logprobs, mask = surrogate(
            case, advantages, ratio=ratio, clip_low=low, clip_high=high
        )
        found.append(gradient((losses * weights)[mask].sum(), logprobs))
    assert_equal(found[0], found[1].tolist())


@every_case()
def test_luspo_is_gspo_summed_over_the_tokens(case: Case, seed: int) -> None:
    scores, slow = scores_for(case, seed), case.with_leaves("logprobs")
    found = surrogate(
        case, oracles.on_sampled(case, scores), ratio="sequence", clip_low=2e-3, clip_high=2.5e-3
    )
    losses, logprobs, mask = found
    total = (losses * AGGREGATIONS["sequence_sum"](TokenRows.of(batch_of(case)), 1))[mask].sum()
    expected = luspo(slow, scores, 2e-3, 2.5e-3)
    assert total.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(gradient(total, logprobs), gradients(expected, slow.logprobs))


@every_case()
@pytest.mark.parametrize(
    ("low", "high", "dual", "cap"),
    [(0.2, 0.28, None, 4.0), (0.2, 0.2, 3.0, 10.0), (0.0, 0.0, None, 1.5)],
)
def test_a_cap_on_the_ratio(
    low: float, high: float, dual: float | None, cap: float, case: Case, seed: int
) -> None:
    (advantages,), slow = rows_for(case, seed), case.with_leaves("logprobs")
    found = surrogate(case, advantages, clip_low=low, clip_high=high, dual_clip=dual, ratio_cap=cap)
    assert_rows(found, slow, oracles.ppo(slow, advantages, low, high, dual, cap))


@every_case()
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
def test_a_response_of_one_token_has_one_ratio_at_every_level(
    ratio: str, case: Case, seed: int
) -> None:
    case.mask = [[m and not any(row[:t]) for t, m in enumerate(row)] for row in case.mask]
    advantages, slow = (
        oracles.on_sampled(case, scores_for(case, seed)),
        case.with_leaves("logprobs"),
    )
    found = surrogate(case, advantages, ratio=ratio, clip_low=0.2, clip_high=0.28)
    assert_rows(found, slow, oracles.ppo(slow, advantages, 0.2, 0.28))


@every_case()
@pytest.mark.parametrize("ratio", ["sequence", "sequence_token"])
def test_on_policy_every_level_has_the_plain_policy_gradient(
    ratio: str, case: Case, seed: int
) -> None:
    case.old = case.logprobs
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    losses, logprobs, mask = surrogate(case, advantages, ratio=ratio, clip_low=3e-4, clip_high=4e-4)
    found = gradient(losses[mask].sum(), logprobs)
    assert_equal(found, [-a for row in advantages for a in row], tolerance=1e-12)


def by_hand(
    ratios: Sequence[float], a: float, **settings: object
) -> tuple[list[float], list[float]]:
    n = len(ratios)
    case = Case(
        [n],
        [0],
        [[True] * n],
        [[math.log(r) for r in ratios]],
        *([[[0.0] * n]] * 4),
        rewards=[0.0],
        truncated=[False],
        final_values=[0.0],
    )
    losses, logprobs, _ = surrogate(case, [[a] * n], **settings)
    return losses.tolist(), gradient(losses.mean(), logprobs).tolist()


def test_gspo_by_hand() -> None:
    # ratios 2 and 8: geometric mean 4; A = -1: loss 4 at both tokens, gradient of the mean s / l = 2. A = 1: held at 1.25
    losses, slopes = by_hand([2.0, 8.0], -1.0, ratio="sequence", clip_low=0.2, clip_high=0.25)
    assert losses == pytest.approx([4.0, 4.0])
    assert slopes == pytest.approx([2.0, 2.0])
    losses, slopes = by_hand([2.0, 8.0], 1.0, ratio="sequence_token", clip_low=0.2, clip_high=0.25)
    assert losses == pytest.approx([-1.25, -1.25])
    assert slopes == [0.0, 0.0]
