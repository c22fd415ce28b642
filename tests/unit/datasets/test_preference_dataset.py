"""Preference rows as tokens: what is trained, cut, dropped and collated."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import PreferenceDataConfig, SFTDataConfig
from lightrft.datasets.preference.preference_dataset import (
    PreferenceDataset,
    PreferenceExample,
    PreferenceResponse,
)
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.types import CORRUPTED, GOLD
from lightrft.utils.errors import ConfigError, DataError, ModelError
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import clip, picture
from tests.unit.datasets.tokenizers import (
    FORGETS,
    NO_END,
    WITH_BOS,
    WITH_TOOLS,
    bos_tokenizer,
    chat_tokenizer,
)

Make = Callable[..., PreferenceDataset]

ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "1?"}]
PAIR = {"prompt": ASKED, "chosen": "one", "rejected": "two"}
TALK = [
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "result"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
OTHER = [*TALK[:2], {"role": "assistant", "content": "two"}]


@pytest.fixture
def examples(tmp_path: Path) -> Make:
    def make(
        rows: list[dict[str, Any]],
        tokenizer: Any = None,
        kind: Any = "pair",
        max_tokens: int = 1000,
        processor: Any = None,
        gold: bool = False,
        corrupted: bool = False,
        **config: Any,
    ) -> PreferenceDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        data = PreferenceDataConfig.model_validate({"sources": str(path), **config})
        return PreferenceDataset(
            data,
            tokenizer or chat_tokenizer(),
            kind=kind,
            max_tokens=max_tokens,
            seed=0,
            processor=processor,
            gold=gold,
            corrupted=corrupted,
        )

    return make


def learned(response: PreferenceResponse, tokenizer: Any) -> list[str]:
    """Texts of the runs of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(response.token_ids, response.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run) for run in runs]


