"""``lightrft data`` prints rows as a run reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrft.cli.main import main
from lightrft.models.tiny.text import tiny_model
from tests.unit.datasets.tokenizers import chat_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=0).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def printed(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    model: Path,
    row: dict[str, object],
    *words: str,
) -> str:
    (folder / "t.jsonl").write_text(json.dumps(row) + "\n")
    given = [f"model.path={model}", f"data.sources={folder / 't.jsonl'}"]
    assert main(["data", *given, *words]) == 0
    return capsys.readouterr().out


def test_special_tokens_and_trained_tokens_are_visible_and_unused_columns_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    row = {"prompt": "1+1?\x1b[2J", "response": "2", "system": "Add.", "hint": "easy"}
    held_out = f"eval.data.sources={tmp_path / 't.jsonl'}"
    words = ("show.verb=sft", held_out, "reward.terms=[math]")
    shown = printed(capsys, tmp_path, model, row, *words)
    assert "<|im_start|>system\nAdd.<|im_end|>" in shown and "[[2<|im_end|>]]" in shown
    assert "== eval.data" in shown and shown.count("the column hint (1 row)") == 2
    assert "\x1b" not in shown
    colored = printed(capsys, tmp_path, model, row, *words, "show.color=always")
    assert "\x1b[32m2<|im_end|>\x1b[0m" in colored


def test_special_tokens_that_are_text_are_told_from_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    row = {"prompt": "1+1?", "response": "a<|im_start|>b"}
    shown = printed(capsys, tmp_path, model, row, "show.verb=sft")
    assert "special tokens that are text here ['<|im_start|>']" in shown
    control = printed(capsys, tmp_path, model, row, "show.verb=sft", "data.special_tokens=control")
    assert "[[a<|im_start|>b<|im_end|>]]" in control and "are text here" not in control


@pytest.mark.parametrize(
    ("verb", "row", "expected"),
    [
        ("rl", {"prompt": "1?", "label": "2"}, ["label '2'"]),
        ("dpo", {"prompt": "1?", "chosen": "2", "rejected": "3"}, ["chosen", "[[3<|im_end|>]]"]),
        ("kto", {"prompt": "1?", "completion": "2", "label": "true"}, ["desirable True", "[[2"]),
        ("rm", {"prompt": "1?", "chosen": "2", "rejected": "3"}, ["rejected", "rank 1"]),
        ("prm", {"prompt": "1?", "completions": ["2"], "labels": [True]}, ["[[\n]]", "[1.0]"]),
    ],
)
def test_the_rows_of_every_verb_are_shown(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    verb: str,
    row: dict[str, object],
    expected: list[str],
) -> None:
    shown = printed(capsys, tmp_path, model, row, f"show.verb={verb}")
    assert all(text in shown for text in expected), shown
