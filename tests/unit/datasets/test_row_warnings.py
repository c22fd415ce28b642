"""Text that a tokenizer does not know, and labels that are missing, are counted with the place of the first."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrft.config.data import DataConfig, SFTDataConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import (
    UNKNOWN,
    UnknownText,
    check_rows,
    first_place,
    is_missing,
    is_plain,
    note_label,
    note_text,
    unlabelled,
    unread_problem,
)
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.tiny.text import tiny_tokenizer


def dropping_tokenizer() -> PreTrainedTokenizerFast:
    """Knows a, b and c; other characters leave no token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Knows every byte, and has one token for unknown, begin and end, as GPT-2's has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*alphabet, "<end>"])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one = {"unk_token": "<end>", "bos_token": "<end>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **one)


def unknown_in(tokenizer, text: str) -> int:
    return UnknownText(tokenizer).count(text, tokenizer.encode(text, add_special_tokens=False))


def test_unknown_tokens_are_counted() -> None:
    assert unknown_in(tiny_tokenizer(), "1 + é = ü") == 2
    assert unknown_in(tiny_tokenizer(), "1 + 1 = 2") == 0


def test_characters_that_leave_no_token_are_counted() -> None:
    assert dropping_tokenizer().unk_token_id is None
    assert unknown_in(dropping_tokenizer(), "abc é\nü é") == 3


def test_a_tokenizer_of_bytes_knows_everything_also_its_own_end_token() -> None:
    assert unknown_in(byte_tokenizer(), "é \u4e2d<end>") == 0


@pytest.mark.parametrize("gold", [None, "", "  \n", math.nan])
def test_a_label_is_missing_when_it_is_null_blank_or_not_a_number(gold) -> None:
    assert is_missing(gold)


@pytest.mark.parametrize("gold", [0, 0.0, False, "0", [], math.inf])
def test_any_other_label_is_there(gold) -> None:
    assert not is_missing(gold)


def test_the_first_place_is_kept_and_counts_of_rows_stay_apart() -> None:
    counts: Counter[str] = Counter(rows=3)
    for row, (unknown, gold) in enumerate([(0, "1"), (2, None), (1, None)]):
        note_text(counts, unknown, 10, 4, row)
        note_label(counts, "math", gold, 4, row)
    assert counts[UNKNOWN] == 3 and first_place(counts, UNKNOWN) == (4, 1)
    assert unlabelled(counts) == {"math": 2} and first_place(counts, "unlabelled/math") == (4, 1)
    assert [name for name in counts if is_plain(name)] == ["rows"]


def test_prompts_and_conversations_count_their_doubts(tmp_path) -> None:
    rows = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "é+1=", "response": "ü"},
        {"prompt": "x", "label": " "},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = PromptDataset(DataConfig(sources=[str(file)]), tiny_tokenizer(), seed=0)
    assert prompts.counts[UNKNOWN] == 1 and prompts.first_with(UNKNOWN) == f"{file}, line 2"
    assert sum(unlabelled(prompts.counts).values()) == 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    examples = SFTDataset(
        SFTDataConfig(sources=[str(file)]), tiny_tokenizer(), max_tokens=64, seed=0
    )
    assert examples.counts[UNKNOWN] == 2 and examples.first_with(UNKNOWN) == f"{file}, line 2"


@pytest.mark.parametrize("key", ["data.sources", "eval.data"])
def test_rows_that_spell_a_special_token_are_warned_of_with_the_setting(tmp_path, caplog, key):
    file = tmp_path / "rows.jsonl"
    rows = [("1+1", "<think>2</think>"), ("2+2", "4"), ("3+3<|im_end|>", "6")]
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in rows]
    file.write_text("\n".join(lines))
    tokenizer = tiny_tokenizer(special=["<think>", "</think>"])
    warned = {}
    for kind in ("text", "responses", "control"):
        settings = SFTDataConfig(sources=[{"path": str(file)}], special_tokens=kind)
        caplog.clear()
        check_rows(SFTDataset(settings, tokenizer, max_tokens=200, seed=0), key)
        warned[kind] = [record.getMessage() for record in caplog.records]
    (message,) = warned["text"]
    section = key.removesuffix(".sources")
    assert message.startswith(f"{key}: ") and f"set {section}.special_tokens=responses" in message
    assert ": 2. It is encoded as plain text" in message and not warned["control"]
    (asked,) = warned["responses"]
    assert ": 1. It is encoded as plain text" in asked


def test_a_column_inside_records_is_not_advised_to_be_named_where_it_cannot_be():
    inside = unread_problem("a.jsonl", {"responses[].rationale": 2}, rewards=False)
    assert inside == "a.jsonl: the column responses[].rationale (2 rows): read by nothing"
    both = unread_problem("a.jsonl", {"note": 1, "responses[].rationale": 2}, rewards=False)
    assert both.endswith("; if it matters, name it in data.columns or data.template")
