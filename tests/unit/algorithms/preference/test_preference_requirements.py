"""What a run of preference learning must compute follows from its losses and modifiers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.preference.sections import PreferenceConfig


def required(**tree: Any) -> set[str]:
    found = preference_requirements(PreferenceConfig.model_validate(tree))
    return {field.name for field in dataclasses.fields(found) if getattr(found, field.name) is True}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, {"reference"}),
        ({"losses": ["simpo"]}, set()),
        ({"losses": ["sft"]}, set()),
        ({"losses": ["simpo", "ipo"]}, {"reference"}),
        ({"losses": ["aot"]}, {"reference", "whole_batch"}),
        ({"losses": ["beta_dpo"]}, {"reference", "whole_batch", "margin_stats"}),
        ({"losses": ["tdpo2"]}, {"reference", "sequence_kl"}),
        ({"losses": ["odpo"]}, {"reference", "margin"}),
        ({"losses": ["mdpo"]}, {"reference", "corrupted"}),
        ({"losses": ["tpo"]}, {"gold"}),
        ({"losses": ["kto"]}, {"reference", "kl"}),
        ({"losses": ["bco"]}, {"reference", "shift"}),
        ({"losses": ["plackett_luce"]}, {"reference"}),
        ({"losses": ["lipo"]}, {"reference", "rating"}),
        ({"preset": "mpo"}, {"reference", "shift"}),
        ({"wpo": True}, {"reference", "collision"}),
        ({"ld_alpha": 0.5}, {"reference", "partner"}),
        ({"sampo": True}, {"reference", "partner"}),
    ],
)
def test_losses_and_modifiers_require_what_they_read(
    tree: dict[str, Any], expected: set[str]
) -> None:
    assert required(**tree) == expected


@pytest.mark.parametrize(
    ("name", "kind"), [("sigmoid", "pair"), ("kto", "labelled"), ("lipo", "ranked")]
)
def test_the_kind_of_the_losses_is_the_kind_of_the_data(name: str, kind: str) -> None:
    settings = PreferenceConfig.model_validate({"losses": [name]})
    assert preference_requirements(settings).kind == kind


def test_a_users_loss_declares_its_kind_and_needs(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(data, settings): return data.responses.logprobs\n"
        "loss.kind = 'labelled'\n"
        "loss.needs = {'kl'}\n",
        encoding="utf-8",
    )
    settings = PreferenceConfig.model_validate({"losses": [f"{file}:loss"]})
    found = preference_requirements(settings)
    assert (found.kind, found.kl, found.reference) == ("labelled", True, False)
