"""Functions, rows and models of the running program become files that settings name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, Value
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture
from transformers import AutoModelForCausalLM

from lightrft.api.calls import read
from lightrft.api.inputs import is_rows, plain
from lightrft.config.base import load_settings
from lightrft.config.model import MergeConfig
from lightrft.config.strategy import OptimizerConfig
from lightrft.config.verbs import EvaluateConfig, RLConfig, SFTConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.utils.errors import ConfigError

ROWS = [{"prompt": "1+1=", "label": "2"}, {"prompt": "2+2=", "label": "4", "tags": ["a", None]}]


def rl(tmp_path: Path, *configs, **settings) -> RLConfig:
    """The settings of ``lightrft.rl``, whose files are below ``tmp_path``."""
    settings.setdefault("model", "m")
    return read(RLConfig, configs, {"dir": str(tmp_path), **settings})


def path_of(tmp_path: Path, rows) -> str:
    """The file that ``rows`` become."""
    return plain({"sources": rows}, tmp_path)["sources"]["path"]


def written(tmp_path: Path, rows) -> list[dict]:
    """The rows of the file that ``rows`` become."""
    text = Path(path_of(tmp_path, rows)).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        Dataset.from_list([{"tags": None, **row} for row in ROWS]),
        pandas.DataFrame(ROWS),
        pyarrow.Table.from_pylist([{"tags": None, **row} for row in ROWS]),
        polars.DataFrame(ROWS),
        polars.LazyFrame(ROWS).filter(polars.lit(True)),
    ],
    ids=["list", "tuple", "iterator", "dataset", "frame", "arrow", "polars", "lazy"],
)
def test_rows_of_every_kind_are_written_with_all_their_columns(tmp_path, rows):
    found = written(tmp_path, rows)
    assert [{k: v for k, v in row.items() if v is not None} for row in found] == ROWS


def test_numbers_of_numpy_and_torch_in_rows_are_written_as_numbers(tmp_path):
    row = {"a": np.float32(0.5), "b": np.arange(3), "c": torch.tensor([[1, 2]]), "d": float("nan")}
    assert written(tmp_path, [row]) == [{"a": 0.5, "b": [0, 1, 2], "c": [[1, 2]], "d": None}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(), JSON, min_size=1, max_size=4), min_size=1, max_size=4)
)
def test_rows_of_plain_values_are_written_unchanged(tmp_path_factory, rows):
    if is_rows(rows):
        assert written(tmp_path_factory.mktemp("rows"), rows) == rows


def test_equal_rows_have_one_file_and_others_another(tmp_path):
    paths = [path_of(tmp_path, rows) for rows in (ROWS, list(ROWS), ROWS[:1])]
    assert paths[0] == paths[1] != paths[2]


@pytest.mark.parametrize("as_dataset", [False, True])
def test_images_in_rows_are_written_as_they_are(tmp_path, as_dataset):
    picture = Picture.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    rows: object = [{"prompt": "what?", "image": picture}]
    if as_dataset:
        features = Features({"prompt": Value("string"), "image": Image()})
        rows = Dataset.from_list(rows, features=features)
    path = path_of(tmp_path, rows)
    assert path.endswith(".parquet")
    found = Dataset.from_parquet(path, cache_dir=str(tmp_path / "cache"))[0]["image"]
    assert np.array_equal(np.asarray(found), np.asarray(picture))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (DatasetDict({"train": Dataset.from_list(ROWS)}), "splits train; choose one"),
        (iter([]), "there are no rows"),
        (iter(["text"]), "row 0 is of type str"),
    ],
)
def test_what_is_no_rows_is_refused_with_the_name_of_the_setting(tmp_path, rows, words):
    with pytest.raises(ConfigError, match=f"^data.*: .*{words}"):
        rl(tmp_path, data=rows)


def test_an_iterator_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrft.api.inputs.MOST_ROWS", 10)
    assert len(written(tmp_path, itertools.islice(itertools.cycle(ROWS), 10))) == 10
    with pytest.raises(ConfigError, match="gave 10 rows, and has more; end it, as by itertools"):
        rl(tmp_path, data=itertools.cycle(ROWS))


def test_models_of_a_merge_are_models_of_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair = tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    config = read(MergeConfig, (), {"models": [pair, {"model": pair}], "output": str(tmp_path)})
    assert len({one.model for one in config.models}) == 1


def test_a_table_of_columns_is_rows_unless_it_is_a_section(tmp_path):
    config = rl(tmp_path, data={"prompt": ["1+1=", "2+2="], "label": ["2", "4"]})
    [source] = config.data.sources
    lines = Path(source.path).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "1+1=", "label": "2"},
        {"prompt": "2+2=", "label": "4"},
    ]
    assert rl(tmp_path, data={"sources": ["a.jsonl", "b.jsonl"]}).data.sources[1].path == "b.jsonl"
    with pytest.raises(
        ConfigError, match=r"data: the columns have different lengths: \{'prompt': 2"
    ):
        rl(tmp_path, data={"prompt": ["a", "b"], "label": ["c"]})


def test_the_rows_of_an_evaluation_are_its_data_under_either_name(tmp_path):
    for name in ("data", "eval", "eval.data.sources"):
        settings = {"model": "m", "dir": str(tmp_path), "rewards": ["math"], name: ROWS}
        [source] = read(EvaluateConfig, (), settings).eval.data.sources
        assert Path(source.path).parent == tmp_path / "inputs"


def test_a_list_of_sources_is_none_of_rows(tmp_path):
    config = rl(
        tmp_path, data=["a.jsonl", {"path": ROWS, "weight": 2.0}], **{"data.blend": "sample"}
    )
    first, second = config.data.sources
    assert first.path == "a.jsonl" and second.weight == 2.0
    assert json.loads(Path(second.path).read_text().splitlines()[0]) == ROWS[0]
    assert rl(tmp_path, data=[{"path": "b.jsonl", "limit": 3}]).data.sources[0].limit == 3


def test_media_of_rows_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given_rows in ({"data": ROWS}, {"data": {"sources": ROWS}}, {"data.sources": ROWS}):
        assert rl(tmp_path, **given_rows).data.media.root == str(tmp_path)
    assert rl(tmp_path, data=ROWS, **{"data.media.root": "x"}).data.media.root == "x"
    assert rl(tmp_path, data="rows.jsonl").data.media.root == ""


def test_a_model_with_its_tokenizer_becomes_a_folder_that_loads(tmp_path):
    model, tokenizer = tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    config = rl(tmp_path, model=(model, tokenizer), data=ROWS)
    loaded = AutoModelForCausalLM.from_pretrained(config.model.path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert rl(tmp_path, model=(model, tokenizer)).model.path == config.model.path
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    changed = rl(
        tmp_path, model={"path": model, "tokenizer": tokenizer}, reference=(model, tokenizer)
    )
    assert changed.reference not in (None, config.model.path)
    assert Path(changed.model.tokenizer or "", "tokenizer_config.json").is_file()
    with pytest.raises(ConfigError, match=r"model: a LlamaForCausalLM needs its tokenizer"):
        rl(tmp_path, model=model)


def test_keywords_files_and_config_objects_are_merged_left_to_right(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {steps: 3}\noptimizer: {lr: 1.0e-3, weight_decay: 0.5}\n")
    own = RLConfig.model_validate({"train": {"steps": 4}, "run": {"seed": 7}})
    config = rl(tmp_path, str(file), own, optimizer=OptimizerConfig(lr=2e-3), rewards=["math"])
    assert (config.train.steps, config.run.seed) == (4, 7)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-3, 0.5)
    assert [term.function for term in config.reward.terms] == ["math"]
    assert rl(tmp_path, file, steps=9).train.steps == 9


def test_every_keyword_is_as_its_yaml(tmp_path):
    yaml = tmp_path / "c.yaml"
    yaml.write_text("algorithm: dapo\nsampling: {temperature: 0.5}\nreward: {terms: [math]}\n")
    python = rl(tmp_path, algorithm="dapo", reward="math", **{"sampling.temperature": 0.5})
    of_file = load_settings(RLConfig, [yaml], ["model=m", f"run.dir={tmp_path}"]).settings
    assert python == of_file


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"leraning_rate": 1}, "unknown setting leraning_rate"),
        ({"optimizer": {"learning": 1}}, "optimizer.learning"),
        ({"lr": "fast"}, r"optimizer.lr = 'fast' \(from Python\)"),
        ({"peft_config": object()}, "peft_config is model.lora here"),
        ({"compute_metrics": len}, "compute_metrics"),
        ({"reward": {"terms": [{"function": "math", "options": {"x": object()}}]}}, "type object"),
    ],
)
def test_a_wrong_setting_gets_a_message_of_ours(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        rl(tmp_path, **settings)


def test_a_setting_that_a_verb_has_itself_is_not_taken_for_a_short_name(tmp_path):
    config = read(
        SFTConfig, (), {"dir": str(tmp_path), "model": "m", "data": ROWS, "batch_size": 2}
    )
    assert config.batch_size == 2 and config.run.dir == str(tmp_path)
    with pytest.raises(ConfigError, match=r"'gpt2' is no YAML file; .* model='gpt2'"):
        read(SFTConfig, ("gpt2",), {})
    with pytest.raises(ConfigError, match="neither a YAML file nor settings"):
        read(SFTConfig, (3,), {})  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("kind", [Path, dict, np.float32])
def test_a_class_in_place_of_a_function_is_named_with_the_way_out(kind, tmp_path):
    said = rf"reward\.terms\.0: {kind.__name__} is a class; give an object of it"
    with pytest.raises(ConfigError, match=said):
        plain([kind], tmp_path, "reward.terms")
