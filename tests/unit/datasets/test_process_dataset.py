"""Rows with labels of steps, as their sets publish them, and their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.data import ProcessDataConfig
from lightrft.datasets.process.process_dataset import ProcessDataset, ProcessExample
from lightrft.datasets.process.step_formats import RawSteps, read_steps
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import check_steps
from lightrft.datasets.rows.recorded_row import RecordedRow
from lightrft.utils.errors import ConfigError, DataError
from tests.media_helpers import rig
from tests.unit.datasets.media_files import picture
from tests.unit.datasets.tokenizers import chat_tokenizer

Make = Callable[..., ProcessDataset]
NAN = math.nan
KI = "ки"

STEPWISE = {"prompt": "1+1?", "completions": ["One and one.", "It is 3."], "labels": [True, False]}
SHEPHERD = {
    "input": f"How many? Step 1: Two and two. {KI}\nStep 2: It is 5. {KI}",
    "label": "How many? Step 1: Two and two. +\nStep 2: It is 5. -",
    "task": "GSM8K",
}
PRM800K = {
    "labeler": "x",
    "question": {"problem": "How many?", "ground_truth_answer": "4"},
    "label": {
        "steps": [
            {
                "completions": [
                    {"text": "Bad.", "rating": -1, "flagged": False},
                    {"text": "Two and two.", "rating": 1, "flagged": False},
                ],
                "human_completion": None,
                "chosen_completion": 1,
            },
            {
                "completions": [{"text": "Let us see.", "rating": 0, "flagged": False}],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [{"text": "Worse.", "rating": -1, "flagged": False}],
                "human_completion": {"text": "By hand.", "rating": None},
                "chosen_completion": None,
            },
            {
                "completions": [{"text": "It is 5.", "rating": -1, "flagged": False}],
                "human_completion": None,
                "chosen_completion": None,
            },
        ],
        "total_time": 1,
        "finish_reason": "found_error",
    },
}
VISUAL_RAW = {
    "image": "a.png",
    "question": "<image>\nHow many?",
    "answer": "2",
    "response": "Look. It is 2.",
    "steps_with_score": [
        {"step": "Look.", "score": 0.875, "num_mc_correct": 14, "num_mc_total": 16},
        {"step": "It is 2.", "score": 0.0, "num_mc_correct": 0, "num_mc_total": 16},
    ],
}
VISUAL = {
    "image": "a.png",
    "conversations": [
        {"from": "system", "value": "You judge steps."},
        {
            "from": "human",
            "value": "<image>\n### Question:\nHow many?\n\n### Solution Process:\nLook.",
        },
        {"from": "gpt", "value": "+"},
        {"from": "human", "value": "It is 2."},
        {"from": "gpt", "value": "-"},
    ],
}
VISUAL_BENCH = {
    "image": ["a.png"],
    "question": "<image>\nHow many?",
    "response": {"steps": ["Look.", "See.", "It is 2."], "process_correctness": [1, 0, -1]},
}
BENCH = {"id": "gsm8k-1", "problem": "How many?", "steps": ["a", "b", "c", "d"], "label": 1}

ROWS = [
    ("TRL", STEPWISE, "1+1?", ["One and one.", "It is 3."], [1, 0]),
    ("Math-Shepherd", SHEPHERD, "How many?", ["Step 1: Two and two.", "Step 2: It is 5."], [1, 0]),
    (
        "OpenRLHF, words",
        {"input": SHEPHERD["input"], "label": ["+", "-"]},
        "How many?",
        ["Step 1: Two and two.", "Step 2: It is 5."],
        [1, 0],
    ),
    (
        "OpenRLHF, numbers",
        {"input": f"How many?\nTwo.{KI}Five.{KI} The end.", "value": [0.75, None]},
        "How many?",
        ["Two.", "Five."],
        [0.75, NAN],
    ),
    (
        "PRM800K",
        PRM800K,
        "How many?",
        ["Two and two.", "Let us see.", "By hand.", "It is 5."],
        [1, 1, 1, 0],
    ),
    ("VisualPRM400K-Raw", VISUAL_RAW, "<image>\nHow many?", ["Look.", "It is 2."], [0.875, 0]),
    ("VisualPRM400K", VISUAL, "<image>\nHow many?", ["Look.", "It is 2."], [1, 0]),
    (
        "VisualProcessBench",
        VISUAL_BENCH,
        "<image>\nHow many?",
        ["Look.", "See.", "It is 2."],
        [1, 1, 0],
    ),
    (
        "VisualProcessBench, JSON",
        {**VISUAL_BENCH, "response": json.dumps(VISUAL_BENCH["response"])},
        "<image>\nHow many?",
        ["Look.", "See.", "It is 2."],
        [1, 1, 0],
    ),
    ("ProcessBench", BENCH, "How many?", ["a", "b", "c", "d"], [1, 0, NAN, NAN]),
    ("ProcessBench, right", {**BENCH, "label": -1}, "How many?", [*"abcd"], [1, 1, 1, 1]),
]


def read(row: dict[str, Any], **config: Any) -> RawSteps:
    return read_steps(row, ProcessDataConfig(**config), "rows.jsonl, line 7")


@pytest.mark.parametrize(
    ("row", "prompt", "steps", "labels"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_every_published_layout_is_read_without_settings(
    row: dict[str, Any], prompt: str, steps: list[str], labels: list[float]
) -> None:
    found = read(row)
    assert (found.prompt, found.steps) == (prompt, steps)
    assert found.labels == pytest.approx(labels, nan_ok=True, abs=0)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1+1?"}, "no labels of steps in the row, which has: prompt"),
        ({**STEPWISE, "labels": [True]}, "1 labels for 2 steps"),
        ({**STEPWISE, "labels": [True, 1.5]}, "the label of step 2 is 1.5, not from 0 to 1"),
        ({**STEPWISE, "labels": [True, "maybe"]}, "the label of a step is 'maybe'"),
        ({**STEPWISE, "labels": [None, None]}, "none of 2 steps has a label"),
        ({**STEPWISE, "completions": ["a", " "]}, "step 2 is empty"),
        ({**STEPWISE, "prompt": None}, "no column with a prompt"),
        (
            {**SHEPHERD, "label": "How many?"},
            f"label has no \\+ or - in the place of '{KI}' number 1",
        ),
        ({"input": "a", "label": ["+"]}, f"input has no '{KI}'; set data.placeholder"),
        ({"input": f"a{KI}", "label": ["+"]}, "input has neither 'Step 1:' nor a line break"),
        (
            {"question": "q", "steps_with_score": [{"step": None, "score": 1.0}]},
            "step 1 is None, not a text",
        ),
        (
            {**PRM800K, "label": {"steps": [{"completions": [{"text": 5, "rating": 1}]}]}},
            "step 1 is 5, not a text",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "### Question:\nq\n### Solution Process:\na"},
                    {"from": "gpt", "value": "+"},
                    {"from": "human", "value": None},
                    {"from": "gpt", "value": "-"},
                ]
            },
            "step 2 is None, not a text",
        ),
        ({**BENCH, "label": 4}, "label is 4, and there are 4 steps"),
    ],
)
def test_rows_that_cannot_be_used_are_named_with_their_location(
    row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(MalformedRow, match=f"^rows.jsonl, line 7: {problem}"):
        read(row)


def test_ratings_of_prm800k_out_of_range_are_refused() -> None:
    damaged = json.loads(json.dumps(PRM800K).replace('"rating": 0', '"rating": 2'))
    with pytest.raises(MalformedRow, match="line 7, step 2: rating is 2, not -1, 0 or 1"):
        read(damaged)


@pytest.fixture
def examples(tmp_path: Path) -> Make:
    def make(
        rows: list[dict[str, Any]],
        tokenizer: Any = None,
        max_tokens: int = 500,
        processor: Any = None,
        **config: Any,
    ) -> ProcessDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = ProcessDataConfig.model_validate({"sources": str(path), **config})
        return ProcessDataset(
            data,
            tokenizer or chat_tokenizer(),
            max_tokens=max_tokens,
            seed=0,
            processor=processor,
        )

    return make


def steps_of(example: ProcessExample, tokenizer: Any) -> list[str]:
    """Texts of the tokens up to each separator."""
    starts = [0, *[end + 1 for end in example.separators]]
    pieces = zip(starts, example.separators)
    return [tokenizer.decode(example.response_ids[a : b + 1]) for a, b in pieces]


def test_a_separator_follows_each_step_and_marks_where_it_is_scored(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    dataset = examples([STEPWISE], tokenizer, separator="<|im_end|>")
    (example,) = dataset
    assert steps_of(example, tokenizer) == ["One and one.<|im_end|>", "It is 3.<|im_end|>"]
    assert example.labels == [1.0, 0.0]
    assert example.separators[-1] == len(example.response_ids) - 1
    separator = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [example.response_ids[at] for at in example.separators] == [separator] * 2
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(example.prompt_ids) == asked
    assert (dataset.counts["steps/labelled"], dataset.counts["steps/unlabelled"]) == (2, 0)


def test_a_separator_of_several_tokens_is_scored_at_its_last(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    (example,) = examples([STEPWISE], tokenizer, separator=" ;;\n")
    assert steps_of(example, tokenizer) == ["One and one. ;;\n", "It is 3. ;;\n"]


def test_a_separator_that_a_step_spells_is_not_one(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    row = {**STEPWISE, "completions": ["a<|im_end|>b", "c"]}
    dataset = examples([row], tokenizer, separator="<|im_end|>")
    (example,) = dataset
    separator = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert example.response_ids.count(separator) == 2
    assert dataset.counts["special_tokens"] == 1


def test_the_last_steps_of_a_long_example_are_cut_as_wholes(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    (whole,) = examples([STEPWISE], tokenizer)
    room = len(whole.prompt_ids) + len(whole.response_ids) - 1
    dataset = examples([STEPWISE], tokenizer, max_tokens=room, overlong_prompts="truncate")
    (cut,) = dataset
    assert steps_of(cut, tokenizer) == ["One and one.\n"]
    assert cut.labels == [1.0]
    assert dataset.counts["truncated"] == 1
    other = {**STEPWISE, "completions": ["a", "b"]}
    dropped = examples([STEPWISE, other], tokenizer, max_tokens=room)
    assert (len(dropped), dropped.counts["overlong"]) == (1, 1)
    with pytest.raises(DataError, match=r"line 1: .* tokens, more than max_tokens"):
        examples([STEPWISE], tokenizer, max_tokens=room, overlong_prompts="error")


def test_bad_rows_are_counted_where_the_settings_say_so(examples: Make) -> None:
    rows = [{**STEPWISE, "labels": [True]}, STEPWISE]
    dataset = examples(rows, bad_rows="skip")
    assert (len(dataset), dataset.counts["malformed"]) == (1, 1)
    assert "line 1: 1 labels for 2 steps" in dataset.first_problem
    with pytest.raises(DataError, match="line 1: 1 labels for 2 steps"):
        examples(rows)


def test_a_separator_that_the_tokenizer_does_not_know_is_refused(examples: Make) -> None:
    tokenizer = chat_tokenizer()
    assert tokenizer.unk_token_id is not None
    with pytest.raises(ConfigError, match=r"data\.separator = .* is unknown to the tokenizer"):
        examples([STEPWISE], tokenizer, separator="\u2603")


def test_steps_that_contain_the_separator_are_counted_and_warned_of_with_the_first(
    examples: Make, caplog: pytest.LogCaptureFixture
) -> None:
    split = {**STEPWISE, "completions": ["One;and;one.", "It is 3."]}
    check_steps(examples([STEPWISE], separator=";"), "data")
    assert not caplog.messages
    dataset = examples([STEPWISE, split, split], separator=";")
    check_steps(dataset, "data")
    assert dataset.counts["steps/with_separator"] == 2
    (warning,) = caplog.messages
    assert "2 of 6 steps contain data.separator" in warning
    assert "line 2" in warning


def test_steps_that_are_cut_off_count_no_separators(examples: Make) -> None:
    row = {**STEPWISE, "completions": ["One.", "It; is; 3."]}
    (whole,) = examples([row], separator=";")
    room = len(whole.prompt_ids) + len(whole.response_ids) - 1
    dataset = examples([row], separator=";", max_tokens=room, overlong_prompts="truncate")
    assert dataset.counts["truncated"] == 1
    assert dataset.counts["steps/with_separator"] == 0


@pytest.mark.parametrize(("separator", "warned"), [("<extra_0>", 1), ("<|im_end|>", 0), (" ;;", 0)])
def test_a_separator_that_looks_like_a_special_token_and_is_none_is_warned_of(
    separator: str, warned: int, examples: Make, caplog: pytest.LogCaptureFixture
) -> None:
    examples([STEPWISE], separator=separator)
    assert len(caplog.messages) == warned
    assert all("looks like a special token" in message for message in caplog.messages)


def test_media_of_a_question_belong_to_the_prompt(examples: Make, tmp_path: Path) -> None:
    eye = rig("qwen2_5_vl", tmp_path / "eye")
    picture(tmp_path / "a.png", 40, 60, seed=1)
    dataset = examples([VISUAL_RAW, VISUAL], eye.tokenizer, processor=eye.processor)
    for example in (dataset[0], dataset[1]):
        assert example.prompt_media
        assert dataset.encoder.placeholders.isdisjoint(example.response_ids)
    first, second = (example.prompt_media for example in dataset)
    assert all(torch.equal(first[name].values, second[name].values) for name in first)


def test_cached_tokens_give_the_same_examples(examples: Make, tmp_path: Path) -> None:
    options = {"token_cache": str(tmp_path / "cache"), "token_cache_min_mb": 0}
    rows = [STEPWISE, {**STEPWISE, "labels": [None, 0.25], "example_weight": 2}]
    first, again = examples(rows, **options), examples(rows, **options)
    assert list((tmp_path / "cache").glob("*.arrow"))
    for one, other in [(first[0], again[0]), (first[1], again[1])]:
        assert one.labels == pytest.approx(other.labels, nan_ok=True, abs=0)
        assert (one.response_ids, one.separators) == (other.response_ids, other.separators)
    assert again.counts == first.counts
    assert first[1].weight == 2.0


def test_text_in_the_records_of_steps_that_no_step_reads_is_named() -> None:
    scored = [{**step, "critique": "Well."} for step in VISUAL_RAW["steps_with_score"]]
    row = RecordedRow({**VISUAL_RAW, "steps_with_score": scored})
    assert len(read_steps(row, ProcessDataConfig(), "line 1").steps) == 2
    nested = row.unread_columns() - set(VISUAL_RAW)
    assert nested == {"steps_with_score[].critique"}
    # The text of a completion that was not chosen has the name of one that was.
    chosen = RecordedRow(PRM800K)
    assert len(read_steps(chosen, ProcessDataConfig(), "line 1").steps) == 4
    assert not any("text" in name for name in chosen.unread_columns())
