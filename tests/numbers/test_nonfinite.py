"""Infinite and NaN log-probs and rewards spoil nothing but their own token or response, in every preset."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.contracts.cases import rollout
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_masks import with_token_masks
from lightrft.algorithms.token_ops import LIMIT, clamp_log_ratio
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import build
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.process_reward import outcome_losses
from lightrft.learner.sft_step import mean_nll
from lightrft.models.logprobs import entropy_from_logits, token_logprobs
from lightrft.observability.metrics import Metrics
from lightrft.rollout.accounting import CollectedRollouts, filter_and_select, rollout_metrics
from lightrft.trainer.phases import with_shaped_rewards
from lightrft.types import Batch
from tests.advantage_helpers import with_advantages
from tests.numbers.compare import gradient
from tests.numbers.strategies import batch_of, plain_case
from tests.numbers.test_any_combination import assert_same, batch_for, mini_batch, through
from tests.numbers.test_extreme_ratios import CORRECTED

ALL = [*PRESETS]
FAULTS = [
    (value, place) for value, place in zip((math.inf, -math.inf, math.nan), (0, 7, 15), strict=True)
]
"""A log-prob that is not finite, and its token: inside a long response, in a response of one token, and the last one of its response."""


def algorithm_of(preset: str, **tree: object) -> AlgorithmConfig:
    return build(RLConfig, {"algorithm": {"preset": preset, **tree}}).algorithm


def loss_of(
    algorithm: AlgorithmConfig, batch: Batch, logprobs: Tensor, left_out: int | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a whole step; without the token ``left_out``, whose share of the denominator stays."""
    mini, objective = mini_batch(algorithm, batch, logprobs, on_policy=False)
    if left_out is not None:
        # Token masks must not have seen that token.
        mini = without(mini, left_out).replace(token_mask=None, pull=None)
        mini = with_token_masks(
            mini, algorithm.token_masks, algorithm.loss, torch.Generator().manual_seed(0)
        )
    return through(mini, objective, logprobs, [torch.arange(len(mini))])


def without(batch: Batch, token: int) -> Batch:
    """``batch`` with ``token`` not sampled and of no weight."""
    there = torch.arange(batch.tokens) == token
    weights = {
        k: v for k, v in batch.columns("token").items() if k in ("loss_weights", "positive_weights")
    }
    return batch.replace(
        sampled=batch.mask & ~there, **{k: torch.where(there, 0.0, v) for k, v in weights.items()}
    )


def reads(algorithm: AlgorithmConfig, column: str) -> bool:
    """Whether a sampler's log-prob is part of the loss. The other columns are there only where they are read."""
    by_sampler = (
        algorithm.old_logprobs != "policy"
        or bool(algorithm.importance_sampling)
        or "behavior" in Requirements.of(algorithm).needs
    )
    return column != "behavior_logprobs" or by_sampler


def faulty(batch: Batch, column: str, value: float, token: int) -> Batch:
    there = torch.arange(batch.tokens) == token
    return batch.replace(**{column: torch.where(there, value, batch.columns("token")[column])})


@pytest.mark.parametrize("preset", ALL)
@pytest.mark.parametrize("column", ["old_logprobs", "behavior_logprobs", "ref_logprobs"])
def test_a_column_that_is_not_finite_at_a_token_gives_the_loss_without_that_token(
    preset: str, column: str
) -> None:
    algorithm = algorithm_of(preset)
    batch, logprobs = batch_for(random.Random(1))
    if column == "old_logprobs" and algorithm.old_logprobs == "rollout":
        column = "behavior_logprobs"  # which old ones are taken from
    for value, token in FAULTS:
        assert batch.mask[token]
        found = loss_of(algorithm, faulty(batch, column, value, token), logprobs)
        assert torch.isfinite(found[0]) and torch.isfinite(found[1]).all(), (
            f"{value} at {token}: {found}"
        )
        masked = faulty(batch, "sampled", 0.0, token)
        masked = masked.replace(sampled=masked.sampled.bool())  # type: ignore[union-attr]
        expected = loss_of(algorithm, masked if reads(algorithm, column) else batch, logprobs)
        assert_same(found, expected, f"{value} at {token} of {column}")


@pytest.mark.parametrize("preset", ALL)
def test_a_policy_that_gives_a_token_no_probability_gives_the_loss_without_that_token(
    preset: str,
) -> None:
    algorithm = algorithm_of(preset)
    batch, logprobs = batch_for(random.Random(2))
    for value, token in FAULTS:
        spoiled = torch.where(torch.arange(batch.tokens) == token, value, logprobs)
        loss, slopes = loss_of(algorithm, batch, spoiled)
        assert torch.isfinite(loss) and torch.isfinite(slopes).all(), (
            f"{value} at {token}: {loss} {slopes}"
        )
        assert_same(
            (loss, slopes),
            loss_of(algorithm, batch, logprobs, left_out=token),
            f"{value} at {token}",
        )


