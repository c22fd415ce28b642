"""Batches by tokens, keys and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from lightrft.config.generation.serving import BatchingConfig
from lightrft.serving.batcher import Batcher
from lightrft.serving.problems import HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.work_queue import Work


class Computer:
    """Doubles numbers. It waits for ``gate`` before its first batch, and fails for 13."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def __call__(self, works: Sequence[Work[int]]) -> list[int]:
        self.begun.release()
        self.gate.wait(300)
        self.batches.append([work.payload for work in works])
        if 13 in self.batches[-1]:
            raise ValueError("13")
        return [2 * work.payload for work in works]


def batcher(computer: Computer, **settings: Any) -> Batcher[int]:
    tree = {"max_tokens": 10, "wait_ms": 100, **settings}
    return Batcher(computer, BatchingConfig(**tree), ServerMetrics())


def work(value: int, tokens: int = 1, key: object = None, seconds: float = 900) -> Work[int]:
    return Work(value, tokens, time.monotonic() + seconds, key)


def test_waiting_works_share_a_batch_up_to_the_tokens_and_only_with_equal_keys():
    computer = Computer()
    made = batcher(computer)
    futures = [made.submit(work(0))]
    assert computer.begun.acquire(timeout=300)  # the first is taken alone, until the gate opens
    rows = [work(1, 6), work(2, 6), work(3, 4), work(4, key="x"), work(5, 99)]
    futures += [made.submit(one) for one in rows]
    computer.gate.set()
    assert [future.result(300) for future in futures] == [0, 2, 4, 6, 8, 10]
    assert computer.batches == [[0], [1, 3], [2], [4], [5]]
    made.close()


def test_a_work_waits_for_others_no_longer_than_it_may():
    computer = Computer()
    computer.gate.set()
    alone = batcher(computer, wait_ms=500)
    start = time.monotonic()
    assert alone.submit(work(1)).result(300) == 2
    assert time.monotonic() - start > 0.4
    alone.close()
    patient = batcher(computer, wait_ms=900_000)
    first, second = patient.submit(work(2)), patient.submit(work(3, 9))  # enough tokens
    assert (first.result(300), second.result(300)) == (4, 6)
    assert computer.batches == [[1], [2, 3]]
    patient.close()


def test_a_work_that_fails_does_not_fail_its_batch():
    computer = Computer()
    computer.gate.set()
    made = batcher(computer)
    good, wrong = made.submit(work(1)), made.submit(work(13))
    assert good.result(300) == 2
    with pytest.raises(ValueError, match="13"):
        wrong.result(300)
    made.close()


def test_a_work_past_its_deadline_or_given_up_is_not_computed():
    computer = Computer()
    made = batcher(computer, wait_ms=0)
    first = made.submit(work(0))
    assert computer.begun.acquire(timeout=300)
    late, dropped = made.submit(work(1, seconds=0.05)), made.submit(work(2))
    dropped.cancel()
    time.sleep(0.1)
    computer.gate.set()
    assert first.result(300) == 0
    with pytest.raises(HTTPProblem, match="waited longer"):
        late.result(300)
    made.close()
    assert computer.batches == [[0]]


def test_closing_computes_what_waits_and_refuses_what_comes_later():
    computer = Computer()
    made = batcher(computer, wait_ms=900_000)
    futures = [made.submit(work(k)) for k in range(3)]
    computer.gate.set()
    made.close()
    assert [future.result(0) for future in futures] == [0, 2, 4]
    with pytest.raises(HTTPProblem, match="stopping"):
        made.submit(work(4))


def test_works_that_wait_end_at_once_when_the_thread_ends():
    gate = threading.Event()

    def end(works: Sequence[Work[int]]) -> list[int]:
        gate.wait(300)
        raise SystemExit("the device is lost")

    made = Batcher(end, BatchingConfig(max_tokens=1, wait_ms=0), ServerMetrics())
    assert made.problem == ""
    futures = [made.submit(work(k)) for k in range(3)]
    cancelled = made.submit(work(3))
    cancelled.cancel()
    gate.set()
    for future in futures:
        with pytest.raises(HTTPProblem, match=r"\(the device is lost\); restart it") as caught:
            future.result(300)
        assert caught.value.status == 503
    assert cancelled.cancelled() and "the device is lost" in made.problem
    with pytest.raises(HTTPProblem, match="restart it"):
        made.submit(work(4))
    made.close()


def test_a_work_that_is_given_up_while_it_is_computed_ends_no_other():
    computer = Computer()
    made = batcher(computer, wait_ms=0)
    first = made.submit(work(1))
    assert computer.begun.acquire(timeout=300)
    assert first.cancel()
    computer.gate.set()
    assert made.submit(work(2)).result(300) == 4
    assert computer.batches == [[1], [2]] and made.problem == ""
    made.close()
