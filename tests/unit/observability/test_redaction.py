"""Secrets are in nothing that a run writes, and a run that has some is resumed all the same."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, load_settings
from lightrft.config.verbs import RLConfig
from lightrft.observability.redaction import MARK, check_complete, redacted
from lightrft.observability.run_directory import RunDirectory
from lightrft.utils.errors import ConfigError
from lightrft.utils.yaml_text import tree_to_yaml
from lightrft.viewer.report import write_report

NAMES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "mysecret")
SECRETS = {name: f"hush-{number}" for number, name in enumerate(NAMES, 1)}
OPEN = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PATH": "/bin"}


def config(**environment: str) -> RLConfig:
    terms = [
        {
            "function": "a.py:judge",
            "options": {
                "api_key": environment.get("HF_TOKEN", "hush-6"),
                "key": "answer",
                "max_tokens": 5,
            },
        }
    ]
    per_source = {
        "a": [{"function": "b.py:judge", "options": {"headers": {"Authorization": "hush-7"}}}]
    }
    tree: dict[str, Any] = {
        "launch": {"kind": "ray", "ray": {"environment": {**SECRETS, **OPEN, **environment}}},
        "reward": {"terms": terms, "per_source": per_source},
        "data": {
            "sources": ["https://me:hush-8@example.org/rows.jsonl"],
            "special_tokens": "control",
        },
    }
    return build(RLConfig, tree)


def test_secrets_are_redacted_and_everything_else_stays() -> None:
    tree = redacted(config())
    assert "hush" not in str(tree)
    environment = tree["launch"]["ray"]["environment"]
    assert environment == {**dict.fromkeys(SECRETS, MARK), **OPEN}
    assert tree["reward"]["terms"][0]["options"] == {
        "api_key": MARK,
        "key": "answer",
        "max_tokens": 5,
    }
    assert tree["data"]["sources"][0]["path"] == f"https://{MARK}@example.org/rows.jsonl"
    plain = build(RLConfig, {"launch": {"kind": "ray", "ray": {"environment": OPEN}}})
    assert redacted(plain) == plain.model_dump(mode="json")


def test_nothing_in_a_run_folder_holds_a_secret_and_only_its_user_reads_the_settings(
    tmp_path: Path,
) -> None:
    # The same command with a new token resumes.
    for step, secret in enumerate(("hush-1", "hush-other")):
        with RunDirectory.open(
            tmp_path / "run", config(HF_TOKEN=secret), resume="auto", overwrite=False
        ) as folder:
            assert folder.fresh == (secret == "hush-1")
            folder.log({"step": step, "phase": "rl"})
            folder.write_summary({"steps": 1})
    write_report(tmp_path / "run")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {"config.yaml", "summary.json", "log.txt", "report.html"} <= {
        file.name for file in files
    }
    assert [file for file in files if b"hush" in file.read_bytes()] == []
    for name in ("config.yaml", "summary.json"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["changed"][
            "launch.ray.environment.HF_TOKEN"
        ]
        == MARK
    )


def test_a_file_in_which_secrets_were_redacted_is_refused_until_they_are_given_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        tree_to_yaml(
            redacted(
                build(
                    RLConfig, {"launch": {"kind": "ray", "ray": {"environment": {"HF_TOKEN": "x"}}}}
                )
            )
        )
    )
    with pytest.raises(
        ConfigError, match=r"^launch\.ray\.environment\.HF_TOKEN: the secret was left out"
    ):
        RunDirectory.open(
            tmp_path / "run",
            load_settings(RLConfig, [file]).settings,
            resume="auto",
            overwrite=False,
        )
    check_complete(load_settings(RLConfig, [file], ["launch.ray.environment.HF_TOKEN=y"]).settings)


def test_an_error_about_a_variable_does_not_show_its_value() -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(RLConfig, [], ["launch.kind=ray", "launch.ray.environment.HF_TOKEN=123456"])
    assert "HF_TOKEN" in str(refused.value) and "123456" not in str(refused.value)


@pytest.mark.parametrize("name", ["../x", "../../x", "a/../../x", "/tmp/x", ".", "a\0b", ".."])
def test_a_name_that_leads_out_of_the_folder_of_runs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: .* is no folder below run\.dir"):
        build(RLConfig, {"run": {"name": name}})


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="name = '': it is empty; leave it out for 'run'"):
        build(RLConfig, {"run": {"name": ""}})


def test_a_name_may_have_folders() -> None:
    assert build(RLConfig, {"run": {"name": "trials/first"}}).run.name == "trials/first"
