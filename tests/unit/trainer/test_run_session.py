"""When a run of several processes stops: all of them at once."""

from __future__ import annotations

import shlex
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.config.run import CheckpointConfig
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.observability.observer import NullObserver
from lightrft.observability.run_directory import ReadOnlyRunDirectory, RunDirectory
from lightrft.strategy.checkpoint import CheckpointStore, DiskFullError
from lightrft.trainer.run_session import RunSession, next_commands
from lightrft.utils.stop_signal import StopFlag
from tests.unit.rollout.test_collect import Threads, of_all_ranks


class Late:
    """Ranks of which this one is asked to stop while it waits for what the others say."""

    rank, size, minutes = 0, 2, 1.0

    def __init__(self) -> None:
        self.session: RunSession | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.session is not None
        self.session.stop.request("a signal")
        return [value, ("", False)]


def test_a_rank_that_is_asked_to_stop_while_others_are_heard_goes_on_as_they_do_and_stops_with_them_the_next_time() -> (
    None
):
    ranks = Late()
    ranks.session = RunSession(None, None, CheckpointConfig(), "rl", NullObserver(), ranks=ranks)  # type: ignore[arg-type]
    assert [ranks.session.stopping(), ranks.session.stopping()] == [False, True]


def test_a_command_that_a_run_names_is_one_argument_of_a_shell_for_each_path() -> None:
    for phase in ("rm", "prm"):
        session = SimpleNamespace(path=Path("/runs of $USER/it's"), phase=phase)
        (command,) = next_commands(session)
        assert shlex.split(command)[-1].partition("=")[2] == "/runs of $USER/it's/model"


class Clock:
    """The time of each rank, which a test sets."""

    def __init__(self) -> None:
        self.now = threading.local()

    def perf_counter(self) -> float:
        return getattr(self.now, "is", 0.0)

    def set(self, seconds: float) -> None:
        setattr(self.now, "is", seconds)


def run_at(step: int) -> Any:
    """A run without models that has taken ``step`` steps."""
    strategy = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(step=step, strategy=strategy, trained={}, state=dict)


def saves(
    ranks: Any,
    path: Path,
    asked: CheckpointConfig,
    times: list[float],
    clock: Clock,
    values: list[Any],
) -> tuple[Any, ...]:
    """The steps that a run saves whose steps end at ``times``, and the session."""
    path.mkdir(exist_ok=True)
    clock.set(100.0 * ranks.rank)
    folder = ReadOnlyRunDirectory(path, fresh=True, checkpoint=None)
    session = RunSession(
        folder,
        CheckpointStore(path / "checkpoints", 9, asked.best),
        asked,
        "rl",
        NullObserver(),
        StopFlag(),
        ranks=ranks,
    )
    saved = []
    for step, now in enumerate(times, 1):
        clock.set(now)
        session.save_if_due(run_at(step), values[step - 1])
        saved += [step] if session.saved_step == step else []
    return saved, session


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("lightrft.trainer.run_session.time", found)
    return found


def test_a_checkpoint_is_saved_every_ten_minutes_unless_told_otherwise(clock, tmp_path) -> None:
    times = [60.0 * n for n in (4, 9, 11, 15, 20, 22)]
    found = [
        saves(SINGLE_PROCESS, tmp_path / str(k), asked, times, clock, [{}] * 6)
        for k, asked in enumerate(
            [CheckpointConfig(), CheckpointConfig(every_minutes=0), CheckpointConfig(every=4)]
        )
    ]
    assert [saved for saved, _ in found] == [[3, 6], [], [3, 4]]
    assert [session.at_risk for _, session in found] == [(660.0, 3), (1320.0, 6), (660.0, 3)]


def test_ranks_whose_clocks_differ_save_the_same_steps(clock, tmp_path) -> None:
    def run(ranks: Threads) -> tuple[Any, ...]:
        times = [60.0 * n * (1 + ranks.rank) for n in (4, 9, 11, 15)]
        return saves(ranks, tmp_path, CheckpointConfig(), times, clock, [{}] * 4)

    assert [saved for saved, _ in of_all_ranks(run, 2)] == [[3], [3]]


def test_a_step_that_is_better_than_all_checkpoints_is_saved(clock, tmp_path) -> None:
    values = [
        {"loss": 3.0},
        {},
        {"loss": 2.0},
        {"loss": 2.5},
        {"loss": float("nan")},
        {"loss": 1.0},
    ]
    saved, _ = saves(
        SINGLE_PROCESS, tmp_path, CheckpointConfig(best="-loss"), [1.0] * 6, clock, values
    )
    assert saved == [1, 3, 6]


def test_a_disk_that_stays_full_is_not_tried_again_at_every_step(
    clock, tmp_path, monkeypatch
) -> None:
    tried: list[float] = []

    def full(*_: Any) -> None:
        tried.append(clock.perf_counter())
        raise DiskFullError("full")

    monkeypatch.setattr(RunSession, "save", full)
    _, session = saves(
        SINGLE_PROCESS,
        tmp_path,
        CheckpointConfig(),
        [60.0 * n for n in range(1, 25)],
        clock,
        [{}] * 24,
    )
    assert tried == [600.0, 1200.0]
    assert session.at_risk == (1440.0, 24)


def test_ranks_wait_for_the_one_that_reads_a_checkpoint_again_as_long_as_it_says_that_it_is_at_work(
    tmp_path, monkeypatch
) -> None:
    # A sign whenever one may be given.
    monkeypatch.setattr("lightrft.distributed.process_group.KEEPALIVES", 1e9)
    monkeypatch.setattr("lightrft.strategy.manifest.PART", 16)
    said: list[list[bool]] = [[], []]
    path = RunDirectory.open(
        tmp_path / "run", CheckpointConfig(), resume="auto", overwrite=False
    ).path

    class Counted(Threads):
        def gather(self, value: Any) -> list[Any]:
            if value is False:
                said[self.rank].append(value)
                time.sleep(0.001)
            return super().gather(value)

    def saved_and_taken_up(ranks: Threads) -> tuple[int, dict[str, Any], dict[str, Any]]:
        counted = Counted(ranks.rank, ranks.meeting, ranks.told, 4.0)
        folder = ReadOnlyRunDirectory(path, fresh=False, checkpoint=None)
        store = CheckpointStore(path / "checkpoints", 1)
        session = RunSession(
            folder,
            store,
            CheckpointConfig(),
            "rl",
            NullObserver(),
            SimpleNamespace(),
            ranks=counted,
        )
        run = run_at(3)
        session.save(run, {}, {"much": "x" * 4096})
        said[ranks.rank].append(True)
        return session.resume(run.strategy, {})

    found = of_all_ranks(saved_and_taken_up, 2)
    assert [(step, state) for step, state, _ in found] == [(3, {"much": "x" * 4096})] * 2
    assert said[1] == [True]
    at = said[0].index(True)
    assert at and len(said[0]) > at + 1
