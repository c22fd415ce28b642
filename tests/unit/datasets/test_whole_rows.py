"""Rows with media, histories, tools, calls and reasoning at once: all of it is encoded or named, alike in every verb."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.base import build
from lightrft.config.data import DataConfig, PreferenceDataConfig, SFTDataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import Processor, load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.utils.errors import UserError
from tests.unit.datasets.media_files import picture
from tests.unit.datasets.published_templates import PUBLISHED

EYE = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
CALL_ID = "abcdefghi"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that reads pictures, and two pictures."""
    path = tmp_path_factory.mktemp("rows")
    save_tiny_media("qwen2_5_vl", path / "eye")
    picture(path / "a.png", 20, 30, seed=1)
    picture(path / "b.png", 32, 16, seed=2)
    return path


@lru_cache(maxsize=1)
def own_processor(path: str) -> Processor:
    model = ModelConfig(path=path)
    found = load_processor(model, load_tokenizer(model))
    assert found is not None
    return found


def reader_of(name: str, folder: Path) -> tuple[Any, Processor]:
    """A tokenizer of a published format that has the tokens of pictures too, and its processor."""
    form = PUBLISHED[name]
    special = dict.fromkeys((*form.special, form.eos, *EYE))
    tokenizer = tiny_tokenizer(special=tuple(special), chat_template=form.template)
    tokenizer.eos_token = form.eos
    own = own_processor(str(folder / "eye"))
    texts = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    tokens = {kind: tokenizer.convert_tokens_to_ids(text) for kind, text in texts.items()}
    return tokenizer, replace(own, tokens=tokens)


class Row:
    """A row that grows, and the texts in it by the name of their column or field."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.texts: dict[str, str] = {}
        self.columns: dict[str, Any] = {}
        self.pictures: list[str] = []

    def text(self, field: str) -> str:
        """Return a text that no other field has."""
        made = f"{self.draw(st.sampled_from(['so', 'a b', '1+1', 'x?']))}{len(self.texts)}y"
        self.texts[made] = field
        return made

    def maybe(self) -> bool:
        return self.draw(st.booleans())

    def user(self) -> dict[str, Any]:
        """Return a message of the user with any number of pictures, in one of the forms."""
        text, form = self.text("content"), self.draw(st.sampled_from(["text", "mark", "parts"]))
        if form == "text":
            return {"role": "user", "content": text}
        names = self.draw(st.lists(st.sampled_from(["a.png", "b.png"]), min_size=1, max_size=2))
        self.pictures += names
        if form == "mark":
            self.columns.setdefault("images", []).extend(names)
            return {"role": "user", "content": f"{'<image>' * len(names)}{text}"}
        parts = [{"type": "image", "image": one} for one in names]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def turns(self) -> list[dict[str, Any]]:
        """Return a question, an answer, and a call with its result between them where there is one."""
        answer: dict[str, Any] = {"role": "assistant", "content": self.text("content")}
        # Most formats refuse it, and rows that are refused prove little.
        if self.draw(st.integers(0, 4)) == 4:
            answer["reasoning_content"] = self.text("reasoning_content")
        question, found = self.user(), [answer]
        if self.maybe():
            function = {
                "name": self.text("tool_calls"),
                "arguments": {"a": self.text("tool_calls")},
            }
            call = {"id": CALL_ID, "type": "function", "function": function}
            result = {"role": "tool", "content": self.text("content"), "tool_call_id": CALL_ID}
            found = [{"role": "assistant", "content": "", "tool_calls": [call]}, result, answer]
        return [question, *found]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row of a conversation whose last turn is the answer."""
    row = Row(draw)
    turns = [turn for _ in range(draw(st.integers(1, 2))) for turn in row.turns()]
    if row.maybe():
        system = row.text("system")
        if row.maybe():
            turns.insert(0, {"role": "system", "content": system})
        else:
            row.columns["system"] = system
    if row.maybe():
        row.columns["history"] = [[row.text("history"), row.text("history")]]
    if row.maybe():
        tool = {"name": row.text("tools"), "description": row.text("tools")}
        tool["parameters"] = {"type": "object", "properties": {}}
        row.columns["tools"] = [{"type": "function", "function": tool}]
    if row.maybe():
        row.columns["topic"] = row.text("topic")
    row.columns["messages"] = turns
    return row


