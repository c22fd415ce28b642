"""The objective of a batch is the sum over its parts, however it is dealt out; and it is the published one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.requirements import Requirements
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.micro_batches import micro_batches
from lightrft.learner.policy_update import Objective, with_loss_weights
from lightrft.models.actor import TokenScores
from lightrft.types import Batch, rows_of
from tests.advantage_helpers import with_advantages
from tests.numbers import oracles
from tests.numbers.compare import assert_equal, every_case, gradient, scores_for
from tests.numbers.oracles import Case
from tests.numbers.scalars import gradients, number
from tests.numbers.strategies import SEEDS, batch_of, cases, corner_cases, partitions, tensor_of

KL_PLACES = [("none", "k3", 0.0), ("loss", "k2", 0.04), ("loss", "k3", 0.5), ("reward", "k1", 0.1)]
ENTROPY = [0.0, 0.01, -0.2]


def algorithm_of(aggregation: str, kl: tuple[str, str, float], entropy: float) -> AlgorithmConfig:
    where, estimator, coef = kl
    return AlgorithmConfig.model_validate(
        {
            "preset": None,
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
            "aggregation": aggregation,
            "kl": {"where": where, "estimator": estimator, "coef": coef},
            "entropy": {"coef": entropy},
        }
    )


def prepared(case: Case, seed: int, algorithm: AlgorithmConfig, **columns: Tensor) -> Batch:
    """The case with one advantage per response, about a third of them 0, and the weights of the global batch."""
    batch = batch_of(case).replace(
        advantages=tensor_of(oracles.on_sampled(case, scores_for(case, seed))), **columns
    )
    return with_loss_weights(batch, algorithm, RLConfig().sampling.max_new_tokens)


def entropies(logprobs: Tensor) -> Tensor:
    """Something differentiable in the place of an entropy."""
    return (logprobs * 0.3).sin() + 2


def through(
    batch: Batch, parts: Sequence[Tensor], logprobs: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient with respect to ``logprobs`` (a leaf in the order of ``batch``) and metrics, summed over ``parts``."""
    leaf = logprobs.clone().requires_grad_()
    total, found, metrics = torch.zeros((), dtype=torch.float64), torch.zeros_like(leaf), None
    for index in parts:
        own = leaf[rows_of(batch.lengths, index)]
        entropy = entropies(own) if objective.wants_entropy else None
        loss, part = objective(batch.select(index), TokenScores(own, entropy))
        found += gradient(loss, leaf)
        total = total + loss.detach()
        if metrics is None:
            metrics = part
        else:
            metrics.merge(part)
    return total, found, metrics.compute() if metrics is not None else {}


def assert_same(
    left: tuple[Tensor, Tensor, dict[str, float]], right: tuple[Tensor, Tensor, dict[str, float]]
) -> None:
    assert left[0].item() == pytest.approx(right[0].item(), rel=1e-10, abs=1e-10)
    assert_equal(left[1], right[1].tolist(), tolerance=1e-10)
    assert left[2] == pytest.approx(right[2], rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("entropy", ENTROPY)
@pytest.mark.parametrize("kl", KL_PLACES, ids=str)
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@settings(deadline=None, max_examples=15)
@given(case=cases(max_gap=5.0), seed=SEEDS, data=st.data())
def test_no_split_and_no_order_changes_loss_gradient_or_metrics(
    aggregation: str,
    kl: tuple[str, str, float],
    entropy: float,
    case: Case,
    seed: int,
    data: st.DataObject,
) -> None:
    algorithm = algorithm_of(aggregation, kl, entropy)
    objective = Objective(algorithm, Requirements.of(algorithm), kl[2], algorithm.entropy.coef)
    batch, logprobs = prepared(case, seed, algorithm), tensor_of(case.logprobs)
    whole = through(batch, [torch.arange(len(batch))], logprobs, objective)
    parts = [torch.tensor(part) for part in data.draw(partitions(len(batch)))]
    assert_same(through(batch, parts, logprobs, objective), whole)

    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    places = rows_of(batch.lengths, order)
    shuffled = with_loss_weights(
        batch.select(order).replace(loss_weights=None),
        algorithm,
        RLConfig().sampling.max_new_tokens,
    )
    moved = through(shuffled, [torch.arange(len(batch))], logprobs[places], objective)
    assert_same(
        (moved[0], torch.zeros_like(moved[1]).index_copy(0, places, moved[1]), moved[2]), whole
    )


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@settings(deadline=None, max_examples=15)
@given(case=cases(max_gap=5.0), seed=SEEDS, budget=st.integers(1, 30))
@example(case=corner_cases()[3], seed=1, budget=2)
def test_the_micro_batches_of_any_budget_give_the_same(
    aggregation: str, layout: str, case: Case, seed: int, budget: int
) -> None:
    algorithm = algorithm_of(aggregation, KL_PLACES[2], 0.01)
    objective = Objective(algorithm, Requirements.of(algorithm), 0.5, algorithm.entropy.coef)
    batch, logprobs = prepared(case, seed, algorithm), tensor_of(case.logprobs)
    whole = through(batch, [torch.arange(len(batch))], logprobs, objective)
    assert_same(through(batch, micro_batches(batch, budget, layout), logprobs, objective), whole)


@pytest.mark.parametrize("entropy", ENTROPY)
@pytest.mark.parametrize("kl", KL_PLACES, ids=str)
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=15, max_gap=5.0)
def test_rows_that_are_left_out_change_neither_loss_nor_gradient(
    aggregation: str, kl: tuple[str, str, float], entropy: float, case: Case, seed: int
) -> None:
    algorithm = algorithm_of(aggregation, kl, entropy)
    objective = Objective(algorithm, Requirements.of(algorithm), kl[2], algorithm.entropy.coef)
    batch, logprobs = prepared(case, seed, algorithm), tensor_of(case.logprobs)
    active = objective.active(batch)
    loss, found, _ = through(batch, [torch.arange(len(batch))], logprobs, objective)
    only, kept, _ = through(batch, [active], logprobs, objective)
    assert only.item() == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)
    assert_equal(kept, found.tolist(), tolerance=1e-10)
    everything = bool(entropy) or kl[0] == "loss"
    scores = scores_for(case, seed)
    assert active.tolist() == [
        i for i in range(len(case)) if case.sampled(i) and (everything or scores[i] != 0)
    ]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("kl", KL_PLACES, ids=str)
