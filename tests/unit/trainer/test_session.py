"""When a run of several processes stops: all of them at once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from lightrft.config import CheckpointConfig
from lightrft.strategy.checkpoint import CheckpointStore
from lightrft.trainer.session import Nobody, Session
from lightrft.utils.run_folder import Elsewhere, RunFolder
from tests.unit.trainer.test_rollout import Threads, of_all_ranks


class Late:
    """Ranks of which this one is asked to stop while it waits for what the others say."""

    rank, size, minutes = 0, 2, 1.0

    def __init__(self) -> None:
        self.session: Session | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.session is not None
        self.session.stop.request("a signal")
        return [value, False]


def test_a_rank_that_is_asked_to_stop_while_others_are_heard_goes_on_as_they_do_and_stops_with_them_the_next_time() -> None:
    ranks = Late()
    ranks.session = Session(None, None, CheckpointConfig(), "rl", Nobody(), ranks=ranks)  # type: ignore[arg-type]
    assert [ranks.session.stopping(), ranks.session.stopping()] == [False, True]


def test_ranks_wait_for_the_one_that_reads_a_checkpoint_again_as_long_as_it_says_that_it_is_at_work(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("lightrft.utils.ranks.PULSES", 1e9)  # a sign whenever one may be given
    monkeypatch.setattr("lightrft.strategy.checkpoint.PART", 16)
    said: list[list[bool]] = [[], []]
    path = RunFolder.open(tmp_path / "run", CheckpointConfig(), resume="auto", overwrite=False).path

    class Counted(Threads):
        def gather(self, value: Any) -> list[Any]:
            if value is False:
                said[self.rank].append(value)
                time.sleep(0.001)
            return super().gather(value)

    def saved_and_taken_up(ranks: Threads) -> tuple[int, dict[str, Any], dict[str, Any]]:
        counted = Counted(ranks.rank, ranks.meeting, ranks.told, 4.0)
        folder = Elsewhere(path, fresh=False, checkpoint=None)
        store = CheckpointStore(path / "checkpoints", 1)
        session = Session(folder, store, CheckpointConfig(), "rl", Nobody(), SimpleNamespace(), ranks=counted)  # type: ignore[arg-type]
        strategy: Any = SimpleNamespace(device=torch.device("cpu"))
        session.save(3, strategy, {}, {"much": "x" * 4096}, {})
        said[ranks.rank].append(True)
        return session.resume(strategy, {})

    found = of_all_ranks(saved_and_taken_up, 2)
    assert [(step, state) for step, state, _ in found] == [(3, {"much": "x" * 4096})] * 2
    assert said[1] == [True]
    at = said[0].index(True)
    assert at and len(said[0]) > at + 1
