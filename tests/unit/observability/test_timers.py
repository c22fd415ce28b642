from types import SimpleNamespace

import pytest
import torch

from lightrft.observability.timers import Timers, queued_is_done, tokens_per_second


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_nest_and_what_no_phase_took_is_other():
    clock = Clock()
    timers = Timers(clock=clock)
    for _ in range(2):
        with timers("update"):
            clock.now += 1
            with timers("forward"):
                clock.now += 2
    clock.now += 0.5
    assert timers.take().compute() == {
        "time/update/forward": 4.0,
        "time/update": 6.0,
        "time/other": 0.5,
        "time/step": 6.5,
    }
    assert timers.take().compute() == {"time/other": 0.0, "time/step": 0.0}


def test_a_phase_that_raises_is_charged_and_closed():
    clock = Clock()
    timers = Timers(clock=clock)
    with pytest.raises(ZeroDivisionError), timers("reward"):
        clock.now += 3
        raise ZeroDivisionError
    assert timers.take().compute()["time/reward"] == 3.0


def test_queued_work_is_charged_to_the_phase_that_queued_it():
    clock = Clock()

    def wait():
        clock.now += 5

    timers = Timers(synchronize=wait, clock=clock)
    with timers("update"):
        pass
    assert timers.seconds("update") == 5


@pytest.mark.parametrize("in_use", [True, False])
def test_a_device_is_waited_for_where_one_is_in_use(monkeypatch, in_use):
    waits = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(
        torch.accelerator,
        "current_stream",
        lambda: SimpleNamespace(synchronize=lambda: waits.append(1)),
    )
    with Timers(queued_is_done)("update"):
        pass
    assert len(waits) == in_use


def test_an_open_phase_cannot_be_taken():
    timers = Timers()
    with timers("a"), timers("b"), pytest.raises(RuntimeError, match="a/b"):
        timers.take()


def test_throughput_of_no_time_is_zero():
    assert (tokens_per_second(10, 2.0), tokens_per_second(10, 0.0)) == (5.0, 0.0)
