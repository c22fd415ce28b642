import bz2
import gzip
import json
import lzma
import pickle
from pathlib import Path

import pytest

from lightrft.config.data import DataConfig, SourceConfig
from lightrft.datasets.open_source import media_root, open_source, source_name
from lightrft.utils.errors import ConfigError, DataError

ROWS = [
    {"question": 'What is "1+1", in one line?', "label": "2"},
    {"question": "Zwei\nZeilen, größer als eine?", "label": "007"},
    {"question": "3*3=?", "label": "9"},
]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, kind: str) -> Path:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS), encoding="utf-8"
        )
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind == "csv":
        table.to_csv(str(path))
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "saved":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(path))
    return path


def rows_of(**options):
    malformed = options.pop("bad_rows", "error")
    rows = open_source(SourceConfig(**options), malformed)
    return [dict(rows[i]) for i in range(len(rows))]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved", "saved_splits"])
def test_every_container_gives_the_same_rows(tmp_path, kind):
    assert rows_of(path=str(write(tmp_path, kind))) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_an_opened_source_pickles(tmp_path, kind):
    rows = pickle.loads(pickle.dumps(open_source(SourceConfig(path=str(write(tmp_path, kind))))))
    assert [dict(rows[i]) for i in range(len(rows))] == ROWS


def test_json_lines_under_the_name_json_are_read(tmp_path):
    write(tmp_path, "jsonl").rename(tmp_path / "rows.json")
    assert rows_of(path=str(tmp_path / "rows.json")) == ROWS


def test_a_pattern_takes_its_files_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    assert rows_of(path=f"{tmp_path}/*.jsonl") == [{"prompt": "a"}, {"prompt": "b"}]


def test_media_of_a_file_are_in_its_folder_even_if_the_name_of_the_folder_has_brackets(tmp_path):
    folder = tmp_path / "rows [small]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    assert media_root("", str(folder / "rows.jsonl")) == folder
    assert media_root("", f"{tmp_path}/rows*/*.jsonl") == tmp_path


def test_a_folder_gives_only_the_files_of_the_split(tmp_path):
    for name in ("train-00000", "train-00001", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    assert [r["prompt"] for r in rows_of(path=str(tmp_path))] == ["train-00000", "train-00001"]
    assert [r["prompt"] for r in rows_of(path=str(tmp_path), split="test")] == ["test"]
    with pytest.raises(DataError, match=r"no files of split 'dev', but of: test, train"):
        rows_of(path=str(tmp_path), split="dev")


def test_a_folder_without_splits_gives_all_its_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    assert len(rows_of(path=str(tmp_path))) == 2


def test_a_saved_data_set_without_the_split_says_which_it_has(tmp_path):
    with pytest.raises(DataError, match=r"no split 'dev'; it has: train, test"):
        rows_of(path=str(write(tmp_path, "saved_splits")), split="dev")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n', 3, "not JSON"),
        ('{"prompt": "a"}\n["b"]\n{"prompt": "b"}\n', 2, "must be a JSON object, not list"),
        (
            '{"prompt": "a"}\n{"prompt": "lost", "prompt": "c"}\n{"prompt": "b"}\n',
            2,
            "the key 'prompt' is given twice",
        ),
        (
            '{"prompt": "a"}\n{"prompt": "c", "x": [{"y": 1, "y": 1}]}\n{"prompt": "b"}\n',
            2,
            "the key 'y' is given twice",
        ),
    ],
)
def test_a_malformed_json_line_names_file_and_line_and_is_counted_when_skipped(
    tmp_path, text, line, what
):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(
        DataError, match=rf"rows\.jsonl, line {line}: .*{what}.*data\.bad_rows: skip"
    ):
        open_source(SourceConfig(path=str(path)))
    rows = open_source(SourceConfig(path=str(path)), "skip")
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["a", "b"]
    assert rows.malformed == 1


