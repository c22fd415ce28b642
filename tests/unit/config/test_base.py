"""YAML files and ``a.b=value`` to one frozen tree, and what is said when it does not fit."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from pydantic import Field

from lightrft.config.base import Settings, build, deep_merge, dotted, load_settings, to_yaml
from lightrft.config.verbs import RLConfig, RMConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import parse_yaml


class Leaf(Settings):
    shorthand: ClassVar[str | None] = "name"

    name: str = "a"
    rate: float = Field(1.0, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)


class Branch(Settings):
    leaf: Leaf = Leaf()
    maybe: Leaf | None = None
    count: int = 1
    kind: Literal["one", "two"] = "one"
    flag: bool = False
    tags: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, tuple[Leaf, ...]] = Field(default_factory=dict)


class Root(Settings):
    branch: Branch = Branch()
    name: str = "root"
    rate: float = 1.0
    note: str | None = None


def file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def loaded(*overrides: str) -> Root:
    return load_settings(Root, [], overrides).settings


def message(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(Root, files, overrides)
    return str(caught.value)


def test_later_files_win_leaf_by_leaf_and_arguments_over_all(tmp_path: Path) -> None:
    first = file(tmp_path / "a.yaml", "branch: {count: 2, flag: true, tags: [x, y]}\nname: first\n")
    second = file(tmp_path / "b.yaml", "branch: {count: 3, tags: [z]}\n")
    found = load_settings(Root, [first, second], ["branch.count=4", "rate=2"])
    assert found.settings == Root(
        branch=Branch(count=4, flag=True, tags=("z",)), name="first", rate=2.0
    )
    assert load_settings(Root, [second, first]).settings.branch.count == 2
    assert found.sources == {
        "branch.count": "command line",
        "branch.flag": str(first),
        "branch.tags": str(second),
        "name": str(first),
        "rate": "command line",
    }


def test_nothing_given_is_the_defaults(tmp_path: Path) -> None:
    assert load_settings(Root).settings == Root()
    assert load_settings(Root, [file(tmp_path / "empty.yaml", "# nothing\n")]).settings == Root()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E-6", 1e-6),
        ("1.5e3", 1500.0),
        ("-2e2", -200.0),
        ("3", 3),
        ("0.1", 0.1),
        (".5", 0.5),
        ("1e5", 1e5),
    ],
)
def test_numbers_are_numbers_on_the_command_line_and_in_files(
    text: str, value: float, tmp_path: Path
) -> None:
    found = loaded(f"branch.leaf.options.x={text}").branch.leaf.options["x"]
    assert found == value
    assert type(found) is type(value)
    read = load_settings(
        Root,
        [file(tmp_path / "a.yaml", f"branch: {{leaf: {{options: {{x: {text}, y: [{text}]}}}}}}\n")],
    )
    assert read.settings.branch.leaf.options == {"x": value, "y": [value]}
    assert loaded(f"rate={text}").rate == value


@pytest.mark.parametrize(
    "text", ["'1e-6'", '"1e-6"', '"12e4567"', "12e4567x", "e5", "1e", "v1.2", "1-2", "2fast"]
)
def test_text_that_only_looks_like_a_number_stays_text(text: str) -> None:
    assert loaded(f"name={text}").name == text.strip("'\"")


def test_values_are_yaml() -> None:
    found = loaded(
        "branch.flag=true",
        "branch.tags=[a, b]",
        "note=null",
        "branch.leaf.options={a: {b: [1, x]}}",
        "name=a=b c",
    )
    assert found.branch.flag is True
    assert found.branch.tags == ("a", "b")
    assert found.note is None
    assert found.branch.leaf.options == {"a": {"b": [1, "x"]}}
    assert found.name == "a=b c"


def test_an_empty_value_is_null() -> None:
    assert loaded("note=x", "note=").note is None


def test_a_bare_value_stands_for_the_field_that_a_branch_names(tmp_path: Path) -> None:
    read = load_settings(
        Root, [file(tmp_path / "a.yaml", "branch: {leaf: b, maybe: c}\n")], ["branch.leaf.rate=2"]
    )
    assert read.settings.branch.leaf == Leaf(name="b", rate=2.0)
    assert read.settings.branch.maybe == Leaf(name="c")
    assert read.sources["branch.leaf.name"] == str(tmp_path / "a.yaml")
    assert loaded("branch.leaf=z").branch.leaf.name == "z"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rate=true", "rate = true: a number is needed, not a flag"),
        ("branch.leaf.rate=false", "rate = false: a number is needed, not a flag"),
        ("branch.count=true", "count = true: a number is needed, not a flag"),
        ("rate=.nan", "rate = nan (from command line): Input should be a finite number"),
        ("rate=.inf", "rate = inf (from command line): Input should be a finite number"),
        ("note=''", "note = '': it is empty; leave it out, or give null for none"),
    ],
)
def test_a_value_that_would_be_read_as_another_is_refused(given: str, said: str) -> None:
    assert said in message(given)


def test_a_bare_value_over_a_written_out_branch_changes_that_field_alone(tmp_path: Path) -> None:
    full = file(tmp_path / "a.yaml", "branch: {leaf: {name: b, rate: 3}}\n")
    assert load_settings(Root, [full], ["branch.leaf=c"]).settings.branch.leaf == Leaf(
        name="c", rate=3.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "branch.leaf.rate: 3\nbranch: {count: 2}\n",
        "branch: {leaf.rate: 3, count: 2}\n",
        "branch: {count: 2}\nbranch.leaf: {rate: 3}\n",
    ],
)
def test_a_dotted_key_in_a_file_or_a_table_is_a_key_of_its_branch(tmp_path, text) -> None:
    expected = Branch(leaf=Leaf(rate=3.0), count=2)
    assert load_settings(Root, [file(tmp_path / "a.yaml", text)]).settings.branch == expected
    assert load_settings(Root, trees=[parse_yaml(text)]).settings.branch == expected


def test_a_dotted_key_inside_a_table_without_fixed_keys_stays_one_key() -> None:
    assert loaded("branch.leaf.options={layers.0: 8}").branch.leaf.options == {"layers.0": 8}


def test_a_setting_that_is_given_twice_by_a_dotted_key_is_an_error(tmp_path: Path) -> None:
    for text in ("branch: {count: 2}\nbranch.count: 3\n", "branch.count: 3\nbranch: {count: 2}\n"):
        read = file(tmp_path / "a.yaml", text)
        assert message(files=(read,)) == "branch.count is given twice; leave one of them out"


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    bad = file(
        tmp_path / "bad.yaml", "branch: {cuont: 2, kind: three, leaf: {rate: -1}}\nnmae: x\n"
    )
    lines = message("branch.count=many", "nonsense", "rate=fast", files=(bad,)).splitlines()
    assert len(lines) == 7
    assert lines[0] == "'nonsense' is neither a .yaml file nor key=value"
    rest = sorted(lines[1:])
    assert rest[0].startswith("branch.count = 'many' (from command line): ")
    assert rest[1].startswith(f"branch.kind = 'three' (from {bad}): Input should be 'one' or 'two'")
    assert rest[2].startswith(f"branch.leaf.rate = -1 (from {bad}): Input should be greater than 0")
    assert rest[3].startswith("rate = 'fast' (from command line): ")
    assert rest[4] == f"unknown setting branch.cuont (from {bad}); did you mean branch.count?"
    assert rest[5] == f"unknown setting nmae (from {bad}); did you mean name?"


def test_an_unknown_key_far_from_all_is_met_with_all() -> None:
    assert message("branch.leaf.zzz=1") == (
        "unknown setting branch.leaf.zzz (from command line); known here: name, rate, options"
    )


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("branch.leaves=[{nmae: x}]", "did you mean branch.leaves.0.name?"),
        ("branch.by_name={k: [{name: a}, {raet: 2}]}", "did you mean branch.by_name.k.1.rate?"),
        ("branch.maybe.nmae=x", "did you mean branch.maybe.name?"),
    ],
)
def test_nearest_names_are_known_inside_lists_and_tables_too(override: str, near: str) -> None:
    assert near in message(override)


@pytest.mark.parametrize("text", ["", "novalue", "=3"])
def test_an_argument_without_a_key_or_a_value_is_said(text: str) -> None:
    assert message(text) == f"{text!r} is neither a .yaml file nor key=value"


def test_values_that_are_no_text_are_said() -> None:
    assert "'runs\\udcff' has bytes that are no UTF-8" in message("name=runs\udcff")


def test_values_that_are_no_yaml_are_said() -> None:
    assert message("branch.tags=[a").startswith("branch.tags: '[a' is not a YAML value")


@pytest.mark.parametrize("text", ["#1", "runs #1", "[a, b] # c", "'x' #", "1 #2"])
def test_a_value_that_yaml_would_cut_at_a_comment_is_refused(text: str) -> None:
    assert "is a comment in YAML and would be lost" in message(f"name={text}")
    quoted = text.replace("'", "''")
    assert loaded(f"name='{quoted}'").name == text
    assert loaded("name=a#b").name == "a#b"


def test_files_that_are_missing_or_no_settings_are_said(tmp_path: Path) -> None:
    good = file(tmp_path / "train.yaml", "name: x\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(Root, [tmp_path / "trian.yaml"])
    assert (
        str(caught.value)
        == f"there is no config file {tmp_path / 'trian.yaml'}; did you mean {good}?"
    )
    with pytest.raises(ConfigError, match="there is no config file"):
        load_settings(Root, [tmp_path / "nowhere" / "a.yaml"])
    with pytest.raises(ConfigError, match="is not YAML"):
        load_settings(Root, [file(tmp_path / "bad.yaml", "a: [1\n")])
    with pytest.raises(ConfigError, match="must hold keys and values, not list"):
        load_settings(Root, [file(tmp_path / "list.yaml", "- 1\n")])
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_settings(Root, [tmp_path / "latin.yaml"])


def test_missing_files_come_with_the_other_problems(tmp_path: Path) -> None:
    lines = message(
        "nmae=1", "nonsense", files=(tmp_path / "a.yaml", tmp_path / "b.yaml")
    ).splitlines()
    assert lines == [
        f"there is no config file {tmp_path / 'a.yaml'}",
        f"there is no config file {tmp_path / 'b.yaml'}",
        "'nonsense' is neither a .yaml file nor key=value",
        "unknown setting nmae (from command line); did you mean name?",
    ]


def test_text_that_was_read_as_a_number_comes_with_the_way_out() -> None:
    assert message("name=12e3").startswith(
        "name = 12000.0 (from command line): Input should be a valid string; to give it as text"
    )
    assert """name='"..."'""" in message("name=3")


@pytest.mark.parametrize(
    ("override", "advised", "found"),
    [
        ("name=yes", """name='"..."'""", lambda root: root.name),
        (
            "branch.tags=[a,yes]",
            """branch.tags='["...", "..."]'""",
            lambda root: root.branch.tags[1],
        ),
        (
            "branch.leaves=[{name: yes}]",
            """branch.leaves='[{name: "..."}]'""",
            lambda root: root.branch.leaves[0].name,
        ),
        (
            "branch.by_name={a: [{name: yes}]}",
            """branch.by_name.a='[{name: "..."}]'""",
            lambda root: root.branch.by_name["a"][0].name,
        ),
    ],
)
def test_the_said_way_to_give_a_word_as_text_works(
    override: str, advised: str, found: Callable[[Root], str]
) -> None:
    assert message(override).endswith(f"put quotes inside the quotes: {advised}")
    # as a shell reads it
    [argument] = shlex.split(advised.replace("...", "yes"))
    assert found(loaded(argument)) == "yes"


def test_the_said_way_to_give_choices_as_text_works() -> None:
    key = "eval.sampling.constraint.choices"
    with pytest.raises(ConfigError, match=rf"""{key}='\["...", "..."\]'"""):
        load_settings(RLConfig, [], [f"{key}=[yes,no]"])
    found = load_settings(RLConfig, [], [f'{key}=["yes", "no"]']).settings
    assert found.eval.sampling.constraint.choices == ("yes", "no")


def test_settings_are_frozen() -> None:
    with pytest.raises(ConfigError, match=r"name cannot be set: settings are frozen; build others"):
        Root().name = "other"  # type: ignore[misc]


TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8
) | st.sampled_from(
    [
        "1e-6",
        "12e4567",
        "yes",
        "null",
        "1",
        "0x1",
        "a: b",
        "\n",
        "  ",
        "1_0",
        "1:30",
        "=",
        "~",
        ".5e1",
        "2001-01-01",
    ]
)
NUMBERS = st.floats(allow_nan=False) | st.integers()
VALUES = st.recursive(
    TEXT | NUMBERS | st.booleans() | st.none(),
    lambda v: st.lists(v) | st.dictionaries(TEXT, v),
    max_leaves=5,
)


@tries(deadline=None)
@given(
    TEXT.filter(bool),
    st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False),
    st.dictionaries(TEXT, VALUES),
    st.lists(TEXT),
)
def test_what_was_saved_loads_back_equal(
    name: str, rate: float, options: dict[str, Any], tags: list[str]
) -> None:
    leaf = Leaf(name=name, rate=rate, options=options)
    settings = Root(
        branch=Branch(
            leaf=leaf, maybe=leaf, leaves=(leaf,), by_name={"k": (leaf,)}, tags=tuple(tags)
        ),
        note=name or None,
    )
    assert build(Root, parse_yaml(to_yaml(settings))) == settings


def test_a_saved_file_is_plain_yaml() -> None:
    tree = yaml.safe_load(to_yaml(Root(branch=Branch(tags=("a",)))))
    assert tree["branch"]["tags"] == ["a"]
    assert list(tree) == ["branch", "name", "rate", "note"]


def test_leaves_are_listed_and_merged() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}
    assert dict(dotted(tree)) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
    assert deep_merge(tree, {"a": {"b": 2}, "d": []}) == {"a": {"b": 2, "c": {}}, "d": []}
    assert tree["a"] == {"b": 1, "c": {}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("num_generations=8", "num_generations is rollout.group_size here"),
        ("rollout.samples=8", "rollout.samples is rollout.group_size here"),
        ("eval.data.chat=true", "eval.data.chat is eval.data.apply_chat_template here"),
        ("process.path=x", "process.path is prm.path here"),
        (
            "critic.optimizer.warmup=3",
            "set critic.optimizer.warmup_steps, or critic.optimizer.warmup_ratio",
        ),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is rollout.group_size here"),
        ("rollout.n=8", "rollout.n is rollout.group_size here"),
        (
            "algorithm.clip_ratio_high=0.3",
            "algorithm.clip_ratio_high is algorithm.loss.clip_high here",
        ),
        ("n_samples_per_prompt=8", "n_samples_per_prompt is rollout.group_size here"),
        (
            "trainer={total_epochs: 1, save_freq: 2}",
            "trainer.total_epochs is train.epochs here, trainer.save_freq is checkpoint.every here",
        ),
        ("trainer={colour: 1}", "did you mean train?"),
        ("rollout.group_siz=8", "did you mean rollout.group_size?"),
    ],
)
def test_a_name_of_another_program_is_answered_with_ours(given, said):
    from lightrft.config.verbs import RLConfig

    with pytest.raises(ConfigError) as raised:
        load_settings(RLConfig, overrides=[given])
    assert said in str(raised.value)


def test_a_section_of_another_verb_is_named_before_an_option_of_another_framework():
    """``optimizer`` is an option of others too, for kinds of optimizers that do not exist here."""
    from lightrft.config.verbs import EvaluateConfig

    with pytest.raises(ConfigError) as raised:
        load_settings(EvaluateConfig, overrides=["optimizer={lr: 1e-5}"])
    said = "optimizer is a setting of lightrft rl and dpo, and not of this verb (from command line)"
    assert str(raised.value).startswith(f"{said}; as a name of another framework, optimizer has no")


@pytest.mark.parametrize("verb", ["SFTConfig", "DistillVerbConfig", "DPOConfig"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("eval_dataset=x", "eval_dataset is validation.sources here"),
        ("data.val_files=x", "data.val_files is validation.sources here"),
        ("per_device_train_batch_size=8", "per_device_train_batch_size is batch_size here"),
        ("data.train_batch_size=8", "data.train_batch_size is batch_size here"),
    ],
)
def test_names_of_supervised_training_are_answered_with_those_of_given_responses(verb, given, said):
    """They would else name the eval set, which needs a reward, and the size of micro-batches."""
    from lightrft.config import verbs

    with pytest.raises(ConfigError) as raised:
        load_settings(getattr(verbs, verb), overrides=[given])
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["critic", "process"])
def test_a_setting_that_was_removed_is_refused_with_what_to_do_instead(name, tmp_path):
    from lightrft.config.verbs import RLConfig

    old = tmp_path / "old.yaml"
    old.write_text(f"launch: {{kind: ray, ray: {{{name}: true}}}}")
    said = rf"unknown setting launch\.ray\.{name} \(from .*old\.yaml\); it was removed: .* the ranks train it, and .* shards it"
    with pytest.raises(ConfigError, match=said):
        load_settings(RLConfig, [old])


def test_a_malformed_item_is_not_also_an_item_too_few() -> None:
    with pytest.raises(ConfigError) as refused:
        build(RMConfig, {"reward_model": {"heads": [{"name": "a", "knd": "mlp"}]}})
    assert "reward_model.heads.0.knd" in str(refused.value)
    assert "at least 1 item" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"heads = \[\]: Tuple should have at least 1 item"):
        build(RMConfig, {"reward_model": {"heads": []}})
