"""Relative paths in a YAML file are relative to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightrft.config.base import build, load_settings
from lightrft.config.setting_paths import made_absolute
from lightrft.config.verbs import ChatConfig, RLConfig
from lightrft.observability.run_directory import RunDirectory
from lightrft.utils.errors import ConfigError

TREE = """
model: {path: models/policy, tokenizer: ../models/policy, chat_template: chat.jinja}
reference: Qwen/Qwen2.5-0.5B
data:
  sources: [rows.jsonl, {path: data/*.jsonl, reader: "rows.py:read"}, "rows.py:rows", owner/name, "package.module:rows"]
  media: {root: images}
eval: {data: {sources: rows.jsonl}}
reward: {terms: ["reward.py:score", math, {function: "package.module:score"}], per_source: {a: "reward.py:score"}}
algorithm: {advantage: "parts.py:mine", filters: ["parts.py:drop"], kl: {estimator: "parts.py:kl"}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with a folder of settings that is not the working directory."""
    for folder in ("conf/models/policy", "conf/images", "models/policy", "conf/math"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf" / "rows.jsonl").write_text("")
    (tmp_path / "conf" / "a.yaml").write_text(TREE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_of_a_file_are_relative_to_it_and_names_stay(project):
    (project / "models" / "policy").rmdir()
    (project / "conf" / "chat.jinja").write_text("x")
    found = load_settings(RLConfig, ["conf/a.yaml"]).settings
    assert (found.model.path, found.model.chat_template) == (
        "conf/models/policy",
        "conf/chat.jinja",
    )
    assert found.model.tokenizer == "models/policy"
    assert found.reference == "Qwen/Qwen2.5-0.5B"
    paths = [
        "conf/rows.jsonl",
        "conf/data/*.jsonl",
        "conf/rows.py:rows",
        "owner/name",
        "package.module:rows",
    ]
    assert [s.path for s in found.data.sources] == paths
    assert found.data.sources[1].reader == "conf/rows.py:read"
    assert found.data.media.root == "conf/images"
    assert found.eval.data.sources[0].path == "conf/rows.jsonl"
    assert [t.function for t in found.reward.terms] == [
        "conf/reward.py:score",
        "math",
        "package.module:score",
    ]
    assert found.reward.per_source["a"][0].function == "conf/reward.py:score"
    assert found.algorithm.advantage.name == "conf/parts.py:mine"
    assert found.algorithm.filters[0].name == "conf/parts.py:drop"
    assert found.algorithm.kl.estimator == "conf/parts.py:kl"


def test_paths_of_arguments_are_relative_to_the_working_directory(project):
    given = [
        "model=conf/models/policy",
        "data.sources=[conf/rows.jsonl]",
        "reward.terms=['conf/reward.py:score']",
    ]
    found = load_settings(RLConfig, [], given).settings
    assert (found.model.path, found.data.sources[0].path) == (
        "conf/models/policy",
        "conf/rows.jsonl",
    )
    assert found.reward.terms[0].function == "conf/reward.py:score"


def test_absolute_paths_templates_and_urls_stay(project):
    (project / "conf" / "b.yaml").write_text(
        f"model: {{path: '{project}/models/policy', tokenizer: ~/x/y/z, chat_template: '</s>{{{{ m }}}}</s>/a'}}\n"
        "data: {sources: ['https://host.test/a/b.jsonl']}\n"
    )
    found = load_settings(RLConfig, ["conf/b.yaml"]).settings
    assert (found.model.path, found.model.tokenizer) == (f"{project}/models/policy", "~/x/y/z")
    assert found.model.chat_template == "</s>{{ m }}</s>/a"
    assert found.data.sources[0].path == "https://host.test/a/b.jsonl"


def test_a_path_that_is_only_in_the_working_directory_is_refused_with_what_to_write(project):
    (project / "here.jsonl").write_text("")
    (project / "reward.py").write_text("")
    (project / "conf" / "b.yaml").write_text(
        "data: {sources: [here.jsonl]}\nreward: {terms: ['reward.py:f']}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_settings(RLConfig, ["conf/b.yaml"])
    first, second = str(raised.value).splitlines()
    assert first.startswith(
        "data.sources.0.path = 'here.jsonl' (from conf/b.yaml)"
    ) and first.endswith("write ../here.jsonl")
    assert second.startswith("reward.terms.0.function = 'reward.py'") and second.endswith(
        "write ../reward.py"
    )


def test_the_settings_of_a_run_folder_hold_absolute_paths_and_mean_the_same_from_elsewhere(
    project, monkeypatch
):
    (project / "models" / "policy").rmdir()
    found = load_settings(RLConfig, ["conf/a.yaml"], ["teacher.path=conf/models/policy"]).settings
    RunDirectory.open(Path("runs/x"), found, resume="auto", overwrite=False).close()
    saved = yaml.safe_load((project / "runs" / "x" / "config.yaml").read_text())
    assert saved["model"]["path"] == saved["teacher"]["path"] == f"{project}/conf/models/policy"
    assert saved["reward"]["terms"][0]["function"] == f"{project}/conf/reward.py:score"
    assert (saved["reward"]["terms"][1]["function"], saved["reference"]) == (
        "math",
        "Qwen/Qwen2.5-0.5B",
    )
    first = load_settings(RLConfig, ["runs/x/config.yaml"]).settings
    trees = [made_absolute(RLConfig, config.model_dump()) for config in (first, found)]
    assert trees[0] == trees[1]
    monkeypatch.chdir(project / "conf")
    assert load_settings(RLConfig, ["../runs/x/config.yaml"]).settings == first


def test_a_run_is_resumed_from_the_same_settings_and_not_from_another_path(project):
    found = build(RLConfig, {"model": {"path": "models/policy"}})
    RunDirectory.open(Path("runs/x"), found, resume="auto", overwrite=False).close()
    Path("runs/x/metrics.jsonl").write_text('{"step": 1}\n')
    RunDirectory.open(Path("runs/x"), found, resume="auto", overwrite=False).close()
    other = build(RLConfig, {"model": {"path": "conf/models/policy"}})
    with pytest.raises(ConfigError, match=r"model\.path"):
        RunDirectory.open(Path("runs/x"), other, resume="auto", overwrite=False)


def test_lists_of_paths_are_relative_too(project):
    (project / "conf" / "other.png").write_text("")
    (project / "conf" / "c.yaml").write_text("attach: [images, other.png]\n")
    assert load_settings(ChatConfig, ["conf/c.yaml"]).settings.attach == (
        "conf/images",
        "conf/other.png",
    )


def test_a_path_in_place_of_data_is_relative_to_the_file_too(project):
    (project / "conf" / "d.yaml").write_text("data: rows.jsonl\neval: {data: rows.jsonl}\n")
    found = load_settings(RLConfig, ["conf/d.yaml"]).settings
    assert [s.path for s in found.data.sources] == ["conf/rows.jsonl"]
    assert [s.path for s in found.eval.data.sources] == ["conf/rows.jsonl"]
