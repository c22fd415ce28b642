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
    "engine.tensor_parallel=1",
    "engine.gpu_memory_utilization=null",
    "sampling.max_new_tokens=4",
    "rollout.prompts_per_step=2",
]


def rows_for(verb: str, file: Path) -> Path:
    """Write rows with the columns of ``verb``, under the names of the configs."""
    names = ("prompt", "question", "context_messages")
    with file.open("w", encoding="utf-8") as lines:
        for k in range(200):
            own: dict[str, Any] = {"chosen": "2", "rejected": "3", "response": "2", "label": "2"}
            if verb == "kto":
                own = {"response": "2", "label": k % 2 == 0}
            lines.write(f"{json.dumps({**dict.fromkeys(names, f'{k}+1='), **own})}\n")
    return file


def test_each_framework_of_the_page_has_a_pair() -> None:
    assert {path.parent.name for path in THEIRS} == {
        *("trl", "verl", "openrlhf", "llamafactory", "ms-swift", "lightrft")
    }
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    for theirs in THEIRS:
        ours = theirs.with_name(f"{theirs.stem}{OURS}")
        for file in (theirs, ours):
            shown = f"\n{file.read_text(encoding='utf-8').strip()}\n```\n" in page
            assert shown or f"](../{file.relative_to(ROOT)})" in page


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_of_another_framework_is_imported_and_trains_a_step(
    theirs: Path, model_folder: Path, capsys, tmp_path: Path, monkeypatch
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
    rows = rows_for(verb, tmp_path / "rows.jsonl")
    words = [f"model.path={model_folder}", f"data.sources={rows}", *SMALL]
    if verb == "rl":
        words += REWARDED
        words += [f"eval.data.sources={rows}", "eval.limit=2"] if "eval" in tree else []
    else:
        words.append("batch_size=2")
        words += [f"validation.sources={rows}"] if "eval" in tree else []
    if verb == "distill":
        words.append(f"teacher.path={model_folder}")
    if "strategy" in tree:
        words += ["strategy.kind=auto", "strategy.zero_stage=2"]
    if "launch" in tree:
        words.append("launch.processes=1")
    outcome = command(capsys, verb, "config.yaml", *words)
    assert outcome.status == 0, outcome
    run = {"dir": "runs", **tree["run"]}
    summary = json.loads((tmp_path / run["dir"] / run["name"] / "summary.json").read_text())
    assert summary["steps"] == 1
