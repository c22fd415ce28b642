"""DPO, IPO and KTO reach their closed-form optimum on a bandit whose data is enumerated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences, Responses
from lightrft.algorithms.preference.objective import preference_loss, preference_terms
from lightrft.config.preference.sections import PreferenceConfig
from tests.numbers import oracles_bandit as bandits
from tests.numbers.compare import tensor

REFERENCE = [0.4, 0.3, 0.2, 0.1]
REWARDS = [0.0, 1.0, -0.5, 0.7]
SAMPLER = [0.1, 0.2, 0.3, 0.4]
CYCLE = [
    [0.5, 0.9, 0.2, 0.6],
    [0.1, 0.5, 0.7, 0.3],
    [0.8, 0.3, 0.5, 0.9],
    [0.4, 0.7, 0.1, 0.5],
]
"""Arm 0 beats 1, 1 beats 2 and 2 beats 0: no rewards explain it."""
CLOSE = 0.02
"""Largest total variation between a trained policy and its optimum."""


def arms(logprobs: Tensor, index: Tensor) -> Responses:
    """Responses of one token each: the arms ``index``."""
    reference = tensor(REFERENCE).log()
    return Responses(logprobs[index], reference[index], torch.ones(len(index)).double())


def trained(
    data_of: Callable[[Tensor], Preferences], weights: Tensor, chosen: PreferenceConfig
) -> list[float]:
    """Return the policy that minimises the loss of all data at once, from the reference on."""
    theta = tensor(REFERENCE).log().requires_grad_()
    # The loss is smooth and has five numbers, so second-order steps take milliseconds.
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        terms = preference_terms(data_of(theta.log_softmax(-1)), chosen)
        loss = preference_loss(terms, weights)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return theta.detach().softmax(-1).tolist()


def trained_on_pairs(bandit: bandits.Bandit, **tree: Any) -> list[float]:
    chosen, rejected, probability = zip(*bandits.pairs(bandit), strict=True)
    better, worse = torch.tensor(chosen), torch.tensor(rejected)

    def data_of(logprobs: Tensor) -> Pairs:
        return Pairs(arms(logprobs, better), arms(logprobs, worse))

    return trained(data_of, tensor(list(probability)), PreferenceConfig.model_validate(tree))


def trained_on_labels(desirable: list[float], **tree: Any) -> list[float]:
    """Every arm once as desirable and once as not, in proportion to the reference."""
    index = torch.arange(len(REFERENCE)).repeat(2)
    good = torch.arange(len(index)) < len(REFERENCE)
    share = tensor(desirable)
    weights = tensor(REFERENCE).repeat(2) * torch.cat([share, 1 - share])

    def data_of(logprobs: Tensor) -> Labelled:
        # each response after each prompt: there is one prompt
        kl = (tensor(REFERENCE) * (logprobs - tensor(REFERENCE).log())).sum()
        return Labelled(arms(logprobs, index), good, kl=kl)

    return trained(data_of, weights, PreferenceConfig.model_validate(tree))


@pytest.mark.parametrize("sampler", [None, SAMPLER])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_dpo_reaches_the_reference_tilted_by_the_rewards(
    sampler: list[float] | None, beta: float
) -> None:
    bandit = bandits.bradley_terry(REFERENCE, REWARDS, sampler)
    best = bandits.dpo_optimum(REFERENCE, REWARDS, beta)
    found = trained_on_pairs(bandit, losses=["sigmoid"], beta=beta)
    assert bandits.total_variation(REFERENCE, best) > 10 * CLOSE
    assert bandits.total_variation(found, best) < CLOSE


@pytest.mark.parametrize("name", ["ipo", "ipo_sum"])
@pytest.mark.parametrize("beta", [0.2, 0.5])
def test_ipo_reaches_the_reference_tilted_by_the_win_rates_of_cyclic_preferences(
    name: str, beta: float
) -> None:
    bandit = bandits.Bandit(REFERENCE, SAMPLER, CYCLE)
    best = bandits.ipo_optimum(bandit, beta)
    found = trained_on_pairs(bandit, losses=[name], beta=beta)
    assert bandits.total_variation(REFERENCE, best) > 3 * CLOSE
    assert bandits.total_variation(found, best) < CLOSE


@pytest.mark.parametrize("lambdas", [(1.0, 1.0), (1.3, 1.0)])
@pytest.mark.parametrize("desirable", [[0.9, 0.7, 0.55, 0.8], [0.6, 0.95, 0.3, 0.8]])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_kto_reaches_the_policy_where_all_arms_have_one_price(
    beta: float, desirable: list[float], lambdas: tuple[float, float]
) -> None:
    best = bandits.kto_optimum(REFERENCE, REFERENCE, desirable, beta, lambdas)
    options = {"desirable_weight": lambdas[0], "undesirable_weight": lambdas[1]}
    losses = [{"name": "kto", "options": options}]
    found = trained_on_labels(desirable, losses=losses, beta=beta)
    assert bandits.total_variation(REFERENCE, best) > 3 * CLOSE
    assert bandits.total_variation(found, best) < CLOSE
