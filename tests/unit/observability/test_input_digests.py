"""A resumed run notices that a file under the same path has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.observability import input_digests as module
from lightrft.observability.input_digests import input_digests
from lightrft.observability.run_directory import RunDirectory
from lightrft.utils.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Any:
    for name in ("model", "reference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(5000))
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "2"}\n')
    (tmp_path / "reward.py").write_text("def right(rollout): return 1.0\n")
    tree = {
        "model": {"path": f"{tmp_path}/model", "chat_template": f"{tmp_path}/template.jinja"},
        "reference": f"{tmp_path}/reference",
        "data": {
            "sources": [f"{tmp_path}/rows*.jsonl", "owner/name"],
            "media": {"root": f"{tmp_path}"},
        },
        "eval": {"data": {"sources": [f"{tmp_path}/held.jsonl"]}},
        "reward": {"terms": [f"{tmp_path}/reward.py:right"]},
    }
    return build(RLConfig, tree)


def resume(config: Any, tmp_path: Path) -> None:
    folder = RunDirectory.open(
        tmp_path / "run", config, resume="auto", overwrite=False, ignore=("run", "eval")
    )
    with folder:
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("model/model.safetensors", "model.path"),
        ("model/config.json", "model.path"),
        ("reference/model.safetensors", "reference"),
        ("template.jinja", "model.chat_template"),
        ("rows.jsonl", "data.sources.0.path"),
    ],
)
def test_a_changed_input_is_refused_by_the_name_of_its_setting(config, tmp_path, file, key):
    resume(config, tmp_path)
    resume(config, tmp_path)
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=f"inputs have changed .*: {key}; restore"):
        resume(config, tmp_path)
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    resume(config, tmp_path)


def test_a_further_file_of_a_pattern_is_a_change(config, tmp_path):
    resume(config, tmp_path)
    (tmp_path / "rows2.jsonl").write_text('{"prompt": "3"}\n')
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.path"):
        resume(config, tmp_path)


def test_a_changed_function_or_eval_set_is_a_warning(config, tmp_path, caplog):
    resume(config, tmp_path)
    (tmp_path / "held.jsonl").write_text("other")
    (tmp_path / "reward.py").write_text("def right(rollout): return 0.5\n")
    resume(config, tmp_path)
    assert "reward.terms.0.function: the file of the function has changed" in caplog.text
    assert "eval.data.sources.0.path: its files have changed since the run began" in caplog.text
    # The run folder has both texts of the function, and those of an earlier run are removed.
    texts = {file.read_text()[-4:-1] for file in (tmp_path / "run" / "functions").iterdir()}
    assert texts == {"1.0", "0.5"}
    options = {"resume": "auto", "overwrite": True, "ignore": ("run", "eval")}
    with RunDirectory.open(tmp_path / "run", config, **options):
        (copy,) = (tmp_path / "run" / "functions").iterdir()
        assert "0.5" in copy.read_text()


def test_a_run_without_digests_is_resumed(config, tmp_path):
    resume(config, tmp_path)
    (tmp_path / "run" / module.FILE).unlink()
    (tmp_path / "rows.jsonl").write_text("other")
    resume(config, tmp_path)
    # From now on, it has them.
    (tmp_path / "rows.jsonl").write_text("more")
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.path"):
        resume(config, tmp_path)


def test_blocks_of_a_large_file_are_read_up_to_its_end(config, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 100)
    monkeypatch.setattr(module, "BLOCK", 100)
    before = input_digests(config, ())
    file = tmp_path / "model" / "model.safetensors"
    for place in (0, 4999, 79):
        content = bytearray(5000)
        content[place] = 1
        file.write_bytes(bytes(content))
        assert input_digests(config, ())["model.path"] != before["model.path"]


def test_names_on_a_hub_and_folders_of_media_have_no_digest(config):
    assert sorted(input_digests(config, ("eval",))) == [
        "data.sources.0.path",
        "model.chat_template",
        "model.path",
        "reference",
        "reward.terms.0.function",
    ]