def test_a_list_of_rows_with_a_repeated_key_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a"}, {"label": 1, "label": 2}]')
    with pytest.raises(DataError, match=r"rows\.json: the key 'label' is given twice"):
        open_source(SourceConfig(path=str(path)))


def test_a_line_that_is_not_utf8_is_malformed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2: not UTF-8"):
        open_source(SourceConfig(path=str(path)))


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt\na\n")
    assert (
        rows_of(path=str(tmp_path / "a.jsonl"))
        == rows_of(path=str(tmp_path / "a.csv"))
        == [{"prompt": "a"}]
    )


def test_a_csv_row_of_the_wrong_width_names_its_line_and_is_counted_when_skipped(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,label\n"two\nlines",1\nwide,2,3\nlast,4\n')
    with pytest.raises(DataError, match=r"rows\.csv, line 4: 3 values under a header of 2"):
        open_source(SourceConfig(path=str(path)))
    rows = open_source(SourceConfig(path=str(path)), "skip")
    assert [dict(rows[i]) for i in range(2)] == [
        {"prompt": "two\nlines", "label": "1"},
        {"prompt": "last", "label": "4"},
    ]
    assert (len(rows), rows.malformed, rows.where(1)) == (2, 1, f"{path}, line 5")


def test_a_csv_quote_that_never_closes_loses_one_line_only(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,label\n"open,1\ngood,2\n')
    rows = open_source(SourceConfig(path=str(path)), "skip")
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["good"]
    assert rows.malformed == 1


def test_a_broken_json_array_names_its_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n {"prompt": "a"},\n {"prompt" "b"}\n]')
    with pytest.raises(DataError, match=r"rows\.json, line 3: not JSON"):
        open_source(SourceConfig(path=str(path)))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_an_empty_file_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=rf"{name} has no rows"):
        open_source(SourceConfig(path=str(tmp_path / name)))


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path, "jsonl")
    with pytest.raises(
        DataError, match=r"no file or folder .*row\.jsonl; did you mean .*rows\.jsonl"
    ):
        open_source(SourceConfig(path=str(tmp_path / "row.jsonl")))


def test_a_parquet_file_that_is_none_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"cannot read .*rows\.parquet"):
        open_source(SourceConfig(path=str(tmp_path / "rows.parquet")))


def test_a_hub_name_that_cannot_be_loaded_says_what_was_tried():
    with pytest.raises(
        DataError, match=r"nobody/nothing is no file or folder here, and as a data set of the hub"
    ):
        open_source(SourceConfig(path="nobody/nothing"))


def test_limit_takes_the_first_rows(tmp_path):
    for kind in ("jsonl", "json", "csv", "parquet"):
        assert rows_of(path=str(write(tmp_path, kind)), limit=2) == ROWS[:2]


def test_a_function_of_a_file_gives_rows_and_takes_options_and_the_split(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows(n, split):\n    for i in range(n):\n        yield {'prompt': f'{split} {i}'}\n"
    )
    path = f"{tmp_path}/mine.py:rows"
    assert rows_of(path=path, options={"n": 2}, split="test") == [
        {"prompt": "test 0"},
        {"prompt": "test 1"},
    ]
    assert source_name(SourceConfig(path=path)) == "mine"
    with pytest.raises(ConfigError, match=r"data\.sources\.options: .*takes \(n, split\)"):
        rows_of(path=path, options={"m": 2})


def test_a_function_that_raises_is_named(tmp_path):
    (tmp_path / "bad.py").write_text(
        "def rows():\n    yield {'prompt': 'a'}\n    raise RuntimeError('no more')\n"
    )
    with pytest.raises(DataError, match=r"bad\.py:rows raised RuntimeError: no more"):
        rows_of(path=f"{tmp_path}/bad.py:rows")


