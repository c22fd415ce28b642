"""Every misfit between a config and the functions that it names is listed before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import ComponentConfig, build
from lightrft.config.verbs import RLConfig
from lightrft.trainer.checks.check_rollout import check_rollout
from lightrft.utils.errors import ConfigError

MINE = """
def shaped(batch, rewards, *, max_new_tokens, power=1.0): return rewards
def ordinary(batch, rewards, max_new_tokens, power=1.0): return rewards
def open_shaped(batch, rewards, *, needed, **options): return rewards
def deaf(batch, rewards, *, power=1.0): return rewards
def short(rewards, *, max_new_tokens): return rewards
def advantage(batch, token_rewards, settings, *, anything=0): return token_rewards, token_rewards
def narrow_advantage(batch, token_rewards): return token_rewards, token_rewards
def wide_loss(logprobs, old, advantages, rows, settings, extra): return logprobs, {}
NUMBER = 3
"""


def problems(**tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_parts(AlgorithmConfig.model_validate(tree))
    return str(caught.value).splitlines()


def accepted(**tree: Any) -> bool:
    check_parts(AlgorithmConfig.model_validate(tree))
    return True


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return f"{tmp_path}/mine.py"


def test_every_problem_is_listed_at_once() -> None:
    found = problems(
        advantage={"name": "gropo"},
        loss={"name": "ppo_clp", "options": {"x": 1}},
        aggregation="tokens",
        kl={"estimator": "k4"},
        shaping=[{"name": "overlong", "options": {"bufer": 3}}, "overlogn"],
        filters=[{"name": "zero_variance", "options": {"low": 1}}],
    )
    assert [line.split(":")[0].split(" is ")[0] for line in found] == [
        "algorithm.advantage",
        "algorithm.loss",
        "algorithm.aggregation",
        "algorithm.kl.estimator",
        "algorithm.shaping.0.options.bufer",
        "algorithm.shaping.1",
        "algorithm.filters.0.options.low",
    ]
    assert "did you mean 'grpo'?" in found[0]
    assert "did you mean 'ppo_clip'?" in found[1]
    assert "did you mean 'token'?" in found[2]
    assert found[4].endswith("is not an option of 'overlong'; it takes buffer, penalty")
    assert "did you mean 'overlong'?" in found[5]
    assert found[6].endswith("is not an option of 'zero_variance'; it takes none")


def test_what_fits_passes(mine: str) -> None:
    assert accepted()
    assert accepted(
        advantage={"name": f"{mine}:advantage", "options": {"anything": 1}},
        shaping=[
            {"name": "overlong", "options": {"buffer": 3}},
            {"name": f"{mine}:shaped", "options": {"power": 2}},
            {"name": f"{mine}:ordinary", "options": {"power": 2}},
            {"name": f"{mine}:open_shaped", "options": {"needed": 1, "whatever": 2}},
        ],
        filters=["zero_variance", {"name": "reward_bounds", "options": {"low": 0.1}}],
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "deaf"}, "'{0}:deaf' must take the keyword max_new_tokens"),
        ({"name": "short"}, "'{0}:short' takes 1 arguments; it is called with 2"),
        ({"name": "open_shaped"}, "options.needed is missing"),
        (
            {"name": "shaped", "options": {"max_new_tokens": 3}},
            "options.max_new_tokens is not an option",
        ),
        ({"name": "NUMBER"}, "'{0}:NUMBER' is not a function"),
        ({"name": "shapde"}, "did you mean 'shaped'?"),
    ],
)
def test_a_function_of_ones_own_is_held_to_its_signature(
    mine: str, part: dict[str, Any], message: str
) -> None:
    found = problems(shaping=[{**part, "name": f"{mine}:{part['name']}"}])
    assert len(found) == 1
    assert message.format(mine) in found[0]


def test_advantages_and_losses_are_held_to_their_number_of_arguments(mine: str) -> None:
    found = problems(
        advantage={"name": f"{mine}:narrow_advantage"}, loss={"name": f"{mine}:wide_loss"}
    )
    assert len(found) == 2
    assert found[0].endswith("takes 2 arguments; it is called with 3")
    assert found[1].endswith("options.extra is missing: " + repr(f"{mine}:wide_loss") + " needs it")


def test_options_that_nothing_reads_are_refused() -> None:
    found = problems(
        advantage={"name": "grpo", "options": {"x": 1}},
        loss={"name": "ppo_clip", "options": {"tau": 1}},
    )
    assert found == [
        "algorithm.advantage.options.x is not an option of 'grpo'; it takes none",
        "algorithm.loss.options.tau is not an option of 'ppo_clip'; it takes none",
    ]


def test_a_setting_that_the_function_in_force_does_not_read_is_refused() -> None:
    assert problems(
        advantage={"name": "grpo", "gamma": 0.9}, loss={"name": "ppo_clip", "ratio_cap": 5.0}
    ) == ["algorithm.advantage.gamma = 0.9 changes nothing: 'grpo' reads eps"]


def test_numbers_of_a_preset_are_not_for_another_function() -> None:
    chosen = AlgorithmConfig.model_validate({"preset": "ppo", "advantage": {"name": "reinforce"}})
    assert chosen.advantage.gae_lambda == 0.95
    assert chosen.advantage.normalize == "none"
    assert (
        AlgorithmConfig.model_validate(
            {"preset": "ppo", "advantage": {"gae_lambda": 0.9}}
        ).advantage.normalize
        == "batch"
    )


def test_a_scale_that_the_advantage_has_no_use_for_is_refused_with_the_reason() -> None:
    assert problems(normalize={"values": True}) == [
        "algorithm.normalize.values = True changes nothing: advantage 'grpo' has no critic"
    ]
    assert problems(normalize={"eps": 0.1}) == [
        "algorithm.normalize.eps = 0.1 changes nothing: no terms, rewards or values are normalised"
    ]
    assert problems(value={"clip": 0.3}) == [
        "algorithm.value.clip = 0.3 changes nothing: advantage 'grpo' has no critic"
    ]
    for given in (
        {"normalize": {"rewards": "scale"}},
        {"normalize": {"terms": "group"}},
        {"shaping": "reward_clip"},
    ):
        (found,) = problems(advantage={"name": "remax"}, **given)
        assert "changes the rewards of responses but not of the greedy response" in found
    assert accepted(
        advantage={"name": "gae"}, normalize={"values": True, "rewards": "standard", "eps": 0.1}
    )


def rollout_problems(**tree: Any) -> list[str]:
    config = build(RLConfig, tree)
    with pytest.raises(ConfigError) as caught:
        check_rollout(config, Requirements.of(config.algorithm))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"rollout": {"select": {"name": "top"}}},
            "unknown selection 'top'; did you mean 'top_k'?",
        ),
        ({"rollout": {"select": {"name": "top_k"}}}, "rollout.select.options.keep is missing"),
        (
            {"rollout": {"select": {"name": "top_k", "options": {"keep": 8}}}},
            "leaves out none of rollout.group_size = 8 responses",
        ),
        (
            {"rollout": {"select": {"name": "top_k", "options": {"keep": 1}}}},
            "'grpo' compares the responses of a group",
        ),
        (
            {"rollout": {"select": {"name": "balanced", "options": {"keep": 1}}}},
            "options.keep is 1",
        ),
        (
            {"rollout": {"select": {"name": "top_k", "options": {"keep": "two"}}}},
            "cannot use its options|options.keep is two",
        ),
        (
            {"rollout": {"curriculum": {"name": "easy_to_hard"}}},
            "rollout.curriculum.options.epochs is missing",
        ),
        (
            {"rollout": {"curriculum": {"name": "priority", "options": {"floor": -1}}}},
            "rollout.curriculum: .*floor is -1",
        ),
        (
            {"rollout": {"curriculum": {"name": "priority"}}, "data": {"shuffle": False}},
            "data.shuffle = False",
        ),
        ({"rollout": {"carry_over": True}}, "changes nothing: without rollout.oversample"),
        (
            {"rollout": {"carry_over": True, "oversample": 2}},
            "an older policy, which nothing corrects",
        ),
        (
            {
                "rollout": {"carry_over": True, "oversample": 2, "staleness": 1},
                "algorithm": {"importance_sampling": ["tis"]},
            },
            "further back than rollout.staleness = 1",
        ),
        (
            {"algorithm": {"filters": [{"name": "pass_rate", "options": {"low": 1, "high": 0}}]}},
            "algorithm.filters.0: .* above",
        ),
        (
            {"algorithm": "opd", "rollout": {"curriculum": {"name": "priority"}}},
            "rollout.curriculum reads rewards",
        ),
    ],
)
def test_settings_of_rollouts_that_cannot_be_followed_are_told(
    tree: dict[str, Any], said: str
) -> None:
    assert any(re.search(said, problem) for problem in rollout_problems(**tree))


def test_settings_of_rollouts_that_fit_are_accepted() -> None:
    rollout = {
        "oversample": 1.5,
        "carry_over": True,
        "select": {"name": "balanced", "options": {"keep": 4}},
    }
    curriculum = {"name": "easy_to_hard", "options": {"epochs": 2}}
    filters = [{"name": "pass_rate", "options": {"low": 0.1, "high": 0.9}}]
    chosen = build(
        RLConfig,
        {
            "rollout": {**rollout, "curriculum": curriculum},
            "algorithm": {"filters": filters, "importance_sampling": ["tis"]},
        },
    )
    check_rollout(chosen, Requirements.of(chosen.algorithm))
    assert chosen.rollout.select == ComponentConfig(name="balanced", options={"keep": 4})


@pytest.mark.parametrize(
    "tree", [{"preset": "prime"}, {"preset": "opd"}, {"distill": {"kind": "sampled"}}], ids=str
)
def test_advantages_that_differ_from_token_to_token_do_not_go_with_the_ratio_of_whole_answers(
    tree: dict[str, Any],
) -> None:
    (found,) = problems(**tree, loss={"name": "ppo_clip", "ratio": "sequence"})
    assert "take ratio: sequence_token" in found


def test_log_probs_that_a_teacher_reads_are_computed_or_asked_for() -> None:
    (found,) = problems(preset="opd", old_logprobs="interpolated")
    assert "which distill.kind: sampled reads" in found
    assert accepted(preset="opd", old_logprobs="rollout", loss={"name": "reinforce"})
    assert Requirements.of(AlgorithmConfig.model_validate("opd")).old_logprobs(1)
    whole = AlgorithmConfig.model_validate({"preset": "opd", "distill": {"kind": "jsd"}})
    assert not Requirements.of(whole).old_logprobs(1)


@pytest.mark.parametrize(
    "reading",
    [
        {"shaping": ["reward_clip"]},
        {"filters": ["zero_variance"]},
        {"positive_nll": {"coef": 0.1}},
        {"normalize": {"rewards": "standard"}},
        {"normalize": {"terms": "group"}},
        {"advantage": {"name": "grpo"}},
    ],
    ids=str,
)
def test_a_reward_is_needed_as_soon_as_one_part_reads_it(reading: dict[str, Any]) -> None:
    assert not Requirements.of(AlgorithmConfig.model_validate("opd")).reward
    assert Requirements.of(AlgorithmConfig.model_validate({"preset": "opd", **reading})).reward


def test_the_reference_is_needed_for_a_kl_term_or_a_process_reward_alone() -> None:
    needed = {
        name: Requirements.of(AlgorithmConfig.model_validate(name)).reference
        for name in ("grpo", "opd", "prime", "dr_grpo")
    }
    assert needed == {"grpo": True, "opd": False, "prime": True, "dr_grpo": False}


@pytest.mark.parametrize(
    ("tree", "flag", "holds"),
    [
        ("ppo", "critic", True),
        ("grpo", "critic", False),
        ("remax", "greedy", True),
        ("grpo", "groups", True),
        ("prime", "prm", True),
        ("opd", "teacher", True),
        ({"advantage": {"name": "gigpo"}}, "steps", True),
        ({"entropy": {"coef": 0.01, "target": 0.5}}, "entropy", True),
        ("grpo", "entropy", False),
        ("grpo", "sampler", False),
        ({"importance_sampling": ["tis"]}, "sampler", True),
        ({"old_logprobs": "interpolated"}, "sampler", True),
        ("grpo", "ignores_sampler_logprobs", True),
        ({"importance_sampling": ["tis"]}, "ignores_sampler_logprobs", False),
        ({"old_logprobs": "rollout"}, "ignores_sampler_logprobs", False),
    ],
    ids=str,
)
def test_what_an_algorithm_requires_follows_from_its_parts(
    tree: Any, flag: str, holds: bool
) -> None:
    assert getattr(Requirements.of(AlgorithmConfig.model_validate(tree)), flag) is holds


def test_old_log_probs_are_computed_before_the_update_only_if_the_ratio_can_leave_one() -> None:
    plain, by_sampler = (
        AlgorithmConfig.model_validate({"preset": "grpo", "kl": {"coef": 0.0}, **more})
        for more in ({}, {"old_logprobs": "rollout"})
    )
    assert [Requirements.of(plain).old_logprobs(steps) for steps in (1, 2)] == [False, True]
    assert [Requirements.of(by_sampler).old_logprobs(steps) for steps in (1, 2)] == [False, False]
