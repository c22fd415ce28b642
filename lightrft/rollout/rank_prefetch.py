"""Generate this rank's part of coming batches in a background thread.

The thread starts its part of the next batch without waiting for ranks that still finish the current
one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from torch import Tensor

from lightrft.config.rollout import RolloutConfig
from lightrft.distributed.process_group import ProcessGroup, run_with_keepalive
from lightrft.engines.base import Engine
from lightrft.observability.timers import Timers, queued_is_done
from lightrft.roles import Roles
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.collect import (
    CollectSettings,
    RankGroups,
    Round,
    admit,
    check_scored,
    places_of,
    plan_round,
    unpack_groups,
)
from lightrft.rollout.generation import generate_and_score
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.weight_probe import WeightProbe, load_checked
from lightrft.types import Rollout
from lightrft.utils.errors import GenerationInterrupted
from lightrft.utils.state_io import State

LOOK_SECONDS = 0.02
"""Seconds between two polls for the finished part."""


def can_prefetch_per_rank(rollout: RolloutConfig, engine: Engine, ranks: ProcessGroup) -> bool:
    """Return whether a rank can start a batch before the batch ahead of it is complete.

    This requires that the prompts of a batch do not depend on earlier batches.

    Args:
        rollout: The settings ``rollout``.
        engine: The engine of this rank.
        ranks: The process group that generates.
    """
    conditions = (
        rollout.max_rounds == 1,
        rollout.curriculum is None,
        not rollout.partial,
        # Ranks that share an engine or a model must generate the same batch at the same time.
        engine.tensor_parallel_size == 1,
        not engine.shared_by_all_ranks,
        ranks.size > 1,
    )
    return all(conditions)


@dataclass(slots=True)
class RankPart:
    """The part of one batch that this rank has generated and scored.

    Attributes:
        planned: The requests of all ranks.
        groups: The scored groups of this rank.
        unreadable: Number of unreadable prompts that the batch skipped.
        timers: Seconds of generation and scoring.
        idle: Seconds that the thread was idle before this part.
    """

    planned: Round
    groups: list[list[Rollout]]
    unreadable: int
    timers: Timers
    idle: float


@dataclass(slots=True, eq=False)
class PrefetchJob:
    """A part of a batch that was queued.

    Attributes:
        future: The finished part.
        before: State of the prompt sampler before the batch. ``None`` until the part is started.
    """

    future: Future[RankPart] = field(default_factory=Future)
    before: State | None = None


class RankPrefetcher:
    """Generates parts of batches in the order of the calls of ``submit``.

    It stops when one of them fails or ``stopped`` returns true.

    Args:
        roles: The engine and the scorer.
        settings: Decide which groups are collected.
        stream: Source of prompts.
        ranks: The process group that generates.
        stopped: Returns true when the run must stop.
    """

    def __init__(
        self,
        roles: Roles,
        settings: CollectSettings,
        stream: PromptStream,
        ranks: ProcessGroup,
        stopped: Callable[[], bool],
    ) -> None:
        self._roles, self._settings, self._stream = roles, settings, stream
        self._ranks, self._stopped = ranks, stopped
        self._loaded = -1
        self._moves = 0
        self._ended = 0.0
        self._jobs: list[PrefetchJob] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generation prefetch")

    def submit(
        self, batch: int, version: int, weights: Mapping[str, Tensor], probe: WeightProbe | None
    ) -> PrefetchJob:
        """Queue this rank's part of a batch and return it at once.

        Args:
            batch: Index of the batch.
            version: Version of ``weights``.
            weights: Weights to generate with.
            probe: Probe that the engine responds to first. ``None`` for none.
        """
        job = PrefetchJob()
        self._jobs = [j for j in self._jobs if not j.future.done()] + [job]
        self._worker.submit(self._run, job, batch, version, weights, probe)
        return job

    def collect(self, job: PrefetchJob, batch: int) -> tuple[CollectedRollouts, RankPart]:
        """Exchange the parts of ``batch`` between ranks; return its groups and this rank's part.

        Every rank must call it.

        Raises:
            GenerationInterrupted: If ``stopped`` interrupted generation.
            RewardError: If every response failed to be scored.
        """

        def finished(keep_alive: Callable[[], None]) -> RankGroups:
            part = self._wait_for(job, keep_alive)
            return RankGroups.of(places_of(self._ranks, len(part.planned.requests)), part.groups)

        parts = run_with_keepalive(self._ranks, finished)
        part = job.future.result()
        groups = unpack_groups(parts, part.planned.requests)
        if part.planned.limit is not None:
            part.planned.limit.count_in_order(range(len(groups)), groups)
        collected = CollectedRollouts()
        admit(collected, part.planned, groups, self._settings.rollout)
        check_scored(collected.rollouts, f"of step {batch + 1}")
        collected.settle(part.unreadable)
        return collected, part

    def rewind_to(self, job: PrefetchJob) -> None:
        """Rewind the stream to the start of ``job``.

        No further call of ``submit`` may follow, and ``stopped`` must return true.
        """
        wait([j.future for j in self._jobs])
        if job.before is not None:
            self._stream.sampler.load_state_dict(job.before)

    def close(self) -> None:
        """End the thread; ``stopped`` must return true."""
        self._worker.shutdown(wait=True)

    def _wait_for(self, job: PrefetchJob, keep_alive: Callable[[], None]) -> RankPart:
        """Wait for a part, and call ``keep_alive`` whenever generation has advanced."""
        seen = -1
        while not job.future.done():
            now = self._moves
            if now != seen:
                seen = now
                keep_alive()
            wait([job.future], LOOK_SECONDS)
        return job.future.result()

    def _run(
        self,
        job: PrefetchJob,
        batch: int,
        version: int,
        weights: Mapping[str, Tensor],
        probe: WeightProbe | None,
    ) -> None:
        try:
            job.future.set_result(self._generate(job, batch, version, weights, probe))
        except BaseException as error:
            # ``collect`` raises it in the thread that waits, which would else wait forever.
            job.future.set_exception(error)

    def _generate(
        self,
        job: PrefetchJob,
        batch: int,
        version: int,
        weights: Mapping[str, Tensor],
        probe: WeightProbe | None,
    ) -> RankPart:
        began, timers = time.perf_counter(), Timers(queued_is_done)
        idle = began - self._ended if self._ended else 0.0
        if self._stopped():
            raise GenerationInterrupted
        stream, engine = self._stream, self._roles.engine
        # Before the batch takes its prompts, so that ``rewind_to`` can give them back.
        job.before = stream.sampler.state_dict()
        planned = plan_round(self._settings, batch, stream, CollectedRollouts(), deque())
        assert planned is not None  # the first round of a step always needs prompts
        unreadable, stream.unreadable_rows = stream.unreadable_rows, 0
        if self._loaded != version:
            load_checked(engine, weights, version, self._settings.engine.check_logprobs)
            self._loaded = version
        if probe is not None:
            probe.ask(engine)
        asked = [planned.requests[i] for i in places_of(self._ranks, len(planned.requests))]
        # Every group is finished: the order of groups, not time, determines which of them are used.
        groups = generate_and_score(
            engine,
            self._roles.scorer,
            asked,
            self._settings.sampling,
            timers,
            self._stopped,
            keep_alive=self._move,
        )
        self._ended = time.perf_counter()
        return RankPart(planned, groups, unreadable, timers, idle)

    def _move(self) -> None:
        # Without a lock: one thread writes, and the reader only asks whether it has changed.
        self._moves += 1
