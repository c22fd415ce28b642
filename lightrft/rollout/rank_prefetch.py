"""What one rank draws of batches to come, in a thread of its own: it goes from its share of one batch to that of the next without
waiting for the ranks that still draw the tail of the first."""

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
"""Between two looks at whether the share is there."""


def goes_on_alone(config: RLConfig, engine: Engine, ranks: Ranks) -> bool:
    """Whether the prompts of a batch are known before the batch ahead of it is, so that ranks need not wait for it."""
    rollout = config.rollout
    settled = rollout.max_rounds == 1 and rollout.curriculum is None and not rollout.partial
    return settled and ranks.size > 1 and engine.together == 1 and not engine.of_all


class Share:
    """This rank's share of one batch, drawn and scored elsewhere. Whoever collects the batch takes it for the source of its prompts,
    for an engine and for a scorer."""

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
        """The prompts of all ranks."""
        return self.prompts.result()

    def settle(self, collected: Collected) -> None:
        if self.lost:
            collected.dropped["unreadable"] += self.lost
        collected.finished, collected.carried, collected.begun = [], [], []

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """What is drawn, once all of it is; until then ``stopped`` is asked whenever the drawing has come further."""
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
    """Draws the shares of batches in the order in which they are asked for, until one of them fails or ``stopped`` turns true."""

    def __init__(self, roles: Roles, config: RLConfig, stream: PromptStream, ranks: Ranks, stopped: Callable[[], bool]) -> None:
        self._roles, self._config, self._stream, self._ranks, self._stopped = roles, config, stream, ranks, stopped
        self._loaded = -1
        self._moves = 0
        self._ended = 0.0
        self._asked: list[Share] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generation share")

    def ask(self, batch: int, version: int, weights: Mapping[str, Tensor], probe: WeightProbe | None) -> Share:
        """This rank's share of ``batch``, to be drawn by ``weights``, which are ``version``, once the engine has answered ``probe``."""
        share = Share(lambda: self._moves)
        self._asked = [s for s in self._asked if not s.drawn.done()] + [share]
        self._worker.submit(self._draw, share, batch, version, weights, probe)
        return share

    def back_to(self, share: Share) -> None:
        """Have the stream stand where ``share`` began. Nothing may be asked for any more, and ``stopped`` must be true."""
        wait([s.drawn for s in self._asked])
        if share.before is not None:
            self._stream.sampler.load_state_dict(share.before)

    def close(self) -> None:
        """End the thread; ``stopped`` must be true."""
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
        """Those of all ranks, as ``collect`` will ask for them."""
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
