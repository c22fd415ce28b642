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
from lightrft.config.data import (
    DataConfig,
    PreferenceDataConfig,
    ProcessDataConfig,
    RewardDataConfig,
    SFTDataConfig,
)
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DistillVerbConfig, GenerateConfig, RLConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import Processor, load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.rollout.evaluation import load_prompts
from lightrft.trainer.distill.data import load_rows, load_shown
from lightrft.utils.errors import UserError
from tests.unit.datasets.media_files import clip, picture, sound
from tests.unit.datasets.published_templates import PUBLISHED

FAMILY = "qwen2_5_omni_thinker"
"""A family that reads every kind of media."""
FILES = {"image": ["a.png", "b.png"], "video": ["a.mp4", "b.mp4"], "audio": ["a.wav", "b.wav"]}
COUNTED = {"image": "image_grid_thw", "video": "video_grid_thw", "audio": "feature_lengths"}
"""The input that has a row for each item of a kind."""
CALL_ID = "abcdefghi"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that reads media, and two files of each kind."""
    path = tmp_path_factory.mktemp("rows")
    save_tiny_media(FAMILY, path / "model")
    picture(path / "a.png", 20, 30, seed=1)
    picture(path / "b.png", 32, 16, seed=2)
    clip(path / "a.mp4", frames=4, height=16, width=32)
    clip(path / "b.mp4", frames=8, height=32, width=16)
    sound(path / "a.wav", 0.1)
    sound(path / "b.wav", 0.2)
    return path


@lru_cache(maxsize=1)
def own_processor(path: str) -> tuple[Processor, dict[str, str], tuple[str, ...]]:
    """The processor of a model, the text of each placeholder, and its special tokens."""
    model = ModelConfig(path=path)
    tokenizer = load_tokenizer(model)
    found = load_processor(model, tokenizer)
    assert found is not None
    texts = {kind: tokenizer.convert_ids_to_tokens(one) for kind, one in found.tokens.items()}
    return found, texts, tuple(tokenizer.get_added_vocab())


@lru_cache(maxsize=2)
def reader_of(name: str, folder: Path) -> tuple[Any, Processor]:
    """A tokenizer of a published format that has the tokens of media too, and its processor."""
    form = PUBLISHED[name]
    own, texts, marks = own_processor(str(folder / "model"))
    special = dict.fromkeys((*form.special, form.eos, *marks))
    tokenizer = tiny_tokenizer(special=tuple(special), chat_template=form.template)
    tokenizer.eos_token = form.eos
    tokens = {kind: tokenizer.convert_tokens_to_ids(text) for kind, text in texts.items()}
    return tokenizer, replace(own, tokens=tokens)


class Row:
    """A row that grows, and the texts in it by the name of their column or field."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.texts: dict[str, str] = {}
        self.columns: dict[str, Any] = {}
        self.media: list[tuple[str, str]] = []

    def text(self, field: str) -> str:
        """Return a text that no other field has."""
        made = f"{self.draw(st.sampled_from(['so', 'a b', '1+1', 'x?']))}{len(self.texts)}y"
        self.texts[made] = field
        return made

    def maybe(self) -> bool:
        return self.draw(st.booleans())

    def message(self, role: str, **fields: Any) -> dict[str, Any]:
        """Return a message of a role with any number of items, in one of the forms."""
        text, form = self.text("content"), self.draw(st.sampled_from(["text", "mark", "parts"]))
        if form == "text":
            return {"role": role, "content": text, **fields}
        kinds = self.draw(st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=2))
        items = [(kind, self.draw(st.sampled_from(FILES[kind]))) for kind in kinds]
        self.media += items
        if form == "mark":
            for kind, name in items:
                self.columns.setdefault(f"{kind}s", []).append(name)
            marks = "".join(f"<{kind}>" for kind in kinds)
            return {"role": role, "content": marks + text, **fields}
        parts = [{"type": kind, kind: name} for kind, name in items]
        return {"role": role, "content": [*parts, {"type": "text", "text": text}], **fields}

    def turns(self) -> list[dict[str, Any]]:
        """Return a question, an answer, and a call with its result between them where there is one."""
        answer: dict[str, Any] = {"role": "assistant", "content": self.text("content")}
        # Most formats refuse it, and rows that are refused prove little.
        if self.draw(st.integers(0, 4)) == 4:
            answer["reasoning_content"] = self.text("reasoning_content")
        question, found = self.message("user"), [answer]
        if self.maybe():
            function = {
                "name": self.text("tool_calls"),
                "arguments": {"a": self.text("tool_calls")},
            }
            call = {"id": CALL_ID, "type": "function", "function": function}
            result = self.message("tool", tool_call_id=CALL_ID)
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
    others = {name: value for name, value in row.columns.items() if name != "messages"}
    answered = {**others, "prompt": messages[:-1]}
    rejected = [{**messages[-1], "content": "no"}]
    pair = {**answered, "chosen": [messages[-1]], "rejected": rejected}

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

    options = {"max_tokens": 5000, "seed": 0, "processor": processor}

    def dpo() -> Any:
        data = PreferenceDataConfig(**written("dpo", pair))
        return PreferenceDataset(data, tokenizer, kind="pair", **options)

    def kto() -> Any:
        data = PreferenceDataConfig(**written("kto", {**row.columns, "label": True}))
        return PreferenceDataset(data, tokenizer, kind="labelled", **options)

    def rm() -> Any:
        data = RewardDataConfig(**written("rm", pair))
        return PreferenceDataset(data, tokenizer, kind="ranked", heads=["right"], **options)

    def prm() -> Any:
        steps = {**answered, "completions": [messages[-1]["content"]], "labels": [True]}
        data = ProcessDataConfig(**written("prm", steps))
        return ProcessDataset(data, tokenizer, **options)

    def distill(on_policy: float) -> tuple[DistillVerbConfig, Any]:
        data = {**written("distill", row.columns), "turns": "last"}
        tree = {
            "data": data,
            "distill": {"on_policy": on_policy},
            "batch_size": 1,
            "max_tokens": 5000,
        }
        config = build(DistillVerbConfig, tree)
        return config, load_rows(config, tokenizer, processor)

    def distill_given() -> Any:
        return distill(0.0)[1]

    def distill_sampled() -> Any:
        return distill(1.0)[1]

    def teacher() -> Any:
        config, dataset = distill(0.0)
        return load_shown(config, config.data, dataset, tokenizer, processor)

    def generate() -> Any:
        data = build(GenerateConfig, {"data": written("generate", row.columns)}).data
        return load_prompts(data, tokenizer, 0, processor, None, "data.sources")

    found: dict[str, Any] = {}
    sampling = (rl, held_out, generate, distill_sampled, teacher)
    for make in (*sampling, sft, distill_given, dpo, kto, rm, prm):
        try:
            dataset = make()
            found[make.__name__] = (dataset, dataset[0])
        except UserError as error:
            found[make.__name__] = error
    return found


