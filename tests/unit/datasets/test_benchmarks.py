import json
import re

import pytest

from lightrft.config.data import Columns, SourceConfig
from lightrft.datasets.open_source import open_source
from lightrft.datasets.rows.row_reader import read_record
from lightrft.utils.errors import ConfigError, DataError


def opened(tmp_path, row, reader, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    rows = open_source(SourceConfig(path=str(path), reader=reader, reader_options=options))
    return read_record(rows[0], Columns(), rows.where(0))


@pytest.mark.parametrize(
    ("split", "count", "first", "last"), [("train", 7473, "72", "50"), ("test", 1319, "18", "14")]
)
def test_gsm8k_is_whole_and_its_labels_are_numbers(split, count, first, last):
    rows = open_source(SourceConfig(path="data/gsm8k", split=split, reader="gsm8k"))
    made = [rows[i] for i in range(len(rows))]
    assert len(made) == count
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", r["label"]) for r in made)
    assert (made[0]["label"], made[-1]["label"]) == (first, last)
    assert all(
        "<<" not in r["response"] and r["response"].replace(",", "").endswith(f"#### {r['label']}")
        for r in made
    )


def test_gsm8k_labels_lose_their_commas_and_marks_can_stay(tmp_path):
    row = {"question": "q", "answer": "It is 500*2=$<<500*2=1000>>1,000.\n#### 1,000"}
    found = opened(tmp_path, row, "gsm8k")
    assert (found.prompt, found.label, found.response) == (
        "q",
        "1000",
        "It is 500*2=$1,000.\n#### 1,000",
    )
    assert found.data_source == "gsm8k"
    assert opened(tmp_path, row, "gsm8k", keep_marks=True).response == row["answer"]


def test_a_row_that_a_reader_cannot_read_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"rows\.json, row 1: reader 'gsm8k' cannot read the row: .*#### number"
    ):
        opened(tmp_path, {"question": "q", "answer": "no number"}, "gsm8k")
    with pytest.raises(
        DataError,
        match=r"rows\.json, row 1: reader 'gsm8k' needs column 'answer'; the row has: question",
    ):
        opened(tmp_path, {"question": "q"}, "gsm8k")


def test_an_unknown_reader_or_option_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown reader 'gsm8'; did you mean 'gsm8k'"):
        opened(tmp_path, {"question": "q"}, "gsm8")
    with pytest.raises(ConfigError, match=r"reader_options: reader 'gsm8k' takes"):
        opened(tmp_path, {"question": "q"}, "gsm8k", marks=True)


@pytest.mark.parametrize("reader", ["verl", None])
def test_the_verl_layout_is_read_from_parquet_with_and_without_its_reader(
    tmp_path, monkeypatch, reader
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 4, "answer": "so #### 72", "label": "gsm8k_rule"},
    }
    datasets.Dataset.from_list([row]).to_parquet(str(tmp_path / "train.parquet"))
    rows = open_source(SourceConfig(path=str(tmp_path), reader=reader))
    found = read_record(rows[0], Columns(), "row")
    assert (found.prompt, found.label, found.data_source) == (row["prompt"], "72", "openai/gsm8k")
    assert found.columns["extra_info"] == row["extra_info"]
    assert (found.id, found.reference) == (
        ("openai/gsm8k/train/4", "so #### 72") if reader else ("", "72")
    )


def test_messages_in_a_string_are_read(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    found = opened(
        tmp_path, {"message": json.dumps(messages), "answer": "$3$", "datasource": "geo"}, "lmm_r1"
    )
    assert (found.prompt, found.label, found.data_source) == (
        [{"role": "user", "content": "q"}],
        "$3$",
        "geo",
    )


@pytest.mark.parametrize("name", ["math500", "aime2024", "aime2025"])
def test_mathematics_sets_are_read(tmp_path, name):
    found = opened(
        tmp_path, {"prompt": [{"from": "user", "value": "q"}], "final_answer": "70"}, name
    )
    assert (found.prompt, found.label, found.data_source) == (
        [{"role": "user", "content": "q"}],
        "70",
        name,
    )


def test_choices_are_shown_once_and_the_label_is_a_letter(tmp_path):
    row = {
        "prompt": [{"from": "user", "value": "q?"}],
        "final_answer": "blue",
        "choices": ["red", "blue"],
    }
    found = opened(tmp_path, row, "gpqa_diamond")
    assert found.prompt == [{"role": "user", "content": "q?\n\nA. red\nB. blue"}]
    assert found.label == "B"
    shown = {
        **row,
        "prompt": [{"from": "user", "value": "q? A) red B) blue"}],
        "final_answer": "B",
        "choices": {"A": "red", "B": "blue"},
    }
    found = opened(tmp_path, shown, "gpqa")
    assert (found.prompt, found.label) == ([{"role": "user", "content": "q? A) red B) blue"}], "B")


def test_an_input_follows_its_instruction(tmp_path):
    found = opened(tmp_path, {"instruction": "Add.", "input": "1 1", "output": "2"}, "alpaca")
    assert (found.prompt, found.response) == ("Add.\n\n1 1", "2")
    assert (
        opened(tmp_path, {"instruction": "Go.", "input": "", "output": "2"}, "alpaca").prompt
        == "Go."
    )
