"""Held-out data inherit the settings of the data to learn from that they do not set."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build, to_yaml
from lightrft.config.data import DataConfig, SFTDataConfig
from lightrft.config.rollout import EvalConfig
from lightrft.config.verbs import DPOConfig, PRMVerbConfig, RLConfig, SFTConfig
from lightrft.diagnostics.prompts.prompt_texts import prompt_texts
from lightrft.utils.yaml_text import parse_yaml

GIVEN: dict[str, Any] = {
    "sources": ["train.jsonl"],
    "system": "Add.",
    "template": "{prompt} Think.",
    "chat_template_options": {"enable_thinking": False},
    "media": {"max_pixels": 64},
    "max_prompt_tokens": 99,
    "shuffle": True,
    "columns": {"prompt": "q"},
}
HELD: dict[str, Any] = {"sources": ["test.jsonl"]}


@pytest.mark.parametrize("cls", [RLConfig, SFTConfig, DPOConfig])
def test_the_eval_set_inherits_what_it_does_not_set(cls: Any) -> None:
    tree = {"data": GIVEN, "eval": {"data": {**HELD, "system": None, "media": {"fps": 1.0}}}}
    data = build(cls, tree).eval.data
    assert (data.template, data.max_prompt_tokens) == ("{prompt} Think.", 99)
    assert data.chat_template_options == {"enable_thinking": False}
    assert (data.media.max_pixels, data.media.fps) == (64, 1.0)
    assert data.system is None and not data.shuffle and data.columns.prompt == ""
    assert [source.path for source in data.sources] == ["test.jsonl"]


def test_validation_inherits_settings_of_responses_too() -> None:
    data = {**GIVEN, "turns": "last"}
    config = build(SFTConfig, {"data": data, "validation": HELD, "eval": {"data": HELD}})
    assert (config.validation.turns, config.validation.system) == ("last", "Add.")
    assert not config.validation.shuffle
    data = {"sources": ["a.jsonl"], "separator": "#"}
    held = build(PRMVerbConfig, {"data": data, "validation": HELD}).validation
    assert held.separator == "#"


def test_sections_without_sources_stay_as_they_are_and_settings_may_be_objects() -> None:
    config = build(SFTConfig, {"data": GIVEN})
    assert config.eval.data == SFTConfig().eval.data and config.validation == SFTConfig().validation
    config = SFTConfig(
        data=SFTDataConfig(system="Add."), eval=EvalConfig(data=DataConfig(sources=["test.jsonl"]))
    )
    assert config.eval.data.system == "Add."


def test_a_saved_tree_loads_back_equal_and_inherits_no_more() -> None:
    config = build(RLConfig, {"data": GIVEN, "eval": {"data": HELD}})
    tree = parse_yaml(to_yaml(config))
    assert build(RLConfig, tree) == config
    tree["data"]["system"] = "Subtract."
    assert build(RLConfig, tree).eval.data.system == "Add."


def test_an_explanation_has_the_prompts_of_both_sections() -> None:
    given = {**GIVEN, "apply_chat_template": True}
    config = build(RLConfig, {"data": given, "eval": {"data": {**HELD, "template": "{prompt}"}}})
    shown = dict(prompt_texts(config))
    assert list(shown) == ["data", "eval.data"]
    assert "system: 'Add.', user: '{prompt} Think.'" in shown["data"]
    assert (
        "user: '{prompt}', in the chat template, with enable_thinking=False" in shown["eval.data"]
    )
