"""The contract of losses of reward models catches the faults that it is there for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.contracts import loss_checks
from lightrft.algorithms.contracts.checks import ContractViolation
from lightrft.algorithms.contracts.reward_cases import scored_cases
from lightrft.algorithms.contracts.run_checks import CHECKS, run_contract_checks
from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.registry import pair_gaps

softplus = torch.nn.functional.softplus


def of_kind(kind: str, *heads: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.kind = kind
        if heads:
            function.heads = heads
        return function

    return mark


@of_kind("pair")
def overflows(data: ScoredResponses) -> Tensor:
    return torch.exp(-pair_gaps(data))


@of_kind("pair")
def logarithm_of_a_probability(data: ScoredResponses) -> Tensor:
    return -torch.log(torch.sigmoid(pair_gaps(data)))


@of_kind("pair")
def wrong_sign(data: ScoredResponses) -> Tensor:
    return softplus(pair_gaps(data))


@of_kind("pair")
def reads_the_level(data: ScoredResponses) -> Tensor:
    """Takes the score of the better response alone."""
    return softplus(-data.scores[data.pairs()[0]])


@of_kind("pair")
def saturates_at_0(data: ScoredResponses) -> Tensor:
    """Has no gradient at equal scores."""
    return torch.relu(-pair_gaps(data)).square()


@of_kind("pair")
def mean_of_the_batch(data: ScoredResponses) -> Tensor:
    return softplus(-pair_gaps(data)).mean()


@of_kind("pair")
def relative_to_the_batch(data: ScoredResponses) -> Tensor:
    """Couples the groups."""
    gap = pair_gaps(data)
    return softplus(-gap + gap.sum() / 10)


@of_kind("pair")
def compares_all(data: ScoredResponses) -> Tensor:
    """Compares neighbours, whatever their group."""
    return softplus(data.scores[1:] - data.scores[:-1])


@of_kind("rating")
def by_place(data: ScoredResponses) -> Tensor:
    """Takes the order of the batch for the ratings."""
    index = data.rated()
    return (data.scores[index] - (index % 2 == 0).to(data.scores.dtype)).square()


@of_kind("pair")
def always_double(data: ScoredResponses) -> Tensor:
    return softplus(-pair_gaps(data).double())


@of_kind("pair")
def loses_digits(data: ScoredResponses) -> Tensor:
    return softplus(-((pair_gaps(data) + 1e6) - 1e6))


@of_kind("pair")
def writes_to_its_input(data: ScoredResponses) -> Tensor:
    assert data.margin is not None
    data.margin.add_(1)
    return softplus(-pair_gaps(data))


@of_kind("rating", "gaussian")
def divides_by_the_variance(data: ScoredResponses) -> Tensor:
    mean, log_variance = data.outputs[data.rated()].unbind(1)
    return mean.square() / log_variance.exp()


def without_a_kind(data: ScoredResponses) -> Tensor:
    return softplus(-pair_gaps(data))


FINITE = "check_reward_loss_is_finite"
FAULTS = [
    (overflows, FINITE, "inf"),
    (logarithm_of_a_probability, FINITE, "inf"),
    (mean_of_the_batch, FINITE, "shape ()"),
    (compares_all, FINITE, "shape"),
    (divides_by_the_variance, FINITE, "gradient: "),
    (without_a_kind, FINITE, "attribute kind"),
    (wrong_sign, "check_reward_loss_is_no_higher_if_the_scores_agree", "larger score"),
    (wrong_sign, "check_reward_loss_raises_the_better_response", "gradient"),
    (saturates_at_0, "check_reward_loss_raises_the_better_response", "gradient"),
    (reads_the_level, "check_reward_loss_ignores_a_shift_of_all_scores", "all scores"),
    (relative_to_the_batch, "check_reward_loss_is_by_group", "alone"),
    (by_place, "check_reward_loss_is_by_group", "in reverse"),
    (always_double, "check_reward_loss_keeps_the_dtype", "torch.float64"),
    (loses_digits, "check_reward_loss_keeps_the_dtype", "in float32"),
    (writes_to_its_input, "check_reward_loss_leaves_its_input_alone", "margin was written to"),
]


@pytest.mark.parametrize(
    ("function", "check", "said"), FAULTS, ids=[f"{f.__name__}-{c}" for f, c, _ in FAULTS]
)
def test_a_faulty_loss_of_reward_models_is_caught(
    function: Callable[..., Any], check: str, said: str
) -> None:
    with pytest.raises(ContractViolation, match=re.escape(said)):
        getattr(loss_checks, check)(function)


def test_a_registered_loss_of_reward_models_can_be_checked_by_its_name_and_options() -> None:
    options = {"margin": True, "weight": "margin", "label_smoothing": 0.1}
    results = run_contract_checks("bradley_terry", "reward_model", options)
    assert len(results) == len(CHECKS["reward_model"])
    assert [result.broken for result in results if result.broken] == []


def test_the_cases_have_ties_missing_labels_and_groups_out_of_order() -> None:
    cases = dict(scored_cases("classes"))
    groups = cases["groups [1, 0, 2, 0, 1, 1]"]
    assert groups.group_of.tolist() != sorted(groups.group_of.tolist())
    assert groups.ties()[0].numel() > 0
    some = cases["some labels missing"]
    assert some.rated().numel() < len(some)
    assert some.rank is not None and -1 in some.rank.tolist()
