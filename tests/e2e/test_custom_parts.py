"""The parts of ``examples/custom_parts.py``, as ``docs/extending.md`` names them: checked, and trained with for a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.yaml_text import parse_yaml
from tests.e2e.command import ROOT, command

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = [
    parse_yaml(body)["algorithm"]
    for body in re.findall(r"^```yaml rl\n(.*?)^```", PAGE, re.S | re.M)
]


def parts(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and options of every function of the examples in ``tree``."""
    for branch in tree.values():
        for part in branch if isinstance(branch, list) else [branch]:
            full = {"name": part} if isinstance(part, str) else part
            yield full["name"].partition(":")[2], full.get("options", {})


def here(tree: Any) -> Any:
    """``tree`` with the examples under their full path."""
    if isinstance(tree, dict):
        return {key: here(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [here(value) for value in tree]
    return f"{ROOT}/{tree}" if isinstance(tree, str) and tree.startswith("examples/") else tree


CHECKED = [
    pytest.param(name, options, id=name) for block in BLOCKS for name, options in parts(block)
]


def test_the_page_names_every_function_of_the_example() -> None:
    text = (ROOT / "examples" / "custom_parts.py").read_text(encoding="utf-8")
    assert [param.id for param in CHECKED] == re.findall(r"^def (\w+)", text, re.M)


@pytest.mark.parametrize(("name", "options"), CHECKED)
def test_an_example_keeps_the_contract_of_its_kind(capsys, name, options):
    words = [f"{key}={value}" for key, value in options.items()]
    outcome = command(capsys, "check", f"{ROOT}/examples/custom_parts.py:{name}", *words)
    assert outcome.status == 0, outcome
    assert "checks hold" in outcome.out


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(
        "def reward(rollout):\n    return sum(rollout.token_ids) % 7 / 7\n"
    )
    return f"{tmp_path}/reward.py:reward"


@pytest.mark.parametrize("block", BLOCKS, ids=[param.id for param in CHECKED])
def test_a_step_is_trained_with_an_example(rl_config, tmp_path, reward, block):
    config = rl_config(
        algorithm={"preset": "grpo", **here(block)},
        reward={"terms": [reward]},
        train={"steps": 1, "num_mini_batches": 2},
    )
    summary = run_rl(config)
    assert summary["finished"]
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["policy/optimizer_steps"] > 0
    assert row["policy/grad_norm"] > 0