@pytest.mark.parametrize(("correction", "options"), CORRECTED, ids=str)
def test_a_correction_leaves_out_a_token_whose_log_prob_is_not_finite(
    correction: str, options: dict[str, Any]
) -> None:
    algorithm = algorithm_of("grpo", importance_sampling=[{"name": correction, "options": options}])
    batch, logprobs = batch_for(random.Random(1))
    for column in ("behavior_logprobs", "old_logprobs"):
        for value, token in FAULTS:
            found = loss_of(algorithm, faulty(batch, column, value, token), logprobs)
            assert torch.isfinite(found[0]) and torch.isfinite(found[1]).all(), (
                f"{value} at {token}: {found}"
            )
            masked = batch.replace(sampled=batch.mask & (torch.arange(batch.tokens) != token))
            assert_same(
                found, loss_of(algorithm, masked, logprobs), f"{value} at {token} of {column}"
            )


def small_batches() -> Iterator[tuple[str, Batch]]:
    """Batches that divide by nothing, or have nothing to compare."""
    shapes: dict[str, tuple[list[list[bool]], list[int], list[float] | None]] = {
        "equal rewards": ([[True, True], [True], [True] * 3], [0, 0, 0], [0.1, 0.1, 0.1]),
        "one response": ([[True, True]], [0], [1.0]),
        "an empty response": ([[True], [], [True, True]], [0, 0, 0], [1.0, 0.0, 0.5]),
        "nothing but empty responses": ([[], []], [0, 0], [1.0, 0.0]),
        "no token sampled": ([[False, False], [False]], [0, 0], [1.0, 0.0]),
    }
    for name, shape in shapes.items():
        batch = batch_of(plain_case(*shape))
        n, count = batch.tokens, len(batch)
        yield (
            name,
            batch.replace(
                process_rewards=torch.linspace(-1, 1, n, dtype=torch.float64),
                entropy=torch.linspace(0, 1, n, dtype=torch.float64),
                energy=torch.linspace(0, 1, n, dtype=torch.float64),
                versions=torch.zeros(n, dtype=torch.long),
                baselines=torch.full((count,), 0.5, dtype=torch.float64),
                terms=torch.ones(count, 1, dtype=torch.float64),
                term_weights=torch.ones(count, 1, dtype=torch.float64),
                teacher_logprobs=torch.full((n,), -1.0, dtype=torch.float64),
                costs=torch.linspace(0, 1, count, dtype=torch.float64)[:, None],
                cost_values=torch.linspace(-1, 1, n, dtype=torch.float64),
            ),
        )


@pytest.mark.parametrize("preset", ALL)
def test_batches_with_nothing_to_compare_have_a_finite_loss(preset: str) -> None:
    for name, batch in small_batches():
        logprobs = torch.linspace(-2, -0.1, batch.tokens, dtype=torch.float64)
        loss, slopes = loss_of(algorithm_of(preset), batch, logprobs)
        assert torch.isfinite(loss) and torch.isfinite(slopes).all(), f"{name}: {loss} {slopes}"
        if not batch.mask.any():
            assert loss == 0 and not slopes.any(), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("preset", ALL)
def test_a_row_whose_reward_is_not_finite_leaves_its_group_untouched(
    preset: str, value: float
) -> None:
    algorithm = algorithm_of(preset)
    config = RLConfig(algorithm=algorithm)
    batch, _ = batch_for(random.Random(3))
    assert batch.rewards is not None and batch.prompt_of.tolist().count(2) == 3
    others = torch.tensor([i for i in range(len(batch)) if i != 2])
    spoiled = batch.replace(
        rewards=torch.where(torch.arange(len(batch)) == 2, value, batch.rewards)
    )
    found, kept = with_shaped_rewards(
        spoiled, config, Controllers.of(algorithm), Requirements.of(config.algorithm)
    )
    assert kept.tolist() == others.tolist()
    assert len(found) == len(batch) - 1
    found = with_advantages(
        spoiled, config, Controllers.of(algorithm), Requirements.of(config.algorithm)
    )
    expected = with_advantages(
        batch.select(others), config, Controllers.of(algorithm), Requirements.of(config.algorithm)
    )
    for name in ("advantages", "returns"):
        column = found.columns("token")[name]
        assert torch.isfinite(column).all()
        assert torch.equal(column, expected.columns("token")[name])


def spoil_first(batch: Batch, rewards: Tensor, *, max_new_tokens: int) -> Tensor:
    """A user's shaping that divides by 0 in the first response."""
    return torch.where(torch.arange(len(rewards)) == 0, rewards / 0 * 0, rewards)


