"""What a part declares (``needs``, ``reads``) is what its function reads: the rest of the program believes the declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.contracts.cases import filled, plain_batch
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AdvantageConfig, LossConfig
from lightrft.types import Batch
from lightrft.utils.registry import Registry

LOSS_SETTINGS: dict[str, Any] = {
    "ratio": "sequence",
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.5,
    "ratio_cap": 1.4,
}
ADVANTAGE_SETTINGS: dict[str, Any] = {
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "eps": 0.5,
    "bootstrap_truncated": True,
}
COLUMNS = {
    "critic": "values",
    "greedy": "baselines",
    "prm": "process_rewards",
    "energy": "energy",
    "steps": "steps",
}


GROUPS = [0, 1, 0, 1, 2, 1]


def case(prompt_of: Sequence[int] = GROUPS) -> Batch:
    """Three groups, one of them of one answer; policies far enough apart that every bound acts."""
    mask = [
        [True, True, True],
        [True, True],
        [True],
        [True, True, True, True],
        [True, False, True],
        [True, True],
    ]
    return filled(plain_batch(mask, prompt_of, [1.0, 0.0, 0.0, 2.0, 1.0, 0.5]))


def column(batch: Batch, name: str) -> Tensor:
    found = getattr(batch, name)
    assert isinstance(found, Tensor)
    return found


def losses_of(name: str, batch: Batch, settings: LossConfig) -> Tensor:
    columns = (column(batch, c) for c in ("logprobs", "old_logprobs", "advantages"))
    return POLICY_LOSSES[name](*columns, TokenRows.of(batch), settings)[0]


def changes(function: Callable[[Any], Tensor], before: Any, after: Any) -> bool:
    return not torch.equal(function(before), function(after))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_reads_the_settings_that_it_lists_and_no_other(name: str) -> None:
    batch = case()
    assert POLICY_LOSSES.about(name).reads == {
        key
        for key, value in LOSS_SETTINGS.items()
        if changes(
            lambda settings: losses_of(name, batch, settings),
            LossConfig(),
            LossConfig(**{key: value}),
        )
    }


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_says_whether_it_reads_the_old_log_probs(name: str) -> None:
    batch = case()
    moved = batch.replace(old_logprobs=column(batch, "old_logprobs") - 0.3)
    read = changes(lambda b: losses_of(name, b, LossConfig()), batch, moved)
    assert ("old" in POLICY_LOSSES.about(name).needs) == read


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_what_a_policy_loss_reports_carries_no_gradient(name: str) -> None:
    batch = case()
    logprobs = column(batch, "logprobs").requires_grad_()
    losses, stats = POLICY_LOSSES[name](
        logprobs,
        column(batch, "old_logprobs"),
        column(batch, "advantages"),
        TokenRows.of(batch),
        LossConfig(),
    )
    assert losses.requires_grad
    assert not any(stat.requires_grad for stat in stats.values())


def advantages_of(name: str, batch: Batch, settings: AdvantageConfig) -> Tensor:
    rewards = torch.sin(torch.arange(batch.tokens).double())
    return torch.stack(ADVANTAGES[name](batch, rewards, settings))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_advantage_reads_the_settings_that_it_lists_and_no_other(name: str) -> None:
    batch = case()
    assert ADVANTAGES.about(name).reads == {
        key
        for key, value in ADVANTAGE_SETTINGS.items()
        if changes(
            lambda settings: advantages_of(name, batch, settings),
            AdvantageConfig(),
            AdvantageConfig(**{key: value}),
        )
    }


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_advantage_says_which_columns_it_cannot_do_without(name: str) -> None:
    needed = set()
    for need, missing in COLUMNS.items():
        try:
            advantages_of(name, case().replace(**{missing: None}), AdvantageConfig())
        except ValueError as error:
            assert missing in str(error)
            needed.add(need)
    assert ADVANTAGES.about(name).needs & COLUMNS.keys() == needed


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_advantage_says_whether_it_compares_the_answers_of_a_group(name: str) -> None:
    together, apart = case(), case(range(len(GROUPS))).replace(baselines=case().baselines)
    compares = changes(lambda batch: advantages_of(name, batch, AdvantageConfig()), together, apart)
    assert ("groups" in ADVANTAGES.about(name).needs) == compares


@pytest.mark.parametrize("name", sorted(IS_CORRECTIONS))
def test_a_correction_says_which_log_probs_it_reads(name: str) -> None:
    batch = case()
    columns = dict.fromkeys(("now", "old", "behavior"), column(batch, "logprobs"))

    def weights(moved: dict[str, Tensor]) -> Tensor:
        options = {"opsm": {"delta": 0.1}, "divergence_reject": {"limit": 0.1}}.get(name, {})
        return IS_CORRECTIONS[name](
            *moved.values(), column(batch, "advantages"), TokenRows.of(batch), **options
        )

    # What is normalised does not see that all have moved alike.
    uneven = torch.linspace(0.5, 1.5, batch.tokens)
    read = {
        need
        for need in ("old", "behavior")
        if any(
            changes(weights, columns, {**columns, need: columns[need] + size * uneven})
            for size in (-1, 1)
        )
    }
    assert IS_CORRECTIONS.about(name).needs & {"old", "behavior"} == read


PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "advantage": {
        "gae": {"lam_critic": None},
        "gigpo": {"weight": 1.0, "std": True},
        "gpg": {"std_eps": None},
        "otb": {"zero_tail": True},
        "pass_at_k": {"std_eps": None},
        "prime_released": {"outcome_coef": 1.0, "process_coef": 1.0, "batch_norm": False},
        "rft": {"threshold": 1.0},
        "vapo": {"alpha": 0.05, "lam_critic": 1.0},
    },
    "policy loss": {
        "cispo_cap": {"cap": 5.0},
        "dppo": {"low": 0.15, "high": 0.15},
        "dppo_kl": {"low": 0.05, "high": 0.05},
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "topr": {"pos_low": 1.0, "pos_high": 1.0, "neg_low": 0.0, "neg_high": 1.0},
        "vespo": {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
    },
    "correction": {
        "divergence_reject": {"estimator": "k3", "level": "token"},
        "icepop": {"low": 0.5, "high": 5.0},
        "mis": {"level": "sequence", "low": 0.0, "high": 2.0},
        "sequence_mask": {"level": "geometric", "low": 0.99, "high": 1.01, "cap": None},
        "sequence_reject": {"level": "geometric", "low": 0.99, "high": 1.01},
        "tis": {"level": "token", "low": 0.0, "high": 2.0},
        "tis_normalized": {"level": "token", "low": 0.0, "high": 2.0},
    },
}
"""Options with their values when none is given: the numbers of the papers."""


@pytest.mark.parametrize(
    "registry", [ADVANTAGES, POLICY_LOSSES, IS_CORRECTIONS], ids=lambda registry: registry.kind
)
def test_options_that_are_not_given_are_the_published_numbers(registry: Registry[Any]) -> None:
    found = {}
    for name in registry:
        options = [
            p
            for p in inspect.signature(registry[name]).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        ]
        found[name] = {p.name: p.default for p in options if p.default is not p.empty}
    assert {name: options for name, options in found.items() if options} == PUBLISHED[registry.kind]
