"""Settings of reward models that cannot be meant are refused, with the reason and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.algorithms.reward_model.compatibility import check_reward_model
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.utils.errors import ConfigError

GAUSSIAN = {"name": "preference", "kind": "gaussian"}
CLASSES = {"name": "preference", "kind": "classes", "size": 5}
MLP = {"name": "preference", "kind": "mlp"}
ENSEMBLE = {"name": "preference", "kind": "ensemble", "size": 3}


def loss(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "options": options}


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"losses": ["bradley_tery"]}, ["losses.0: unknown", "did you mean 'bradley_terry'"]),
    (
        {"losses": ["mse", loss("bradley_terry", beta=1)]},
        ["losses.1.options.beta is not an option", "label_smoothing, margin, weight"],
    ),
    ({"losses": [loss("bradley_terry", weight="m")]}, ["weight = 'm' is none of none, margin"]),
    (
        {"losses": [loss("bradley_terry", label_smoothing=0.5)]},
        ["label_smoothing is 0.5", "less than 0.5"],
    ),
    ({"losses": [loss("hps", label_smoothing=-0.01)]}, ["options.label_smoothing is -0.01"]),
    ({"losses": [loss("davidson", nu=-1)]}, ["options.nu is -1", "above 0"]),
    ({"losses": [loss("hps", label_smoothing="0.1")]}, ["options.label_smoothing is '0.1'"]),
    ({"losses": [loss("rao_kupper", theta=1)]}, ["options.theta is 1", "above 1"]),
    ({"losses": [loss("davidson", nu=0.0)]}, ["options.nu is 0.0", "above 0"]),
    ({"losses": [loss("log_exp", per="batch")]}, ["options.per = 'batch' is none of group, pair"]),
    (
        {"losses": [loss("mse", per="pair")]},
        ["options.per = 'pair' changes nothing", "of kind rating"],
    ),
    ({"losses": [loss("plackett_luce", per="group")]}, ["changes nothing", "of kind group"]),
    (
        {"losses": ["cross_entropy"]},
        ["'cross_entropy' does not fit head 'preference' of kind linear", "it fits classes"],
    ),
    ({"losses": ["ordinal"], "heads": [CLASSES]}, ["of kind classes", "it fits ordinal"]),
    ({"losses": ["gaussian_nll"], "heads": [ENSEMBLE]}, ["of kind ensemble", "fits gaussian"]),
    (
        {"losses": ["cost_sign"], "heads": [MLP]},
        ["of kind mlp", "it fits ensemble, gaussian, linear"],
    ),
    ({"losses": ["bradley_terry", "centre"], "heads": [CLASSES]}, ["'centre' does not fit"]),
    (
        {"heads": ["a", "b"], "losses": [{"name": "bradley_terry", "head": "a"}]},
        ["no loss reads head 'b'", "head: b"],
    ),
    ({"heads": [GAUSSIAN]}, ["no loss reads the variance of head 'preference'", "kind: linear"]),
    (
        {"losses": ["mse", {"name": "mse", "weight": 2}]},
        ["names 'mse' of head 'preference' twice", "sum of the weights"],
    ),
    (
        {"heads": ["a", "b"], "gate": True},
        ["no loss reads the combined score", "head: mixture, e.g. bradley_terry"],
    ),
    (
        {"losses": ["mse", {"name": "bradley_terry", "head": "mixture"}]},
        ["'bradley_terry' reads head 'mixture'", "set gate: true"],
    ),
    (
        {
            "heads": ["a", "mixture"],
            "gate": True,
            "losses": ["mse", {"name": "bradley_terry", "head": "mixture"}],
        },
        ["'mixture' is the name of the combined score"],
    ),
    (
        {"heads": [{**ENSEMBLE, "logit_scale": True}]},
        ["logit_scale of 'preference' changes nothing", "each member of an ensemble"],
    ),
    (
        {"heads": [{**CLASSES, "logit_scale": True}], "losses": ["cross_entropy"]},
        ["logit_scale of 'preference' changes nothing: cross_entropy reads the outputs"],
    ),
    *[
        (
            {"losses": ["bradley_terry", loss("cost_sign", unsafe_from=2)], "normalize": kind},
            [
                f"reward_model.normalize = '{kind}' shifts",
                "'cost_sign'",
                "normalize=none, or leave",
            ],
        )
        for kind in ("center", "scale")
    ],
]


@pytest.mark.parametrize(("tree", "said"), REFUSED, ids=[str(tree) for tree, _ in REFUSED])
def test_settings_of_a_reward_model_that_make_no_sense_are_refused_with_the_reason(
    tree: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_reward_model(RewardModelConfig.model_validate(tree))
    for words in said:
        assert words in str(caught.value)
    # one reason each
    assert len(str(caught.value).splitlines()) == 1


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"losses": [loss("bradley_terry", margin=True, weight="margin", per="pair")]},
    {"losses": ["bradley_terry", "tie_distance", {"name": "centre", "weight": 0.01}]},
    {"losses": ["bradley_terry", {"name": "cost_sign", "weight": 2}, "l2"]},
    {"heads": [{**MLP, "logit_scale": True}], "losses": ["hps", "tie_distance"]},
    {"heads": [{**CLASSES, "logit_scale": True}], "losses": ["cross_entropy", "bradley_terry"]},
    {"heads": [CLASSES], "losses": ["mse"]},
    {"heads": [GAUSSIAN], "losses": ["gaussian_nll", "bradley_terry"]},
    {"heads": [GAUSSIAN], "losses": ["thurstone"]},
    {"heads": [ENSEMBLE], "losses": ["bradley_terry", "centre", "mse"]},
    {"heads": ["a", "b"], "gate": True, "losses": [{"name": "log_exp", "head": "mixture"}]},
    {"heads": ["a", "mixture"], "losses": ["bradley_terry"]},
    {"losses": [loss("rao_kupper", theta=1.5), loss("rao_kupper", theta=3)]},
    {"losses": [loss("davidson", nu=0.5), loss("hps", label_smoothing=0)]},
    {"losses": [loss("bradley_terry", label_smoothing=0.49)]},
]


@pytest.mark.parametrize("tree", ACCEPTED, ids=str)
def test_settings_of_a_reward_model_that_make_sense_are_accepted(tree: dict[str, Any]) -> None:
    assert check_reward_model(RewardModelConfig.model_validate(tree)) is None


def of_no_kind(data: Any) -> Any:
    """A user's loss without a kind."""
    return data.scores


