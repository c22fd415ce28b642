"""Several processes, and something goes wrong: the run goes on, or ends on all of them in time and says why. The same command then comes
to the end of a run that nothing happened to, every answer drawn once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightrft.config.base import deep_merge
from lightrft.observability.trackers import read_rows
from tests import warm
from tests.e2e.several import ENVIRONMENT, check_equal, config_file, train
from tests.unit.distributed.test_process_group import at, free_port

KILLING = Path(__file__).with_name("killing.py")
LAUNCH = """
import os, sys
from lightrft.distributed.torchrun import run_processes
from torch.distributed.elastic.multiprocessing.api import PContext
PContext.close.__defaults__ = None, int(os.environ.get("GRACE", "30"))
sys.exit(run_processes("lightrft rl", sys.argv[1:], 2, 1.0))
"""
STEPS, ANSWERS = 4, 15
END = 300.0
"""Seconds after which a run in which a process was killed has ended everywhere. It takes 35: torch's launcher gives the others thirty. On
a busy machine it is more; one that waits for the rank that is gone takes ten minutes."""
TIMEOUT = 30.0
"""Seconds of ``strategy.timeout_minutes`` where a process is stopped."""
GRACE = 4
"""Seconds that a launcher gives a stopped process to end by itself, which it never does. torch gives it thirty."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its status, what it said, and the seconds since something happened to it."""

    status: int
    said: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.said.strip().splitlines()[-1]


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Five groups of three, a checkpoint at every step, and a reward that tells all answers apart."""
    terms = rl_tree["reward"]["terms"]
    more = {
        "rollout": {"prompts_per_step": 5, "group_size": 3},
        "train": {"steps": STEPS, "max_tokens_per_micro_batch": 60},
        "checkpoint": {"every": 1, "keep": 2},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "reward": {"terms": [terms[0].replace(":ones", ":varied")]},
    }
    return deep_merge(rl_tree, more)


@pytest.fixture(scope="module")
def whole_runs() -> dict[str, Path]:
    """Runs that nothing happened to, by their config."""
    return {}


@pytest.fixture
def whole(tree, whole_runs, tmp_path_factory) -> Path:
    """The run of ``tree`` that nothing happens to, on one process."""
    if "whole" not in whole_runs:
        whole_runs["whole"] = train(tree, tmp_path_factory.mktemp("whole"), "whole", 1)
    return whole_runs["whole"]


def run_until(file: Path, where: str, nth: int, rank: int, how: str) -> Ended:
    """Two processes of the run of ``file``; on ``rank`` something happens."""
    words = ["-c", LAUNCH, KILLING, file, where, str(nth), str(rank), how]
    limits = {"GRACE": str(GRACE)} if how == "stop" else {}
    done = warm.run(words, env=ENVIRONMENT | limits, seats=2)
    happened = file.with_name("happened")
    assert happened.exists() or where == "never", done.stderr
    since = time.time() - float(happened.read_text()) if happened.exists() else 0.0
    return Ended(done.returncode, done.stderr, since)


def check_whole(run: Path, whole: Path) -> None:
    """``run`` has come to the end of ``whole``, and every answer was drawn once."""
    check_equal(run, whole)
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    drawn = [json.loads(line)["seed"] for file in files for line in file.read_text().splitlines()]
    assert len(files) == STEPS and len(drawn) == STEPS * ANSWERS == len(set(drawn))


@contextmanager
def started(file: Path, rows: int) -> Iterator[subprocess.Popen[str]]:
    """``lightrft rl`` on two processes, once it has taken ``rows`` steps."""
    command = [sys.executable, "-m", "lightrft", "rl", str(file), "launch.processes=2"]
    metrics = file.with_suffix("") / "metrics.jsonl"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            deadline = time.monotonic() + 900
            while not (metrics.exists() and len(metrics.read_text().splitlines()) >= rows):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that ``lightrft rl`` has started for its ranks, in their order."""
    workers = [
        p for p in psutil.Process(process.pid).children(recursive=True) if "lightrft" in p.cmdline()
    ]
    return sorted(workers, key=lambda p: int(p.environ()["RANK"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth", "rank"),
    [
        ("an answer", 12, 1),
        pytest.param("backward", 5, 1, marks=pytest.mark.thorough),
        pytest.param("checkpoint files", 2, 1, marks=pytest.mark.thorough),
        pytest.param("checkpoint manifest", 2, 0, marks=pytest.mark.thorough),
        ("checkpoint publishing", 2, 0),
    ],
)
def test_a_rank_that_is_killed_ends_the_run_in_time_and_the_same_command_goes_on(
    tree, whole, tmp_path, where, nth, rank
):
    file = config_file(tree, tmp_path, "run")
    ended = run_until(file, where, nth, rank, "kill")
    assert ended.status == 1 and ended.seconds < END, ended
    assert ended.last_line.startswith(f"lightrft rl: rank {rank} was killed by SIGKILL"), ended.said
    again = run_until(file, "never", 0, 0, "")
    assert again.status == 0, again.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_rank_that_is_paused_for_less_than_the_limit_changes_nothing(tree, whole, tmp_path):
    file = config_file(deep_merge(tree, {"strategy": {"timeout_minutes": 5.0}}), tmp_path, "run")
    ended = run_until(file, "backward", 5, 1, "stop:8")
    assert ended.status == 0, ended.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth", "rank"),
    [pytest.param("backward", 5, 1, marks=pytest.mark.thorough), ("an answer", 12, 0)],
)
def test_a_rank_that_is_paused_for_longer_ends_the_run_in_time_and_is_named(
    tree, whole, tmp_path, where, nth, rank
):
    file = config_file(
        deep_merge(tree, {"strategy": {"timeout_minutes": TIMEOUT / 60}}), tmp_path, "run"
    )
    ended = run_until(file, where, nth, rank, "stop")
    assert ended.status == 2 and ended.seconds < TIMEOUT + END, ended
    assert (
        ended.last_line.startswith(f"lightrft rl: rank {rank} (process ")
        and "sends no heartbeat" in ended.last_line
    ), ended.said
    again = run_until(config_file(tree, tmp_path, "run"), "never", 0, 0, "")
    assert again.status == 0, again.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "nth"), [("checkpoint writing", 2), ("checkpoint manifest", 2)])
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_on_all_ranks(
    tree, whole, tmp_path, where, nth
):
    file = config_file(tree, tmp_path, "run")
    ended = run_until(file, where, nth, 0, "full")
    assert ended.status == 0, ended.said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row.pop("checkpoint/failed", 0) for row in rows] == [0, 1, 0, 0]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_ends_the_run_with_one_message_and_the_same_command_goes_on(
    tree, whole, tmp_path
):
    file = config_file(tree, tmp_path, "run")
    ended = run_until(file, "checkpoint writing", STEPS, 0, "full")
    assert ended.status == 2 and ended.seconds < END, ended
    assert "was not saved: the disk is full" in ended.last_line, ended.said
    again = run_until(file, "never", 0, 0, "")
    assert again.status == 0, again.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nth", "rank", "saved"),
    [
        (12, 1, 1),
        pytest.param(20, 0, 2, marks=pytest.mark.thorough),
        pytest.param(2, 1, 0, marks=pytest.mark.thorough),
    ],
)
def test_an_engine_that_fails_on_one_rank_costs_no_whole_step_on_any(
    tree, whole, tmp_path, nth, rank, saved
):
    file = config_file(deep_merge(tree, {"checkpoint": {"every": 0}}), tmp_path, "run")
    ended = run_until(file, "an answer", nth, rank, "unanswered")
    assert ended.status == 2 and ended.seconds < END, ended
    assert "engine.url = 'x': no answer. The same command resumes from" in ended.last_line
    assert (f"resumes from step {saved}, which is saved" in ended.said) == (saved > 0), ended.said
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert steps == [f"step_{saved:06d}"] * (saved > 0)
    again = run_until(file, "never", 0, 0, "")
    assert again.status == 0, again.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_rank_is_repeated_when_the_run_resumes(tree, tmp_path):
    held = {"data": tree["data"], "every": 2, "at_start": False, "sampling": tree["sampling"]}
    tree = deep_merge(tree, {"checkpoint": {"every": 0}, "eval": held})
    file = config_file(tree, tmp_path, "run")
    # rank 1 has sampled 12 responses of two steps
    ended = run_until(file, "an answer", 13, 1, "unanswered")
    assert ended.status == 2 and "resumes from step 2, which is saved" in ended.said, ended
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1]
    again = run_until(file, "never", 0, 0, "")
    assert again.status == 0, again.said
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/reward" in row] == [2, 4]
    check_equal(tmp_path / "run", train(tree, tmp_path, "undisturbed", 2))