@every_case(examples=25, max_gap=5.0)
def test_the_objective_is_aggregated_surrogate_plus_kl(
    kl: tuple[str, str, float], aggregation: str, case: Case, seed: int
) -> None:
    algorithm = algorithm_of(aggregation, kl, 0.0)
    batch = prepared(case, seed, algorithm)
    loss, found, _ = through(
        batch,
        [torch.arange(len(batch))],
        tensor_of(case.logprobs),
        Objective(algorithm, Requirements.of(algorithm), kl[2], algorithm.entropy.coef),
    )
    slow = case.with_leaves("logprobs")
    limit = RLConfig(algorithm=algorithm).sampling.max_new_tokens
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    expected = oracles.aggregate(
        slow, oracles.ppo(slow, advantages, 0.2, 0.28, 3.0), aggregation, limit
    )
    if kl[0] == "loss":
        expected = expected + kl[2] * oracles.aggregate(
            slow, oracles.kl_rows(slow, kl[1]), aggregation, limit
        )
    assert loss.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(found, gradients(expected, slow.logprobs))


@pytest.mark.parametrize("coef", [0.01, -0.2])
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=15, max_gap=5.0)
def test_entropy_is_taken_off_the_loss(
    aggregation: str, coef: float, case: Case, seed: int
) -> None:
    """A positive coefficient rewards entropy: gradient descent raises it."""
    plain, rewarded = (algorithm_of(aggregation, KL_PLACES[0], c) for c in (0.0, coef))
    batch, logprobs = prepared(case, seed, plain), tensor_of(case.logprobs)
    everything = [torch.arange(len(batch))]
    without = through(
        batch,
        everything,
        logprobs,
        Objective(plain, Requirements.of(plain), 0.0, plain.entropy.coef),
    )
    found = through(
        batch,
        everything,
        logprobs,
        Objective(rewarded, Requirements.of(rewarded), 0.0, rewarded.entropy.coef),
    )
    slow = case.with_leaves("logprobs")
    limit = RLConfig().sampling.max_new_tokens
    term = oracles.aggregate(
        slow, [[(x * 0.3).sin() + 2 for x in row] for row in slow.logprobs], aggregation, limit
    )
    assert found[0].item() - without[0].item() == pytest.approx(
        -coef * number(term), rel=1e-9, abs=1e-9
    )
    expected = [-coef * g for row in gradients(term, slow.logprobs) for g in row]
    assert_equal(found[1] - without[1], expected)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@every_case(examples=25, max_gap=5.0)
def test_whatever_stands_at_tokens_that_were_not_sampled_changes_nothing(
    garbage: float, case: Case, seed: int
) -> None:
    algorithm = algorithm_of("sequence", ("loss", "k3", 0.5), 0.0)
    objective = Objective(algorithm, Requirements.of(algorithm), 0.5, algorithm.entropy.coef)
    batch, logprobs = prepared(case, seed, algorithm), tensor_of(case.logprobs)
    everything = [torch.arange(len(batch))]
    clean = through(batch, everything, logprobs, objective)
    spoil = {
        name: column.masked_fill(~batch.mask, garbage)
        for name, column in batch.columns("token").items()
        if name in ("old_logprobs", "ref_logprobs", "advantages")
    }
    assert_same(through(batch.replace(**spoil), everything, logprobs, objective), clean)
    spoiled = through(
        batch.replace(**spoil), everything, logprobs.masked_fill(~batch.mask, garbage), objective
    )
    assert_same(spoiled, clean)


