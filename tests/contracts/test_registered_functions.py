"""Every function in every table keeps the contract of its kind; a new entry is covered by being there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.contracts import checks, loss_checks
from lightrft.algorithms.group_filters import FILTERS
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_shaping import SHAPINGS
from lightrft.algorithms.token_masks import TOKEN_MASKS, TokenMask
from lightrft.algorithms.token_ops import TokenRows
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.algorithm import AdvantageConfig, AlgorithmConfig, LossConfig
from lightrft.config.presets import PRESETS
from lightrft.types import Batch
from lightrft.utils.registry import Registry

TABLES: list[tuple[Registry[Any], list[Callable[[Any], None]]]] = [
    (ADVANTAGES, checks.ADVANTAGE_CHECKS),
    (POLICY_LOSSES, checks.POLICY_LOSS_CHECKS),
    (AGGREGATIONS, checks.AGGREGATION_CHECKS),
    (KL_ESTIMATORS, checks.KL_CHECKS),
    (IS_CORRECTIONS, checks.CORRECTION_CHECKS),
    (TOKEN_MASKS, checks.TOKEN_MASK_CHECKS),
    (SHAPINGS, checks.SHAPING_CHECKS),
    (FILTERS, checks.FILTER_CHECKS),
    (PREFERENCE_LOSSES, loss_checks.PREFERENCE_CHECKS),
    (REWARD_LOSSES, loss_checks.REWARD_CHECKS),
]
CONTRACTS = [
    pytest.param(
        table, name, check, id=f"{table.kind}-{name}-{check.__name__.removeprefix('check_')}"
    )
    for table, listed in TABLES
    for name in table
    for check in listed
]
ENTRIES = [
    pytest.param(table, name, id=f"{table.kind}-{name}") for table, _ in TABLES for name in table
]


@pytest.mark.parametrize(("table", "name", "check"), CONTRACTS)
def test_every_registered_function_keeps_its_contract(
    table: Registry[Any], name: str, check: Callable[[Any], None]
) -> None:
    check(table[name])
    assert name in table


def test_every_check_of_the_module_is_in_a_list() -> None:
    listed = {check.__name__ for _, every in TABLES for check in every}
    names = [*vars(checks), *vars(loss_checks)]
    assert listed == {name for name in names if name.startswith("check_")} - {"check_order"}


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_every_registered_function_says_what_it_is(table: Registry[Any], name: str) -> None:
    about = table.about(name)
    assert about.formula
    assert about.latex
    assert "\n" not in about.formula + about.latex + about.paper
    assert (table[name].__doc__ or "").strip().endswith((".", ".\n"))


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_a_space_in_a_latex_formula_does_not_swallow_the_symbol_after_it(
    table: Registry[Any], name: str
) -> None:
    assert not re.search(r"\\quad[A-Za-z]", table.about(name).latex)


SOURCED = [
    *(ADVANTAGES, POLICY_LOSSES, IS_CORRECTIONS, TOKEN_MASKS, AGGREGATIONS, KL_ESTIMATORS),
    *(PREFERENCE_LOSSES, REWARD_LOSSES),
]


@pytest.mark.parametrize("table", SOURCED, ids=lambda t: t.kind)
def test_every_formula_of_the_objective_names_its_source(table: Registry[Any]) -> None:
    assert [name for name in table if not table.about(name).paper] == []


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_an_aggregation_writes_the_token_loss_as_explain_expects(name: str) -> None:
    about = AGGREGATIONS.about(name)
    assert "L_it" in about.formula
    assert "L_{i,t}" in about.latex


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_names_functions_that_exist(preset: str) -> None:
    check_parts(AlgorithmConfig.model_validate(preset))
    assert AlgorithmConfig.model_validate(preset).preset == preset


# The checks can fail: functions with the faults that they are there for


def mean_by_place(batch: Batch, token: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Groups of two neighbours, whoever they are."""
    rewards = batch.rewards if batch.rewards is not None else torch.zeros(0)
    group = torch.arange(len(batch)) // 2
    total = torch.zeros_like(rewards).index_add(0, group, rewards)
    found = torch.where(batch.mask, (rewards - total[group] / 2)[batch.row_of], 0.0)
    return found, found