def outcomes(row: Row, folder: Path, name: str) -> dict[str, Any]:
    """The dataset of each verb over ``row``, or the error that ends it."""
    tokenizer, processor = reader_of(name, folder)
    messages = row.columns["messages"]
    pair = {k: v for k, v in row.columns.items() if k != "messages"} | {
        "prompt": messages[:-1],
        "chosen": [messages[-1]],
        "rejected": [{**messages[-1], "content": "no"}],
    }

    def written(kind: str, columns: dict[str, Any]) -> dict[str, Any]:
        path = folder / f"{kind}.jsonl"
        path.write_text(json.dumps(columns) + "\n")
        return {"sources": [{"path": str(path)}], "shuffle": False}

    def rl() -> Any:
        data = DataConfig(**written("rl", row.columns))
        return PromptDataset(data, tokenizer, seed=0, processor=processor)

    def held_out() -> Any:
        sources = written("eval", row.columns)
        tree = {"data": sources, "eval": {"data": {"sources": sources["sources"]}, "every": 1}}
        data = build(RLConfig, {**tree, "reward": {"terms": ["math"]}}).eval.data
        return PromptDataset(data, tokenizer, seed=0, processor=processor)

    def sft() -> Any:
        data = SFTDataConfig(**written("sft", row.columns), turns="last")
        return SFTDataset(data, tokenizer, max_tokens=5000, seed=0, processor=processor)

    def dpo() -> Any:
        data = PreferenceDataConfig(**written("dpo", pair))
        return PreferenceDataset(
            data, tokenizer, kind="pair", max_tokens=5000, seed=0, processor=processor
        )

    found: dict[str, Any] = {}
    for make in (rl, held_out, sft, dpo):
        try:
            dataset = make()
            found[make.__name__] = (dataset, dataset[0])
        except UserError as error:
            found[make.__name__] = error
    return found


SAMPLED = ("rl", "held_out")
"""Verbs that generate. The last turn of a row is no part of their prompts."""


def tokens_of(verb: str, example: Any) -> list[int]:
    return list(example.token_ids if verb in SAMPLED else example.prompt_ids)


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=12, derandomize=True)
@given(row=rows())
def test_all_that_a_row_carries_is_encoded_or_named_and_every_verb_has_one_prompt(
    name: str, folder: Path, row: Row
) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("lightrft")
    log.addHandler(handler)
    try:
        found = outcomes(row, folder, name)
    finally:
        log.removeHandler(handler)
    errors = {verb: str(one) for verb, one in found.items() if isinstance(one, UserError)}
    for error in errors.values():
        assert ".jsonl" in error and "line 1" in error
        assert any(field in error for field in (*row.columns, *row.texts.values())), error
    read = {verb: one for verb, one in found.items() if verb not in errors}
    prompts = {verb: tokens_of(verb, example) for verb, (_, example) in read.items()}
    assert len({tuple(tokens) for tokens in prompts.values()}) <= 1, (row.columns, prompts.keys())
    # What one verb cannot read, no other reads but for the last turn.
    assert not errors or set(errors) == set(found) or set(read) == set(SAMPLED), errors
    tokenizer, processor = reader_of(name, folder)
    for verb, (dataset, example) in read.items():
        ids = prompts[verb] + ([] if verb in SAMPLED else response_of(verb, example))
        text = tokenizer.decode(ids)
        unread = set().union(*dataset.unread.values())
        last = row.columns["messages"][-1]
        for one, field in row.texts.items():
            answered = verb in SAMPLED and one in (last["content"], last.get("reasoning_content"))
            earlier = field == "reasoning_content" and one != last.get(field)
            named = field in unread or any(re.search(rf"\b{field}\b", line) for line in told)
            assert one in text or answered or earlier or named, (verb, one, field, text)
        media = example.media if verb in SAMPLED else example.prompt_media
        pictures = len(media["image_grid_thw"].values) if media else 0
        assert pictures == len(row.pictures), (verb, row.columns)
        inputs = {key: rows.values for key, rows in media.items()}
        count = processor.parts["image"].count(inputs) if media else 0
        assert ids.count(processor.tokens["image"]) == count


def response_of(verb: str, example: Any) -> list[int]:
    return list(example.response_ids if verb == "sft" else example.responses[0].token_ids)
