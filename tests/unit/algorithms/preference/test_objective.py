"""The weighted sum of preference losses: divisors, splits, weights of examples and of WPO."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lightrft.algorithms.contracts.preference_cases import (
    labelled_responses,
    pairs,
    ranked_groups,
    selected,
)
from lightrft.algorithms.preference.inputs import Pairs, Preferences
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.objective import (
    implicit_rewards,
    preference_loss,
    preference_terms,
)
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import ConfigError, DataError
from tests.unit.algorithms.preference.examples import loss_of, numbers, pair, settings

MPO = PreferenceConfig.model_validate("mpo")


def value(data: Preferences, chosen: PreferenceConfig) -> float:
    return float(preference_loss(preference_terms(data, chosen)))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_mpo_is_a_weighted_sum_whose_likelihood_is_a_mean_over_tokens() -> None:
    data = pairs(5)
    likelihood = -float(data.chosen.logprobs.sum() / data.chosen.tokens.sum())
    expected = 0.8 * mean(loss_of("sigmoid", data)) + 0.2 * mean(loss_of("bco_pair", data))
    assert value(data, MPO) == pytest.approx(expected + likelihood, rel=1e-14)


def test_rpo_takes_the_likelihood_as_a_mean_over_each_response() -> None:
    data = pairs(5)
    likelihood = -float((data.chosen.logprobs / data.chosen.tokens).mean())
    expected = mean(loss_of("sigmoid", data)) + likelihood
    assert value(data, PreferenceConfig.model_validate("rpo")) == pytest.approx(expected, rel=1e-14)


def test_the_likelihood_of_gold_responses_is_a_mean_over_their_tokens() -> None:
    data = pairs(4)
    assert data.gold is not None
    expected = -float(data.gold.logprobs.sum() / data.gold.tokens.sum())
    assert value(data, settings("sft_gold")) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("kind", "name"), [("labelled", "kto"), ("ranked", "plackett_luce")])
def test_other_kinds_are_means_over_responses_and_over_groups(kind: str, name: str) -> None:
    data = labelled_responses(5) if kind == "labelled" else ranked_groups([1, 0, 2, 0, 1, 1])
    assert value(data, settings(name)) == pytest.approx(mean(loss_of(name, data)), rel=1e-14)


def test_parts_of_a_batch_add_up_to_its_loss_and_gradient() -> None:
    data = pairs(7)
    leaf = data.chosen.logprobs.clone().requires_grad_()
    data = dataclasses.replace(data, chosen=dataclasses.replace(data.chosen, logprobs=leaf))
    whole = preference_terms(data, MPO)
    (expected,) = torch.autograd.grad(preference_loss(whole), leaf)
    totals = [float(term.units.sum()) for term in whole]
    parts = [selected(data, index) for index in torch.arange(7).split(3)]
    losses = [preference_loss(preference_terms(part, MPO), totals=totals) for part in parts]
    total = torch.stack(losses).sum()
    (found,) = torch.autograd.grad(total, leaf)
    assert total.item() == pytest.approx(preference_loss(whole).item(), rel=1e-14)
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)


def test_a_pair_of_weight_2_counts_as_two_and_one_of_weight_0_not_at_all() -> None:
    data = pairs(3)
    weighed = preference_loss(preference_terms(data, MPO), numbers(2.0, 1.0, 0.0))
    repeated = selected(data, torch.tensor([0, 0, 1]))
    assert float(weighed) == pytest.approx(value(repeated, MPO), rel=1e-14)


def test_a_loss_of_the_whole_batch_refuses_weights_of_examples() -> None:
    terms = preference_terms(pairs(3), settings("aot"))
    with pytest.raises(ConfigError, match="'aot' compares the batch as a whole"):
        preference_loss(terms, numbers(1.0, 1.0, 1.0))
    assert math.isfinite(float(preference_loss(terms)))


def test_a_batch_without_anything_to_train_on_is_an_error_and_not_a_loss_of_nan() -> None:
    data = pairs(2)
    none = dataclasses.replace(data.chosen, tokens=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(DataError, match="sft: the batch has nothing to train on"):
        value(dataclasses.replace(data, chosen=none), settings("sft"))
    with pytest.raises(DataError, match="nothing to train on"):
        value(pairs(0), settings())


def with_wpo(data: Pairs, chosen: list[float], rejected: list[float]) -> Pairs:
    return dataclasses.replace(
        data,
        chosen=dataclasses.replace(data.chosen, wpo=numbers(*chosen)),
        rejected=dataclasses.replace(data.rejected, wpo=numbers(*rejected)),
    )


def test_wpo_multiplies_each_loss_by_the_weights_of_both_responses_up_to_its_cap() -> None:
    data = with_wpo(pairs(2), [0.5, 2.0], [0.5, 1.5])
    plain = loss_of("sigmoid", data)
    capped = value(data, settings(wpo=True))
    assert capped == pytest.approx((0.25 * plain[0] + plain[1]) / 2, rel=1e-14)
    free = value(data, settings(wpo=True, wpo_cap=None))
    assert free == pytest.approx((0.25 * plain[0] + 3 * plain[1]) / 2, rel=1e-14)
    assert value(data, settings()) == pytest.approx(mean(plain), rel=1e-14)


def test_wpo_of_labelled_responses_takes_their_own_weight() -> None:
    data = labelled_responses(2)
    responses = dataclasses.replace(data.responses, wpo=numbers(0.5, 0.25))
    data = dataclasses.replace(data, responses=responses)
    plain = loss_of("kto", data)
    found = value(data, settings("kto", wpo=True))
    assert found == pytest.approx((plain[0] / 2 + plain[1] / 4) / 2, rel=1e-14)


def test_wpo_without_weights_is_an_error() -> None:
    data = pairs(2)
    bare = dataclasses.replace(data, chosen=dataclasses.replace(data.chosen, wpo=None))
    with pytest.raises(ValueError, match="reads weights that the responses do not have"):
        value(bare, settings(wpo=True))
    with pytest.raises(ConfigError, match="not ranked groups"):
        value(ranked_groups([0, 0]), settings("plackett_luce", wpo=True))


def test_weights_of_wpo_carry_no_gradient() -> None:
    data = pairs(2)
    leaf = numbers(0.5, 0.5).requires_grad_()
    chosen = dataclasses.replace(
        data.chosen, wpo=leaf, logprobs=data.chosen.logprobs.clone().requires_grad_()
    )
    loss = preference_loss(
        preference_terms(dataclasses.replace(data, chosen=chosen), settings(wpo=True))
    )
    slopes = torch.autograd.grad(loss, (chosen.logprobs, leaf), allow_unused=True)
    assert slopes[0].any()
    assert slopes[1] is None


def test_terms_carry_the_names_and_weights_of_the_settings() -> None:
    terms = preference_terms(pairs(3), MPO)
    assert [(term.name, term.weight) for term in terms] == [
        *(("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0))
    ]
    assert {term.name for term in terms} <= set(PREFERENCE_LOSSES)


FREE = [
    ("simpo", {"gamma": 0.0}),
    ("alphapo", {"gamma": 0.0}),
    ("orpo", {"alpha": 0.0}),
    *(("cpo", {"alpha": 0.0, "form": form}) for form in ("sigmoid", "hinge", "ipo")),
    *(("tpo", {"alpha": 0.0, "form": form}) for form in ("sigmoid", "hinge", "ipo")),
    ("tpo", {"alpha": 0.0, "form": "length_normalized", "gamma": 0.0}),
]


@pytest.mark.parametrize(("name", "options"), FREE, ids=str)
def test_implicit_rewards_have_the_order_that_a_loss_without_a_reference_learns(
    name: str, options: dict[str, object]
) -> None:
    # by sums the second response is likelier, by means over tokens the first
    sides = (-6.0, 0.0, 6.0), (-4.0, 0.0, 2.0)
    right, wrong = pair(*sides), pair(*sides[::-1])
    is_first_better = loss_of(name, right, **options) < loss_of(name, wrong, **options)
    chosen = PreferenceConfig.model_validate({"losses": [{"name": name, "options": options}]})
    rewards = [implicit_rewards(side, chosen) for side in (right.chosen, right.rejected)]
    assert bool(rewards[0] > rewards[1]) == is_first_better


def test_implicit_rewards_are_scaled_log_ratios_where_any_loss_reads_a_reference() -> None:
    data = pair((-6.0, -7.0, 6.0), (-4.0, -4.5, 2.0))
    for names in (["sigmoid"], ["ipo"], ["simpo", "sigmoid"]):
        chosen = PreferenceConfig.model_validate({"losses": names, "beta": 0.5})
        assert implicit_rewards(data.chosen, chosen).tolist() == [0.5]
    alone = pair((-6.0, 0.0, 6.0), (-4.0, 0.0, 2.0))
    for names in (["simpo"], ["sft", "simpo"]):
        free = PreferenceConfig.model_validate({"losses": names, "beta": 0.5})
        assert implicit_rewards(alone.chosen, free).tolist() == [-0.5]
        assert implicit_rewards(alone.rejected, free).tolist() == [-1.0]
