"""The demo, shortened: from nothing to a report, also when it is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightrft.utils.trackers import read_rows

ROOT = Path(__file__).parents[2]
SHORT = ["sft.train.steps=4", "sft.checkpoint.every=2", "rl.train.steps=4", "rl.checkpoint.every=1", "rl.eval.every=2"]


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "lightrft", "demo", f"run.dir={folder}", "run.name=demo", *SHORT]


@pytest.mark.slow
def test_a_demo_that_is_killed_goes_on_and_ends_with_its_report(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(tmp_path), env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "demo" / "rl" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None and not (metrics.exists() and len(read_rows(metrics)) >= 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    trained = (tmp_path / "demo" / "sft" / "metrics.jsonl").read_text()

    again = subprocess.run(command(tmp_path), env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "demo" / "sft" / "metrics.jsonl").read_text() == trained, "a phase that had finished was run again"
    assert [r["step"] for r in read_rows(metrics)] == [0, 1, 2, 3, 4]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {"heldout_before", "heldout_after", "seconds"} <= summary.keys()
    report = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in report and str(tmp_path / "demo" / "report.html") in again.stdout
    samples = json.loads((tmp_path / "demo" / "samples.json").read_text())
    assert len(samples["before"]) == len(samples["after"]) == 5
