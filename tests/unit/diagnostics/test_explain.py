"""What ``explain`` says is what is in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.config.base import build, load_settings
from lightrft.config.presets import PAPERS, PRESETS, SOURCES, source_of
from lightrft.config.verbs import RLConfig
from lightrft.trainer.explanation.effective_settings import EffectiveSetting, flat, set_by
from lightrft.trainer.explanation.explain import Explanation, explain, symbol_of, to_latex, to_text


def explained(*overrides: str, files: tuple[Path, ...] = ()) -> tuple[RLConfig, Explanation]:
    loaded = load_settings(RLConfig, files, overrides)
    return loaded.settings, explain(loaded.settings, loaded.sources)


def value_of(config: RLConfig, key: str) -> Any:
    """The number that the loop itself reads under a dotted key."""
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found[int(part) if part.isdigit() else part]
    return found


def is_default_option(number: EffectiveSetting) -> bool:
    return number.source.startswith("default of ")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_numbers_are_those_of_the_config_with_their_sources(preset: str) -> None:
    config, found = explained(f"algorithm={preset}", "train.ppo_epochs=3")
    shown = {n.key: n for n in found.numbers}
    own = [n for n in found.numbers if not is_default_option(n)]
    assert {n.key: n.value for n in own} == {n.key: value_of(config, n.key) for n in own}
    given = {
        f"algorithm.{key}": value for key, value in flat(PRESETS[preset]).items() if value != {}
    }
    from_preset = {n.key: n.value for n in own if n.source.partition(":")[0] == f"preset {preset}"}
    assert from_preset == {key: value for key, value in given.items() if key in shown}
    assert shown["algorithm.preset"].source == "command line"
    assert shown["train.ppo_epochs"].source == "command line"
    assert shown["rollout.group_size"].source == "default"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_a_preset_names_is_in_force(preset: str) -> None:
    """A number of a row that nothing reads would be one that the paper has and the run has not."""
    _, found = explained(f"algorithm={preset}")
    named = {f"algorithm.{key}" for key, value in flat(PRESETS[preset]).items() if value != {}}
    assert named <= {n.key for n in found.numbers}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_number_stands_in_the_text_with_its_source(preset: str) -> None:
    _, found = explained(f"algorithm={preset}")
    lines = [line.split() for line in to_text(found).splitlines()]
    assert [
        n for n in found.numbers if [n.key, *str(n.value).split(), *n.source.split()] not in lines
    ] == []


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_number_of_a_part_stands_beside_its_formula(preset: str) -> None:
    _, found = explained(f"algorithm={preset}")
    beside = {n.key for line in found.lines for n in line.numbers}
    options = {
        n.key
        for n in found.numbers
        if ".options." in n.key or n.key.startswith("algorithm.loss.clip")
    }
    assert options <= beside
    text = to_text(found)
    assert all(f"{symbol_of(n)} = {n.value}" in text for line in found.lines for n in line.numbers)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_formulas_are_those_of_the_functions_that_run(preset: str) -> None:
    config, found = explained(f"algorithm={preset}", "algorithm.loss.ratio=token")
    text, latex = to_text(found), to_latex(found)
    algorithm = config.algorithm
    for table, name in (
        (ADVANTAGES, algorithm.advantage.name),
        (POLICY_LOSSES, algorithm.loss.name),
    ):
        assert table.about(name).formula.replace("min(rho_t, ratio_cap)", "rho_t") in text
        assert table.about(name).paper in text
        assert table.about(name).latex in latex
    assert AGGREGATIONS.about(algorithm.aggregation).paper in text
    assert (f"{algorithm.kl.coef:g} kl_t" in text) == algorithm.kl.used
    assert latex.startswith("\\begin{align*}")
    assert latex.endswith("\\end{align*}")
    assert latex.count("{") == latex.count("}")


@pytest.mark.parametrize(
    "name", [name for name in POLICY_LOSSES if "ratio" in POLICY_LOSSES.about(name).reads]
)
@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_a_loss_is_shown_with_the_ratio_in_force(name: str, level: str) -> None:
    _, found = explained(f"algorithm.loss={{name: {name}, ratio: {level}}}")
    assert "mean_t (logp - logp_old)" in to_text(found)
    assert r"\frac1{l_i}\sum_t\log" in to_latex(found)


def test_bounds_of_the_ratio_are_shown_once_they_are_set() -> None:
    _, plain = explained("algorithm=grpo")
    assert "ratio_cap" not in to_text(plain) and "dual_clip" not in to_text(plain)
    _, bounded = explained("algorithm=grpo", "algorithm.loss.dual_clip=3")
    assert "L_t <- min(L_t, -dual_clip A_t) where A_t < 0" in to_text(
        bounded
    ) and "dual_clip = 3.0" in to_text(bounded)
    _, capped = explained("algorithm=grpo", "algorithm.loss.ratio_cap=2")
    assert "min(rho_t, ratio_cap)" in to_text(capped) and "ratio_cap = 2.0" in to_text(capped)


def test_the_default_of_an_option_is_read_from_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def late(batch, rewards, *, max_new_tokens, start=3, by=0.5): return rewards\n"
    )
    name = f"{tmp_path}/mine.py:late"
    _, found = explained(f"algorithm.shaping=[{{name: '{name}', options: {{by: 0.25}}}}]")
    numbers = {n.key: (n.value, n.source) for n in found.numbers}
    assert numbers["algorithm.shaping.0.options.start"] == (3, f"default of {name}")
    assert numbers["algorithm.shaping.0.options.by"] == (0.25, "command line")
    assert "with start = 3, by = 0.25" in to_text(found)


def test_what_stands_beside_a_preset_wins_and_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "algorithm: {preset: ppo, kl: {coef: 0.5}, advantage: {gae_lambda: 1.0}}\n",
        encoding="utf-8",
    )
    _, found = explained("algorithm.advantage.gae_lambda=0.9", files=(file,))
    numbers = {n.key: (n.value, n.source) for n in found.numbers}
    assert numbers["algorithm.kl.coef"] == (0.5, str(file))
    assert numbers["algorithm.advantage.gae_lambda"] == (0.9, "command line")
    assert numbers["algorithm.advantage.gamma"] == (
        1.0,
        "preset ppo: InstructGPT, arXiv 2203.02155, appendix C.4",
    )
    assert numbers["algorithm.kl.controller"] == ("fixed", "default")
    assert "algorithm.kl.target" not in numbers


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_terms_in_the_loss_stand_in_the_objective_of_every_aggregation(aggregation: str) -> None:
    _, found = explained(f"algorithm.aggregation={aggregation}", "algorithm.entropy.coef=0.01")
    assert "(L_it + 0.04 kl_t - 0.01 H_t)" in found.objective
    assert r"\big(L_{i,t}+0.04\,k_{i,t}-0.01\,H_{i,t}\big)" in found.latex
    _, plain = explained(
        f"algorithm.aggregation={aggregation}", "algorithm.kl.where=none", "algorithm.kl.coef=0"
    )
    assert "kl_t" not in plain.objective + to_text(plain).split("numbers in force")[0]
    assert "L_it" in plain.objective


def test_the_length_limit_is_shown_where_a_formula_reads_it() -> None:
    config, found = explained("algorithm.aggregation=constant", "sampling.max_new_tokens=77")
    assert {n.key: n.value for n in found.numbers}["sampling.max_new_tokens"] == 77
    assert config.algorithm.constant_length is None
    assert "77" in to_text(found)


def test_shaping_and_filters_are_shown() -> None:
    _, found = explained(
        "algorithm.shaping=[{name: overlong, options: {buffer: 5}}]",
        "algorithm.filters=zero_variance",
    )
    named = [(line.part, line.name) for line in found.lines]
    assert ("shaping", "overlong") in named
    assert ("filter", "zero_variance") in named
    assert "with buffer = 5, penalty = 1.0" in to_text(found)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.ppo_epochs=1"], "Each batch gets one update, on policy"),
        (["train.ppo_epochs=2", "train.num_mini_batches=3"], "Each batch gets 6 optimizer steps"),
        (["algorithm=grpo"], "Rows with advantage 0 still get gradient"),
        (["algorithm=reinforce++"], "Rows whose advantages are all 0 get no gradient"),
        (["algorithm=ppo"], "The critic is trained on the returns"),
        (
            ["algorithm=grpo", "algorithm.kl.coef=0"],
            "No KL term: no reference model is loaded or run.",
        ),
    ],
)
def test_where_gradient_goes_is_said(overrides: list[str], said: str) -> None:
    _, found = explained(*overrides)
    assert any(line.startswith(said) for line in found.gradient)


def test_a_preset_of_ones_own_making_is_custom() -> None:
    _, found = explained("algorithm.preset=null")
    assert found.title == "custom"
    assert {n.source for n in found.numbers} == {"default"}


def test_scales_of_rewards_and_values_are_shown_before_shaping() -> None:
    scales = ["algorithm.shaping=reward_clip", "algorithm.normalize.values=true"]
    _, found = explained("algorithm=ppo", "algorithm.normalize.rewards=scale", *scales)
    assert [line.part for line in found.lines][:3] == ["reward scale", "values", "shaping"]
    assert "R <- R / (std + eps)" in to_text(found)
    _, found = explained("algorithm=ppo", "algorithm.normalize.terms=batch", *scales)
    assert [line.part for line in found.lines][:3] == ["reward terms", "values", "shaping"]
    assert "R = sum_k w_k (x_k - mean_batch x_k) / (std_batch x_k + eps)" in to_text(found)
    _, plain = explained("algorithm=ppo")
    assert not {"reward terms", "reward scale", "values"} & {line.part for line in plain.lines}


def test_the_numbers_and_the_first_steps_of_a_critic_are_shown() -> None:
    _, found = explained("algorithm=vapo", "critic.warmup_steps=50")
    numbers = {n.key: (n.value, n.source) for n in found.numbers}
    assert numbers["critic.warmup_steps"] == (50, "command line")
    assert numbers["algorithm.advantage.options.alpha"] == (
        0.05,
        "preset vapo: VAPO, arXiv 2504.05118, section 5.1",
    )
    assert (
        "In the first 50 steps it is trained alone: the policy does not change." in found.gradient
    )
    assert "critic.warmup_steps" not in {n.key for n in explained("algorithm=grpo")[1].numbers}


def test_what_is_kept_of_a_group_and_which_prompts_come_are_told_with_their_numbers() -> None:
    select = {"name": "balanced", "options": {"keep": 4}}
    curriculum = {"name": "easy_to_hard", "options": {"epochs": 3}}
    told = explain(build(RLConfig, {"rollout": {"select": select, "curriculum": curriculum}}), {})
    lines = {line.part: line for line in told.lines}
    assert (lines["selection"].name, lines["prompts"].name) == ("balanced", "easy_to_hard")
    assert {"rollout.select.options.keep", "rollout.curriculum.options.epochs"} <= {
        n.key for n in told.numbers
    }
    found = {n.key: n.value for n in told.numbers}
    assert found["rollout.curriculum.options.width"] == 0.2
    assert found["rollout.curriculum.momentum"] == 0.5
    assert "keep" in to_text(told)


def test_every_preset_says_where_it_is_from() -> None:
    assert sorted(PAPERS) == sorted(PRESETS)
    assert PAPERS["gspo"] in to_text(explained("algorithm=gspo")[1])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_number_of_a_preset_says_where_it_is_from(preset: str) -> None:
    given = flat(PRESETS[preset])
    counted = {
        key
        for key, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert {key for key in counted if not source_of(preset, key)} == set()
    assert preset in SOURCES or not counted
    used = {
        branch
        for branch in SOURCES.get(preset, {})
        if any(f"{key}.".startswith(f"{branch}.") for key in counted)
    }
    assert set(SOURCES.get(preset, {})) == used
    shown = to_text(explained(f"algorithm={preset}")[1])
    assert all(f"preset {preset}: {source_of(preset, key)}" in shown for key in counted)


def test_the_source_of_one_number_comes_before_that_of_its_branch() -> None:
    assert source_of("cispo", "loss.clip_low") != source_of("cispo", "loss.clip_high")
    assert source_of("grpo", "loss.clip_low") == source_of("grpo", "loss.clip_high")
    assert source_of("grpo", "entropy.coef") is None


def test_the_origin_of_a_setting_without_a_section_is_found() -> None:
    sources = {"batch_size": "run.yaml", "algorithm": "grpo", "data.sources": "run.yaml"}
    assert set_by("batch_size", sources) == "run.yaml"
    assert set_by("max_tokens", sources) is None
    # the preset is no origin of a number in its section
    assert set_by("algorithm.kl.coef", sources) is None