def test_a_pair_is_one_prompt_and_two_responses_that_end_their_turn(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    (pair,) = examples([PAIR])
    asked = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(pair.prompt_ids) == asked
    texts = [tokenizer.decode(r.token_ids) for r in pair.responses]
    assert texts == ["one<|im_end|>", "two<|im_end|>"]
    assert all(all(r.trained) for r in pair.responses)
    assert [r.rank for r in pair.responses] == [0, 1]
    assert [r.desirable for r in pair.responses] == [None, None]
    assert (pair.id, pair.weight) == ("rows/0", 1.0)


@pytest.mark.parametrize(
    "tokenizer",
    [chat_tokenizer(), chat_tokenizer(NO_END), bos_tokenizer(WITH_BOS)],
    ids=["chatml", "no_end", "bos"],
)
def test_a_response_has_the_tokens_and_mask_that_sft_gives_it(
    examples: Make, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": ASKED, "chosen": TALK, "rejected": OTHER}]
    (pair,) = examples(rows, tokenizer)
    for response, said in zip(pair.responses, (TALK, OTHER), strict=True):
        path = tmp_path / "sft.jsonl"
        path.write_text(json.dumps({"prompt": ASKED, "response": said}) + "\n")
        config = SFTDataConfig.model_validate({"sources": str(path)})
        (lesson,) = SFTDataset(config, tokenizer, max_tokens=1000, seed=0)
        assert pair.prompt_ids == lesson.prompt_ids
        assert response.token_ids == lesson.response_ids
        assert response.trained == lesson.trained


def test_tools_of_a_row_are_part_of_the_prompt(examples: Make) -> None:
    tokenizer = chat_tokenizer(WITH_TOOLS)
    tools = [{"name": "look_up"}]
    (pair,) = examples([{**PAIR, "tools": tools}], tokenizer)
    asked = tokenizer.apply_chat_template(ASKED, tools=tools, add_generation_prompt=True)
    assert pair.prompt_ids == asked["input_ids"]
    assert learned(pair.responses[0], tokenizer) == ["one<|im_end|>"]


def test_a_turn_of_weight_0_in_a_response_is_masked(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    masked = [{**TALK[0], "weight": 0}, *TALK[1:]]
    (pair,) = examples([{"prompt": ASKED, "chosen": masked, "rejected": OTHER}])
    assert learned(pair.responses[0], tokenizer) == ["one<|im_end|>", "yes<|im_end|>"]
    (plain,) = examples([{"prompt": ASKED, "chosen": TALK, "rejected": OTHER}])
    assert pair.responses[0].token_ids == plain.responses[0].token_ids
    half = [{**TALK[0], "weight": 0.5}, *TALK[1:]]
    with pytest.raises(DataError, match=r"chosen has a turn of weight 0\.5.*weight 0 or 1"):
        examples([{"prompt": ASKED, "chosen": half, "rejected": OTHER}])


def test_the_column_of_the_weight_may_have_another_name(examples: Make) -> None:
    rows = [{**PAIR, "weight": 3}]
    assert [pair.weight for pair in examples(rows)] == [1.0]
    assert [pair.weight for pair in examples(rows, columns={"weight": "weight"})] == [3.0]


def test_tool_and_user_tokens_of_a_response_are_masked(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    rows = [{"prompt": ASKED, "chosen": TALK, "rejected": OTHER}]
    (pair,) = examples(rows)
    first, second = (learned(r, tokenizer) for r in pair.responses)
    assert first == ["call<|im_end|>", "one<|im_end|>", "yes<|im_end|>"]
    assert second == ["call<|im_end|>", "two<|im_end|>"]
    (last,) = examples(rows, turns="last")
    assert [learned(r, tokenizer) for r in last.responses] == [["yes<|im_end|>"], ["two<|im_end|>"]]
    assert [r.token_ids for r in last.responses] == [r.token_ids for r in pair.responses]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_turns(
    examples: Make,
) -> None:
    rows = [{"prompt": ASKED, "chosen": TALK, "rejected": OTHER}]
    with pytest.raises(ModelError, match=r"does not keep what came before"):
        examples(rows, chat_tokenizer(FORGETS))
    (pair,) = examples([PAIR], chat_tokenizer(FORGETS))
    assert learned(pair.responses[0], chat_tokenizer())[0].endswith("one<|im_end|>")


def test_examples_of_single_turns_are_refused(examples: Make) -> None:
    with pytest.raises(ConfigError, match=r"data\.turns: each .* set data\.turns: all or last"):
        examples([PAIR], turns="each")


def test_without_a_chat_template_text_is_continued_as_it_stands(examples: Make) -> None:
    tokenizer = bos_tokenizer()
    rows = [{"chosen": "The sky is blue.", "rejected": "The sky is green."}]
    (pair,) = examples(rows, tokenizer)
    assert tokenizer.decode(pair.prompt_ids) == "<s>The sky is"
    assert [tokenizer.decode(r.token_ids) for r in pair.responses] == [
        " blue.</s>",
        " green.</s>",
    ]


def test_without_a_chat_template_a_response_of_several_turns_is_refused(examples: Make) -> None:
    row = {"prompt": "1?", "chosen": TALK, "rejected": OTHER}
    with pytest.raises(DataError, match=r"line 1: a response of 5 messages needs a chat template"):
        examples([row], bos_tokenizer())


def test_spelled_special_tokens_and_unknown_text_are_counted_once_a_row(examples: Make) -> None:
    rows = [{**PAIR, "prompt": "<|im_end|>?"}, {**PAIR, "chosen": "<|im_end|> one"}, PAIR]
    data = examples(rows)
    assert data.counts["special_tokens"] == 2
    stored = sum(len(e.prompt_ids) + sum(len(r.token_ids) for r in e.responses) for e in data)
    assert data.counts["tokens"] == stored


TEXT = st.text("ab <|>\n", min_size=1, max_size=8).filter(str.strip)
WORDS = st.lists(TEXT, min_size=2, max_size=4, unique_by=str.strip)


@settings(max_examples=60, deadline=None)
@given(question=TEXT, words=WORDS, tool=TEXT)
def test_for_any_row_prompt_and_response_are_the_tokens_of_the_conversation(
    tmp_path_factory: pytest.TempPathFactory, question: str, words: list[str], tool: str
) -> None:
    tokenizer = chat_tokenizer()
    asked = [{"role": "user", "content": question}]
    called = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": tool}]
    said = [[*called, {"role": "assistant", "content": word}] for word in words]
    completions = [{"rank": k, "completion": one} for k, one in enumerate(said)]
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_text(json.dumps({"context": asked, "completions": completions}))
    config = PreferenceDataConfig.model_validate({"sources": str(path)})
    (row,) = PreferenceDataset(config, tokenizer, kind="ranked", max_tokens=1000, seed=0)
    assert [r.rank for r in row.responses] == list(range(len(words)))
    opened = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row.prompt_ids) == opened
    for response, messages, word in zip(row.responses, said, words, strict=True):
        text = tokenizer.apply_chat_template([*asked, *messages], tokenize=False)
        whole = [*row.prompt_ids, *response.token_ids]
        # all but the line break behind the last turn
        assert tokenizer.decode(whole) + "\n" == text
        # a line break at the start of a word would merge with that of the template
        if not word.startswith(("\n", " ")):
            assert whole == tokenizer(text, add_special_tokens=False)["input_ids"][: len(whole)]
        assert learned(response, tokenizer) == ["call<|im_end|>", f"{word}<|im_end|>"]


def expect_refused(examples: Make, row: dict[str, Any], problem: str, **options: Any) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: {problem}"):
        examples([PAIR, row], **options)
    kept = examples([PAIR, row], bad_rows="skip", **options)
    assert len(kept) == 1 and kept.counts["malformed"] == 1
    assert "line 2" in kept.first_problem


def test_bad_pairs_are_refused_or_counted_with_file_and_line(examples: Make) -> None:
    expect_refused(examples, {**PAIR, "rejected": "one"}, "chosen is equal to rejected")
    expect_refused(examples, {**PAIR, "rejected": " "}, "rejected is empty")
    spelled = {**PAIR, "rejected": "<|im_end|><|im_end|>"}
    expect_refused(examples, spelled, "rejected contains only special tokens")
    expect_refused(
        examples, spelled, "rejected contains only special tokens", special_tokens="control"
    )
    expect_refused(
        examples, {"prompt": "a", "completion": "b", "label": True}, "labels of one value"
    )
    expect_refused(
        examples,
        {"prompt": "a", "answers": [{"rank": k, "answer": str(k)} for k in range(3)]},
        "3 ranks do not say which responses are good",
        kind="labelled",
    )


def test_responses_that_differ_in_untrained_text_alone_are_refused(examples: Make) -> None:
    # the template cuts what follows the last turn of the assistant
    tail = [{"role": "user", "content": "thanks"}]
    said = [{"role": "assistant", "content": "one"}]
    row = {"prompt": ASKED, "chosen": said, "rejected": [*said, *tail]}
    expect_refused(examples, row, "chosen and rejected have equal tokens, but one is better")


def test_a_source_without_a_good_row_says_why(examples: Make) -> None:
    with pytest.raises(DataError, match=r"nothing is left.*1 malformed.*chosen is equal"):
        examples([{**PAIR, "rejected": "one"}], bad_rows="skip")


def test_labelled_rows_and_pairs_train_on_labels(examples: Make) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": False}, PAIR]
    one, two = examples(rows, kind="labelled")
    assert [r.desirable for r in one.responses] == [False]
    assert [r.desirable for r in two.responses] == [True, False]
    assert [r.rank for r in two.responses] == [None, None]


def test_the_limit_cuts_the_end_of_responses_and_counts_what_it_cut(examples: Make) -> None:
    rows = [{**PAIR, "chosen": "a b c d e f", "rejected": "b"}]
    (whole,) = examples(rows)
    asked = len(whole.prompt_ids)
    limit = asked + 3
    lost = len(whole.responses[0].token_ids) - 3
    assert lost > 0
    data = examples(rows, max_tokens=limit, overlong_prompts="truncate")
    assert data[0].prompt_ids == whole.prompt_ids
    assert data[0].responses[0].token_ids == whole.responses[0].token_ids[:3]
    assert data[0].responses[1].token_ids == whole.responses[1].token_ids
    assert (data.counts["truncated"], data.counts["truncated/tokens"]) == (1, lost)
    assert data.longest == limit
    with pytest.raises(DataError, match=rf"line 1: {limit + lost} tokens, more than max_tokens"):
        examples(rows, max_tokens=limit, overlong_prompts="error")


def test_a_response_that_the_limit_cuts_to_nothing_drops_and_counts_its_row(
    examples: Make,
) -> None:
    (whole,) = examples([PAIR])
    rows = [{**PAIR, "prompt": "1?"}, PAIR]
    limit = len(whole.prompt_ids)
    for overlong in ("drop", "truncate"):
        data = examples(rows, max_tokens=limit, overlong_prompts=overlong)
        assert len(data) == 1 and data.counts["overlong"] == 1
        assert "line 2" in data.first_problem and data.counts["truncated"] == 0


def test_responses_that_the_limit_makes_equal_drop_their_row(examples: Make) -> None:
    long = {**PAIR, "chosen": "a b c d e", "rejected": "a b c d f"}
    (whole,) = examples([long])
    limit = len(whole.prompt_ids) + 2
    data = examples([PAIR, long], max_tokens=limit, overlong_prompts="truncate")
    assert len(data) == 1 and data.counts["overlong"] == 1


def test_a_loss_that_needs_margins_names_the_first_row_without_one(examples: Make) -> None:
    data = examples([{**PAIR, "margin": 2}, PAIR])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: the row has no margin"):
        data.require("margin")
    examples([{**PAIR, "margin": 2}] * 2).require("margin")


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    for name in "ab":
        rows = [{"prompt": f"{name}{k}?", "chosen": "y", "rejected": "n"} for k in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 3.0},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1.0},
    ]
    config = PreferenceDataConfig.model_validate({"sources": sources, "blend": "sample"})
    data = PreferenceDataset(config, chat_tokenizer(), kind="pair", max_tokens=99, seed=0)
    of_a = sum(name.startswith("a/") for name in data.ids)
    assert of_a == 40 and 5 <= len(data) - of_a <= 25


def test_a_cached_data_set_gives_the_same_examples(examples: Make, tmp_path: Path) -> None:
    rows = [
        {**PAIR, "margin": 0.5, "example_weight": 2},
        {"prompt": "a", "answers": [{"rank": k, "answer": f"{k}"} for k in (2, 0, 1)]},
    ]
    options = {"token_cache": str(tmp_path / "tokens"), "token_cache_min_mb": 0.0}
    plain = list(examples(rows, kind="ranked"))
    first = examples(rows, kind="ranked", **options)
    second = examples(rows, kind="ranked", **options)
    assert list((tmp_path / "tokens").glob("*.arrow"))
    assert list(first) == list(second) == plain
    assert first.counts == second.counts and first.longest == second.longest
    assert list(pickle.loads(pickle.dumps(second))) == plain
    assert second.is_weighted and not examples([PAIR]).is_weighted


def test_a_batch_has_a_group_for_each_example(examples: Make) -> None:
    rows = [
        {**PAIR, "margin": 0.5, "score_chosen": 4, "score_rejected": 1, "example_weight": 2},
        {**PAIR, "margin": 1.5, "score_chosen": 3, "score_rejected": 2},
    ]
    data = examples(rows)
    batch = preference_to_batch([data[0], data[1], data[0]])
    assert batch.prompt_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert column(batch.example) == [0, 0, 1, 1, 2, 2]
    assert column(batch.rank) == [0, 1] * 3
    assert column(batch.rating) == [4, 1, 3, 2, 4, 1]
    assert column(batch.margin) == [0.5, 0, 1.5, 0, 0.5, 0]
    assert column(batch.example_weights) == [2, 2, 1, 1, 2, 2]
    assert batch.desirable is None
    assert len(batch.prompts) == 3 and len(batch) == 6
    response = data[1].responses[1]
    chosen = batch.select(torch.tensor([3]))
    assert chosen.responses.tokens.tolist() == response.token_ids
    assert chosen.mask.tolist() == response.trained


def test_a_column_that_one_response_lacks_is_left_out_of_the_batch(examples: Make) -> None:
    data = examples([{**PAIR, "margin": 0.5}, PAIR])
    assert preference_to_batch([data[0]]).margin is not None
    batch = preference_to_batch(list(data))
    assert batch.margin is None and batch.rating is None and batch.example_weights is None
    labels = preference_to_batch(list(examples([PAIR], kind="labelled")))
    assert column(labels.desirable) == [True, False] and labels.rank is None


def test_a_gold_response_has_its_own_rank(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    rows = [{**PAIR, "reference": "gold", "score_chosen": 4, "score_rejected": 1}]
    data = examples(rows, gold=True)
    (row,) = data
    assert [r.rank for r in row.responses] == [0, 1, GOLD]
    assert tokenizer.decode(row.responses[2].token_ids) == "gold<|im_end|>"
    batch = preference_to_batch([row])
    assert column(batch.rank) == [0, 1, GOLD] and batch.prompt_of.tolist() == [0, 0, 0]
    assert column(batch.rating)[:2] == [4, 1] and column(batch.margin)[0] == 3
    data.require("rating")
    # without a loss that reads it, the column is one like any other
    assert [r.rank for r in examples(rows)[0].responses] == [0, 1]


def test_the_gold_response_may_be_equal_to_the_better_one(examples: Make) -> None:
    (row,) = examples([{**PAIR, "reference": "one"}], gold=True)
    assert row.responses[0].token_ids == row.responses[2].token_ids


@pytest.mark.parametrize(
    ("row", "kind", "problem"),
    [
        (PAIR, "pair", r"line 1: the loss needs a gold response.*data\.columns\.reference"),
        ({**PAIR, "reference": " "}, "pair", "line 1: reference is empty"),
        (
            {"prompt": "a", "completion": "b", "label": True, "reference": "c"},
            "labelled",
            "a gold response goes with compared responses",
        ),
    ],
)
def test_a_row_without_a_gold_response_is_refused_if_the_loss_reads_one(
    examples: Make, row: dict[str, Any], kind: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        examples([row], kind=kind, gold=True)


def column(values: torch.Tensor | None) -> list[Any]:
    assert values is not None
    return values.tolist()


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


def seen(example: PreferenceExample, eye: Rig) -> tuple[int, list[int]]:
    """Number of placeholders in the prompt and in each response."""
    pad = eye.processor.tokens["image"]
    return example.prompt_ids.count(pad), [r.token_ids.count(pad) for r in example.responses]


def test_a_picture_of_the_prompt_is_loaded_once(examples: Make, eye: Rig, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 20, 30, seed=1)
    row = {"prompt": "<image>what?", "chosen": "a cat", "rejected": "a dog", "image": "a.png"}
    data = examples([row], eye.tokenizer, processor=eye.processor)
    (example,) = data.fetch([0])
    assert isinstance(example, PreferenceExample)
    count = eye.processor.parts["image"].count
    held = {name: r.values for name, r in example.prompt_media.items()}
    assert seen(example, eye) == (count(held), [0, 0]) and count(held) > 0
    assert [r.media for r in example.responses] == [{}, {}]
    batch = preference_to_batch([example])
    assert batch.prompts.media.keys() == example.prompt_media.keys()
    assert batch.responses.media == {}


def test_a_corrupted_copy_has_the_tokens_of_the_better_response_and_other_pixels(
    examples: Make, eye: Rig, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png", 40, 60, seed=1)
    row = {"prompt": "<image>what?", "chosen": "a cat!", "rejected": "a dog", "image": "a.png"}
    options = {"processor": eye.processor, "corrupted": True}
    data = examples([row], eye.tokenizer, **options)
    (example,) = data.fetch([0])
    assert isinstance(example, PreferenceExample) and example.corrupted_media is not None
    batch = preference_to_batch([example])
    assert column(batch.rank) == [0, 1, CORRUPTED]
    assert column(batch.example) == [0, 0, 0] and batch.prompt_of.tolist() == [0, 0, 1]
    better, copy = batch.select(torch.tensor([0])), batch.select(torch.tensor([2]))
    assert torch.equal(better.prompts.tokens, copy.prompts.tokens)
    assert torch.equal(better.responses.tokens, copy.responses.tokens)
    assert torch.equal(better.mask, copy.mask)
    for name, rows in better.prompts.media.items():
        other = copy.prompts.media[name]
        assert rows.values.shape == other.values.shape
        assert torch.equal(rows.values, other.values) == (name != "pixel_values")
    # the cached log-probs of a reference have the same places
    assert data.response_tokens.tolist() == [batch.tokens]
    assert data.digest() != examples([row], eye.tokenizer, processor=eye.processor).digest()
    (again,) = examples([row], eye.tokenizer, **options).fetch([0])
    pixels = again.corrupted_media["pixel_values"].values
    assert torch.equal(pixels, example.corrupted_media["pixel_values"].values)


def test_a_digest_follows_the_picture_and_reads_no_row_again(
    examples: Make, eye: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "<image>what?", "chosen": "a cat", "rejected": "a dog", "image": "a.png"}
    digests = []
    for seed in (1, 1, 2):
        picture(tmp_path / "a.png", 20, 30, seed=seed)
        # A file counts by its size and time; the clock of the file system may be coarse.
        os.utime(tmp_path / "a.png", (seed, seed))
        data = examples([row], eye.tokenizer, processor=eye.processor)
        monkeypatch.setattr(data, "_record", None)
        digests.append(data.digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_digest_follows_every_setting_of_an_item(
    examples: Make, eye: Rig, tmp_path: Path
) -> None:
    clip(tmp_path / "c.mp4", frames=24)
    digests = []
    # One number of tokens, of other frames.
    for start in (0.0, 0.0, 1.0):
        item = {"video": "c.mp4", "nframes": 4, "video_start": start}
        row = {"prompt": "<video>what?", "chosen": "a cat", "rejected": "a dog", "videos": [item]}
        digests.append(examples([row], eye.tokenizer, processor=eye.processor).digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_prompt_without_media_cannot_be_corrupted(examples: Make, eye: Rig) -> None:
    with pytest.raises(DataError, match="line 1: the loss corrupts the media of a prompt"):
        examples([PAIR], eye.tokenizer, processor=eye.processor, corrupted=True)


def test_pictures_of_later_turns_are_in_both_responses_and_never_trained(
    examples: Make, eye: Rig, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png", 20, 30, seed=1)
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    sides = {
        name: [
            {"role": "assistant", "content": name},
            shown,
            {"role": "assistant", "content": "end"},
        ]
        for name in ("chosen", "rejected")
    }
    data = examples([{"prompt": "1?", **sides}], eye.tokenizer, processor=eye.processor)
    (example,) = data.fetch([0])
    assert isinstance(example, PreferenceExample)
    in_prompt, in_responses = seen(example, eye)
    assert in_prompt == 0 and in_responses[0] == in_responses[1] > 0
    for response, name in zip(example.responses, sides, strict=True):
        assert response.media.keys() and example.prompt_media == {}
        assert learned(response, eye.tokenizer) == [f"{name}<|im_end|>", "end<|im_end|>"]


def test_the_limit_never_cuts_a_picture(examples: Make, eye: Rig, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 20, 30, seed=1)
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    end = {"role": "assistant", "content": "end"}
    row = {
        "prompt": "1?",
        "chosen": [{"role": "assistant", "content": "a"}, shown, end],
        "rejected": [{"role": "assistant", "content": "b"}, shown, end],
    }
    (whole,) = examples([row], eye.tokenizer, processor=eye.processor)
    pad = eye.processor.tokens["image"]
    response = whole.responses[0].token_ids
    last = len(response) - response[::-1].index(pad)
    asked = len(whole.prompt_ids)
    options = {"processor": eye.processor, "overlong_prompts": "truncate"}
    (cut,) = examples([row], eye.tokenizer, max_tokens=asked + last, **options)
    assert seen(cut, eye) == seen(whole, eye)
    with pytest.raises(DataError, match=r"nothing is left.*1 overlong"):
        examples([row], eye.tokenizer, max_tokens=asked + last - 1, **options)
