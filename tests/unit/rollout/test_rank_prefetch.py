"""Parts of a batch that ranks generate ahead of one another."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightrft.algorithms.requirements import Requirements
from lightrft.observability.timers import Timers
from lightrft.roles import Roles
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.collect import collect_rollouts
from lightrft.rollout.rank_prefetch import RankPrefetcher
from lightrft.trainer.rl_step import collect_settings
from lightrft.types import Prompt
from lightrft.utils.errors import GenerationInterrupted, RankError
from tests.unit.rollout.test_collect import (
    SINGLE_PROCESS,
    FakeEngine,
    FakeScorer,
    Prompts,
    Threads,
    config_of,
    of_all_ranks,
    seeds_of,
)


class LoadedEngine(FakeEngine):
    """Counts the versions that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int] = []

    def load_weights(self, weights: Any, version: int) -> dict[str, str]:
        self.versions.append(version)
        return {}


class Stream(Prompts):
    """A stream whose place can be restored. It passes over one row, and fails at prompt number ``fails``."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.unreadable_rows, self.fails, self.sampler = 1, fails, self

    def draw(self, count: int) -> list[Prompt]:
        if self.fails is not None and sum(self.asked) + count > self.fails:
            raise OSError("a row cannot be read")
        return super().draw(count)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": list(self.asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = list(state["asked"])


def prefetched(
    rank: Threads,
    stream: Stream,
    config: Any,
    batches: int = 1,
    stopped: Callable[[], bool] = lambda: False,
) -> list[CollectedRollouts]:
    """The batches that ``rank`` collects from parts that are all queued at once."""
    roles = Roles(SimpleNamespace(ranks=SINGLE_PROCESS), None, LoadedEngine(), FakeScorer(), None)  # type: ignore[arg-type]
    prefetcher = RankPrefetcher(
        roles,
        collect_settings(config, Requirements.of(config.algorithm)),
        stream,
        rank,
        stopped,
    )
    jobs = [prefetcher.submit(batch, 0, {}, None) for batch in range(batches)]
    try:
        return [prefetcher.collect(job, batch)[0] for batch, job in enumerate(jobs)]
    except BaseException:
        prefetcher.rewind_to(jobs[0])
        raise
    finally:
        prefetcher.close()


@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_prefetched_parts_make_the_batch_that_the_ranks_would_collect_together(
    oversample: float,
) -> None:
    over = {
        "rollout": {"max_rounds": 1, "oversample": oversample},
        "algorithm": {"filters": ["zero_variance"]},
    }
    config = config_of(**over)

    def together(rank: Threads) -> list[CollectedRollouts]:
        roles = Roles(SimpleNamespace(ranks=rank), None, LoadedEngine(), FakeScorer(), None)  # type: ignore[arg-type]
        source = Prompts()
        return [
            collect_rollouts(
                roles,
                collect_settings(config, Requirements.of(config.algorithm)),
                step,
                source,
                Timers(),
            )
            for step in range(3)
        ]

    expected = of_all_ranks(together, 2)[0]
    for found in of_all_ranks(lambda rank: prefetched(rank, Stream(), config, batches=3), 2):
        assert [seeds_of(batch.groups) for batch in found] == [
            seeds_of(batch.groups) for batch in expected
        ]
        assert [batch.tokens for batch in found] == [batch.tokens for batch in expected]
        assert [batch.rounds for batch in found] == [1, 1, 1]
        assert [batch.dropped["unreadable"] for batch in found] == [1, 0, 0]


def test_a_rank_that_cannot_read_its_prompts_ends_the_batch_on_all_ranks() -> None:
    def of_rank(rank: Threads) -> str:
        stream = Stream(fails=2 if rank.rank == 1 else None)
        with pytest.raises((OSError, RankError)) as caught:
            prefetched(rank, stream, config_of(rollout={"max_rounds": 1}))
        assert stream.asked == []
        return f"{type(caught.value).__name__}: {caught.value}"

    found = of_all_ranks(of_rank, 2, minutes=1 / 6)
    assert found == [
        "RankError: rank 1: OSError: a row cannot be read",
        "OSError: a row cannot be read",
    ]


def test_a_rank_that_is_asked_to_stop_stops_all_ranks_at_the_same_batch() -> None:
    def of_rank(rank: Threads) -> None:
        stream = Stream()
        with pytest.raises(GenerationInterrupted):
            prefetched(
                rank, stream, config_of(rollout={"max_rounds": 1}), stopped=lambda: rank.rank == 0
            )
        assert stream.asked == []

    of_all_ranks(of_rank, 2, minutes=1 / 6)
