"""The trees of the verbs: what they refuse and how they say it, and that what was saved loads back equal."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lightrft.config import verbs as trees
from lightrft.config.algorithm import AlgorithmConfig, KLConfig
from lightrft.config.base import ComponentConfig, Settings, build, load_settings
from lightrft.config.generation.serving import ServeConfig, ServeRMConfig
from lightrft.config.presets import PRESETS
from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.config.setting_paths import made_absolute
from lightrft.config.strategy import SamplingConfig
from lightrft.config.train import CriticConfig
from lightrft.config.verbs import ChatConfig, RLConfig, SFTConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import tree_to_yaml

CLASSES = [
    c
    for _, c in inspect.getmembers(trees, inspect.isclass)
    if issubclass(c, Settings) and not any(f.is_required() for f in c.model_fields.values())
]


def saved(settings: Settings, folder: Path) -> Path:
    path = folder / "config.yaml"
    tree = made_absolute(type(settings), settings.model_dump(mode="json"))
    path.write_text(tree_to_yaml(tree), encoding="utf-8")
    return path


def said(cls: type[Settings], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(cls, [], overrides)
    return str(caught.value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_tree_that_was_saved_loads_back_equal(cls: type[Settings], tmp_path: Path) -> None:
    assert load_settings(cls, [saved(cls(), tmp_path)]).settings == cls()


@pytest.mark.parametrize("preset", [*sorted(PRESETS), "null"])
def test_every_preset_that_was_saved_loads_back_equal(preset: str, tmp_path: Path) -> None:
    first = load_settings(
        RLConfig, [], [f"algorithm.preset={preset}", "algorithm.kl.target=3"]
    ).settings
    assert load_settings(RLConfig, [saved(first, tmp_path)]).settings == first
    assert first.algorithm.kl.target == 3.0


def test_a_full_tree_that_was_saved_loads_back_equal(tmp_path: Path) -> None:
    first = load_settings(
        RLConfig,
        [],
        [
            "algorithm=ppo",
            "algorithm.shaping=[{name: overlong, options: {buffer: 8, penalty: 1e-3}}, "
            "reward_clip]",
            "algorithm.filters=[{name: reward_bounds, options: {high: .inf}}]",
            "reward.terms=[math, {function: '/mine.py:f', weight: 0.5, options: {text: '1e-6'}}]",
            "reward.per_source={gsm8k: math, other: [a, b]}",
            "model.lora={rank: 8, targets: [q_proj, v_proj]}",
            r'sampling.stop=["\n\n", "</answer>", "yes"]',
            "data.sources=[/a.jsonl, {path: /b.jsonl, limit: 3}]",
            "optimizer.lr=1e-6",
            "run.name='1e-6'",
        ],
    ).settings
    assert load_settings(RLConfig, [saved(first, tmp_path)]).settings == first
    assert first.run.name == "1e-6"
    assert first.optimizer.lr == 1e-6
    assert first.algorithm.shaping[0].options["penalty"] == 1e-3
    assert first.reward.terms[1].options == {"text": "1e-6"}
    assert first.sampling.stop == ("\n\n", "</answer>", "yes")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_fills_in_what_is_not_given(preset: str) -> None:
    plain = AlgorithmConfig.model_validate(preset)
    assert (
        plain
        == AlgorithmConfig.model_validate({"preset": preset})
        == AlgorithmConfig.model_validate(PRESETS[preset] | {"preset": preset})
    )
    near = AlgorithmConfig.model_validate({"preset": preset, "loss": {"clip_high": 0.28}})
    assert near == plain.model_copy(
        update={"loss": plain.loss.model_copy(update={"clip_high": 0.28})}
    )


def test_without_a_preset_the_parts_have_their_own_defaults() -> None:
    bare = AlgorithmConfig.model_validate({"preset": None})
    assert bare.kl == KLConfig()
    assert bare.aggregation == AlgorithmConfig.model_fields["aggregation"].default
    assert AlgorithmConfig().preset == "grpo"
    assert AlgorithmConfig() == AlgorithmConfig.model_validate("grpo")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm=gprpo"],
            "algorithm (from command line): unknown preset 'gprpo'; did you mean 'grpo'? Known: "
            f"{', '.join(sorted(PRESETS))}",
        ),
        (
            ["algorithm.preset=[grpo]"],
            "algorithm (from command line): unknown preset ['grpo']; did you mean 'grpo'? Known: "
            f"{', '.join(sorted(PRESETS))}",
        ),
        (
            ["algorithm=zzz"],
            "algorithm (from command line): unknown preset 'zzz'. Known: "
            f"{', '.join(sorted(PRESETS))}",
        ),
        (
            ["algorithm.kl={where: none, coef: 0.1}"],
            "algorithm.kl (from command line): kl.coef is 0.1 but kl.where is 'none'; set "
            "kl.where to 'reward' or 'loss'",
        ),
        (
            ["algorithm.kl={where: loss, estimator: k1, coef: 0.1}"],
            "algorithm.kl (from command line): kl.estimator k1 in the loss has zero expected "
            "gradient; take k2 or k3, or kl.weighted: true, or kl.where: reward",
        ),
        (
            [
                "algorithm.kl={where: loss, estimator: k1, coef: 0, final: 0.1, controller: "
                "linear, steps: 3}"
            ],
            "algorithm.kl (from command line): kl.estimator k1 in the loss has zero expected "
            "gradient",
        ),
        (
            ["algorithm.normalize={terms: group, rewards: scale}"],
            "algorithm.normalize (from command line): normalize.terms is 'group' and "
            "normalize.rewards 'scale': terms with separate scales",
        ),
        (
            ["sampling.min_new_tokens=9", "sampling.max_new_tokens=8"],
            "sampling (from command line): min_new_tokens 9 is above max_new_tokens 8; raise the "
            "latter",
        ),
        (
            ['sampling.stop=["a", ""]'],
            "sampling.stop (from command line): stop.1 is an empty text, which can end no "
            "response; leave it out",
        ),
        (
            [r'eval.sampling.stop=["\ud800"]'],
            "is not a YAML value: found invalid Unicode",
        ),
        (
            ["sampling.stop_token_ids=[9223372036854775808]"],
            "sampling.stop_token_ids.0 = 9223372036854775808 (from command line): Input should be "
            "less than 9223372036854775808",
        ),
        (
            ["eval.sampling.stop_token_ids=[3, -1]"],
            "eval.sampling.stop_token_ids.1 = -1 (from command line): Input should be greater "
            "than or equal to 0",
        ),
        (
            ["algorithm.distill.beta=0.3"],
            "algorithm.distill (from command line): distill.beta = 0.3 needs distill.kind jsd, "
            "which is none; set distill.kind=jsd, or leave it out",
        ),
        (
            ["algorithm.distill={kind: sampled, temperature: 2.0}"],
            "distill.temperature = 2.0 needs distill.kind reverse_kl, forward_kl or jsd, which is "
            "sampled",
        ),
        (
            ["algorithm.distill.coef=2"],
            "distill.coef = 2.0 needs distill.kind reverse_kl, forward_kl, jsd or sampled, which is "
            "none; set distill.kind=sampled",
        ),
        (["algorithm.shaping=[{nmae: overlong}]"], "did you mean algorithm.shaping.0.name?"),
        (["reward.terms=[{function: math, wieght: 2}]"], "did you mean reward.terms.0.weight?"),
        (
            ["algorithm.advantage.gamma=1.5"],
            "algorithm.advantage.gamma = 1.5 (from command line): Input should be less than or "
            "equal to 1",
        ),
        (
            ["algorithm.loss.dual_clip=1"],
            "algorithm.loss.dual_clip = 1 (from command line): Input should be greater than 1",
        ),
        (
            ["rollout.group_size=0"],
            "rollout.group_size = 0 (from command line): Input should be greater than or equal "
            "to 1",
        ),
    ],
)
def test_what_means_nothing_is_refused_with_the_way_out(overrides: list[str], message: str) -> None:
    assert message in said(RLConfig, *overrides)


def test_problems_of_all_branches_come_at_once() -> None:
    lines = said(
        RLConfig,
        "sampling.min_new_tokens=999",
        "rollout.sampels=4",
        "train.steps=0",
        "algorithm=zzz",
    ).splitlines()
    assert len(lines) == 4


def test_a_kl_term_without_a_coefficient_needs_no_reference() -> None:
    assert not KLConfig(where="loss", estimator="k1", coef=0.0).used
    assert not KLConfig().used
    assert KLConfig(where="reward", estimator="k1", coef=0.1).used


@pytest.mark.parametrize(
    ("given", "terms"),
    [
        ("math", (RewardTerm(function="math"),)),
        (["math", "a.py:f"], (RewardTerm(function="math"), RewardTerm(function="a.py:f"))),
        (RewardTerm(function="math"), (RewardTerm(function="math"),)),
        ({"function": "math", "weight": 2}, (RewardTerm(function="math", weight=2.0),)),
        (["math", {"function": "b"}], (RewardTerm(function="math"), RewardTerm(function="b"))),
        ([], ()),
    ],
)
def test_terms_of_a_reward_may_be_bare_names(given: Any, terms: tuple[RewardTerm, ...]) -> None:
    assert build(RewardConfig, {"terms": given}).terms == terms
    assert build(RewardConfig, {"per_source": {"x": given}}).per_source == {"x": terms}


@pytest.mark.parametrize(
    "given",
    ["zero_variance", ["zero_variance"], {"name": "zero_variance"}, [{"name": "zero_variance"}]],
)
def test_parts_may_be_bare_names(given: Any) -> None:
    assert build(AlgorithmConfig, {"filters": given}).filters == (
        ComponentConfig(name="zero_variance"),
    )
    assert build(AlgorithmConfig, {"shaping": given}).shaping == (
        ComponentConfig(name="zero_variance"),
    )


def test_bare_values_stand_for_branches() -> None:
    found = load_settings(
        RLConfig,
        [],
        ["model=some/folder", "algorithm=ppo", "algorithm.loss=ppo_clip", "data.sources=a.jsonl"],
    ).settings
    assert found.model.path == "some/folder"
    assert found.algorithm.preset == "ppo"
    assert found.algorithm.advantage.name == "gae"
    assert [s.path for s in found.data.sources] == ["a.jsonl"]


def test_bare_values_stand_for_the_reward_the_engine_and_the_strategy(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("reward: mine.py:score\nengine: vllm\nstrategy: fsdp2\n")
    (tmp_path / "mine.py").touch()
    found = load_settings(RLConfig, [file]).settings
    assert [t.function for t in found.reward.terms] == [f"{tmp_path}/mine.py:score"]
    assert (found.engine.kind, found.strategy.kind) == ("vllm", "fsdp2")
    words = ["reward=[math,format]", "engine=native", "engine.max_num_seqs=8"]
    words += ["model.lora=8", "algorithm=grpo", "algorithm.kl=0.02"]
    found = load_settings(RLConfig, [file], words).settings
    assert found.model.lora is not None and found.model.lora.rank == 8
    assert (found.algorithm.kl.where, found.algorithm.kl.coef) == ("loss", 0.02)
    assert [t.function for t in found.reward.terms] == ["math", "format"]
    assert (found.engine.kind, found.engine.max_num_seqs) == ("native", 8)


def test_a_path_stands_for_the_sources_of_data() -> None:
    words = ["data=a.jsonl", "data.shuffle=false", "eval.data=b.jsonl"]
    found = load_settings(RLConfig, [], words).settings
    assert [s.path for s in found.data.sources] == ["a.jsonl"] and not found.data.shuffle
    assert [s.path for s in found.eval.data.sources] == ["b.jsonl"]


def test_a_list_stands_for_the_sources_of_data(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data: [a.jsonl, {path: b.jsonl, limit: 2}]\n")
    found = load_settings(RLConfig, [file], ["eval.data=[c.jsonl, d.jsonl]"]).settings
    assert [Path(s.path) for s in found.data.sources] == [
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
    ]
    assert [s.limit for s in found.data.sources] == [None, 2]
    assert [s.path for s in found.eval.data.sources] == ["c.jsonl", "d.jsonl"]


def test_an_index_changes_one_item_of_a_list(tmp_path: Path) -> None:
    file, more = tmp_path / "a.yaml", tmp_path / "below" / "b.yaml"
    more.parent.mkdir()
    file.write_text(
        "data: [{path: a.jsonl, name: first}, b.jsonl]\nreward: {terms: [math, format]}"
    )
    more.write_text("data.sources.1.path: c.jsonl\nreward.terms.0: {weight: 2.0}")
    words = ["data.sources.0.limit=2", "data.sources.0.options.split=test", "reward.terms.1=length"]
    found = load_settings(RLConfig, [file, more], [*words, "reward.terms.1.weight=-1"]).settings
    first, second = found.data.sources
    assert (Path(first.path), first.name, first.limit) == (tmp_path / "a.jsonl", "first", 2)
    assert first.options == {"split": "test"} and Path(second.path) == more.parent / "c.jsonl"
    terms = [(term.function, term.weight) for term in found.reward.terms]
    assert terms == [("math", 2.0), ("length", -1.0)]


def test_an_index_beyond_a_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data: {sources: [{path: a.jsonl}]}")
    with pytest.raises(ConfigError, match=r"sources\.1: the list sources has 1 items, from 0"):
        load_settings(RLConfig, [file], ["data.sources.1.path=b.jsonl"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data=''", "data.sources.0 (from command line): path = '': it is empty"),
        ("eval.data.sources=[a.jsonl, '']", "path = '': it is empty"),
        ("reference=''", "reference = '': it is empty; leave it out, or give null for none"),
        ("model.tokenizer=''", "tokenizer = '': it is empty"),
        ("reference=none", "reference = none: it is a text; give null for none"),
        ("data.system=None", "system = None: it is a text; give null for none"),
        ("critic.path=None", "path = None: it is a text; leave it out for none"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas.1 = 1.0"),
        ("run.dir=''", "dir = '': it is empty; leave it out for 'runs'"),
        ("algorithm.kl.estimator=''", "estimator = '': it is empty; leave it out for 'k3'"),
        ("sampling.top_k=-1", "to 0; Sample from this many likeliest tokens; 0 keeps all"),
        ("eval.sampling.top_p=0", "than 0; Sample from the likeliest tokens whose"),
        ("train.steps=0", "Input should be greater than or equal to 1; "),
        ("run.seed=9223372036854775808", "run.seed = 9223372036854775808"),
        ("algorithm.kl.coef=.inf", "algorithm.kl.coef = inf"),
        ("eval.threshold=.nan", "eval.threshold = nan"),
        ("rollout.group_size=true", "group_size = true: a number is needed, not a flag"),
        ("optimizer.betas=[0.9,true]", "betas = [0.9, true]: a number is needed, not a flag"),
    ],
)
def test_a_value_that_no_run_can_use_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_settings(RLConfig, [], [word])


@pytest.mark.parametrize("word", ["data.system=''", "data.columns.system=''", "critic.path=''"])
def test_a_text_whose_absence_means_something_may_be_empty(word: str) -> None:
    assert load_settings(RLConfig, [], [word]).settings.data.columns.system == ""


def test_reading_a_tree_does_not_write_into_it() -> None:
    tree = {"terms": ["math"], "per_source": {"x": "math"}}
    build(RewardConfig, tree)
    algorithm: dict[str, Any] = {"filters": "zero_variance"}
    build(AlgorithmConfig, algorithm)
    assert tree == {"terms": ["math"], "per_source": {"x": "math"}}
    assert algorithm == {"filters": "zero_variance"}


def test_presets_are_not_written_into() -> None:
    before = str(PRESETS)
    AlgorithmConfig.model_validate({"preset": "ppo", "kl": {"coef": 9.0}, "value": {"clip": None}})
    assert str(PRESETS) == before


def test_sampling_bounds_may_be_equal() -> None:
    assert SamplingConfig(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4


def test_a_branch_keeps_the_defaults_of_its_place_for_keys_that_are_not_given() -> None:
    config = build(
        RLConfig, {"eval": {"sampling": {"max_new_tokens": 5}, "data": {"sources": "a.jsonl"}}}
    )
    assert (config.eval.sampling.max_new_tokens, config.eval.sampling.temperature) == (5, 0.0)
    assert not config.eval.data.shuffle
    assert (
        build(SFTConfig, {"optimizer": {"schedule": "cosine"}}).optimizer.lr
        == SFTConfig().optimizer.lr
    )
    assert (
        build(RLConfig, {"critic": {"optimizer": {"eps": 1e-6}}}).critic.optimizer.lr
        == CriticConfig().optimizer.lr
    )
    chat = load_settings(ChatConfig, [], ["sampling.temperature=0.2"]).settings.sampling
    assert chat == ChatConfig().sampling.model_copy(update={"temperature": 0.2})


def test_what_is_given_wins_over_the_defaults_of_its_place() -> None:
    assert (
        build(RLConfig, {"eval": {"sampling": {"temperature": 1.0}}}).eval.sampling.temperature
        == 1.0
    )
    assert (
        build(RLConfig, {"eval": {"sampling": SamplingConfig()}}).eval.sampling == SamplingConfig()
    )


@pytest.mark.parametrize("cls", [ServeConfig, ServeRMConfig], ids=lambda c: c.__name__)
def test_a_server_refuses_the_comparison_of_log_probs_that_it_does_not_make(
    cls: type[Settings],
) -> None:
    text = said(cls, "engine.check_logprobs=false")
    assert "engine.check_logprobs = false changes nothing for a server" in text


def test_text_of_a_program_that_is_not_valid_unicode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stop\.0 = .* is not valid Unicode"):
        build(RLConfig, {"sampling": {"stop": ["\ud800"]}})
