"""Signs of life in a store, and what is made of their absence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightrft.distributed import heartbeat as pulses
from lightrft.distributed.heartbeat import Heartbeat
from tests.unit.distributed.test_process_group import longest_pause


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """A store of this process, and beats that come quickly."""
    monkeypatch.setattr(pulses, "BEAT", 0.2)  # a thread of a busy machine may be half a second late
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def of_others(pulse: Heartbeat, *calls: Any) -> str:
    """What ``heartbeat`` says of others that live, once the machine has let them give a sign."""
    said: list[str] = []

    def heard() -> bool:
        said.append(pulse.diagnose_peers(*calls))
        return "no heartbeat" not in said[-1]

    wait_for(heard)
    return said[-1]


def test_ranks_that_live_are_not_blamed_and_one_that_is_late_is(store):
    one, other = Heartbeat(store, 0, 2, 1.0), Heartbeat(store, 1, 2, 1.0)
    assert of_others(one) == of_others(other) == ""
    for _ in range(3):
        one.count_collective("training")
    for _ in range(2):
        other.count_collective("training")
        other.count_collective("drawing")
    late = of_others(one, "training", [0, 1])
    assert (
        late.startswith(f"rank 1 (process {os.getpid()} on ")
        and "has not come to where the others wait" in late
    )
    assert of_others(other, "training", [0, 1]) == ""
    one.end(None)
    other.end(None)


def test_a_rank_that_is_late_in_the_calls_of_another_thread_or_of_others_is_not_blamed(store):
    one, other = Heartbeat(store, 0, 2, 1.0), Heartbeat(store, 1, 2, 1.0)
    for line in ("training", "drawing"):
        one.count_collective(line)
    other.count_collective("training")
    assert of_others(one, "training", [0, 1]) == ""
    assert of_others(one, "drawing", [0]) == ""
    assert of_others(one, "drawing", [0, 1]).startswith("rank 1 ")
    one.end(None)
    other.end(None)


def test_a_rank_without_a_sign_of_life_is_named_and_one_that_failed_is_quoted(store):
    one, other = Heartbeat(store, 0, 3, 1.0), Heartbeat(store, 1, 3, 1.0)
    assert "rank 2 (never seen) sends no heartbeat" in one.diagnose_peers()
    other.end(ValueError("too many"))
    assert one.diagnose_peers() == "rank 1: ValueError: too many"
    one.end(None)


def test_a_rank_that_is_silent_for_longer_than_the_limit_ends_the_others(store, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(pulses, "GRACE", 0.1)
    monkeypatch.setattr(pulses, "_leave", said.append)
    for trial in range(5):
        said.clear()
        with longest_pause() as pause:
            own = dist.PrefixStore(str(trial), store)
            ranks = [Heartbeat(own, rank, 4, 1.2 / 60) for rank in range(4)]
            ranks[3].end(None)  # it is done, and so not missed
            ranks[2]._over.set()
            wait_for(lambda: len(said) > 1)
            for rank in ranks[:2]:
                rank.end(None)
        if pause[0] < 0.6:  # else the machine has held up the others for as long
            break
    assert all(
        text.startswith("rank 2 (process ")
        and "for strategy.timeout_minutes = 0.02 minutes" in text
        for text in said
    )


def test_a_process_whose_launcher_is_gone_stops_as_by_sigterm(store, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        one = Heartbeat(store, 0, 1, 1.0)
        assert not heard
        one._launcher += 1
        wait_for(lambda: heard)
        one.end(None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_what_failed_in_one_run_is_no_matter_of_the_next_of_the_same_ranks(store):
    one, other = Heartbeat(store, 0, 2, 1.0), Heartbeat(store, 1, 2, 1.0)
    other.fail(ValueError("too many"))
    wait_for(lambda: one.failing)
    assert one.diagnose_peers() == "rank 1: ValueError: too many"
    for pulse in (one, other):
        pulse.next_run()
    assert not one.failing and of_others(one) == ""
    other.fail(ValueError("too few"))
    wait_for(lambda: one.failing)
    one.end(None)
    other.end(None)