@pytest.mark.slow
def test_sigterm_to_one_rank_alone_stops_all_cleanly_and_the_same_command_goes_on(
    tree, whole, tmp_path
):
    file = config_file(tree, tmp_path, "run")
    ended = run_until(file, "an answer", 12, 1, "terminate")
    assert ended.status == 0 and ended.seconds < END, ended
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] is False
    again = run_until(file, "never", 0, 0, "")
    assert again.status == 0, again.said
    check_whole(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_process_behind_and_the_same_command_goes_on(
    tree, whole, tmp_path
):
    file = config_file(deep_merge(tree, {"train": {"steps": 200}}), tmp_path, "run")
    with started(file, rows=2) as process:
        ranks = ranks_of(process)
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=END)
    assert len(gone) == 2 and not alive
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        not summary["finished"]
        and (tmp_path / "run" / "checkpoints" / f"step_{summary['steps']:06d}").exists()
    )
    longer = summary["steps"] + 1
    assert train(tree, tmp_path, "run", 2, f"train.steps={longer}")
    check_equal(tmp_path / "run", train(tree, tmp_path, "whole", 1, f"train.steps={longer}"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_all_ranks_which_save_and_leave(number, tree, tmp_path):
    file = config_file(
        deep_merge(tree, {"train": {"steps": 200}, "checkpoint": {"every": 0}}), tmp_path, "run"
    )
    with started(file, rows=2) as process:
        ranks = ranks_of(process)
        process.send_signal(number)
        assert process.wait(timeout=END) == 128 + number
        assert not any(rank.is_running() for rank in ranks)
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert 2 <= steps < 200 and (tmp_path / "run" / "checkpoints" / f"step_{steps:06d}").exists()


@pytest.mark.slow
def test_ranks_that_are_stopped_before_the_first_step_leave_the_run_that_they_replace(
    tree, tmp_path
):
    earlier = train(tree, tmp_path, "run", 1)
    rows = read_rows(earlier / "metrics.jsonl")
    (tmp_path / "stops.py").write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "def right(rollout):\n"
        "    return 1.0\n"
    )
    reward = {"reward": {"terms": [f"{tmp_path}/stops.py:right"]}}
    file = config_file(deep_merge(tree, {**reward, "run": {"overwrite": True}}), tmp_path, "run")
    words = ["-m", "lightrft", "rl", file, "launch.processes=2"]
    done = warm.run(words, env=ENVIRONMENT, seats=2)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "the earlier one is back" in done.stderr
    assert done.stdout == "stopped before the first step; the same command starts over\n"
    assert read_rows(earlier / "metrics.jsonl") == rows
    assert list((earlier / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_reward_that_never_returns_costs_its_own_answers_on_any_number_of_ranks(tree, tmp_path):
    terms = [tree["reward"]["terms"][0].replace(":varied", ":sometimes_hangs")]
    tree = deep_merge(tree, {"reward": {"terms": terms, "timeout": 300.0}, "train": {"steps": 2}})
    one = train(tree, tmp_path, "one", 1)
    check_equal(train(tree, tmp_path, "several", 2), one)
    assert sum(row["rollout/num_failed"] for row in read_rows(one / "metrics.jsonl")) > 0


@pytest.mark.slow
def test_what_a_rank_alone_fails_with_is_the_last_line_and_told_once(tree, tmp_path):
    trap = tmp_path / "trap.py"
    trap.write_text(
        "import os\n\ndef at_rank_one(*args, **options):\n    if os.environ['RANK'] == "
        "'1':\n        raise ZeroDivisionError('the second rank alone')\n    from "
        "lightrft.algorithms.policy_losses import POLICY_LOSSES\n    return "
        "POLICY_LOSSES['ppo_clip'](*args, **options)\n"
    )
    tree = deep_merge(tree, {"algorithm": {"loss": {"name": f"{trap}:at_rank_one"}}})
    file = config_file(tree, tmp_path, "run")
    done = warm.run(["-m", "lightrft", "rl", file, "launch.processes=2"], env=ENVIRONMENT, seats=2)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert (
        last.startswith("lightrft rl: rank 1")
        and "ZeroDivisionError: the second rank alone" in last
    ), done.stderr
    assert "ChildFailedError" not in done.stderr


@pytest.mark.slow
def test_a_mistake_that_every_rank_finds_is_said_once(tree, tmp_path):
    file = config_file(deep_merge(tree, {"strategy": {"kind": "single"}}), tmp_path, "run")
    done = warm.run(["-m", "lightrft", "rl", file, "launch.processes=2"], env=ENVIRONMENT, seats=2)
    assert done.returncode == 2
    assert done.stderr.count("strategy.kind = 'single' is for one process") == 1, done.stderr
    assert "Traceback" not in done.stderr


FAILING = """
import os, sys
from lightrft.trainer import training_loop
run_steps = training_loop.run_steps
def broken(run):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("the second rank alone")
    return run_steps(run)
training_loop.run_steps = broken
from lightrft.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_a_rank_that_fails_alone_in_supervised_training_ends_the_others_with_its_message(
    model_folder, data_folder, tmp_path, verb
):
    rows = data_folder / "train.jsonl"
    if verb == "dpo":
        rows = tmp_path / "pairs.jsonl"
        pairs = [{"prompt": f"{i}=", "chosen": str(i), "rejected": "x"} for i in range(4)]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tree = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(rows)}]},
        "batch_size": 4,
        "train": {"steps": 2},
        "log": {"tensorboard": False},
    }
    if verb == "dpo":
        tree["preference"] = {"losses": ["simpo"]}
    tree["strategy"] = {"timeout_minutes": 60.0}
    file = config_file(tree, tmp_path, "run")
    port = free_port()
    words = ["-c", FAILING, verb, file]
    both = [warm.Process(words, ENVIRONMENT | at(port, rank)) for rank in range(2)]
    try:
        for one in both:
            one.wait(900)
        first, second = (one.said(2) for one in both)
    finally:
        for one in both:
            one.send_signal(signal.SIGKILL)
            one.close()
    assert "ZeroDivisionError: the second rank alone" in second
    assert "rank 1: ZeroDivisionError: the second rank alone" in first
