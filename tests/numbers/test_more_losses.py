"""The policy losses of the second circle of methods against the slow loops, in value and gradient, on any ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig
from tests.numbers import oracles, oracles_losses
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for, scores_for
from tests.numbers.oracles import Case
from tests.numbers.scalars import Rows as Ragged
from tests.numbers.scalars import gradients
from tests.numbers.strategies import batch_of, tensor_of

Slow = Callable[[Case, Ragged], Ragged]


def dppo(low: float, high: float) -> Slow:
    """The package's old policy is the sampler of the paper."""

    def slow(case: Case, advantages: Ragged) -> Ragged:
        case.behavior = case.old
        return oracles_losses.dppo(case, advantages, low, high)

    return slow


OF_TOKENS: dict[str, tuple[str, dict[str, float], dict[str, float], Slow]] = {
    "reinforce": ("reinforce", {}, {}, oracles.reinforce),
    "importance": ("importance", {}, {}, oracles.unclipped),
    "cispo": (
        "cispo",
        {"clip_low": 0.3, "clip_high": 0.4},
        {},
        lambda c, a: oracles.cispo(c, a, 0.3, 0.4),
    ),
    "cispo, lower bound away": (
        "cispo",
        {"clip_low": 1.0, "clip_high": 4.0},
        {},
        lambda c, a: oracles.cispo(c, a, 1.0, 4.0),
    ),
    "cispo_cap": ("cispo_cap", {}, {"cap": 5.0}, lambda c, a: oracles.cispo_absolute(c, a, 5.0)),
    "cpgd": (
        "cpgd",
        {"clip_low": 0.2, "clip_high": 0.3},
        {},
        lambda c, a: oracles.cpgd(c, a, 0.2, 0.3),
    ),
    "sapo": (
        "sapo",
        {},
        {"tau_pos": 1.0, "tau_neg": 1.05},
        lambda c, a: oracles.sapo(c, a, 1.0, 1.05),
    ),
    "sapo, sharp": (
        "sapo",
        {},
        {"tau_pos": 3.0, "tau_neg": 0.2},
        lambda c, a: oracles.sapo(c, a, 3.0, 0.2),
    ),
    "vespo": ("vespo", {}, {}, oracles_losses.vespo),
    "vespo, other kernel": (
        "vespo",
        {},
        {"k_pos": 1.1, "lam_pos": 0.3, "k_neg": 0.7, "lam_neg": 1.3},
        lambda c, a: oracles_losses.vespo(c, a, (1.1, 0.3), (0.7, 1.3)),
    ),
    "dppo": ("dppo", {}, {"low": 0.15, "high": 0.2}, dppo(0.15, 0.2)),
    "dppo, tight": ("dppo", {}, {"low": 0.0, "high": 0.0}, dppo(0.0, 0.0)),
}


def through(
    case: Case, name: str, bounds: dict[str, float], options: dict[str, float], advantages: Ragged
) -> tuple[Any, ...]:
    """Losses, the log-probs that they hang on, what is sampled, and the numbers to log."""
    logprobs, batch = tensor_of(case.logprobs).requires_grad_(), batch_of(case)
    settings = LossConfig.model_validate({"name": name, **bounds})
    losses, stats = POLICY_LOSSES[name](
        logprobs,
        tensor_of(case.old),
        tensor_of(advantages),
        TokenRows.of(batch),
        settings,
        **options,
    )
    return losses, logprobs, batch.mask, stats


def assert_rows(
    losses: Tensor, logprobs: Tensor, mask: Tensor, slow: Case, expected: Ragged
) -> None:
    assert_equal(losses, expected, mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(losses[mask].sum(), logprobs), gradients(total, slow.logprobs))


@every_case()
@pytest.mark.parametrize("method", list(OF_TOKENS))
def test_losses_of_tokens(method: str, case: Case, seed: int) -> None:
    name, bounds, options, rule = OF_TOKENS[method]
    (advantages,), slow = rows_for(case, seed), case.with_leaves("logprobs")
    losses, logprobs, mask, _ = through(case, name, bounds, options, advantages)
    assert_rows(losses, logprobs, mask, slow, rule(slow, advantages))


@every_case()
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.0, 0.0), (1.0, 0.1)])
def test_gmpo(low: float, high: float, case: Case, seed: int) -> None:
    scores, slow = scores_for(case, seed), case.with_leaves("logprobs")
    advantages = oracles.on_sampled(case, scores)
    losses, logprobs, mask, _ = through(
        case, "gmpo", {"clip_low": low, "clip_high": high}, {}, advantages
    )
    assert_rows(losses, logprobs, mask, slow, oracles.gmpo(slow, scores, low, high))


@every_case()
@pytest.mark.parametrize("ratio", ["sequence", "sequence_token"])
def test_importance_of_whole_responses(ratio: str, case: Case, seed: int) -> None:
    scores, slow = scores_for(case, seed), case.with_leaves("logprobs")
    rows = [
        [-oracles.sequence_ratio(slow, i) * scores[i] if m else 0.0 for m in row]
        for i, row in enumerate(slow.mask)
    ]
    logprobs, batch = tensor_of(case.logprobs).requires_grad_(), batch_of(case)
    settings = LossConfig.model_validate({"name": "importance", "ratio": ratio})
    advantages = tensor_of(oracles.on_sampled(case, scores))
    losses, _ = POLICY_LOSSES["importance"](
        logprobs, tensor_of(case.old), advantages, TokenRows.of(batch), settings
    )
    assert_rows(losses, logprobs, batch.mask, slow, rows)


@every_case()
@pytest.mark.parametrize("method", ["cpgd", "dppo", "gmpo"])
def test_what_counts_as_clipped_has_no_gradient_and_the_rest_has(
    method: str, case: Case, seed: int
) -> None:
    bounds = {} if method == "dppo" else {"clip_low": 0.2, "clip_high": 0.3}
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    losses, logprobs, mask, stats = through(case, method, bounds, {}, advantages)
    slope = gradient(losses[mask].sum(), logprobs)[mask]
    pushed = tensor_of(advantages)[mask] != 0
    assert torch.equal((slope == 0) & pushed, stats["clip_fraction"][mask].bool())


@every_case()
@pytest.mark.parametrize("method", [*OF_TOKENS, "gmpo"])
def test_on_policy_every_loss_has_the_plain_policy_gradient(
    method: str, case: Case, seed: int
) -> None:
    name, bounds, options, _ = OF_TOKENS.get(
        method, ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}, {}, None)
    )
    case.old = case.logprobs
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    losses, logprobs, mask, stats = through(case, name, bounds, options, advantages)
    assert_equal(
        gradient(losses[mask].sum(), logprobs),
        [-a for row in advantages for a in row],
        tolerance=1e-12,
    )
    assert stats["ratio"][mask].eq(1).all()


@every_case(max_gap=2000.0)
@pytest.mark.parametrize("method", [*OF_TOKENS, "gmpo"])
def test_log_ratios_that_overflow_give_no_nan_in_the_loss(
    method: str, case: Case, seed: int
) -> None:
    name, bounds, options, _ = OF_TOKENS.get(
        method, ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}, {}, None)
    )
    (advantages,) = rows_for(case, seed)
    losses, _, mask, _ = through(case, name, bounds, options, advantages)
    assert not losses[mask].isnan().any()
