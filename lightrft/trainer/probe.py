"""Expected time of a step, scaled up from a few answers and one micro-batch of the real model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightrft.config import RLConfig
from lightrft.strategy.settings import OptimizerConfig
from lightrft.trainer.collate import collate
from lightrft.trainer.launch.local import local_policy
from lightrft.trainer.needs import Lengths
from lightrft.trainer.workload import forwards
from lightrft.types import Prompt, Request, Rollout

T = TypeVar("T")
ANSWERS, REPEATS = 8, 2


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a step, part by part, and from where to where it may well be."""

    drawing: float
    forward: float
    update: float
    low: float
    high: float

    @property
    def total(self) -> float:
        return self.drawing + self.forward + self.update


def expected(config: RLConfig, prompts: list[Prompt], tokenizer: Any, lengths: Lengths) -> Expected:
    """Load the policy, draw ``ANSWERS`` answers, and run them as one micro-batch, forward alone and forward with backward; each
    ``REPEATS`` times.

    Drawing is scaled by tokens at the width of the probe. A step is wider, so that it may be several times faster: the lower end
    takes it for nothing. Passes (``workload.forwards``) are scaled by tokens, and models of other roles count as the policy does.
    The upper end has every answer as long as it may be, and drawing as slow as in the slowest repeat.
    """
    strategy, actor, engine = local_policy(config.model, config.strategy, config.engine, tokenizer)
    state = strategy.prepare(actor, OptimizerConfig(lr=0.0), 1)
    samples = min(lengths.samples, ANSWERS)
    some = [Request(p, seed=s, sample=s) for p in prompts[: max(1, ANSWERS // samples)] for s in range(samples)]
    drawn = [_timed(lambda: list(engine.generate(some, config.sampling))) for _ in range(REPEATS)]
    engine.close()
    rollouts = drawn[-1][1]
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        rollout.reward = 0.0
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    batch = collate(list(groups.values())).to(strategy.device)

    def forward() -> None:
        with torch.no_grad():
            actor.score(batch)

    def update() -> None:
        actor.train()
        strategy.backward(state, actor.score(batch).logprobs.sum(), last=True)
        actor.eval()

    tokens = sum(len(r) for r in rollouts)
    times = lengths.groups * lengths.samples / len(rollouts)
    passes = list(forwards(config))
    ahead, back = (min(_timed(work)[0] for _ in range(REPEATS)) * times for work in (forward, update))
    drawing = [seconds * times for seconds, _ in drawn]
    plain = ahead * sum(f.passes for f in passes if not f.gradient)
    trained = back * sum(f.passes for f in passes if f.gradient)
    longer = lengths.answer * len(rollouts) / max(1, tokens)
    return Expected(min(drawing), plain, trained, plain + trained, (max(drawing) + plain + trained) * longer)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
