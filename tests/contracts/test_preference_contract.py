"""The contract of preference losses catches the faults that it is there for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.contracts import loss_checks
from lightrft.algorithms.contracts.checks import ContractViolation
from lightrft.algorithms.contracts.preference_cases import leaning, pairs, ranked_groups
from lightrft.algorithms.contracts.run_checks import CHECKS, run_contract_checks
from lightrft.algorithms.preference.inputs import Labelled, Pairs, Ranked
from lightrft.config.preference.sections import PreferenceConfig


def of_kind(kind: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.kind = kind
        return function

    return mark


@of_kind("pair")
def overflows(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.exp(-settings.beta * data.log_ratio)


@of_kind("pair")
def logarithm_of_a_probability(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Finite in value where the sigmoid underflows to 0 in float32 alone."""
    return -torch.log(torch.sigmoid(settings.beta * data.log_ratio))


@of_kind("pair")
def wrong_sign(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.nn.functional.softplus(settings.beta * data.log_ratio)


@of_kind("pair")
def relative_to_the_batch(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Couples the pairs without saying so."""
    ratio = data.log_ratio
    return torch.nn.functional.softplus(-settings.beta * (ratio - ratio.mean() / 2))


@of_kind("pair")
def mean_of_the_batch(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.nn.functional.softplus(-settings.beta * data.log_ratio).mean()


@of_kind("pair")
def always_double(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.nn.functional.softplus(-settings.beta * data.log_ratio.double())


@of_kind("pair")
def loses_digits(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.nn.functional.softplus(-settings.beta * ((data.log_ratio + 1e6) - 1e6))


@of_kind("pair")
def writes_to_its_input(data: Pairs, settings: PreferenceConfig) -> Tensor:
    data.chosen.tokens.add_(1)
    return torch.nn.functional.softplus(-settings.beta * data.log_ratio)


@of_kind("labelled")
def by_place(data: Labelled, settings: PreferenceConfig) -> Tensor:
    """Takes the order of the batch for its labels."""
    good = torch.arange(len(data)) % 2 == 0
    reward = settings.beta * data.responses.log_ratio
    return torch.nn.functional.softplus(torch.where(good, -reward, reward))


@of_kind("ranked")
def first_is_best(data: Ranked, settings: PreferenceConfig) -> Tensor:
    """Takes the first response of a group for its best."""
    index, real = data.padded()
    scores = settings.beta * data.responses.log_ratio[index]
    return torch.logsumexp(scores.masked_fill(~real, -torch.inf), -1) - scores[:, 0]


def without_a_kind(data: Pairs, settings: PreferenceConfig) -> Tensor:
    return torch.nn.functional.softplus(-settings.beta * data.log_ratio)


FAULTS = [
    (overflows, "check_preference_loss_is_finite", "inf"),
    (logarithm_of_a_probability, "check_preference_loss_is_finite", "inf"),
    (mean_of_the_batch, "check_preference_loss_is_finite", "shape ()"),
    (wrong_sign, "check_preference_loss_is_lower_if_the_policy_agrees", "prefers the better"),
    (relative_to_the_batch, "check_preference_loss_is_by_example", "alone"),
    (by_place, "check_preference_loss_is_by_example", "in reverse"),
    (first_is_best, "check_preference_loss_is_by_example", "responses in reverse"),
    (always_double, "check_preference_loss_keeps_the_dtype", "torch.float64"),
    (loses_digits, "check_preference_loss_keeps_the_dtype", "in float32"),
    (writes_to_its_input, "check_preference_loss_leaves_its_input_alone", "written to"),
    (without_a_kind, "check_preference_loss_is_finite", "attribute kind"),
]


@pytest.mark.parametrize(
    ("function", "check", "said"), FAULTS, ids=[function.__name__ for function, _, _ in FAULTS]
)
def test_a_faulty_preference_loss_is_caught(
    function: Callable[..., Any], check: str, said: str
) -> None:
    with pytest.raises(ContractViolation, match=re.escape(said)):
        getattr(loss_checks, check)(function)


def test_a_batch_loss_that_says_so_may_couple_the_pairs() -> None:
    function = of_kind("pair")(lambda data, settings: relative_to_the_batch(data, settings))
    function.needs = {"whole_batch"}
    loss_checks.check_preference_loss_is_by_example(function)
    assert loss_checks.kind_of_loss(function) == "pair"


def test_a_registered_preference_loss_can_be_checked_by_its_name_and_options() -> None:
    results = run_contract_checks("r_dpo", "preference", {"alpha": 0.01})
    assert len(results) == len(CHECKS["preference"])
    assert [result.broken for result in results if result.broken] == []


def test_the_cases_have_ties_and_groups_out_of_order_and_no_positive_log_prob() -> None:
    groups = ranked_groups([1, 0, 2, 0, 1, 1])
    assert len(set(groups.rank.tolist())) < len(groups.rank)
    assert groups.group_of.tolist() != sorted(groups.group_of.tolist())
    far = leaning("pair", 1e4, -1e4)
    assert isinstance(far, Pairs)
    assert bool((far.chosen.logprobs <= 0).all())
    assert len(pairs(7)) == 7
