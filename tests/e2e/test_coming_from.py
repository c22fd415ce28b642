"""The pairs of configs of the page about other frameworks: each is imported, and trains a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import OURS, PAIRS
from tests.e2e.command import ROOT, command
from tests.e2e.mistakes import FILES

THEIRS = sorted(path for path in (ROOT / PAIRS).glob("*/*") if OURS not in path.name)
SMALL = [
    "model.dtype=float32",
    "model.trust_remote_code=false",
    "train.steps=1",
    "log.wandb=null",
    "log.tensorboard=false",
    "run.progress=false",
    "run.overwrite=true",
    "optimizer.warmup_ratio=0",
]
REWARDED = [
    "reward.terms=[varied.py:reward]",
    "reward.models=[]",
    "engine.kind=native",
    "sampling.max_new_tokens=4",
    "rollout.prompts_per_step=2",
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows with the columns of every verb, under the names of the configs."""
    file = tmp_path / "rows.jsonl"
    row: dict[str, Any] = {"label": "2", "response": "2", "chosen": "2", "rejected": "3"}
    names = ("prompt", "question", "context_messages")
    rows = ({**dict.fromkeys(names, f"{k}+1="), **row} for k in range(200))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_each_framework_of_the_page_has_a_pair() -> None:
    assert {path.parent.name for path in THEIRS} == {
        *("trl", "verl", "openrlhf", "llamafactory", "ms-swift")
    }
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    for theirs in THEIRS:
        ours = theirs.with_name(f"{theirs.stem}{OURS}")
        for file in (theirs, ours):
            assert f"\n{file.read_text(encoding='utf-8').strip()}\n```\n" in page
        assert f"import-config {theirs.name} --from {theirs.parent.name} " in page


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_of_another_framework_is_imported_and_trains_a_step(
    theirs: Path, rows: Path, model_folder: Path, capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = command(
        capsys, "import-config", theirs, "--from", theirs.parent.name, "output=config.yaml"
    )
    assert imported.status == 0, imported
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert text == theirs.with_name(f"{theirs.stem}{OURS}").read_text(encoding="utf-8")
    (tmp_path / "varied.py").write_text(str(FILES["varied.py"]))
    verb = text.partition("lightrft ")[2].split()[0]
    tree = yaml.safe_load(text)
    words = [f"model.path={model_folder}", f"data.sources={rows}", *SMALL]
    if verb == "rl":
        words += REWARDED
        words += [f"eval.data.sources={rows}", "eval.limit=2"] if "eval" in tree else []
    else:
        words.append("batch_size=2")
    outcome = command(capsys, verb, "config.yaml", *words)
    assert outcome.status == 0, outcome
    run = {"dir": "runs", **tree["run"]}
    summary = json.loads((tmp_path / run["dir"] / run["name"] / "summary.json").read_text())
    assert summary["steps"] == 1
