"""Preference losses where their value and gradient are known without a formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lightrft.algorithms.contracts.loss_checks import preference_gradient
from lightrft.algorithms.contracts.preference_cases import far_preferences, preferences
from lightrft.algorithms.preference.inputs import Labelled, Pairs
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.config.preference.sections import PreferenceConfig
from tests.unit.algorithms.preference.examples import (
    BETA,
    labelled,
    loss_of,
    numbers,
    pair,
    ranked,
    responses,
    settings,
)

LN2 = math.log(2)
AT_REFERENCE = {
    "sigmoid": LN2,
    "sigmoid_norm": LN2,
    "hinge": 1.0,
    "ipo": 25.0,
    "ipo_sum": 25.0,
    "nca": 2 * LN2,
    "bco_pair": 2 * LN2,
    "sppo_hard": 50.0,
    "aot": LN2,
    "aot_unpaired": LN2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": (LN2 + 1) / 2,
    "dpop": LN2,
    "beta_dpo": LN2,
    "tdpo": LN2,
    "tdpo2": LN2,
    "cal_dpo": LN2 + 50,
    "odpo": LN2,
    "mdpo": 3 * LN2,
}


@pytest.mark.parametrize("name", sorted(AT_REFERENCE))
def test_a_pair_loss_at_policy_equal_to_reference(name: str) -> None:
    assert loss_of(name, pair()) == pytest.approx([AT_REFERENCE[name]], rel=1e-14)


@pytest.mark.parametrize("e", [0.0, 0.1, 0.4])
def test_smoothed_labels_do_not_matter_at_policy_equal_to_reference(e: float) -> None:
    smooth = settings(label_smoothing=e)
    for name in ("sigmoid", "robust", "sigmoid_norm", "aot"):
        assert loss_of(name, pair(), smooth) == pytest.approx([LN2], rel=1e-14)


def test_exo_at_policy_equal_to_reference_is_the_kl_from_a_fair_coin_to_the_labels() -> None:
    e = 1e-3
    expected = -LN2 - math.log(e * (1 - e)) / 2
    found = loss_of("exo", pair(), settings(label_smoothing=e))
    assert found == pytest.approx([expected], rel=1e-14)


def test_losses_without_a_reference_are_ln_2_between_equal_sides() -> None:
    side = (-6.0, -1.0, 3.0)
    equal = pair(side, side)
    assert loss_of("simpo", equal, gamma=0.0) == pytest.approx([LN2])
    assert loss_of("alphapo", equal, gamma=0.0) == pytest.approx([LN2])
    assert loss_of("cpo", equal, alpha=0.0) == pytest.approx([LN2])
    assert loss_of("tpo", equal, alpha=0.0) == pytest.approx([LN2])
    assert loss_of("orpo", equal, alpha=0.0) == pytest.approx([BETA * LN2])
    assert loss_of("r_dpo", pair((-6.0, -6.0, 3.0), (-9.0, -9.0, 3.0)), alpha=0.5) == [
        pytest.approx(LN2)
    ]


def test_labelled_losses_at_policy_equal_to_reference() -> None:
    data = labelled([-3.0, -5.0], [-3.0, -5.0], [True, False])
    assert loss_of("kto", data) == [0.5, 0.5]
    assert loss_of("apo_zero_unpaired", data) == [0.5, 0.5]
    assert loss_of("bco", data) == pytest.approx([LN2, LN2])


def test_rankings_at_policy_equal_to_reference_have_the_likelihood_of_a_random_order() -> None:
    assert loss_of("plackett_luce", ranked([0, 0, 0, 0], [2, 0, 3, 1])) == pytest.approx(
        [math.log(24)]
    )


def test_a_ranking_of_two_is_dpo() -> None:
    dpo = loss_of("sigmoid", pair((-2.0, -3.5, 1.0), (-7.0, -5.0, 1.0)))
    assert loss_of("plackett_luce", ranked([1.5, -2.0], [0, 1])) == pytest.approx(dpo)
    assert loss_of("plackett_luce", ranked([-2.0, 1.5], [1, 0])) == pytest.approx(dpo)


def test_the_gradient_of_dpo_is_minus_beta_times_the_probability_of_the_wrong_order() -> None:
    data = pair((-2.0, -3.5, 1.0), (-7.0, -5.0, 1.0))
    chosen, rejected = data.chosen.logprobs, data.rejected.logprobs
    chosen.requires_grad_()
    rejected.requires_grad_()
    (loss,) = PREFERENCE_LOSSES["sigmoid"](data, settings())
    slopes = torch.autograd.grad(loss, (chosen, rejected))
    wrong = 1 / (1 + math.exp(BETA * 3.5))
    assert slopes[0].item() == pytest.approx(-BETA * wrong, rel=1e-14)
    assert slopes[0].item() + slopes[1].item() == 0


SUMS_TO_ZERO = (
    *("sigmoid", "robust", "hinge", "ipo_sum", "exo", "discopop", "aot", "aot_unpaired"),
    *("beta_dpo", "tdpo2", "odpo", "r_dpo"),
)


@pytest.mark.parametrize("name", SUMS_TO_ZERO)
def test_a_loss_of_the_gap_of_log_ratios_moves_both_sides_by_the_same_amount(name: str) -> None:
    function = PREFERENCE_LOSSES[name]
    for _, data in preferences("pair"):
        assert isinstance(data, Pairs)
        chosen, rejected, *_ = preference_gradient(function, data)
        assert chosen.sum().item() == pytest.approx(-rejected.sum().item(), rel=1e-12, abs=1e-15)


MONOTONE = (
    *("sigmoid_norm", "robust", "hinge", "bco_pair", "apo_zero", "odpo", "r_dpo", "mdpo"),
    *("aot", "aot_unpaired", "dpop", "tdpo", "tdpo2", "orpo"),
)


@pytest.mark.parametrize("name", [*MONOTONE, "sigmoid", "simpo", "alphapo", "cpo", "tpo"])
def test_a_better_chosen_response_never_raises_the_loss_nor_a_worse_rejected_one(
    name: str,
) -> None:
    plain = settings(label_smoothing=0.0)
    extra: dict[str, Any] = {"alpha": 0.5} if name == "r_dpo" else {}

    def function(data: Any, _: PreferenceConfig) -> torch.Tensor:
        return PREFERENCE_LOSSES[name](data, plain, **extra)

    for _, data in [*preferences("pair"), *far_preferences("pair")]:
        chosen, rejected, *_ = preference_gradient(function, data)
        assert bool((chosen <= 0).all())
        assert bool((rejected >= 0).all())


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired", "bco"])
def test_a_labelled_response_moves_towards_its_label(name: str) -> None:
    for _, data in [*preferences("labelled"), *far_preferences("labelled")]:
        assert isinstance(data, Labelled)
        (slopes,) = preference_gradient(PREFERENCE_LOSSES[name], data)
        assert bool((slopes[data.desirable] <= 0).all())
        assert bool((slopes[~data.desirable] >= 0).all())


def test_no_gradient_flows_to_running_numbers_or_to_the_kl_of_kto() -> None:
    leaf = numbers(0.3)[0].requires_grad_()
    policy = numbers(-3.0).requires_grad_()
    one = dataclasses.replace(responses([-3.0], [-2.0]), logprobs=policy)
    data = labelled([0.0], [0.0], [True], kl=leaf, shift=leaf)
    data = dataclasses.replace(data, responses=one)
    pairs = dataclasses.replace(pair(shift=leaf, margin_mean=leaf, margin_std=leaf), chosen=one)
    losses = [PREFERENCE_LOSSES[name](data, settings()) for name in ("kto", "bco")]
    losses += [PREFERENCE_LOSSES[name](pairs, settings()) for name in ("bco_pair", "beta_dpo")]
    total = torch.cat(losses).sum()
    slopes = torch.autograd.grad(total, (policy, leaf), allow_unused=True)
    assert slopes[0] is not None
    assert slopes[1] is None
