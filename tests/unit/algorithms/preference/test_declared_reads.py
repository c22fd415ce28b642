"""What a preference loss declares (``needs``, ``reads``) is what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightrft.algorithms.contracts.checks import example_options
from lightrft.algorithms.contracts.preference_cases import (
    each_responses,
    labelled_responses,
    pairs,
    ranked_groups,
)
from lightrft.algorithms.preference.inputs import Labelled, Pairs, Preferences, Ranked, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.objective import units_of
from lightrft.config.preference.sections import PreferenceConfig

BASE: dict[str, Any] = {"losses": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.1}
CHANGES: dict[str, Any] = {
    "beta": 0.2,
    "label_smoothing": 0.2,
    "f_divergence": {"kind": "js"},
}


def data_of(kind: str) -> Preferences:
    if kind == "ranked":
        return ranked_groups([0, 0, 0, 1, 1])
    return pairs(4) if kind == "pair" else labelled_responses(4)


def outcome(name: str, data: Preferences, settings: PreferenceConfig) -> torch.Tensor:
    """Losses over units: a sum over tokens reads their number there."""
    function = PREFERENCE_LOSSES[name]
    part = settings.losses[0].model_copy(update={"name": name})
    losses = function(data, settings, **example_options(function))
    return losses / units_of(part, data)


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_preference_loss_reads_the_settings_that_it_lists_and_no_other(name: str) -> None:
    data = data_of(PREFERENCE_LOSSES.about(name).kind)
    before = outcome(name, data, PreferenceConfig.model_validate(BASE))
    found = set()
    for key, value in CHANGES.items():
        after = outcome(name, data, PreferenceConfig.model_validate({**BASE, key: value}))
        if not torch.equal(before, after):
            found.add(key)
    assert PREFERENCE_LOSSES.about(name).reads == found


def changed(**columns: Callable[[Any], Any]) -> Callable[[Preferences], Preferences]:
    def change(data: Preferences) -> Preferences:
        names = {field.name for field in dataclasses.fields(data)}
        own = {key: f(getattr(data, key)) for key, f in columns.items() if key in names}
        return dataclasses.replace(data, **own)

    return change


def of_responses(**columns: Callable[[Any], Any]) -> Callable[[Preferences], Preferences]:
    def one(responses: Responses) -> Responses:
        return dataclasses.replace(
            responses, **{key: f(getattr(responses, key)) for key, f in columns.items()}
        )

    return lambda data: each_responses(data, one)


def longer(data: Preferences) -> Preferences:
    """Change the lengths of the two sides of a pair by different amounts."""
    if isinstance(data, Pairs):
        chosen = dataclasses.replace(data.chosen, tokens=data.chosen.tokens + 3)
        data = dataclasses.replace(data, chosen=chosen)
    return of_responses(tokens=lambda x: x * 2)(data)


def other_reference(data: Preferences) -> Preferences:
    """Change the reference by another amount for each response of a pair, group or batch."""
    shift = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    if isinstance(data, Pairs):
        moved = data.chosen.ref_logprobs + shift[:4]
        return dataclasses.replace(
            data, chosen=dataclasses.replace(data.chosen, ref_logprobs=moved)
        )
    moved = data.responses.ref_logprobs + shift[: len(data.responses)]
    return dataclasses.replace(
        data, responses=dataclasses.replace(data.responses, ref_logprobs=moved)
    )


def drifting(x: torch.Tensor) -> torch.Tensor:
    return x + torch.linspace(0.1, 1.0, len(x), dtype=x.dtype)


def other_side(data: Preferences) -> Preferences:
    """Change the KL of the rejected response alone."""
    if not isinstance(data, Pairs) or data.rejected.sequence_kl is None:
        return data
    rejected = dataclasses.replace(data.rejected, sequence_kl=data.rejected.sequence_kl + 1)
    return dataclasses.replace(data, rejected=rejected)


def less_likely(responses: Responses) -> Responses:
    return dataclasses.replace(responses, logprobs=responses.logprobs - 1)


NEEDS: dict[str, Callable[[Preferences], Preferences]] = {
    "reference": other_reference,
    "sequence_kl": other_side,
    "margin": changed(margin=lambda x: x + 1),
    "corrupted": changed(corrupted=less_likely),
    "gold": changed(gold=less_likely),
    "kl": changed(kl=lambda x: x + 1),
    "shift": changed(shift=lambda x: x + 1),
    "margin_stats": changed(margin_mean=lambda x: x + 1, margin_std=lambda x: x * 2),
    "rating": changed(rating=drifting),
    "tokens": longer,
}


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_preference_loss_needs_the_columns_that_it_lists_and_no_other(name: str) -> None:
    about = PREFERENCE_LOSSES.about(name)
    data = data_of(about.kind)
    settings = PreferenceConfig.model_validate(BASE)
    before = outcome(name, data, settings)
    found = set()
    for need, change in NEEDS.items():
        if not torch.equal(before, outcome(name, change(data), settings)):
            found.add(need)
    assert about.needs - {"whole_batch"} == found


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_only_a_loss_that_needs_the_whole_batch_changes_with_the_other_examples(name: str) -> None:
    about = PREFERENCE_LOSSES.about(name)
    data = data_of(about.kind)
    settings = PreferenceConfig.model_validate(BASE)

    def last_moved(responses: Responses) -> Responses:
        moved = torch.cat([responses.logprobs[:-1], responses.logprobs[-1:] - 30])
        return dataclasses.replace(responses, logprobs=moved)

    name_of_side = "chosen" if isinstance(data, Pairs) else "responses"
    moved = changed(**{name_of_side: last_moved})(data)
    same = outcome(name, data, settings)
    other = outcome(name, moved, settings)
    assert not torch.equal(same, other) or name == "sft_gold"
    coupled = not torch.equal(same[:1], other[:1])
    assert coupled == ("whole_batch" in about.needs)


def test_every_row_names_its_kind_and_its_paper() -> None:
    kinds = {name: PREFERENCE_LOSSES.about(name).kind for name in PREFERENCE_LOSSES}
    assert set(kinds.values()) == {"pair", "labelled", "ranked"}
    assert {name for name, kind in kinds.items() if kind == "labelled"} == {
        *("kto", "bco", "apo_zero_unpaired", "implicit_prm")
    }
    assert {name for name, kind in kinds.items() if kind == "ranked"} == {"plackett_luce", "lipo"}
    assert isinstance(data_of("labelled"), Labelled)
    assert isinstance(data_of("ranked"), Ranked)
