"""Token ids that are kept on disk: the next start has the same prompts, in the same order, without tokenizing."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.data import SFTDataConfig
from lightrft.datasets import column_cache
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.column_cache import ColumnCache, Entry, token_cache_of
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import JsonLinesRows
from lightrft.datasets.sft_dataset import SFTDataset
from tests.unit.datasets.tokenizers import CHATML, chat_tokenizer

Folder = Path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows with blank lines, bad rows, equal ids and prompts that are too long."""
    file = tmp_path / "rows.jsonl"
    lines = [
        json.dumps(
            {
                "prompt": f"{i} + {i} = " + "9" * (i % 7) ** 3,
                "answer": str(2 * i),
                "id": f"{i % 20}",
            }
        )
        for i in range(30)
    ]
    file.write_text("\n".join([*lines[:5], "", "{broken", *lines[5:], '{"prompt": ""}']) + "\n")
    return file


def config_of(rows: Path, **settings: Any) -> SFTDataConfig:
    given = {
        "bad_rows": "skip",
        "overlong_prompts": "truncate",
        "max_prompt_tokens": 60,
        "token_cache_min_mb": 0,
        **settings,
    }
    return SFTDataConfig.model_validate(
        {"sources": [str(rows)], "token_cache": str(rows.parent / "cache"), **given}
    )


def prompts_of(config: SFTDataConfig, seed: int = 0, tokenizer: Any = None) -> tuple[Any, ...]:
    data = PromptDataset(config, tokenizer or chat_tokenizer(), seed=seed)
    return (
        [data[i] for i in range(len(data))],
        list(data.ids),
        data.counts,
        data.first_problem,
        data.longest,
        data.data_sources,
    )


def examples_of(config: SFTDataConfig, seed: int = 0) -> tuple[Any, ...]:
    data = SFTDataset(config, chat_tokenizer(), max_tokens=70, seed=seed)
    return [data[i] for i in range(len(data))], data.counts, data.first_problem, data.longest


def entries(rows: Path) -> list[Path]:
    return sorted((rows.parent / "cache").glob("*.arrow"))


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes it an error to tokenize, or to read a file through."""

    def refuse(*_: Any) -> None:
        raise AssertionError("read or tokenized again")

    def apply() -> None:
        monkeypatch.setattr(ChatEncoder, "encode", refuse)
        monkeypatch.setattr(JsonLinesRows, "_scan", refuse)

    return apply


@pytest.mark.parametrize("made", [prompts_of, examples_of])
def test_a_second_start_has_the_same_without_reading_or_tokenizing_anything(rows, no_reading, made):
    plain = made(config_of(rows, token_cache=None))
    assert not entries(rows)
    first = made(config_of(rows))
    assert len(entries(rows)) == 1
    no_reading()
    assert made(config_of(rows)) == first == plain


def test_rows_that_were_left_out_are_told_again_with_file_and_line(rows, no_reading):
    prompts_of(config_of(rows))
    no_reading()
    _, _, counts, first_problem, *_ = prompts_of(config_of(rows))
    assert counts["malformed"] == 2 and counts["truncated"] > 0
    assert first_problem.startswith(f"{rows}, line 7: not JSON")


def test_one_entry_serves_every_seed_and_order_of_a_blend(rows, no_reading):
    other = rows.with_name("other.jsonl")
    other.write_text("".join(f'{{"prompt": "{i}?"}}\n' for i in range(9)))

    def blend(seed: int, cache: bool) -> Any:
        where = {} if cache else {"token_cache": None}
        sources = [{"path": str(rows), "weight": 1 + seed}, str(other)]
        return prompts_of(config_of(rows, sources=sources, blend="sample_all", **where), seed)

    plain = [blend(seed, False) for seed in (1, 2)]
    assert plain[0] != plain[1]
    assert blend(1, True) == plain[0]
    no_reading()
    assert blend(2, True) == plain[1]
    assert len(entries(rows)) == 1


def test_each_change_of_what_tokens_are_made_from_makes_an_entry_of_its_own(rows, monkeypatch):
    def count() -> int:
        return len(entries(rows))

    prompts_of(config_of(rows))
    prompts_of(config_of(rows, max_prompt_tokens=50))
    assert count() == 2
    prompts_of(
        config_of(rows), tokenizer=chat_tokenizer(CHATML.replace("<|im_end|>", "<|im_end|>!"))
    )
    assert count() == 3
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["99"])
    assert prompts_of(config_of(rows), tokenizer=tokenizer)[0] != prompts_of(config_of(rows))[0]
    assert count() == 4
    examples_of(config_of(rows))
    assert count() == 5
    monkeypatch.setattr(column_cache, "_code_digest", lambda: "another version")
    prompts_of(config_of(rows))
    assert count() == 6


def test_a_file_of_equal_size_and_time_with_other_content_is_read_again(rows):
    before, stat = prompts_of(config_of(rows)), rows.stat()
    rows.write_text(rows.read_text().replace("1 + 1", "1 - 1"))
    os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = prompts_of(config_of(rows))
    assert after == prompts_of(config_of(rows, token_cache=None)) != before


def test_tokens_of_a_file_that_changes_while_it_is_read_are_not_kept(rows, monkeypatch):
    scan = JsonLinesRows._scan

    def changing(self: JsonLinesRows, *rest: Any) -> Any:
        found = scan(self, *rest)
        self.path.write_text(self.path.read_text() + "\n")
        return found

    monkeypatch.setattr(JsonLinesRows, "_scan", changing)
    prompts_of(config_of(rows))
    assert not entries(rows)


@pytest.mark.parametrize("damage", ["one byte", "cut", "empty", "no Arrow"])
def test_a_damaged_entry_is_built_again(rows, caplog, damage):
    first = prompts_of(config_of(rows))
    (entry,) = entries(rows)
    data = bytearray(whole := entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(
        {"one byte": data, "cut": whole[:-100], "empty": b"", "no Arrow": b"x" * 500}[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert prompts_of(config_of(rows)) == first
    assert "is damaged and is built again" in caplog.text
    assert entry.read_bytes() == whole
    caplog.clear()
    assert prompts_of(config_of(rows)) == first
    assert "damaged" not in caplog.text


def forked(work: Callable[[], None]) -> int:
    """The id of a process that does ``work`` and leaves."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(1)
    return process