def test_a_function_of_the_user_must_say_its_kind() -> None:
    tree = {"losses": [f"{__name__}:of_no_kind"]}
    with pytest.raises(ConfigError, match="is ''; set the attribute kind of the function to one"):
        check_reward_model(RewardModelConfig.model_validate(tree))


def of_classes(data: Any) -> Any:
    """A user's loss of the probabilities of classes."""
    return data.outputs[:, 0]


def test_a_function_of_the_user_may_say_which_heads_it_fits() -> None:
    function: Any = of_classes
    function.kind, function.heads = "rating", ("classes",)
    tree: dict[str, Any] = {"losses": [f"{__name__}:of_classes"]}
    with pytest.raises(ConfigError, match=r"of_classes' does not fit head .* it fits classes"):
        check_reward_model(RewardModelConfig.model_validate(tree))
    fitting = RewardModelConfig.model_validate({**tree, "heads": [CLASSES]})
    assert check_reward_model(fitting) is None


def test_all_problems_are_told_at_once() -> None:
    tree = {"heads": ["a", "b"], "losses": [{"name": "ordinal", "head": "a"}]}
    with pytest.raises(ConfigError) as caught:
        check_reward_model(RewardModelConfig.model_validate(tree))
    assert len(str(caught.value).splitlines()) == 2