@every_case(examples=40, max_gap=5.0)
def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_that_of_the_policy_gradient(
    case: Case, seed: int
) -> None:
    algorithm = algorithm_of("token", KL_PLACES[0], 0.0)
    batch = prepared(case, seed, algorithm).replace(old_logprobs=None)
    _, found, metrics = through(
        batch,
        [torch.arange(len(batch))],
        tensor_of(case.logprobs),
        Objective(algorithm, Requirements.of(algorithm), 0.0, algorithm.entropy.coef),
    )
    assert_equal(found, (-batch.advantages * batch.loss_weights).tolist(), tolerance=1e-12)  # type: ignore[operator]
    if any(case.sampled(i) for i in range(len(case))):
        assert metrics["policy/ratio"] == 1.0
        assert metrics["policy/clip_fraction"] == 0.0
        assert metrics["policy/old_kl"] == 0.0


@every_case(examples=40, max_gap=2.0)
def test_metrics_are_the_means_over_trained_tokens_that_their_table_names(
    case: Case, seed: int
) -> None:
    algorithm = algorithm_of("token", ("loss", "k2", 0.04), 0.01)
    objective = Objective(algorithm, Requirements.of(algorithm), 0.04, 0.01)
    logprobs = tensor_of(case.logprobs)
    sampler = logprobs + torch.randn(
        len(logprobs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    batch = prepared(case, seed, algorithm, behavior_logprobs=sampler)
    _, _, found = through(batch, [torch.arange(len(batch))], logprobs, objective)
    named: dict[str, list[float]] = {}
    columns = [logprobs, batch.old_logprobs, batch.ref_logprobs, sampler, batch.advantages]
    for k, trained in enumerate(batch.mask.tolist()):
        if not trained:
            continue
        new, old, ref, behavior, advantage = (column[k].item() for column in columns)
        ratio = math.exp(new - old)
        too_far = (advantage > 0 and ratio > 1.28) or (advantage < 0 and not 0.8 <= ratio < 3.0)
        values = {
            "ratio": ratio,
            "clip_fraction": float(too_far),
            "old_kl": math.exp(new - old) - 1 - (new - old),
            "kl": math.exp(ref - new) - 1 - (ref - new),
            "entropy": math.sin(0.3 * new) + 2,
            "rollout_logprob_diff": abs(old - behavior),
        }
        for name, value in values.items():
            named.setdefault(f"policy/{name}", []).append(value)
    means = {name: math.fsum(values) / len(values) for name, values in named.items()}
    assert {name: found[name] for name in means} == pytest.approx(means, rel=1e-9, abs=1e-12)


@every_case(examples=25)
def test_a_policy_that_is_its_reference_has_no_kl_loss(case: Case, seed: int) -> None:
    algorithm = algorithm_of("token", ("loss", "k3", 0.5), 0.0)
    case.ref = case.logprobs
    batch = prepared(case, seed, algorithm)
    everything, logprobs = [torch.arange(len(batch))], tensor_of(case.logprobs)
    with_kl = through(
        batch,
        everything,
        logprobs,
        Objective(algorithm, Requirements.of(algorithm), 0.5, algorithm.entropy.coef),
    )
    assert_same(
        with_kl,
        through(
            batch,
            everything,
            logprobs,
            Objective(algorithm, Requirements.of(algorithm), 0.0, algorithm.entropy.coef),
        ),
    )


@every_case(examples=25, max_gap=3.0)
def test_gae_returns_are_made_before_whitening(case: Case, seed: int) -> None:
    config = RLConfig.model_validate(
        {
            "algorithm": {
                "preset": "ppo",
                "advantage": {"gae_lambda": 0.9, "gamma": 0.97},
                "kl": {"coef": 0.05},
            }
        }
    )
    found = with_advantages(
        batch_of(case), config, Controllers.of(config.algorithm), Requirements.of(config.algorithm)
    )
    token = oracles.token_rewards(case, case.rewards, 0.05, "k1")
    advantages, returns = oracles.gae(case, token, 0.97, 0.9)
    whitened = oracles.whiten(case, advantages, unbiased=False, eps=config.algorithm.advantage.eps)
    # the columns are stored in float32
    assert found.returns.tolist() == pytest.approx(oracles.flat(returns), rel=1e-6, abs=1e-6)  # type: ignore[union-attr]
    assert found.advantages.tolist() == pytest.approx(oracles.flat(whitened), rel=1e-6, abs=1e-6)  # type: ignore[union-attr]


def test_whitening_of_a_batch_in_any_order_is_the_same() -> None:
    config = RLConfig.model_validate({"algorithm": "reinforce++"})
    case = corner_cases()[3]
    batch = batch_of(case)
    order = torch.tensor(random.Random(0).sample(range(len(batch)), len(batch)))
    before = with_advantages(
        batch, config, Controllers.of(config.algorithm), Requirements.of(config.algorithm)
    ).select(order)
    after = with_advantages(
        batch.select(order),
        config,
        Controllers.of(config.algorithm),
        Requirements.of(config.algorithm),
    )
    assert after.advantages.tolist() == before.advantages.tolist()  # type: ignore[union-attr]