def test_a_shaping_that_returns_nan_loses_its_own_response_alone() -> None:
    algorithm = algorithm_of("grpo", shaping=[f"{__name__}:spoil_first"])
    batch, _ = batch_for(random.Random(3))
    _, kept = with_shaped_rewards(
        batch, RLConfig(algorithm=algorithm), Controllers.of(algorithm), Requirements.of(algorithm)
    )
    assert kept.tolist() == list(range(1, len(batch)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rollout_whose_reward_is_not_finite_counts_as_failed(value: float) -> None:
    group = [rollout(r, 3) for r in (1.0, value, 0.0)]
    got = CollectedRollouts()
    got.add_group(group, filter_and_select(group, (), None, 2))
    metrics = rollout_metrics(got).compute()
    assert [r.reward for r in got.groups[0]] == [1.0, 0.0]
    assert group[1].failed == f"the reward is {value}"
    assert (
        metrics["rollout/num_failed"],
        metrics["rollout/tokens_failed"],
        metrics["rollout/tokens_trained"],
    ) == (1, 3, 6)
    assert metrics["reward/mean"] == 0.5


def test_responses_that_shaping_spoiled_move_from_trained_to_failed() -> None:
    groups = [[rollout(1.0, 2), rollout(0.0, 3)], [rollout(1.0, 5)]]
    got = CollectedRollouts()
    for group in groups:
        got.add_group(group, filter_and_select(group, (), None, 1))
    got.keep([0])
    metrics = rollout_metrics(got).compute()
    assert (
        metrics["rollout/tokens_sampled"],
        metrics["rollout/tokens_trained"],
        metrics["rollout/tokens_failed"],
    ) == (10, 2, 8)
    assert metrics["rollout/num_failed"] == 2
    assert [len(group) for group in got.groups] == [1]


def test_an_infinite_gap_is_bounded_without_a_gradient() -> None:
    gap = torch.tensor([math.inf, -math.inf, 50.0], requires_grad=True)
    assert clamp_log_ratio(gap).tolist() == [LIMIT, -LIMIT, LIMIT]
    assert gradient(clamp_log_ratio(gap).sum(), gap).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("generic", [False, True])
def test_a_masked_vocabulary_has_a_finite_entropy_and_gradient(generic: bool) -> None:
    plain = torch.nn.Linear(3, 5)
    with torch.no_grad():
        plain.bias[1:3] = -math.inf
    head = torch.nn.Sequential(plain) if generic else plain
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 3, 4, 0]), entropy=True)
    assert entropy is not None
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(gradient(logprobs.sum() + entropy.sum(), hidden)).all()
    assert torch.allclose(entropy_from_logits(plain(hidden)), entropy, atol=1e-6)


def test_a_process_model_learns_from_the_tokens_that_are_finite() -> None:
    batch = batch_of(plain_case([[True, True, True], [True]], [0, 0], [1.0, 0.0]))
    batch = batch.replace(
        ref_logprobs=torch.tensor([-1.0, -math.inf, -2.0, -1.0], dtype=torch.float64)
    )
    logprobs = torch.tensor([-0.5, -0.5, -math.inf, -0.25], dtype=torch.float64, requires_grad=True)
    losses, _ = outcome_losses(logprobs, batch, 0.5, 1.0)
    expected = [math.log1p(math.exp(-0.25)), math.log1p(math.exp(0.375))]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradient(losses.sum(), logprobs)[1:3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_target_that_the_model_cannot_give_is_left_out_of_a_supervised_loss_and_counted(
    value: float,
) -> None:
    batch = batch_of(plain_case([[True, True, False], [True, True]], [0, 1]))
    batch = batch.replace(loss_weights=batch.mask / batch.mask.sum())
    token = int(batch.mask.nonzero()[1])
    logprobs = torch.linspace(-3, -1, len(batch.mask), dtype=torch.float64)
    faulty_logprobs = logprobs.masked_fill(
        torch.arange(len(logprobs)) == token, value
    ).requires_grad_()
    loss, mean, lost = mean_nll(faulty_logprobs, batch)
    kept = batch.mask & (torch.arange(len(logprobs)) != token)
    assert loss.item() == pytest.approx(-float(logprobs[kept].sum() / batch.mask.sum()))
    found = Metrics({"nll": mean, "lost": lost}).compute()
    assert found == {"nll": pytest.approx(-float(logprobs[kept].mean())), "lost": 1}
    assert torch.equal(gradient(loss, faulty_logprobs) != 0, kept)


def test_every_advantage_is_among_those_of_the_presets_or_tried_elsewhere() -> None:
    named = {algorithm_of(preset).advantage.name for preset in ALL}
    assert set(ADVANTAGES) - named <= {"gigpo"}
