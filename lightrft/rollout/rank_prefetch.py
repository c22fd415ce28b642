"""Generate this rank's part of coming batches in a background thread.

The thread starts its part of the next batch without waiting for ranks that still finish the current
one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from lightrft.algorithms.requirements import needs_of
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import Ranks, mine
from lightrft.engines.base import Engine, Fingerprint, never
from lightrft.observability.timers import Timers, queued_is_done
from lightrft.roles import Roles
from lightrft.rollout.accounting import Collected
from lightrft.rollout.collect import requests_for, scored
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.weight_probe import WeightProbe, load_checked
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import Interrupted

LOOK_SECONDS = 0.02
"""Seconds between two polls for the finished part."""


def goes_on_alone(config: RLConfig, engine: Engine, ranks: Ranks) -> bool:
    """Return whether a rank can start a batch before the batch ahead of it is complete.

    This requires that the prompts of a batch do not depend on earlier batches.

    Args:
        config: The settings of the run.
        engine: The engine of this rank.
        ranks: The process group that generates.
    """
    rollout = config.rollout
    settled = rollout.max_rounds == 1 and rollout.curriculum is None and not rollout.partial
    return settled and ranks.size > 1 and engine.together == 1 and not engine.of_all


class Share:
    """The part of one batch that this rank generates and scores in a background thread.

    It implements ``Source``, ``Engine`` and ``Scoring``, so that ``collect`` can exchange finished
    parts between ranks without generating again.
    """

    of_all = False
    together = 1
    shared = False

    def __init__(self, moved: Callable[[], int]) -> None:
        self.prompts: Future[list[Prompt]] = Future()
        self.drawn: Future[list[list[Rollout]]] = Future()
        self.timers = Timers(queued_is_done)
        self.idle = 0.0
        self.lost = 0
        self.carried: list[list[Rollout]] = []
        self.begun: list[list[Rollout]] = []
        self.before: dict[str, Any] | None = None
        self._moved = moved
        self._held: list[Rollout] = []

    def draw(self, count: int) -> list[Prompt]:
        """Return the prompts of all ranks."""
        return self.prompts.result()

    def settle(self, collected: Collected) -> None:
        """Report unreadable prompts; the stream of this rank has no further state to update."""
        if self.lost:
            collected.dropped["unreadable"] += self.lost
        collected.finished, collected.carried, collected.begun = [], [], []

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """Yield the generated responses once all of them exist.

        Args:
            requests: Not used; the part is already defined.
            sampling: Not used.
            stopped: Called whenever generation has advanced.
        """
        seen = -1
        while not self.drawn.done():
            if (now := self._moved()) != seen:
                seen = now
                stopped()
            wait([self.drawn], LOOK_SECONDS)
        for group in self.drawn.result():
            yield from group

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        return {}

    def sleep(self, level: int) -> None:
        return

    def wake(self) -> None:
        return

    def check_sources(self, sources: Iterable[str]) -> None:
        return

    def submit(self, rollout: Rollout) -> None:
        self._held.append(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        while self._held:
            yield self._held.pop(0)

    def close(self) -> None:
        return


class OwnShares:
    """Generates parts of batches in the order of the calls of ``ask``.

    It stops when one of them fails or ``stopped`` returns true.

    Args:
        roles: The engine and the scorer.
        config: The settings of the run.
        stream: Source of prompts.
        ranks: The process group that generates.
        stopped: Returns true when the run must stop.
    """

    def __init__(self, roles: Roles, config: RLConfig, stream: PromptStream, ranks: Ranks, stopped: Callable[[], bool]) -> None:
        self._roles, self._config, self._stream, self._ranks, self._stopped = roles, config, stream, ranks, stopped
        self._loaded = -1
        self._moves = 0
        self._ended = 0.0
        self._asked: list[Share] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generation share")

    def ask(self, batch: int, version: int, weights: Mapping[str, Tensor], probe: WeightProbe | None) -> Share:
        """Queue this rank's part of a batch and return it at once.

        Args:
            batch: Index of the batch.
            version: Version of ``weights``.
            weights: Weights to generate with.
            probe: Probe that the engine responds to first. ``None`` for none.
        """
        share = Share(lambda: self._moves)
        self._asked = [s for s in self._asked if not s.drawn.done()] + [share]
        self._worker.submit(self._draw, share, batch, version, weights, probe)
        return share

    def back_to(self, share: Share) -> None:
        """Rewind the stream to the start of ``share``.

        No further call of ``ask`` may follow, and ``stopped`` must return true.
        """
        wait([s.drawn for s in self._asked])
        if share.before is not None:
            self._stream.sampler.load_state_dict(share.before)

    def close(self) -> None:
        """End the thread; ``stopped`` must return true."""
        self._worker.shutdown(wait=True)

    def _draw(self, share: Share, batch: int, version: int, weights: Mapping[str, Tensor], probe: WeightProbe | None) -> None:
        try:
            began = time.perf_counter()
            share.idle = began - self._ended if self._ended else 0.0
            asked = self._requests(share, batch)
            if self._loaded != version:
                load_checked(self._roles.engine, weights, version, self._config.engine.check_logprobs)
                self._loaded = version
            if probe is not None:
                probe.ask(self._roles.engine)
            drawn = scored(
                self._roles.engine,
                self._roles.scorer,
                mine(asked, self._ranks),
                self._config.sampling,
                share.timers,
                self._stopped,
                sign=self._move,
            )
            self._ended = time.perf_counter()
            share.drawn.set_result(drawn)
        except BaseException as error:
            for future in (share.prompts, share.drawn):
                if not future.done():
                    future.set_exception(error)

    def _requests(self, share: Share, batch: int) -> Sequence[Sequence[Request]]:
        """Return the requests of all ranks, as ``collect`` will build them."""
        if self._stopped():
            raise Interrupted
        config, stream = self._config, self._stream
        share.before = stream.sampler.state_dict()
        prompts = stream.draw(math.ceil(config.rollout.prompts * config.rollout.oversample))
        share.lost, stream.lost = stream.lost, 0
        share.prompts.set_result(prompts)
        greedy = "greedy" in needs_of(config.algorithm)
        return requests_for(prompts, config.rollout.samples, config.run.seed, batch, 0, greedy=greedy)

    def _move(self) -> None:
        self._moves += 1
