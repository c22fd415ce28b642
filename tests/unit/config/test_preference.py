"""Settings of preference learning: short forms, presets and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightrft.config.base import Settings, load_settings, to_yaml
from lightrft.config.preference.presets import (
    PREFERENCE_PAPERS,
    PREFERENCE_PRESETS,
    PREFERENCE_SOURCES,
)
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.presets import source_of
from lightrft.trainer.explanation.effective_settings import flat
from lightrft.utils.errors import ConfigError


class Tree(Settings):
    """A verb with a section of preferences."""

    preference: PreferenceConfig = PreferenceConfig()
    """Preference losses."""


def loaded(*overrides: str) -> PreferenceConfig:
    return load_settings(Tree, [], list(overrides)).settings.preference


def test_the_defaults_are_those_of_dpo() -> None:
    default = loaded().model_dump(exclude={"preset"})
    assert default == loaded("preference=dpo").model_dump(exclude={"preset"})


def names(settings: PreferenceConfig) -> list[tuple[str, float]]:
    return [(part.name, part.weight) for part in settings.losses]


def test_losses_have_short_forms() -> None:
    assert names(loaded("preference.losses=ipo")) == [("ipo", 1.0)]
    assert names(loaded("preference.losses=[sigmoid, sft]")) == [("sigmoid", 1.0), ("sft", 1.0)]
    weighed = loaded("preference.losses=[{name: sigmoid, weight: 0.8}, sft]")
    assert names(weighed) == [("sigmoid", 0.8), ("sft", 1.0)]
    assert loaded("preference.f_divergence=js").f_divergence.kind == "js"
    assert loaded("preference.reference=cached").reference.source == "cached"


def test_a_preset_can_be_named_alone_and_changed() -> None:
    simpo = loaded("preference=simpo", "preference.beta=10")
    assert (simpo.beta, simpo.losses[0].options) == (10, {"gamma": 1.375})
    mpo = loaded("preference=mpo")
    assert names(mpo) == [("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0)]


def test_options_next_to_a_preset_keep_its_other_numbers() -> None:
    found = loaded(
        "preference=alphapo", "preference.losses=[{name: alphapo, options: {gamma: 1.0}}]"
    )
    assert found.losses[0].options == {"alpha": 0.25, "gamma": 1.0}
    assert names(loaded("preference=mpo", "preference.losses=[sigmoid, bco_pair, sft]")) == [
        *(("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0))
    ]


def test_other_losses_next_to_a_preset_are_an_error() -> None:
    with pytest.raises(ConfigError, match="names sigmoid, and preset 'simpo' has the numbers of"):
        loaded("preference=simpo", "preference.losses=[sigmoid]")


def test_an_unknown_preset_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'simpoo'; did you mean 'simpo'"):
        loaded("preference=simpoo")


@pytest.mark.parametrize(
    "tree",
    [
        {"beta": 0.0},
        {"label_smoothing": -0.1},
        {"label_smoothing": 1.0},
        {"ld_alpha": 1.5},
        {"losses": []},
        {"losses": [{"name": "sigmoid", "weight": 0.0}]},
        {"wpo_cap": 0.0},
        {"f_divergence": {"kind": "tv"}},
        {"reference": {"source": "server"}},
        {"betta": 0.1},
    ],
    ids=str,
)
def test_a_number_out_of_its_range_is_an_error(tree: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PreferenceConfig.model_validate(tree)


def test_a_decay_without_a_refresh_is_an_error() -> None:
    with pytest.raises(ValidationError, match=r"refresh_decay = 0.5 changes nothing without"):
        PreferenceConfig.model_validate({"reference": {"refresh_decay": 0.5}})


@pytest.mark.parametrize("preset", sorted(PREFERENCE_PRESETS))
def test_a_preset_is_read_back_from_yaml_as_it_was(preset: str, tmp_path: Path) -> None:
    tree = Tree.model_validate({"preference": preset})
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(tree), encoding="utf-8")
    assert load_settings(Tree, [file]).settings == tree


# value of the paper, or of the authors' script that ``PREFERENCE_SOURCES`` names
NUMBERS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1},
    "simpo": {"beta": 2.5, "losses.0.options.gamma": 2.5 * 0.55},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "losses.1.weight": 1.0},
    "mpo": {"losses.0.weight": 0.8, "losses.1.weight": 0.2, "losses.2.weight": 1.0},
    "tr_dpo": {"beta": 0.05, "reference.refresh_every": 512, "reference.refresh_decay": 0.4},
    "wpo": {"beta": 0.01, "wpo": True, "wpo_cap": 1.0},
    "sppo": {"beta": 1e-3},
    "discopop": {"beta": 0.05, "losses.0.options.tau": 0.05},
    "robust_dpo": {"beta": 0.1, "label_smoothing": 0.1},
    "cal_dpo": {"beta": 0.001, "losses.0.options.weight": 0.5},
    "tdpo2": {"beta": 0.1, "losses.0.options.alpha": 0.5},
    "beta_dpo": {"beta": 0.1, "losses.0.options.alpha": 0.6},
    "ld_dpo": {"ld_alpha": 0.5},
}


@pytest.mark.parametrize("preset", sorted(NUMBERS))
def test_a_preset_has_the_numbers_of_its_paper(preset: str) -> None:
    found = flat(PreferenceConfig.model_validate(preset).model_dump())
    assert {key: found[key] for key in NUMBERS[preset]} == NUMBERS[preset]


def numbers_of(preset: str) -> list[str]:
    leaves = flat(PREFERENCE_PRESETS[preset]).items()
    return [key for key, value in leaves if isinstance(value, int | float)]


@pytest.mark.parametrize("preset", sorted(PREFERENCE_PRESETS))
def test_every_number_of_a_preset_has_a_source(preset: str) -> None:
    sourced = {key: source_of(preset, key, PREFERENCE_SOURCES) for key in numbers_of(preset)}
    switches = {"sampo", "wpo"}  # the method itself
    assert [key for key, source in sourced.items() if not source and key not in switches] == []


def test_every_preset_names_its_paper_and_no_source_is_left_of_one_that_is_gone() -> None:
    assert PREFERENCE_PAPERS.keys() == PREFERENCE_PRESETS.keys()
    assert PREFERENCE_SOURCES.keys() <= PREFERENCE_PRESETS.keys()
    assert all(PREFERENCE_PAPERS.values())