def test_a_kill_while_an_entry_is_written_leaves_none_and_the_next_start_clears_up(
    rows, monkeypatch
):
    def killed() -> None:
        monkeypatch.setattr(
            column_cache.os, "fsync", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        prompts_of(config_of(rows))

    _, status = os.waitpid(forked(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not entries(rows) and list((rows.parent / "cache").glob(".*.tmp"))
    first = prompts_of(config_of(rows))
    assert len(entries(rows)) == 1 and not list((rows.parent / "cache").glob(".*.tmp"))
    assert prompts_of(config_of(rows)) == first


def test_of_several_processes_that_start_together_one_tokenizes(rows, monkeypatch):
    encoded, results = rows.with_name("encoded"), rows.with_name("results")
    results.mkdir()
    encode = ChatEncoder.encode_prompts

    def noted(self: ChatEncoder, texts: Any) -> Any:
        with encoded.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return encode(self, texts)

    monkeypatch.setattr(ChatEncoder, "encode_prompts", noted)

    def work() -> None:
        (results / str(os.getpid())).write_bytes(pickle.dumps(prompts_of(config_of(rows))))

    processes = [forked(work) for _ in range(4)]
    for process in processes:
        os.waitpid(process, 0)
    found = [pickle.loads((results / str(process)).read_bytes()) for process in processes]
    assert all(f == found[0] for f in found)
    assert len(set(encoded.read_text().split())) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_prompt(rows, caplog):
    rows.with_name("cache").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        assert prompts_of(config_of(rows)) == prompts_of(config_of(rows, token_cache=None))
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"token_cache": None}, {"token_cache_min_mb": 1}],
    ids=["switched off", "too small"],
)
def test_no_tokens_are_kept(rows, settings):
    prompts_of(config_of(rows, **settings))
    assert not entries(rows)


def test_tokens_that_depend_on_the_day_or_on_code_of_the_user_are_not_kept(rows):
    prompts_of(config_of(rows), tokenizer=chat_tokenizer("{{ strftime_now('%Y') }}" + CHATML))
    module = rows.with_name("mine.py")
    module.write_text("def rows():\n    yield {'prompt': 'a'}\n\ndef read(row):\n    return row\n")
    prompts_of(config_of(rows, sources=[f"{module}:rows"]))
    prompts_of(config_of(rows, sources=[{"path": str(rows), "reader": f"{module}:read"}]))
    assert not entries(rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processor": object()}, "the model reads media"),
        ({"sources": ["{mine}:rows"]}, "a source is not a file of this machine"),
        (
            {"sources": [{"path": "{rows}", "reader": "{mine}:read"}]},
            "a reader is a user's function",
        ),
        (
            {"judgement": {"template": "mine.jinja"}},
            "the template of judgements is a user's file",
        ),
        ({"tokenizer": object()}, "the tokenizer is not a fast one"),
    ],
)
def test_the_log_says_why_tokens_are_not_kept(rows, caplog, given, said):
    sources = json.loads(
        json.dumps(given.pop("sources", [str(rows)]))
        .replace("{rows}", str(rows))
        .replace("{mine}", "mine.py")
    )
    tokenizer = given.pop("tokenizer", chat_tokenizer())
    with caplog.at_level(logging.INFO):
        assert (
            token_cache_of(
                config_of(rows, sources=sources, judgement=given.pop("judgement", None)),
                tokenizer,
                "prompts",
                {},
                **given,
            )
            is None
        )
    assert "the tokens of prompts are not kept" in caplog.text and said in caplog.text


def test_a_data_set_from_the_cache_pickles(rows):
    prompts_of(config_of(rows))
    data = PromptDataset(config_of(rows), chat_tokenizer(), seed=0)
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[i] for i in range(len(copy))] == [data[i] for i in range(len(data))]
    assert list(copy.ids) == list(data.ids)


def test_an_entry_without_rows_reads_back(tmp_path):
    import numpy as np

    cache = ColumnCache(tmp_path / "x.arrow", "data.token_cache")
    assert cache.read() is None
    cache.write(Entry({"a": np.zeros(0, dtype=np.int32)}, [], {"b": 1}))
    found = cache.read()
    assert found is not None
    assert len(found.columns["a"]) == 0 and list(found.names) == [] and found.facts == {"b": 1}
