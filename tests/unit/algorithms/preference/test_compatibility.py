"""Preference settings that cannot be meant are refused, with the reason and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.preference.compatibility import (
    check_preference,
    incompatible_preference_settings,
)
from lightrft.config.preference.presets import PREFERENCE_PRESETS
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import ConfigError

JS = {"kind": "js"}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"losses": ["sigmoid", "kto"]},
        ["'sigmoid' of kind pair and 'kto' of kind labelled", "keep the losses of one kind"],
    ),
    ({"losses": ["kto", "lipo"]}, ["mixes 'kto' of kind labelled and 'lipo' of kind ranked"]),
    (
        {"losses": ["sigmoid", {"name": "sigmoid", "weight": 2.0}]},
        ["'sigmoid' twice", "sum of the weights"],
    ),
    ({"losses": ["sft"], "beta": 0.5}, ["beta = 0.5 changes nothing: sft does not read it"]),
    (
        {"losses": ["hinge"], "label_smoothing": 0.1},
        ["label_smoothing = 0.1 changes nothing: hinge"],
    ),
    (
        {"losses": ["kto", "bco"], "label_smoothing": 0.1},
        ["label_smoothing = 0.1 changes nothing: kto, bco"],
    ),
    (
        {"losses": ["robust"], "label_smoothing": 0.5},
        ["label_smoothing = 0.5: 'robust'", "at least half of the labels", "less than 0.5"],
    ),
    ({"losses": ["sigmoid"], "label_smoothing": 0.75}, ["label_smoothing = 0.75: 'sigmoid'"]),
    (
        {"losses": ["sigmoid", "aot"], "label_smoothing": 0.6},
        ["label_smoothing = 0.6: 'sigmoid' would take"],
    ),
    ({"losses": ["exo"]}, ["label_smoothing = 0: loss 'exo'", "e.g. 0.001"]),
    (
        {
            "losses": [{"name": "cpo", "options": {"form": "hinge"}}],
            "label_smoothing": 0.1,
        },
        ["'cpo' with form hinge has no smoothed labels", "form: sigmoid"],
    ),
    (
        {"losses": ["sigmoid", "bco_pair"], "f_divergence": JS},
        ["f_divergence = js: 'bco_pair'", "ignores it", "e.g. sigmoid"],
    ),
    ({"losses": ["kto"], "f_divergence": JS}, ["f_divergence = js: 'kto'"]),
    ({"losses": ["sft"], "f_divergence": JS}, ["f_divergence = js changes nothing: sft has no"]),
    (
        {"f_divergence": {"kind": "js", "alpha": 0.25}},
        ["f_divergence.alpha = 0.25 changes nothing", "kind is js"],
    ),
    ({"f_divergence": {"alpha": 0.25}}, ["kind is reverse_kl"]),
    (
        {"losses": ["ipo"], "ld_alpha": 0.5},
        ["ld_alpha = 0.5 leaves tokens out", "'ipo' reads", "leave one of them out"],
    ),
    ({"losses": ["sigmoid", "sft"], "ld_alpha": 0.5}, ["'sft' reads the likelihood"]),
    ({"losses": ["simpo"], "sampo": True}, ["sampo = True leaves tokens out", "'simpo'"]),
    ({"losses": ["kto"], "ld_alpha": 0.5}, ["lengths of a pair", "'kto' is of kind labelled"]),
    ({"losses": ["lipo"], "sampo": True}, ["lengths of a pair", "'lipo' is of kind ranked"]),
    ({"ld_alpha": 0.5, "sampo": True}, ["both remove the effect of length", "leave one"]),
    ({"losses": ["aot"], "wpo": True}, ["wpo = True weighs each pair", "'aot'"]),
    ({"losses": ["lipo"], "wpo": True}, ["'lipo' compares whole groups"]),
    ({"wpo_cap": None}, ["wpo_cap = None changes nothing: preference.wpo is off"]),
    (
        {"losses": ["simpo"], "reference": {"source": "cached"}},
        ["reference.source = cached changes nothing: simpo has no reference"],
    ),
    (
        {"losses": ["orpo", "sft"], "reference": {"refresh_every": 512}},
        ["refresh_every = 512 changes nothing: orpo, sft has no reference"],
    ),
    (
        {"reference": {"source": "none"}},
        ["source = none: 'sigmoid' compares the policy with a reference", "e.g. simpo"],
    ),
    (
        {"losses": ["hinge", "ipo"], "reference": {"source": "none"}},
        ["source = none: 'hinge' compares"],
    ),
    (
        {"reference": {"source": "cached", "refresh_every": 512}},
        ["refresh_every = 512", "computed once cannot follow it", "source: step"],
    ),
    (
        {"reference": {"source": "adapters_off", "refresh_every": 1}},
        ["the model without adapters never moves", "source: step"],
    ),
    (
        {"losses": [{"name": "tpo", "options": {"gamma": 1.0}}]},
        ["options.gamma = 1.0 changes nothing with form sigmoid", "length_normalized"],
    ),
    (
        {"losses": [{"name": "cpo", "options": {"alpha": 0.0, "nll": "sum"}}]},
        ["options.nll = sum changes nothing: options.alpha is 0"],
    ),
]


@pytest.mark.parametrize(("tree", "said"), REFUSED, ids=[str(tree) for tree, _ in REFUSED])
def test_a_combination_that_makes_no_sense_is_refused_with_its_reason(
    tree: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_preference(PreferenceConfig.model_validate(tree))
    message = str(caught.value)
    assert [text for text in said if text not in message] == []
    assert all(line.startswith("preference.") for line in message.splitlines())


ALLOWED: list[dict[str, Any]] = [
    {"losses": ["sigmoid", "sft"], "f_divergence": JS},
    {"losses": ["ipo", "sft"], "beta": 0.5},
    {"losses": ["aot"], "ld_alpha": 0.5},
    {"losses": ["tdpo"], "sampo": True},
    {"losses": ["kto"], "wpo": True, "wpo_cap": None},
    {"losses": ["simpo"], "wpo": True, "label_smoothing": 0.1},
    {"losses": ["simpo"], "reference": {"source": "none"}},
    {"losses": ["sigmoid", "hinge"], "label_smoothing": 0.1},
    {"losses": [{"name": "cpo", "options": {"form": "hinge"}}, "sigmoid"], "label_smoothing": 0.1},
    {"reference": {"source": "step", "refresh_every": 512, "refresh_decay": 0.4}},
    {"f_divergence": {"kind": "alpha", "alpha": 0.25}},
    {"losses": ["sft", {"name": "sft", "options": {"per": "response"}}]},
    {"losses": [{"name": "tpo", "options": {"form": "length_normalized", "gamma": 1.0}}]},
]


@pytest.mark.parametrize("tree", ALLOWED, ids=str)
def test_a_combination_with_a_meaning_is_let_through(tree: dict[str, Any]) -> None:
    settings = PreferenceConfig.model_validate(tree)
    check_preference(settings)
    assert list(incompatible_preference_settings(settings)) == []


@pytest.mark.parametrize("preset", sorted(PREFERENCE_PRESETS))
def test_every_preset_is_let_through(preset: str) -> None:
    settings = PreferenceConfig.model_validate(preset)
    check_preference(settings)
    assert list(incompatible_preference_settings(settings)) == []


def problems(*losses: Any, **tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_preference(PreferenceConfig.model_validate({"losses": list(losses), **tree}))
    return str(caught.value).splitlines()


def test_every_unknown_name_and_option_is_listed_at_once() -> None:
    found = problems(
        "sigmod",
        {"name": "simpo", "options": {"gama": 1}},
        {"name": "cpo", "options": {"form": "square"}},
        "r_dpo",
    )
    assert [line.split(":")[0].split(" ")[0] for line in found] == [
        "preference.losses.0",
        "preference.losses.1.options.gama",
        "preference.losses.2.options.form",
        "preference.losses.3.options.alpha",
    ]
    assert "did you mean 'sigmoid'" in found[0]
    assert "none of sigmoid, hinge, ipo" in found[2]
    assert "is missing" in found[3]


def test_every_nonsense_combination_is_listed_at_once() -> None:
    assert len(problems("hinge", label_smoothing=0.1, ld_alpha=0.5, sampo=True)) == 2


MINE = """
def loss(data, settings): return data.chosen.logprobs
def labelled(data, settings): return data.responses.logprobs
def narrow(data): return data.chosen.logprobs
loss.kind = "pair"
labelled.kind = "labelled"
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE + "def bare(data, settings): return 0\n", "utf-8")
    return f"{tmp_path}/mine.py"


def test_a_users_loss_may_read_every_shared_setting(mine: str) -> None:
    tree = {
        "losses": [f"{mine}:loss"],
        "beta": 0.5,
        "label_smoothing": 0.1,
        "f_divergence": JS,
        "reference": {"source": "cached"},
    }
    settings = PreferenceConfig.model_validate(tree)
    check_preference(settings)
    assert list(incompatible_preference_settings(settings)) == []


def test_a_users_loss_must_name_its_kind_and_take_two_arguments(mine: str) -> None:
    (line,) = problems(f"{mine}:bare")
    assert "set the attribute kind of the function to one of pair, labelled, ranked" in line
    (line,) = problems(f"{mine}:narrow")
    assert "takes 1 arguments; it is called with 2" in line
    (line,) = problems(f"{mine}:labelled", "sigmoid")
    assert "of kind labelled and 'sigmoid' of kind pair" in line
