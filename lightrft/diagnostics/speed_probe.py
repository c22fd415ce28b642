"""Expected time of a step, scaled up from a few answers and one micro-batch of the real model, whose log-probs are compared with the
engine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.memory.phases import Lengths
from lightrft.diagnostics.step_workload import forwards
from lightrft.engines.base import Engine
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.rollout.collate import collate
from lightrft.rollout.logprob_check import Agreement, agreement, batch_of, compared
from lightrft.types import Prompt, Request, Rollout
from lightrft.workers.local import local_policy

T = TypeVar("T")
ANSWERS, FEW, REPEATS = 8, 2, 2


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a step, part by part, and from where to where it may well be. ``agreement`` compares the engine's log-probs with the
    model's, where a token was sampled that can be compared; ``layout`` says why the model fell back to another one, if it did."""

    drawing: float
    forward: float
    update: float
    low: float
    high: float
    agreement: Agreement | None
    layout: str

    @property
    def total(self) -> float:
        return self.drawing + self.forward + self.update


@dataclass(frozen=True, slots=True)
class Drawing:
    """A decoding step of w answers takes ``each + row x w`` seconds."""

    each: float
    row: float

    @staticmethod
    def of(few: tuple[float, list[Rollout]], many: tuple[float, list[Rollout]]) -> Drawing:
        """From seconds and answers of a narrow call and of a wide one. Where the wide one was no slower, a row costs nothing."""
        (few_seconds, few_width), (many_seconds, many_width) = (_per_step(*call) for call in (few, many))
        row = max(0.0, many_seconds - few_seconds) / max(1e-9, many_width - few_width)
        return Drawing(max(0.0, many_seconds - row * many_width), row)

    def seconds(self, rows: int, mean: float, longest: float, width: int) -> float:
        """Of ``rows`` answers of ``mean`` tokens, the longest of ``longest``, at most ``width`` at one time."""
        return self.each * max(longest, rows * mean / width) + self.row * rows * mean


def expected(config: RLConfig, prompts: list[Prompt], tokenizer: Any, lengths: Lengths) -> Expected:
    """Load the policy, draw ``FEW`` and ``ANSWERS`` answers, run the latter forward alone and forward with backward, and take an optimizer
    step that changes nothing; each ``REPEATS`` times, all in one process.

    Drawing goes by the number of answers at one time (``Drawing``), with lengths as they were drawn. Passes (``workload.forwards``)
    are scaled by tokens, and models of other roles count as the policy does. The lower end has a wider call cost nothing more, the
    upper one every answer as long as it may be, and the slowest repeat.
    """
    alone = StrategyConfig(device=config.strategy.device)
    strategy, actor, engine = local_policy(config.model, alone, config.engine, tokenizer)
    state = strategy.prepare(actor, OptimizerConfig(lr=0.0), 1)
    device = strategy.device
    samples = min(lengths.samples, ANSWERS)
    some = [Request(p, seed=s, sample=s) for p in prompts[: max(1, ANSWERS // samples)] for s in range(samples)]
    narrow, drawn = _drawn(engine, some[:FEW], config, device), _drawn(engine, some, config, device)
    engine.close()
    rollouts = drawn[-1][1]
    layout, agrees = _agreement(actor, rollouts, config)
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        rollout.reward = 0.0
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    batch = collate(list(groups.values()))
    parts = [batch.select(i).to(device) for i in micro_batches(batch, config.train.micro_batch_tokens, actor.layout)]

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                actor.score(part)

    def update() -> None:
        actor.train()
        for number, part in enumerate(parts, start=1):
            strategy.backward(state, actor.score(part).logprobs.sum(), last=number == len(parts))
        actor.eval()

    ahead, back, step = (
        [_timed(does, device)[0] for _ in range(REPEATS)] for does in (forward, update, lambda: strategy.step(state))
    )
    rows, tokens = lengths.groups * lengths.samples, sum(len(r) for r in rollouts)
    passes, times = list(forwards(config)), rows / len(rollouts)
    plain, trained = (sum(f.passes for f in passes if f.gradient is wanted) for wanted in (False, True))
    steps = config.train.updates * config.train.mini_batches

    def passing(which: Callable[[list[float]], float], longer: float = 1.0) -> tuple[float, float]:
        scale = times * longer
        return which(ahead) * scale * plain, which(back) * scale * trained + which(step) * steps

    mean, longest, width = tokens / len(rollouts), max(len(r) for r in rollouts), min(rows, config.engine.max_rows)
    speed = Drawing.of(min(narrow, key=_seconds), min(drawn, key=_seconds))
    slow = Drawing.of(min(narrow, key=_seconds), max(drawn, key=_seconds))
    drawing, (scored, learned) = speed.seconds(rows, mean, longest, width), passing(min)
    most = slow.seconds(rows, lengths.answer, lengths.answer, width) + sum(passing(max, lengths.answer / max(1.0, mean)))
    least = min(drawing, min(map(_seconds, drawn)))
    return Expected(drawing, scored, learned, least + scored + learned, max(most, drawing + scored + learned), agrees, layout)


def _agreement(actor: Actor, rollouts: list[Rollout], config: RLConfig) -> tuple[str, Agreement | None]:
    """Settle the layout as a run does, then compare the log-probs of ``rollouts`` with the model's own."""
    batch = batch_of(rollouts)
    reason = actor.check_layout(batch) if config.model.check_layout else ""
    found = compared(actor, batch, config.sampling, None)
    return reason, None if found is None else agreement(actor, found, config.sampling, None)


def _drawn(engine: Engine, some: list[Request], config: RLConfig, device: torch.device) -> list[tuple[float, list[Rollout]]]:
    return [_timed(lambda: list(engine.generate(some, config.sampling)), device) for _ in range(REPEATS)]


def _seconds(call: tuple[float, Any]) -> float:
    return call[0]


def _per_step(seconds: float, rollouts: list[Rollout]) -> tuple[float, float]:
    """Seconds of a decoding step, and answers in it on average."""
    steps = max(1, *(len(r) for r in rollouts))
    return seconds / steps, sum(len(r) for r in rollouts) / steps


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds, once what was asked of the device is done, and the result."""
    began = time.perf_counter()
    result = work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began, result