def test_an_endless_function_stops_at_the_limit(tmp_path):
    (tmp_path / "endless.py").write_text(
        "def rows():\n    while True:\n        yield {'prompt': 'a'}\n"
    )
    assert len(rows_of(path=f"{tmp_path}/endless.py:rows", limit=5)) == 5


def test_options_that_nothing_reads_are_errors(tmp_path):
    path = str(write(tmp_path, "jsonl"))
    with pytest.raises(
        ConfigError, match=r"data\.sources\.options \(n\) are read by a function source"
    ):
        rows_of(path=path, options={"n": 1})
    with pytest.raises(
        ConfigError, match=r"data\.sources\.reader_options \(n\) are read by a reader"
    ):
        rows_of(path=path, reader_options={"n": 1})


def test_bare_names_stand_for_sources():
    assert DataConfig.model_validate({"sources": "a.jsonl"}).sources == (
        SourceConfig(path="a.jsonl"),
    )
    assert DataConfig.model_validate({"sources": ["a", {"path": "b"}]}).sources == (
        SourceConfig(path="a"),
        SourceConfig(path="b"),
    )


def test_weights_without_sampling_are_refused():
    with pytest.raises(ValueError, match="set blend: sample"):
        DataConfig.model_validate({"sources": [{"path": "a", "weight": 2}, {"path": "b"}]})


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("suffix", PACKED)
def test_a_compressed_text_file_gives_the_same_rows(tmp_path, kind, suffix):
    path = write(tmp_path, kind)
    packed = tmp_path / "packed" / f"{path.name}{suffix}"
    packed.parent.mkdir()
    packed.write_bytes(PACKED[suffix](path.read_bytes()))
    assert (
        rows_of(path=str(packed))
        == rows_of(path=str(packed.parent))
        == rows_of(path=f"{packed.parent}/*{suffix}")
        == ROWS
    )
    assert source_name(SourceConfig(path=str(packed))) == "rows"
    rows = pickle.loads(pickle.dumps(open_source(SourceConfig(path=str(packed)))))
    assert [dict(rows[i]) for i in range(len(rows))] == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encoding_of_a_text_file_is_recognised(tmp_path, kind, encoding):
    path = write(tmp_path, kind)
    text = path.read_text(encoding="utf-8")
    path.write_bytes(text.encode(encoding))
    assert rows_of(path=str(path)) == ROWS
    packed = tmp_path / f"{path.name}.gz"
    packed.write_bytes(gzip.compress(text.encode(encoding)))
    assert rows_of(path=str(packed)) == ROWS


def test_a_bad_row_of_a_compressed_or_utf_16_file_is_named_with_its_line(tmp_path):
    text = '{"prompt": "ä"}\n\n{"prompt": \n'
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode("utf-16")))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz, line 3: not JSON"):
        rows_of(path=str(tmp_path / "rows.jsonl.gz"))
    assert rows_of(path=str(tmp_path / "rows.jsonl.gz"), bad_rows="skip") == [{"prompt": "ä"}]


def test_a_compressed_file_that_is_cut_short_or_is_none_is_named(tmp_path):
    packed = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    for content in (packed[:-20], b"plain text"):
        (tmp_path / "rows.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be decompressed"):
            rows_of(path=str(tmp_path / "rows.jsonl.gz"))


def test_the_first_bad_row_of_a_file_is_remembered_with_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{broken\n{"prompt": "b"}\n[]\n')
    rows = open_source(SourceConfig(path=str(tmp_path / "rows.jsonl")), "skip")
    assert rows.malformed == 2
    assert rows.first_problem.startswith(f"{tmp_path}/rows.jsonl, line 2: not JSON")


@pytest.mark.parametrize("path", ["data/trian", "data/rows", "rows.jsnl", "./rows", "data/"])
def test_a_missing_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, path):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lightrft.datasets.open_source._load", lambda *_, **__: pytest.fail("asked the hub")
    )
    with pytest.raises(DataError, match=r"there is no file or folder|neither a saved data set"):
        rows_of(path=path)
