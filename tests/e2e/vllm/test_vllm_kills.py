"""A run that is killed while vLLM works resumes with the numbers and the tokens of an undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.trainer.rl import run_rl
from tests.e2e.vllm.runs import ENVIRONMENT, lines

DRIVER = Path(__file__).with_name("killed.py")
MEASURED = ("policy/", "response/", "reward/", "rollout/", "staleness/")


def rollouts(folder: Path) -> list[Any]:
    """The tokens of every step, in order."""
    found = []
    for file in sorted(folder.rglob("rollouts/step_*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found.append([(row["token_ids"], row["versions"], row["finish_reason"]) for row in rows])
    return found


def steady(folder: Path) -> list[dict[str, Any]]:
    """The metrics that measure no time or memory."""
    return [
        {name: value for name, value in line.items() if name.startswith(MEASURED)}
        for line in lines(folder)
    ]


@pytest.mark.parametrize(
    ("kills", "over"),
    [
        ([("generation", 1), ("sync", 2), ("sleep", 3)], {}),
        (
            [("generation", 1)],
            {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}},
        ),
    ],
    ids=["between-steps", "during-training"],
)
def test_a_run_killed_in_every_phase_has_the_numbers_and_tokens_of_an_undisturbed_one(
    kills: list[tuple[str, int]], over: dict[str, Any], tree: dict[str, Any], tmp_path: Path
) -> None:
    whole, file = tmp_path / "whole", tmp_path / "config.yaml"
    kept = deep_merge(deep_merge(tree, over), {"train": {"steps": 5}, "checkpoint": {"every": 1}})
    resumed = deep_merge(kept, {"run": {"resume": "auto"}})
    for tries, (phase, version) in enumerate(kills):
        file.write_text(json.dumps(resumed if tries else kept))
        words = [sys.executable, DRIVER, file, phase, str(version)]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        assert len(lines(tmp_path)) <= version + 1
    run_rl(build(RLConfig, resumed))
    found, tokens = steady(tmp_path / "runs"), rollouts(tmp_path / "runs")
    run_rl(build(RLConfig, deep_merge(kept, {"run": {"dir": str(whole / "runs")}})))
    assert found == steady(whole)
    assert tokens == rollouts(whole)
    # every sampled token is trained, filtered or failed
    for line, step in zip(found, tokens, strict=True):
        parts = sum(line[f"rollout/tokens_{part}"] for part in ("trained", "filtered", "failed"))
        assert line["rollout/tokens_sampled"] == parts == sum(len(row[0]) for row in step)
