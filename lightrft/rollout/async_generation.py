"""Generate batches in a background thread while the policy trains, at bounded staleness.

Version max(0, n - staleness) of the policy generates batch n, whatever the timing. Speed decides
which side waits, never the content of a batch. So every run, also a resumed one, gives the same
numbers.

Every rank generates in a background thread. These threads communicate through a separate process
group. When one of them stops or fails, all stop at the same batch. If a batch does not depend on
the batch before it, a rank generates its part in a third thread. That thread does not wait for
other ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from lightrft.distributed.process_group import peer_failed, run_on_all_ranks, run_with_keepalive
from lightrft.observability.metrics import Max, Mean, Metrics, Sum
from lightrft.observability.timers import Timers, queued_is_done
from lightrft.roles import Roles
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.collect import CollectSettings, collect_rollouts
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.rank_prefetch import PrefetchJob, RankPrefetcher, can_prefetch_per_rank
from lightrft.rollout.serialization import pack_collected, unpack_collected
from lightrft.rollout.weight_probe import WeightProbe, load_checked
from lightrft.types import Batch, Rollout
from lightrft.utils.errors import GenerationInterrupted
from lightrft.utils.state_io import State

log = logging.getLogger(__name__)

Weights = dict[str, Tensor]


@dataclass(slots=True)
class GeneratedBatch:
    """One generated batch.

    Attributes:
        collected: The groups and token counts.
        metrics: ``time/ahead/...``, the seconds of the generation thread. They overlap the training
            time.
        probe: Compares engine and policy, as the policy was when the batch was taken.
    """

    collected: CollectedRollouts
    metrics: Metrics = field(default_factory=Metrics)
    probe: WeightProbe | None = None


@dataclass(slots=True)
class _Job:
    version: int
    future: Future[GeneratedBatch]
    probe: WeightProbe | None = None


class AsyncGenerator:
    """Generates up to ``rollout.staleness`` batches ahead of training, in order.

    The background thread owns ``roles.async_engine``, ``roles.scorer`` and ``stream`` while it
    generates. ``wait_until_idle`` waits until it is idle. ``take`` raises any error of the thread,
    with the thread's traceback. Later batches are then not generated, and ``stream`` is rewound to
    the start of the failed batch.

    Args:
        roles: The models, ``async_engine`` and the scorer.
        settings: Decide which groups are collected.
        stream: Source of prompts.
        steps: Number of steps of the run.
        stopped: Returns true when the run must stop.

    Raises:
        ValueError: If ``roles.async_engine`` is missing.
    """

    def __init__(
        self,
        roles: Roles,
        settings: CollectSettings,
        stream: PromptStream,
        steps: int,
        stopped: Callable[[], bool],
    ) -> None:
        if roles.async_engine is None:
            raise ValueError(
                "roles.async_engine is missing: generation during training needs an engine with "
                "separate weights"
            )
        self._engine, self._weights = roles.async_engine, roles.weights
        self._trained = frozenset(
            name for name, p in roles.actor.model.named_parameters() if p.requires_grad
        )
        self._roles, self._settings = replace(roles, engine=roles.async_engine), settings
        self._stream, self._steps = stream, steps
        self._staleness, self._stopped = settings.rollout.staleness, stopped
        self._check_logprobs = settings.engine.check_logprobs
        # A separate group: two threads must not interleave collective calls on one.
        self._ranks = roles.async_process_group or roles.strategy.ranks
        self._jobs: dict[int, _Job] = {}
        self._snapshots: dict[int, Weights] = {}
        self._loaded = -1
        self._ended = 0.0
        self._halted = self._closing = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._prefetcher: RankPrefetcher | None = None
        if can_prefetch_per_rank(settings.rollout, roles.async_engine, self._ranks):
            self._prefetcher = RankPrefetcher(
                self._roles, settings, stream, self._ranks, self._over
            )

    def start(self, step: int, state: State) -> None:
        """Start to generate for a run at ``step``, from a state that ``state_dict`` returned.

        Args:
            step: Number of completed steps.
            state: The state at that step; empty for a new run.
        """
        self._snapshots = {
            version: dict(weights) for version, weights in state.get("weights", {}).items()
        }
        finished = state.get("finished", [])
        for batch in range(step, min(step + self._staleness, self._steps)):
            index = batch - step
            if index >= len(finished):
                self._submit(batch, step)
                continue
            collected = unpack_collected(finished[index], self._stream.named)
            done: Future[GeneratedBatch] = Future()
            done.set_result(GeneratedBatch(collected))
            self._jobs[batch] = _Job(step, done)

    def take(self, step: int, timers: Timers) -> GeneratedBatch:
        """Return the batch of ``step`` and submit a later one.

        The later batch is generated with the current policy, which is version ``step``.

        Args:
            step: Number of completed steps.
            timers: Record the time of waiting and of copying weights.

        Raises:
            RuntimeError: If the batch is more than ``rollout.staleness`` versions old.
            ModelError: If the engine generated with other weights than it received.
        """
        with timers("wait"):
            drawn = self._jobs[step].future.result()
        self._refuse([self._jobs[step]])
        versions = chain.from_iterable(r.versions for r in drawn.collected.rollouts)
        # Without tokens there is nothing stale.
        newest = max(versions, default=step)
        if step - newest > self._staleness:
            raise RuntimeError(
                f"step {step} was generated by version {newest}, more than rollout.staleness = "
                f"{self._staleness} behind: the engine did not take over the weights that it was "
                "given"
            )
        del self._jobs[step]
        with timers("weights"):
            later = step + self._staleness
            if later < self._steps:
                groups = drawn.collected.groups or [drawn.collected.rollouts]
                drawn.probe = self._submit(later, step, groups)
            # A snapshot is a full copy of the trained weights, so keep no more than are waited for.
            needed = {job.version for job in self._jobs.values()}
            self._snapshots = {v: weights for v, weights in self._snapshots.items() if v in needed}
        return drawn

    def wait_until_idle(self) -> None:
        """Wait until the thread has generated every submitted batch."""
        wait([job.future for job in self._jobs.values()])

    def state_dict(self, step: int) -> State:
        """Return finished batches not trained on yet, and the weights for missing ones.

        Waits for batches in progress. If the run was asked to stop, these are interrupted, and the
        resumed run generates them again.

        Raises:
            ModelError: If the engine generated with other weights than it received.
        """
        self.wait_until_idle()
        self._refuse(self._jobs.values())
        finished: list[State] = []
        missing: set[int] = set()
        for job in self._jobs.values():
            if job.future.exception() is None:
                finished.append(pack_collected(job.future.result().collected))
            else:
                missing.add(job.version)
        # The checkpoint has the weights of ``step`` already.
        missing.discard(step)
        weights = {version: self._snapshots[version] for version in sorted(missing)}
        return {"finished": finished, "weights": weights}

    def close(self) -> None:
        """Stop generation at the next response and end the thread."""
        self._closing = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _submit(
        self, batch: int, step: int, groups: Sequence[Sequence[Rollout]] = ()
    ) -> WeightProbe | None:
        """Queue ``batch`` for its due version, or for the current one if that is not stored.

        Returns the probe of the current policy for this batch, made of ``groups``.
        """
        version = max(0, batch - self._staleness)
        if version not in self._snapshots:
            version = step
        if version not in self._snapshots:
            self._snapshots[version] = self._copy_weights()
        weights = self._snapshots[version]
        probe = None
        # The trainer can only compute the logits of its current weights.
        if self._check_logprobs and version == step:
            probe = WeightProbe.of(groups, self._settings.sampling, version, self._settings.engine)
        part = None
        if self._prefetcher is not None:
            part = self._prefetcher.submit(batch, version, weights, probe)
        future = self._worker.submit(self._generate, batch, version, weights, part, probe)
        self._jobs[batch] = _Job(version, future, probe)
        return probe

    def _copy_weights(self) -> Weights:
        """Return copies of the trained weights; none on a rank that loads them into no engine.

        Every rank must call it.
        """
        loads = not self._engine.shared_by_all_ranks or self._ranks.rank == 0
        kept = self._trained if loads else frozenset()
        # Copies: the optimizer changes the weights in place while the engine still loads them. A
        # rank without an engine reads all of them too, since reading gathers their shards.
        return {name: w.detach().clone() for name, w in self._weights() if name in kept}

    def _refuse(self, jobs: Collection[_Job]) -> None:
        """Raise ``ModelError`` if the engine generated finished ``jobs`` with wrong weights.

        Every rank must call it.
        """
        probes = [job.probe for job in jobs if job.probe is not None]
        if probes:
            run_on_all_ranks(
                self._roles.strategy.ranks, lambda: [probe.refuse(self._roles) for probe in probes]
            )
            for job in jobs:
                job.probe = None

    def _over(self) -> bool:
        """Return True if generation must stop."""
        # Also when another rank ends: it waits until the batch in progress ends on all ranks.
        return self._halted or self._closing or self._stopped() or peer_failed()

    def _generate(
        self,
        batch: int,
        version: int,
        weights: Weights,
        part: PrefetchJob | None,
        probe: WeightProbe | None,
    ) -> GeneratedBatch:
        # Batches that were queued behind a failed one: the stream was rewound to before them.
        if self._halted:
            raise GenerationInterrupted
        try:
            # All ranks decide alike, so that none waits in a batch that the others do not start.
            if any(self._ranks.gather(self._over())):
                raise GenerationInterrupted
            if self._prefetcher is None or part is None:
                return self._generate_here(batch, version, weights, probe)
            collected, own = self._prefetcher.collect(part, batch)
            return GeneratedBatch(collected, _metrics(own.timers, own.idle))
        except BaseException:
            self._halted = True
            if self._prefetcher is not None and part is not None:
                self._prefetcher.rewind_to(part)
            raise

    def _generate_here(
        self, batch: int, version: int, weights: Weights, probe: WeightProbe | None
    ) -> GeneratedBatch:
        """Generate ``batch`` in this thread."""
        began, timers = time.perf_counter(), Timers(queued_is_done)
        with self._stream.restore_on_error():
            if self._loaded != version:
                load_checked(self._engine, weights, version, self._check_logprobs)
                self._loaded = version
            if probe is not None:
                self._ask(probe)
            collected = collect_rollouts(
                self._roles, self._settings, batch, self._stream, timers, self._over, self._ranks
            )
        idle = began - self._ended if self._ended else 0.0
        self._ended = time.perf_counter()
        return GeneratedBatch(collected, _metrics(timers, idle))

    def _ask(self, probe: WeightProbe) -> None:
        """Generate the probe's tokens on every engine of the run."""
        asks = not self._engine.shared_by_all_ranks or self._ranks.rank == 0
        run_with_keepalive(
            self._ranks, lambda keep_alive: probe.ask(self._engine, keep_alive) if asks else None
        )


def _metrics(timers: Timers, idle: float) -> Metrics:
    metrics = Metrics()
    for name in ("generate", "reward"):
        metrics.add(f"time/ahead/{name}", Sum(timers.seconds(name)))
    metrics.add("time/ahead/idle", Sum(idle))
    return metrics


def staleness_metrics(batch: Batch | None, step: int) -> Metrics:
    """Return how many versions behind ``step`` the trained tokens were sampled."""
    metrics = Metrics()
    if batch is not None and batch.versions is not None and bool(batch.mask.any()):
        behind = (step - batch.versions[batch.mask]).double()
        metrics.add("staleness/mean", Mean(behind.mean()))
        metrics.add("staleness/max", Max(behind.max()))
    return metrics
