"""What cannot be meant is refused, with the reason and the way out; what can be is let through."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.algorithms.validate.check_parts import check_parts, incompatible_settings
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import build
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig
from lightrft.utils.errors import ConfigError

PLAIN: dict[str, Any] = {"preset": None}
IN_LOSS = {"where": "loss", "coef": 0.1}
IN_REWARD = {"where": "reward", "estimator": "k1", "coef": 0.1}
OPSM = {"name": "opsm", "options": {"delta": 0.1}}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"loss": {"clip_high": 0.5, "ratio_cap": 1.4}},
        ["loss.ratio_cap = 1.4", "1 + clip_high = 1.5", "raise it"],
    ),
    (
        {"loss": {"dual_clip": 3.0, "ratio_cap": 4.0}},
        ["dual_clip = 3.0 and ratio_cap = 4.0", "ratio_cap never acts", "leave one"],
    ),
    ({"loss": {"dual_clip": 5.0, "ratio_cap": 4.0}}, ["dual_clip never acts"]),
    (
        {"advantage": {"name": "gae"}, "loss": {"ratio": "sequence"}},
        ["'gae' has one for each token", "ratio: sequence_token"],
    ),
    (
        {"advantage": {"name": "reinforce", "gamma": 0.9}, "loss": {"ratio": "sequence"}},
        ["gamma = 0.9", "sequence_token"],
    ),
    (
        {"advantage": {"name": "reinforce"}, "kl": IN_REWARD, "loss": {"ratio": "sequence"}},
        ["KL penalty of each token"],
    ),
    (
        {"loss": {"ratio": "sequence"}, "token_masks": ["m2po"]},
        ["token_masks: 'm2po'", "loss.ratio: sequence", "take ratio: sequence_token"],
    ),
    (
        {"advantage": {"name": "rft"}, "kl": IN_REWARD},
        ["kl.where = reward", "options.threshold", "leave it out"],
    ),
    (
        {"advantage": {"name": "rft"}, "normalize": {"terms": "group"}},
        ["normalize.terms = group", "'rft'"],
    ),
    (
        {"advantage": {"name": "teacher"}, "kl": IN_REWARD},
        ["kl.where = reward changes nothing", "'teacher' takes no reward"],
    ),
    (
        {"advantage": {"name": "teacher"}, "shaping": ["overlong"]},
        ["shaping = overlong changes nothing"],
    ),
    (
        {"advantage": {"name": "teacher", "normalize": "batch"}},
        ["advantage.normalize = batch changes nothing"],
    ),
    (
        {"old_logprobs": "rollout", "importance_sampling": ["tis"]},
        ["'tis' weighs", "must not count twice", "old_logprobs: policy"],
    ),
    ({"old_logprobs": "rollout", "importance_sampling": [OPSM, "icepop"]}, ["'icepop' weighs"]),
    (
        {"old_logprobs": "interpolated", "kl": IN_REWARD},
        ["kl.where: reward reads", "old_logprobs: policy"],
    ),
    (
        {"old_logprobs": "interpolated", "kl": {**IN_LOSS, "controller": "adaptive"}},
        ["kl.controller: adaptive reads"],
    ),
    (
        {"old_logprobs": "rollout", "loss": {"name": "reinforce"}},
        ["old_logprobs = rollout changes nothing", "'reinforce' has no ratio"],
    ),
    (
        {"kl": {"final": 0.1, "controller": "linear", "steps": 3}},
        ["kl.final = 0.1", "kl.where is 'none'"],
    ),
    ({"kl": {**IN_REWARD, "weighted": True}}, ["kl.weighted", "'reward'", "kl.where: loss"]),
    ({"kl": {"weighted": True}}, ["kl.weighted", "'none'"]),
    ({"kl": {**IN_LOSS, "estimator": "k2", "weighted": True}}, ["estimator k2", "take k3 or k1"]),
    (
        {"kl": {**IN_LOSS, "target": 3.0}},
        ["kl.target = 3.0 changes nothing", "controller is 'fixed'"],
    ),
    ({"kl": {**IN_LOSS, "controller": "adaptive", "steps": 3}}, ["kl.steps = 3 changes nothing"]),
    (
        {"kl": {**IN_LOSS, "controller": "cosine", "steps": 3, "horizon": 9}},
        ["kl.horizon = 9 changes nothing"],
    ),
    ({"kl": {**IN_LOSS, "controller": "linear"}}, ["kl.steps is missing"]),
    (
        {"kl": {"where": "loss", "coef": 0.0, "controller": "adaptive"}},
        ["kl.coef = 0 stays 0", "start above 0"],
    ),
    (
        {"entropy": {"rate": 0.1}},
        ["entropy.rate = 0.1 changes nothing", "entropy.target is not set"],
    ),
    ({"entropy": {"coef": -0.1, "target": 1.0}}, ["entropy.coef = -0.1", "never below 0"]),
    (
        {"policy_drift": {"cap": 2.0}},
        ["policy_drift.cap = 2.0 changes nothing", "policy_drift.coef is 0"],
    ),
    ({"policy_drift": {"estimator": "k2"}}, ["policy_drift.estimator = k2 changes nothing"]),
    (
        {"policy_drift": {"coef": 0.1, "estimator": "k2", "cap": 1.0}},
        ["policy_drift.cap bounds the gradient of k3 alone"],
    ),
    ({"positive_nll": {"threshold": 0.5}}, ["positive_nll.threshold = 0.5 changes nothing"]),
    ({"constant_length": 9}, ["constant_length = 9 changes nothing", "aggregation: constant"]),
    *(
        (
            {"advantage": {"name": "maxrl"}, "normalize": {key: value}},
            [f"normalize.{key} = {value} centres rewards", "'maxrl' divides by their mean"],
        )
        for key, value in [
            ("terms", "group"),
            ("terms", "batch"),
            ("terms", "running"),
            ("rewards", "standard"),
        ]
    ),
]
ALLOWED: list[dict[str, Any]] = [
    {"loss": {"clip_high": 0.5, "ratio_cap": 1.6}},
    {"advantage": {"name": "gae"}, "loss": {"ratio": "sequence_token"}},
    {"advantage": {"name": "reinforce"}, "loss": {"ratio": "sequence"}},
    {"loss": {"ratio": "sequence_token"}, "token_masks": ["m2po"]},
    {"advantage": {"name": "rft"}, "kl": IN_LOSS},
    {"advantage": {"name": "maxrl"}, "kl": IN_REWARD},
    {"advantage": {"name": "maxrl"}, "normalize": {"rewards": "scale"}},
    {"old_logprobs": "rollout", "importance_sampling": [OPSM]},
    {"old_logprobs": "policy", "importance_sampling": ["tis", OPSM]},
    {"old_logprobs": "interpolated", "importance_sampling": ["importance"]},
    {"old_logprobs": "interpolated", "kl": IN_LOSS},
    {"old_logprobs": "rollout", "loss": {"name": "reinforce"}, "kl": IN_REWARD},
    {"old_logprobs": "rollout", "loss": {"name": "reinforce"}, "policy_drift": {"coef": 0.1}},
    {"kl": {**IN_LOSS, "estimator": "k1", "weighted": True}},
    {"kl": {"where": "loss", "coef": 0.0, "final": 0.1, "controller": "linear", "steps": 3}},
    {"kl": {**IN_LOSS, "controller": "adaptive", "target": 3.0, "horizon": 100}},
    {"entropy": {"coef": 0.0, "target": 1.0, "rate": 0.1}},
    {"policy_drift": {"coef": 0.1, "estimator": "k3", "cap": 1.0}},
    {"positive_nll": {"coef": 0.1, "threshold": 0.5}},
    {"aggregation": "constant", "constant_length": 9},
]


def algorithm_of(tree: dict[str, Any]) -> AlgorithmConfig:
    return build(RLConfig, {"algorithm": {**PLAIN, **tree}}).algorithm


def problems(tree: dict[str, Any]) -> list[str]:
    return list(incompatible_settings(algorithm_of(tree)))


@pytest.mark.parametrize(("tree", "said"), REFUSED, ids=lambda x: str(x)[:60])
def test_what_cannot_be_meant_is_refused_with_the_reason_and_the_way_out(
    tree: dict[str, Any], said: list[str]
) -> None:
    found = problems(tree)
    assert len(found) == 1, found
    assert [word for word in said if word not in found[0]] == []


@pytest.mark.parametrize("tree", ALLOWED, ids=lambda x: str(x)[:60])
def test_what_can_be_meant_is_let_through(tree: dict[str, Any]) -> None:
    assert problems(tree) == []


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_preset_is_nonsense(preset: str) -> None:
    assert list(incompatible_settings(AlgorithmConfig.model_validate(preset))) == []


def test_nonsense_is_told_with_every_other_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(algorithm_of({"loss": {"name": "ppo_clp"}, "constant_length": 9}))
    assert [line.split(" ")[0].rstrip(":") for line in str(caught.value).splitlines()] == [
        "algorithm.loss",
        "algorithm.constant_length",
    ]


def test_functions_of_ones_own_are_not_judged() -> None:
    mine = {"name": "somewhere:mine"}
    assert (
        problems(
            {
                "old_logprobs": "rollout",
                "importance_sampling": [mine],
                "loss": mine,
                "advantage": mine,
            }
        )
        == []
    )


def test_a_word_that_an_option_does_not_take_is_refused() -> None:
    wrong = algorithm_of(
        {"importance_sampling": [{"name": "tis", "options": {"level": "sequnce"}}]}
    )
    with pytest.raises(
        ConfigError, match="level = 'sequnce' is none of token, sequence, geometric"
    ):
        check_parts(wrong)


def test_the_clip_that_a_gate_reads_may_be_set_where_the_loss_has_none() -> None:
    clipped = {"name": "importance", "clip_high": 0.5}
    check_parts(algorithm_of({"loss": clipped, "token_masks": ["clip_cov"]}))
    with pytest.raises(ConfigError, match=r"clip_high = 0\.5 changes nothing"):
        check_parts(algorithm_of({"loss": clipped, "token_masks": ["m2po"]}))
