"""A run that is killed while vLLM works resumes with the numbers and the tokens of an undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.trainer.rl import run_rl
from tests.e2e.vllm.runs import ENVIRONMENT, lines

DRIVER = Path(__file__).with_name("killed.py")
KEPT = {"checkpoint": {"every": 1, "keep": 10}}
DURING = {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}}


def rollouts(folder: Path) -> list[Any]:
    """The tokens of every step, in order."""
    found = []
    for file in sorted(folder.rglob("rollouts/step_*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found.append([(row["token_ids"], row["versions"], row["finish_reason"]) for row in rows])
    return found


def steady(line: dict[str, Any]) -> dict[str, Any]:
    """The metrics that do not measure time or memory."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("time", "memory", "perf", "throughput", "device", "tokens_per"))
    }


@pytest.mark.parametrize(
    ("phase", "over"),
    [("generation", {}), ("sync", {}), ("sleep", {}), ("generation", DURING)],
    ids=["generation", "sync", "sleep", "generation-during-training"],
)
def test_a_run_killed_in_any_phase_resumes_with_the_same_numbers_and_tokens(
    phase: str, over: dict[str, Any], tree: dict[str, Any], tmp_path: Path, undisturbed: Any
) -> None:
    kept = deep_merge(deep_merge(tree, KEPT), over)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(kept))
    words = [sys.executable, DRIVER, file, phase, "1"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    # the kill came in the second step
    assert 1 <= len(lines(tmp_path)) < 3
    run_rl(build(RLConfig, deep_merge(kept, {"run": {"resume": "auto"}})))
    expected, tokens = undisturbed(kept)
    assert [steady(line) for line in lines(tmp_path)] == [steady(line) for line in expected]
    assert rollouts(tmp_path) == tokens
    assert all(len(step) == 12 for step in tokens)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Any]:
    """Run a configuration without a kill, once for each algorithm. Return its metrics and tokens."""
    known: dict[str, Any] = {}

    def find(tree: dict[str, Any]) -> Any:
        key = json.dumps(tree["rollout"], sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            run_rl(build(RLConfig, deep_merge(tree, {"run": {"dir": str(folder / "runs")}})))
            known[key] = lines(folder), rollouts(folder)
        return known[key]

    return find
