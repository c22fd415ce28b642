"""The JSON Schema of a verb: what editors complete and check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lightrft.cli.main import main
from lightrft.cli.settings import json_schema
from lightrft.config.base import (
    descriptions,
    dotted,
    expand_shorthand,
    load_settings,
    to_yaml,
)
from lightrft.config.misread_values import leaves
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import parse_yaml
from lightrft.verbs import all_settings
from tests.settings.flips import FLIPS, nested

ROOT = Path(__file__).parents[3]
CLASSES = all_settings()


def validator(verb: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema(CLASSES[verb]))


def load(verb: str, tree: Any) -> None:
    load_settings(CLASSES[verb], trees=[tree])


@pytest.mark.parametrize("verb", CLASSES)
def test_every_verb_has_a_schema_that_takes_its_defaults_and_knows_each_setting(verb):
    schema = json_schema(CLASSES[verb])
    jsonschema.Draft202012Validator.check_schema(schema)
    validator(verb).validate(parse_yaml(to_yaml(CLASSES[verb]())))
    for name, about in descriptions(CLASSES[verb]).items():
        assert schema["properties"][name]["description"] == about
    assert not validator(verb).is_valid({"no_such_setting": 1})


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_valid(path):
    text = path.read_text(encoding="utf-8")
    words = text.split("lightrft ", 1)[1].split()
    verb = next(v for v in (" ".join(words[:2]), words[0]) if v in CLASSES)
    assert list(validator(verb).iter_errors(parse_yaml(text))) == []


def test_every_legal_value_that_the_tests_of_settings_use_is_valid():
    check = validator("rl")
    names = dict(dotted(CLASSES["rl"]().model_dump()))
    assert len(names.keys() & FLIPS.keys()) > 150
    for name, flip in FLIPS.items():
        # Others are settings of an item.
        if name in names:
            check.validate(nested(name, flip.value))
        check.validate(expand_shorthand(CLASSES["rl"], flip.context))


@pytest.mark.parametrize(
    "tree",
    [
        {"model": "a/folder", "data": "rows.jsonl"},
        {"data": ["a.jsonl", {"path": "b.jsonl"}]},
        {"data": {"sources": {"path": "a.jsonl"}}},
        {"reward": {"terms": ["math", {"function": "f.py:g", "weight": 0.5}]}},
        {"reward": {"terms": "math", "per_source": {"code": ["f.py:g"]}}},
        {"algorithm": "dapo", "eval": {"sampling.top_p": 0.9, "every": 10}},
        {"model": {"lora": {"rank": 16}}},
        {"model": {"lora": None}},
    ],
)
def test_bare_values_and_dotted_keys_are_valid_where_they_are_read(tree):
    load("rl", tree)
    assert list(validator("rl").iter_errors(tree)) == []


@pytest.mark.parametrize("verb", ["rl", "rm", "serve"])
def test_the_schema_refuses_nothing_that_a_verb_takes(verb):
    check = validator(verb)
    refused = 0
    for name in leaves(CLASSES[verb]):
        for value in ("text", -1, True, None, {"a": 1}):
            tree = nested(name, value)
            if not check.is_valid(tree):
                refused += 1
                with pytest.raises(ConfigError):
                    load(verb, tree)
    assert refused > 300


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"sampling": {"temprature": 1}}, ["sampling"]),
        ({"train": {"steps": "many"}}, ["train"]),
        ({"rollout": {"group_size": 0}}, ["rollout"]),
        ({"data": {"sources": [{"pathh": "x"}]}}, ["data"]),
        ({"sampling": {"top_p": 1.5}}, ["sampling", "top_p"]),
    ],
)
def test_a_mistake_is_marked_in_its_section(tree, where):
    (error,) = validator("rl").iter_errors(tree)
    assert list(error.path)[: len(where)] == where


def test_the_command_prints_the_schema_and_names_the_verbs(capsys):
    assert main(["settings", "--schema", "grm", "rl"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(CLASSES["grm rl"])
    assert main(["settings", "--schema", "train"]) == 2
    assert "--schema takes a verb and not train: demo, rl, sft, dpo" in capsys.readouterr().err