SAMPLED = ("rl", "held_out", "generate", "distill_sampled", "teacher")
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
    # What one verb cannot read, no other reads but for the last turn. Steps are texts.
    prompted = {*SAMPLED, "prm"} - {"teacher"}
    assert not errors or set(errors) == set(found) or set(read) == prompted, errors
    tokenizer, processor = reader_of(name, folder)
    for verb, (dataset, example) in read.items():
        ids = prompts[verb] + ([] if verb in SAMPLED else response_of(verb, example))
        text = tokenizer.decode(ids)
        unread = set().union(*dataset.unread.values())
        last = row.columns["messages"][-1]
        for one, field in row.texts.items():
            unread_turn = {last["content"]} if verb in SAMPLED else set()
            if verb in (*SAMPLED, "prm"):
                unread_turn.add(last.get("reasoning_content"))
            earlier = field == "reasoning_content" and one != last.get(field)
            named = field in unread or any(re.search(rf"\b{field}\b", line) for line in told)
            assert one in text or one in unread_turn or earlier or named, (verb, one, field, text)
        media = example.media if verb in SAMPLED else example.prompt_media
        inputs = {key: rows.values for key, rows in media.items()}
        for kind, part in processor.parts.items():
            items = [one for one, _ in row.media].count(kind)
            rows = inputs.get(COUNTED[kind], ())
            assert len(rows) == items, (verb, kind, row.columns)
            count = part.count(inputs) if items else 0
            assert ids.count(processor.tokens[kind]) == count, (verb, kind)


def response_of(verb: str, example: Any) -> list[int]:
    if verb in ("dpo", "kto", "rm"):
        return list(example.responses[0].token_ids)
    return list(example.response_ids)
