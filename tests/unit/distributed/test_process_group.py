"""Ranks that wait for one another: as long as who is at work says so, and no longer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightrft.distributed.process_group import (
    COPIES,
    RENDEZVOUS,
    SINGLE_PROCESS,
    init_process_group,
    run_with_keepalive,
)
from lightrft.utils.errors import ConfigError, LostRankError
from tests import warm
from tests.unit.rollout.test_collect import Threads, of_all_ranks

MINUTES = 0.02
LONG = 2 * 60 * MINUTES


def ended(work: Callable[[Threads, Callable[[], None]], Any], count: int = 3) -> list[Any]:
    """What each of so many ranks got, or the error that it raised. Again where this process was held up for so long that ranks may have
    missed one another for that alone."""

    def one(ranks: Threads) -> Any:
        try:
            return run_with_keepalive(ranks, lambda sign: work(ranks, sign))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    found: list[Any] = []
    for _ in range(5):
        with longest_pause() as pause:
            found = of_all_ranks(one, count, MINUTES)
        if pause[0] < 60 * MINUTES / 2:
            break
    return found


@contextmanager
def longest_pause() -> Iterator[list[float]]:
    """The most seconds that pass meanwhile between two looks of a thread that does nothing else."""
    pause, over = [0.0], threading.Event()

    def look() -> None:
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.01)
            now = time.monotonic()
            pause[0], last = max(pause[0], now - last), now

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield pause
    finally:
        over.set()
        looker.join()


def busy(seconds: float, sign: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
        sign()


def test_ranks_go_on_waiting_for_those_that_say_that_they_are_at_work() -> None:
    def work(ranks: Threads, sign: Callable[[], None]) -> int:
        busy(LONG * ranks.rank / 2, sign)
        return ranks.rank

    assert ended(work) == [[0, 1, 2]] * 3


def test_a_rank_that_has_ceased_to_is_missed() -> None:
    def work(ranks: Threads, sign: Callable[[], None]) -> None:
        if ranks.rank == 1:
            busy(LONG, sign)
            time.sleep(LONG)

    began = time.monotonic()
    found = ended(work)
    assert all("a rank is missing" in found[rank] for rank in (0, 2))
    assert LONG < time.monotonic() - began < 300


def test_a_rank_that_fails_after_long_work_is_told_to_all() -> None:
    def work(ranks: Threads, sign: Callable[[], None]) -> None:
        if ranks.rank == 1:
            busy(LONG, sign)
            raise ZeroDivisionError("late")

    told = "RankError: rank 1: ZeroDivisionError: late"
    assert ended(work) == [told, "ZeroDivisionError: late", told]


def test_a_rank_alone_waits_for_nobody() -> None:
    assert run_with_keepalive(SINGLE_PROCESS, lambda sign: sign()) == [None]
    with pytest.raises(ZeroDivisionError):
        run_with_keepalive(SINGLE_PROCESS, lambda sign: 1 // 0)


def test_a_sign_does_not_wait_for_ranks_that_wait_for_whoever_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightrft.distributed.process_group.KEEPALIVES", 10**9)
    token = threading.Barrier(2)

    def one(ranks: Threads) -> list[int]:
        def work(sign: Callable[[], None]) -> int:
            for _ in range(3):
                if ranks.rank == 0:
                    sign()
                token.wait(300)
            return ranks.rank

        return run_with_keepalive(ranks, work)

    assert of_all_ranks(one, 2) == [[0, 1]] * 2


MEETINGS = """
import sys, time
from lightrft.distributed.process_group import init_process_group
for meeting in range(3):
    with init_process_group(10.0) as ranks:
        assert ranks.gather((meeting, ranks.rank)) == [(meeting, 0), (meeting, 1)]
        time.sleep(1.5 * (ranks.rank == meeting % 2))  # the other one goes ahead to the next meeting
"""

BLAMED = """
import os
from lightrft.distributed.process_group import TorchProcessGroup, init_process_group
with init_process_group(10.0) as ranks:
    store = TorchProcessGroup.heartbeat._store
    store.set(f"about to leave/{ranks.rank}", "")
    store.wait(["about to leave/0", "about to leave/1"])  # neither is needed by the other any more
    store.set("verdict", "rank 1 has given no heartbeat")
    os._exit(2)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def at(port: int, rank: int) -> dict[str, str]:
    """What a launcher tells one of two ranks."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
    }


def ends(program: str, port: int, **more: str) -> list[int]:
    """The exit status of each of two ranks."""
    both = [
        warm.Process(["-c", program], {**os.environ, **at(port, rank), **more}) for rank in range(2)
    ]
    try:
        return [one.wait(300) for one in both]
    finally:
        for one in both:
            one.send_signal(signal.SIGKILL)
            one.close()


@pytest.mark.slow
def test_ranks_that_meet_again_wait_for_those_that_are_still_in_the_last_meeting() -> None:
    assert ends(MEETINGS, free_port()) == [0, 0]


@pytest.mark.slow
def test_processes_that_are_started_anew_find_nothing_of_those_before_in_the_store_of_their_launcher() -> (
    None
):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert ends(BLAMED, store.port, TORCHELASTIC_USE_AGENT_STORE="True") == [2, 2]
    assert ends(MEETINGS, store.port, TORCHELASTIC_USE_AGENT_STORE="True") == [0, 0]


def test_ranks_that_do_not_come_are_an_error_that_says_where_they_were_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    monkeypatch.setattr("lightrft.distributed.process_group.NOTICE_SECONDS", 0.0)
    for name, value in at(port, 0).items():
        monkeypatch.setenv(name, value)
    said = rf"2 processes were to meet at 127\.0\.0\.1:{port} .* strategy\.timeout_minutes = 0\.01 minutes"
    with pytest.raises(LostRankError, match=said), init_process_group(0.01):
        pass
    assert f"rank 0 waits for all 2 processes to meet at 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK = '', MASTER_ADDR = '', MASTER_PORT = ''"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR = ''"),
        (
            {"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "WORLD_SIZE = 'two'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "MASTER_PORT = 'x'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "WORLD_SIZE = 2",
        ),
    ],
)
def test_what_no_launcher_sets_is_refused_by_name(given, named, monkeypatch):
    for name in RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=f"is set, and {named}: .*launch.processes"),
        init_process_group(1.0),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 copies"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 copies"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, ""),  # sbatch, with one copy
        ({"SLURM_STEP_NUM_TASKS": "4(x2)"}, ""),
        ({}, ""),
    ],
)
def test_copies_of_a_command_that_each_run_alone_are_warned_of(given, warned, monkeypatch, caplog):
    for name in (*RENDEZVOUS, *COPIES):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with init_process_group(1.0) as ranks:
        assert ranks.size == 1
    assert (warned in caplog.text) if warned else not caplog.text
