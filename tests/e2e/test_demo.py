"""The demo, shortened: from nothing to a report, also when it is killed on the way."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightrft.cli.main import main
from lightrft.observability.trackers import read_rows

ROOT = Path(__file__).parents[2]
SMALL = [
    "sft.eval.limit=12",
    "rl.eval.limit=12",
    "rl.rollout.prompts_per_step=4",
    "rl.rollout.group_size=2",
]
SHORT = ["sft.train.steps=4", "sft.checkpoint.every=2", "rl.checkpoint.every=1", "rl.eval.every=2"]
FEW = [*SMALL, "sft.train.steps=2", "rl.train.steps=2"]


def parity(folder: Path) -> str:
    """A reward by which responses differ, so that a few steps train something: a run that learns nothing ends with 2."""
    file = folder / "parity.py"
    file.write_text("def parity(rollout):\n    return float(sum(rollout.token_ids) % 2)\n")
    return f"rl.reward.terms=[{file}:parity]"


def command(folder: Path, steps: int) -> list[str]:
    words = [f"run.dir={folder}", "run.name=demo", f"rl.train.steps={steps}", parity(folder)]
    return [sys.executable, "-m", "lightrft", "demo", *words, *SMALL, *SHORT]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_demo_that_is_killed_goes_on_and_ends_with_its_report(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(tmp_path, 400), env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "demo" / "rl" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while (
        time.monotonic() < deadline
        and process.poll() is None
        and not (metrics.exists() and len(read_rows(metrics)) >= 3)
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    steps = read_rows(metrics)[-1]["step"] + 2
    trained = (tmp_path / "demo" / "sft" / "metrics.jsonl").read_text()

    again = subprocess.run(
        command(tmp_path, steps), env=environment, capture_output=True, text=True, timeout=1000
    )
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "demo" / "sft" / "metrics.jsonl").read_text() == trained, (
        "a phase that had finished was run again"
    )
    assert [r["step"] for r in read_rows(metrics)] == [*range(steps + 1)]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {"heldout_before", "heldout_after", "seconds"} <= summary.keys()
    report = (tmp_path / "demo" / "report.html").read_text()
    assert 'class="plot"' in report and str(tmp_path / "demo" / "report.html") in again.stdout
    samples = json.loads((tmp_path / "demo" / "samples.json").read_text())
    assert len(samples["before"]) == len(samples["after"]) == 5


def demo(kind: str, folder: Path, *settings: str, report: str = "report.html") -> dict[str, Any]:
    """The summary of a demo of pictures or clips, run by its command."""
    arguments = ["demo", kind, f"run.dir={folder}", "run.name=demo", *settings]
    done = subprocess.run(
        [sys.executable, "-m", "lightrft", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(folder / "demo" / report) in done.stdout
    return json.loads((folder / "demo" / "summary.json").read_text())


@pytest.mark.thorough
@pytest.mark.slow
def test_the_demo_of_preferences_ends_with_the_accuracy_of_held_out_pairs(tmp_path: Path) -> None:
    few = ["sft.train.steps=2", "dpo.train.steps=2", "sft.eval.limit=12", "dpo.eval.limit=12"]
    cache = f"dpo.preference.reference.cache_dir={tmp_path / 'cache'}"
    summary = demo("preference", tmp_path, *few, cache)
    assert {"heldout_before", "heldout_after"} <= summary.keys()
    assert 0 <= summary["pair_accuracy"] <= 1
    report = (tmp_path / "demo" / "report.html").read_text()
    assert "Pair accuracy" in report
    assert "Implicit rewards" in report
    # the last command runs as it stands
    words = shlex.split(summary["next"][-1])[1:]
    assert main([*words, f"run.dir={tmp_path}", "train.steps=1", "batch_size=4"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "element"), [("vision", '<img src="data:image/png'), ("audio", "<audio controls")]
)
def test_a_demo_of_media_ends_with_a_report_that_holds_the_pictures_or_clips(
    tmp_path: Path, kind: str, element: str
) -> None:
    summary = demo(kind, tmp_path, *FEW, parity(tmp_path))
    assert {"heldout_before", "heldout_after", "seconds"} <= summary.keys()
    samples = json.loads((tmp_path / "demo" / "samples.json").read_text())
    names = [name for row in samples["before"] for name in row["attachments"]]
    assert len(names) == 12
    assert sorted(p.name for p in (tmp_path / "demo" / "media").iterdir()) == sorted(set(names))
    assert {row["prompt"] for row in samples["before"]} == {"Which digit?"}
    assert (tmp_path / "demo" / "report.html").read_text().count(element) == 12


@pytest.mark.slow
def test_rewards_alone_teach_a_model_to_read_digits(tmp_path: Path) -> None:
    summary = demo("vision", tmp_path, "rl.train.steps=30", "rl.eval.every=0")
    assert summary["heldout_before"] < 0.2, "warm-up shows digits that are drawn at random"
    assert summary["heldout_after"] > 0.3


@pytest.mark.thorough
@pytest.mark.slow
def test_the_demo_of_rewards_ends_with_both_reward_models_and_policies_also_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    few = ["rl.train.steps=2", "rl.eval.limit=12", "sft.train.steps=2", "rm.train.steps=2"]
    few += ["rl.rollout.prompts_per_step=4", "rl.rollout.group_size=4", "rm.batch_size=4"]
    parts = [f"learned_rewards.{name}.{word}" for name in ("vision", "audio") for word in few]
    summary = demo("reward", tmp_path, *parts, report="vision/report.html")
    scores = (tmp_path / "demo" / "vision" / "rm" / "metrics.jsonl").read_text()
    for name, element in (("vision", '<img src="data:image/png'), ("audio", "<audio controls")):
        judged, policy = summary["reward_models"][name], summary["policies"][name]
        assert {"heldout_before", "heldout_after"} <= judged.keys()
        assert {"heldout_before", "heldout_after", "proxy_before", "proxy_after"} <= policy.keys()
        folder = tmp_path / "demo" / name
        for row in read_rows(folder / "rl" / "metrics.jsonl"):
            if "reward/mean" in row:
                # exact_match is measured and not learned from
                assert row["reward/mean"] == pytest.approx(row["reward/reward_model"], rel=1e-6)
                assert 0 <= row["reward/exact_match"] <= 1
        report = (folder / "report.html").read_text()
        assert report.count(element) == 12
        assert "Gold reward and learned reward" in report and "Reward model" in report
    # finished phases are kept, and the others run again
    shutil.rmtree(tmp_path / "demo" / "audio" / "rl")
    again = demo("reward", tmp_path, *parts, report="audio/report.html")
    assert again["reward_models"] == summary["reward_models"]
    assert again["policies"]["audio"]["proxy_after"] == summary["policies"]["audio"]["proxy_after"]
    assert (tmp_path / "demo" / "vision" / "rm" / "metrics.jsonl").read_text() == scores