def whole_batch_deviation(
    batch: Batch, token: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Nan for a batch of one answer, and for equal rewards."""
    rewards = batch.rewards if batch.rewards is not None else torch.zeros(0)
    found = ((rewards - rewards.mean()) / rewards.std())[batch.row_of]
    return found, found


def local_mean_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, dict]:
    """Divides by the tokens it happens to see."""
    return -(logprobs - old).exp() * advantages / max(1, int(rows.mask.sum())), {}


def wrong_sign_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, dict]:
    return (logprobs - old).exp() * advantages, {}


def ratio_of_all_tokens_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, dict]:
    """A sequence ratio over all tokens, sampled or not."""
    total = torch.zeros(len(rows), dtype=logprobs.dtype).index_add(0, rows.row_of, logprobs - old)
    return -total[rows.row_of].exp() * advantages, {}


def overflowing_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, dict]:
    return -(5 * (logprobs - old)).exp() * advantages, {}


def mean_of_rows_with_zero_length(rows: TokenRows, constant: int) -> Tensor:
    """Counts padding: rows without tokens take their share, tokens that were not sampled theirs."""
    return torch.ones(rows.mask.numel(), dtype=torch.float64) / max(1, rows.mask.numel())


def plain_sum(rows: TokenRows, constant: int) -> Tensor:
    return rows.mask.double()


def weight_of_the_batch(
    now: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: TokenRows
) -> Tensor:
    """One weight for whatever it happens to see, not sampled tokens too."""
    return (old - behavior).mean().exp().expand(len(old))


def weight_of_products(
    now: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: TokenRows
) -> Tensor:
    """A product over the answer that nothing bounds."""
    return rows.spread(rows.sum(5 * (old - behavior))).exp()


def first_half(batch: Batch, settings: LossConfig, generator: torch.Generator) -> TokenMask:
    return TokenMask((torch.arange(batch.tokens) < batch.tokens / 2) & batch.mask)


def drawn_by_place(batch: Batch, settings: LossConfig, generator: torch.Generator) -> TokenMask:
    return TokenMask((torch.rand(batch.tokens, generator=generator) < 0.5) & batch.mask)


def above_the_mean_of_all(
    batch: Batch, settings: LossConfig, generator: torch.Generator
) -> TokenMask:
    entropy = batch.entropy if batch.entropy is not None else torch.zeros(0)
    return TokenMask((entropy > entropy.mean()) & batch.mask)


def everything(batch: Batch, settings: LossConfig, generator: torch.Generator) -> TokenMask:
    return TokenMask(torch.ones(batch.tokens))


def spends_the_entropy(batch: Batch, settings: LossConfig, generator: torch.Generator) -> TokenMask:
    assert batch.entropy is not None
    batch.entropy.sub_(1)
    return TokenMask((batch.entropy > 0) & batch.mask)


FAULTS = [
    (weight_of_products, "check_correction_is_finite_and_not_negative"),
    (weight_of_the_batch, "check_correction_ignores_what_was_not_sampled"),
    (weight_of_the_batch, "check_correction_is_by_response"),
    (
        lambda now, old, behavior, advantages, rows: (old - behavior).exp() / 2,
        "check_correction_is_one_between_equals",
    ),
    (first_half, "check_token_mask_is_by_content_not_by_place"),
    (drawn_by_place, "check_token_mask_is_by_content_not_by_place"),
    (above_the_mean_of_all, "check_token_mask_ignores_what_was_not_sampled"),
    (everything, "check_token_mask_keeps_a_share_between_nothing_and_all"),
    (spends_the_entropy, "check_token_mask_leaves_its_input_alone"),
    (mean_by_place, "check_advantage_is_by_group_not_by_place"),
    (whole_batch_deviation, "check_advantage_is_finite"),
    (whole_batch_deviation, "check_advantage_is_zero_where_nothing_was_sampled"),
    (local_mean_loss, "check_loss_is_by_response"),
    (wrong_sign_loss, "check_loss_on_policy_pushes_along_the_advantage"),
    (ratio_of_all_tokens_loss, "check_loss_ignores_what_was_not_sampled"),
    (overflowing_loss, "check_loss_is_finite"),
    (mean_of_rows_with_zero_length, "check_aggregation_is_zero_exactly_where_nothing_was_sampled"),
    (plain_sum, "check_aggregation_is_a_mean"),
    (lambda a, b: a - b + 1e-9, "check_kl_is_zero_between_equals"),
    (lambda a, b: (a - b) - (a - b).sum(), "check_kl_is_by_token"),
    (lambda a, b: (10 * (a - b)).exp() - 1, "check_kl_is_finite"),
    (lambda batch, rewards, *, max_new_tokens: rewards / rewards.std(), "check_shaping_is_finite"),
    (
        lambda batch, rewards, *, max_new_tokens: rewards - rewards.sum(),
        "check_shaping_is_by_group_not_by_place",
    ),
    (lambda batch, rewards, *, max_new_tokens: rewards.double(), "check_shaping_keeps_the_dtype"),
    (
        lambda batch, rewards, *, max_new_tokens: rewards + 1e9 - 1e9,
        "check_shaping_is_the_same_in_float32",
    ),
    (
        lambda batch, token, settings: ((token + 1e9) - 1e9, token),
        "check_advantage_is_the_same_in_float32",
    ),
    (
        lambda new, old, a, rows, settings: (-((new + 1e9) - 1e9) * a, {}),
        "check_loss_is_the_same_in_float32",
    ),
    (
        lambda batch, rewards, *, max_new_tokens: rewards.mul_(2),
        "check_shaping_leaves_its_input_alone",
    ),
    (lambda group: len(group) == 0, "check_filter_gives_a_reason_or_nothing"),
    (
        lambda group: "first" if group and group[0].reward == 0 else "",
        "check_filter_is_by_content_not_by_place",
    ),
]


@pytest.mark.parametrize(("function", "check"), FAULTS, ids=[check for _, check in FAULTS])
def test_a_faulty_function_is_caught(function: Callable[..., Any], check: str) -> None:
    with pytest.raises(AssertionError):
        getattr(checks, check)(function)
