"""What ``lightrft explain`` shows is what runs: the shown numbers, and nothing else, give the same loss and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.contracts.cases import plain_batch
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_masks import with_token_masks
from lightrft.config.base import build
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import Objective, with_loss_weights
from lightrft.models.actor import TokenScores
from lightrft.trainer.explanation.effective_settings import EffectiveSetting
from lightrft.trainer.explanation.explain import explain
from lightrft.types import Batch
from tests.advantage_helpers import with_advantages

LIMIT = 8
BESIDE = {"sampling": {"max_new_tokens": LIMIT}}


def batch() -> Batch:
    """Groups of two and three answers, with tokens that were not sampled and log-ratios on either side of every bound."""
    mask = [[True] * 5, [True, False, True], [True, True], [True] * 7, [False, True, True]]
    plain = plain_batch(mask, [0, 1, 0, 1, 1], [1.0, 0.0, 0.25, 1.0, -0.5])
    n = torch.arange(plain.tokens)
    rewards = torch.stack([n[:5].double() / 4, (n[:5] % 2).double()], 1)
    return plain.replace(
        energy=(n * 3 % 7).double() / 8,
        entropy=(n * 7 % 5).double() / 4,
        teacher_logprobs=-(n % 3).double() - 0.1,
        process_rewards=(n % 4).double() / 8,
        costs=torch.tensor([[0.5], [3.0], [1.0], [2.0], [0.0]], dtype=torch.float64),
        cost_values=(n % 5).double() / 8,
        baselines=torch.full((5,), 0.3, dtype=torch.float64),
        terms=rewards,
        term_weights=torch.ones_like(rewards),
        versions=torch.zeros_like(n),
    )


def objective(config: RLConfig) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and returns of the fixed batch, by the functions that a step calls."""
    algorithm, controls = config.algorithm, Controllers.of(config.algorithm)
    whole = with_loss_weights(
        with_advantages(batch(), config, controls, Requirements.of(config.algorithm)),
        config.algorithm,
        config.sampling.max_new_tokens,
    )
    whole = with_token_masks(
        whole, algorithm.token_masks, algorithm.loss, torch.Generator().manual_seed(1)
    )
    leaf = whole.logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    entropy = (leaf * 0.3).sin() + 2
    loss, _ = Objective.of(algorithm, Requirements.of(algorithm), controls, whole, 1)(
        whole, TokenScores(leaf, entropy)
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient, whole.returns  # type: ignore[return-value]


def rebuilt(shown: tuple[EffectiveSetting, ...]) -> dict[str, Any]:
    """The tree of settings that holds the shown numbers and nothing else, with no preset to fill it in."""
    tree: dict[str, Any] = {}
    for number in shown:
        *branches, leaf = number.key.split(".")
        place: Any = tree
        for word in branches:
            place = place.setdefault(word, {})
        place[leaf] = None if number.key == "algorithm.preset" else number.value
    return listed(tree)


def listed(tree: Any) -> Any:
    """``{"0": a, "1": b}`` as ``[a, b]``."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(key.isdigit() for key in tree):
        return [listed(tree[key]) for key in sorted(tree, key=int)]
    return {key: listed(value) for key, value in tree.items()}


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_shown_numbers_alone_give_the_loss_and_gradient_of_the_preset(
    preset: str, updates: int
) -> None:
    config = build(RLConfig, {**BESIDE, "algorithm": preset, "train": {"ppo_epochs": updates}})
    shown = explain(config, {}).numbers
    again = build(RLConfig, rebuilt(shown))
    assert again.algorithm.preset is None
    loss, gradient, returns = objective(config)
    other_loss, other_gradient, other_returns = objective(again)
    assert other_loss == loss
    assert torch.equal(other_gradient, gradient)
    assert torch.equal(other_returns, returns)
    assert gradient.any()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_shown_numbers_choose_the_same_functions_and_models(preset: str) -> None:
    config = build(RLConfig, {**BESIDE, "algorithm": preset})
    found = explain(config, {})
    again = explain(build(RLConfig, rebuilt(found.numbers)), {})
    assert [(line.part, line.name, line.about) for line in again.lines] == [
        (x.part, x.name, x.about) for x in found.lines
    ]
    assert (again.objective, again.latex) == (found.objective, found.latex)
    assert (again.roles, again.forwards, again.gradient) == (
        found.roles,
        found.forwards,
        found.gradient,
    )


def test_a_number_that_is_left_out_is_seen() -> None:
    config = build(RLConfig, {**BESIDE, "algorithm": "cpgd"})
    shown = tuple(n for n in explain(config, {}).numbers if n.key != "algorithm.policy_drift.cap")
    assert objective(build(RLConfig, rebuilt(shown)))[0] != objective(config)[0]
    assert not torch.equal(objective(build(RLConfig, rebuilt(shown)))[1], objective(config)[1])
