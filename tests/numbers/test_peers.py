"""Methods of 2025 and 2026 against the slow loops of ``oracles_peers``, in value and gradient."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AdvantageConfig, LossConfig
from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import Objective, with_loss_weights
from lightrft.models.actor import Actor, TokenScores
from lightrft.models.logprobs import logit_energy
from lightrft.models.tiny.text import tiny_model
from lightrft.trainer.checks.check_rollout import check_rollout
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ConfigError
from tests.numbers import oracles, oracles_advantages, oracles_peers
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for, scores_for, tensor
from tests.numbers.oracles import Case
from tests.numbers.oracles_corrections import LEVELS
from tests.numbers.scalars import gradients
from tests.numbers.strategies import batch_of, tensor_of

LOSSES: dict[str, tuple[str, dict[str, float], Any]] = {
    "dppo_kl": ("dppo_kl", {}, lambda c, a: oracles_peers.dppo_kl(c, a, 0.05, 0.05)),
    "dppo_kl, uneven": (
        "dppo_kl",
        {"low": 0.3, "high": 0.01},
        lambda c, a: oracles_peers.dppo_kl(c, a, 0.3, 0.01),
    ),
    "topr": ("topr", {}, oracles_peers.topr),
    "topr, tapered on both sides": (
        "topr",
        {"pos_low": 0.5, "pos_high": 2.0, "neg_low": 0.1, "neg_high": 0.9},
        lambda c, a: oracles_peers.topr(c, a, (0.5, 2.0), (0.1, 0.9)),
    ),
}


@every_case(max_gap=3.0)
@pytest.mark.parametrize("method", list(LOSSES))
def test_losses(method: str, case: Case, seed: int) -> None:
    name, options, slow = LOSSES[method]
    (advantages,), leafs = rows_for(case, seed), case.with_leaves("logprobs")
    logprobs, batch = tensor_of(case.logprobs).requires_grad_(), batch_of(case)
    columns = (logprobs, tensor_of(case.old), tensor_of(advantages), TokenRows.of(batch))
    losses, _ = POLICY_LOSSES[name](*columns, LossConfig(name=name), **options)
    expected = slow(leafs, advantages)
    assert_equal(losses, expected, batch.mask)
    total = sum((x for row in expected for x in row), 0.0)
    assert_equal(gradient(losses[batch.mask].sum(), logprobs), gradients(total, leafs.logprobs))


@pytest.mark.parametrize(
    ("old", "now", "held"),
    [(-1e-12, -5.0, True), (-5.0, 0.0, True), (0.0, 0.0, False), (1e-7, 1e-7, False)],
)
def test_dppo_kl_at_tokens_that_are_certain(old: float, now: float, held: bool) -> None:
    rows = TokenRows.of(Batch(Segments.of([[0]]), Segments.of([[1]]), torch.tensor([0])))
    sign = 1.0 if now > old else -1.0
    logprobs = tensor([now]).requires_grad_()
    losses, stats = POLICY_LOSSES["dppo_kl"](
        logprobs, tensor([old]), tensor([sign]), rows, LossConfig(name="dppo_kl")
    )
    assert bool(stats["clip_fraction"][0]) is held
    assert torch.isfinite(losses).all() and torch.isfinite(gradient(losses.sum(), logprobs)).all()


@every_case(max_gap=3.0)
@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_the_preset_of_kimi_k15_has_the_gradient_of_its_squared_loss(
    tau: float, case: Case, seed: int
) -> None:
    algorithm = build(
        RLConfig, {"algorithm": {"preset": "kimi_k15", "policy_drift": {"coef": tau}}}
    ).algorithm
    scores, leafs = oracles.dr_grpo(case, case.rewards), case.with_leaves("logprobs")
    batch = batch_of(case).replace(advantages=tensor_of(oracles.on_sampled(case, scores)))
    logprobs = tensor_of(case.logprobs).requires_grad_()
    loss, _ = Objective.of(algorithm, Requirements.of(algorithm), Controllers.of(algorithm))(
        with_loss_weights(batch, algorithm, RLConfig().sampling.max_new_tokens),
        TokenScores(logprobs),
    )
    expected = oracles_peers.mirror_descent(leafs, case.rewards, tau)
    assert_equal(gradient(loss, logprobs), gradients(expected, leafs.logprobs))


@every_case(examples=40)
def test_the_released_remax_gives_each_token_its_own_kl_and_not_that_of_later_ones(
    case: Case, seed: int
) -> None:
    algorithm = build(RLConfig, {"algorithm": {"preset": "remax_released"}}).algorithm
    scores, leafs = scores_for(case, seed), case.with_leaves("logprobs")
    advantages = tensor_of(oracles.on_sampled(case, scores))
    batch = batch_of(case).replace(advantages=advantages, ref_logprobs=tensor_of(case.ref))
    logprobs = tensor_of(case.logprobs).requires_grad_()
    loss, _ = Objective.of(algorithm, Requirements.of(algorithm), Controllers.of(algorithm))(
        with_loss_weights(batch, algorithm, RLConfig().sampling.max_new_tokens),
        TokenScores(logprobs),
    )
    expected = oracles_peers.released_remax(leafs, scores, 0.05)
    assert_equal(gradient(loss, logprobs), gradients(expected, leafs.logprobs))


@every_case()
def test_straight_through_k3_has_the_value_of_k3_and_the_gradient_of_k2(
    case: Case, seed: int
) -> None:
    leafs = case.with_leaves("logprobs")
    logprobs, ref = tensor_of(case.logprobs).requires_grad_(), tensor_of(case.ref)
    found = KL_ESTIMATORS["k3_straight"](logprobs, ref)
    pairs = zip(leafs.logprobs, case.ref, strict=True)
    expected = [
        [oracles_peers.straight_through_k3(a, b) for a, b in zip(*pair, strict=True)]
        for pair in pairs
    ]
    assert_equal(found, expected)
    assert_equal(
        gradient(found.sum(), logprobs),
        gradients(sum((x for row in expected for x in row), 0.0), leafs.logprobs),
    )


def corrected(name: str, case: Case, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    batch = batch_of(case)
    advantages = oracles.on_sampled(case, scores_for(case, seed))
    columns = (tensor_of(rows) for rows in (case.logprobs, case.old, case.behavior, advantages))
    return IS_CORRECTIONS[name](*columns, TokenRows.of(batch), **options), batch.mask


@every_case(examples=40)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
def test_rejection_by_divergence(level: str, estimator: str, case: Case, seed: int) -> None:
    found, mask = corrected(
        "divergence_reject", case, seed, level=level, estimator=estimator, limit=0.05
    )
    assert_equal(found, oracles_peers.rejected_by_divergence(case, level, estimator, 0.05), mask)


@every_case(examples=40)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.5), (0.0, 1e-9)])
def test_normalised_weights(low: float, high: float, level: str, case: Case, seed: int) -> None:
    found, mask = corrected("tis_normalized", case, seed, level=level, low=low, high=high)
    assert_equal(found, oracles_peers.truncated_and_normalised(case, level, low, high), mask)


def with_energy(case: Case, seed: int) -> tuple[list[list[float]], Batch]:
    rng = random.Random(seed)
    energy = [[rng.choice([0.0, rng.uniform(0, 2)]) for _ in row] for row in case.mask]
    return energy, batch_of(case).replace(energy=tensor_of(energy))


@every_case()
@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("spread_out", [True, False])
def test_the_optimal_token_baseline(
    spread_out: bool, zero_tail: bool, case: Case, seed: int
) -> None:
    energy, batch = with_energy(case, seed)
    (rewards,) = rows_for(case, seed)
    if not spread_out:
        rewards = oracles.token_rewards(case, case.rewards, 0.0, "k1")
    found, returns = ADVANTAGES["otb"](
        batch, tensor_of(rewards), AdvantageConfig(eps=1e-8), zero_tail=zero_tail
    )
    assert_equal(
        found,
        oracles_peers.optimal_token_baseline(case, rewards, energy, 1e-8, zero_tail),
        batch.mask,
    )
    assert_equal(returns, oracles.returns(case, rewards, 1.0), batch.mask)


def test_the_energy_of_a_token_is_the_squared_norm_of_the_gradient_of_its_log_prob_in_the_logits() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    head, hidden = (
        torch.nn.Linear(4, 7).double(),
        torch.randn(5, 4, dtype=torch.float64, generator=generator),
    )
    found = logit_energy(hidden, head, torch.tensor([0, 6, 3, 3, 1]), temperature=0.7)
    for state, token, energy in zip(hidden, [0, 6, 3, 3, 1], found.tolist(), strict=True):
        leaf = (head(state) / 0.7).detach().requires_grad_()
        slope = gradient(leaf.log_softmax(-1)[token], leaf)
        assert energy == pytest.approx(sum(float(x) ** 2 for x in slope), rel=1e-12)


def test_the_actor_gives_the_energy_of_its_own_distribution() -> None:
    actor = Actor(tiny_model("qwen2", seed=1, dtype=torch.float64))
    words = actor.base.get_output_embeddings().weight.shape[0]
    batch = Batch(
        Segments.of([[5, 6]]),
        Segments.of([[v] for v in range(words)]),
        torch.zeros(words, dtype=torch.long),
    )
    scores = actor.score(batch, temperature=0.7, energy=True)
    p = scores.logprobs.detach().exp()
    assert scores.energy is not None and not scores.energy.requires_grad
    assert scores.energy.tolist() == pytest.approx(
        (1 - 2 * p + p.square().sum()).tolist(), rel=1e-9
    )


def test_the_energy_does_not_depend_on_chunks() -> None:
    head, hidden = (
        torch.nn.Linear(4, 50).double(),
        torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    targets = torch.arange(9)
    whole, parts = (logit_energy(hidden, head, targets, chunk_mb=mb) for mb in (64, 1e-4))
    assert torch.allclose(whole, parts, rtol=1e-12)


@every_case()
@pytest.mark.parametrize("std", [True, False])
def test_groups_of_steps_in_equal_states(std: bool, case: Case, seed: int) -> None:
    rng = random.Random(seed)
    steps = [sorted(rng.randint(0, 3) for _ in row) for row in case.mask]
    names = [[rng.randint(0, 2) for _ in range(4)] for _ in case.mask]
    states = [[float(names[i][s]) for s in row] for i, row in enumerate(steps)]
    batch = batch_of(case).replace(steps=tensor_of(steps).long(), states=tensor_of(states).long())  # type: ignore[arg-type]
    rewards = tensor_of(oracles.token_rewards(case, case.rewards, 0.0, "k1"))
    settings = AdvantageConfig(gamma=0.9, eps=1e-6)
    found, _ = ADVANTAGES["gigpo"](batch, rewards, settings, weight=0.5, std=std)
    assert_equal(
        found,
        oracles_peers.gigpo(case, case.rewards, (0.9, 0.5, 1e-6), steps, states, std),
        batch.mask,
    )


def test_an_advantage_of_steps_is_refused_at_the_start_while_nothing_names_states() -> None:
    config = build(
        RLConfig,
        {
            "algorithm": {"preset": None, "advantage": {"name": "gigpo"}},
            "rollout": {"group_size": 4},
        },
    )
    with pytest.raises(ConfigError, match="no environment of this version names states; take grpo"):
        check_rollout(config, Requirements.of(config.algorithm))


@every_case(max_gap=1.0)
@pytest.mark.parametrize(
    ("tau", "low", "high"), [(0.04, 0.3, 0.5), (0.04, 0.0, 0.0), (0.3, 0.0, 0.1), (1e-9, 0.0, 0.0)]
)
def test_the_clip_of_m2po_as_released(
    tau: float, low: float, high: float, case: Case, seed: int
) -> None:
    (advantages,) = rows_for(case, seed)
    batch = batch_of(case).replace(
        logprobs=tensor_of(case.logprobs), advantages=tensor_of(advantages)
    )
    options = {"tau": tau, "floor_low": low, "floor_high": high}
    gate = TOKEN_MASKS["m2po_released"](batch, LossConfig(), torch.Generator(), **options)
    expected = oracles_peers.m2po_released(case, advantages, tau, low, high)
    assert gate.weight.tolist() == [k for row in expected for k in row]


@every_case()
def test_process_rewards_as_prime_releases_them(case: Case, seed: int) -> None:
    (process,) = rows_for(case, seed)
    batch = batch_of(case).replace(process_rewards=tensor_of(process))
    rewards = tensor_of(oracles.token_rewards(case, case.rewards, 0.0, "k1"))
    found, _ = ADVANTAGES["prime_released"](
        batch, rewards, AdvantageConfig(), outcome_coef=5.0, process_coef=5.0, batch_norm=True
    )
    scaled = oracles_peers.batch_normalised(case, process)
    assert_equal(
        found, oracles_advantages.prime_released(case, case.rewards, scaled, 5.0, 5.0), batch.mask
    )


def test_rejected_tokens_stay_in_the_denominator() -> None:
    algorithm = build(
        RLConfig, {"algorithm": {"preset": None, "importance_sampling": [{"name": "icepop"}]}}
    ).algorithm
    batch = Batch(
        Segments.of([[0]]),
        Segments.of([[1, 2, 3, 4]]),
        torch.tensor([0]),
        behavior_logprobs=tensor([-1.0, -1.0, -9.0, -9.0]),
        old_logprobs=tensor([-1.0] * 4),
        advantages=tensor([1.0] * 4),
    )
    objective = Objective.of(algorithm, Requirements.of(algorithm), Controllers.of(algorithm))
    loss, _ = objective(
        with_loss_weights(batch, algorithm, RLConfig().sampling.max_new_tokens),
        TokenScores(tensor([-1.0] * 4)),
    )
    assert float(loss) == pytest.approx(-0.5)  # the two that are kept, over four
