"""Estimate the time of a step from a few responses and one micro-batch of the real model.

The log-probs of that micro-batch are compared with those of the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.memory.phases import Lengths
from lightrft.engines.base import Engine
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.models.attention.layout_check import check_layout
from lightrft.rollout.collate import collate
from lightrft.rollout.logprob_check import Agreement, agreement, batch_of, compare_logprobs
from lightrft.strategy.base import Strategy, TrainState
from lightrft.trainer.explanation.step_workload import forward_passes
from lightrft.types import Prompt, Request, Rollout
from lightrft.workers.local import local_policy

T = TypeVar("T")
ANSWERS, FEW, REPEATS = 8, 2, 2


@dataclass(frozen=True, slots=True)
class StepTimeEstimate:
    """Estimated seconds of each part of a step, with a lower and an upper bound of the total.

    ``agreement`` compares log-probs of engine and model. It is None if no sampled token can be
    compared. ``layout`` is the reason why the model fell back to another layout, or "".
    """

    drawing: float
    forward: float
    update: float
    low: float
    high: float
    agreement: Agreement | None
    layout: str

    @property
    def total(self) -> float:
        """The estimated seconds of a step."""
        return self.drawing + self.forward + self.update


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """A model of generation: a decoding step of w responses takes ``each + row * w`` seconds."""

    each: float
    row: float

    @staticmethod
    def of(few: tuple[float, list[Rollout]], many: tuple[float, list[Rollout]]) -> GenerationTiming:
        """Fit the model to the seconds and responses of a narrow and a wide call.

        If the wide call was not slower, ``row`` is 0.
        """
        few_seconds, few_width = _per_step(*few)
        many_seconds, many_width = _per_step(*many)
        # Noise may make the wide call the faster one, and both calls may have the same width.
        row = max(0.0, many_seconds - few_seconds) / max(1e-9, many_width - few_width)
        return GenerationTiming(max(0.0, many_seconds - row * many_width), row)

    def seconds(self, rows: int, mean: float, longest: float, width: int) -> float:
        """Return the seconds for a set of responses.

        Args:
            rows: number of responses.
            mean: mean length, in tokens.
            longest: length of the longest response, in tokens.
            width: maximum number of concurrent responses.
        """
        # There are at least as many decoding steps as tokens in the longest response, and more if
        # rows wait for a free place.
        steps = max(longest, rows * mean / width)
        return self.each * steps + self.row * rows * mean


def expected(
    config: RLConfig, prompts: list[Prompt], tokenizer: Any, lengths: Lengths
) -> StepTimeEstimate:
    """Measure the real model and scale the time to a full step.

    The policy is loaded in one process. It generates ``FEW`` and ``ANSWERS`` responses. The latter
    run forward, then forward and backward, and an optimizer step with learning rate 0. Each is
    repeated ``REPEATS`` times.

    Generation scales with the number of concurrent responses (``GenerationTiming``), at the sampled
    lengths. Passes (``step_workload.forwards``) scale with tokens. Models of other roles count like
    the policy. The lower bound assumes that a wider call costs nothing more. The upper bound
    assumes responses of maximum length and the slowest repeat.

    Args:
        config: settings of the run.
        prompts: some prompts of the data.
        tokenizer: tokenizer of the policy.
        lengths: lengths and number of responses of a step.
    """
    alone = StrategyConfig(device=config.strategy.device)
    asked = config.engine
    if asked.url is not None:
        # without updates, nothing is read from a folder; and passes need the weights of the policy
        asked = asked.model_copy(update={"weights_dir": None, "check_logprobs": True})
    # a run that trains sends its own weights first
    strategy, actor, engine = local_policy(
        config.model, alone, asked, tokenizer, trains=False, compares=False
    )
    state = strategy.prepare(actor, OptimizerConfig(lr=0.0), 1)  # lr 0 keeps the weights
    some = _requests(prompts, min(lengths.samples, ANSWERS))
    narrow = _drawn(engine, some[:FEW], config, strategy.device)
    wide = _drawn(engine, some, config, strategy.device)
    engine.close()  # frees the cache, which a training step does not have
    _, rollouts = wide[-1]
    # Before passes are timed, since it may change the layout in which they run.
    layout, agrees = _agreement(actor, rollouts, config)
    times = _timed_passes(strategy, state, actor, rollouts, config)

    rows = lengths.groups * lengths.samples
    width = min(rows, config.engine.max_num_seqs)
    token_counts = [len(rollout) for rollout in rollouts]
    mean = sum(token_counts) / len(rollouts)
    # The first repeat may compile kernels, which a long run does once.
    fastest = min(wide, key=_seconds)
    speed = GenerationTiming.of(min(narrow, key=_seconds), fastest)
    drawing = speed.seconds(rows, mean, max(token_counts), width)
    scored, learned = times.of_step(config, rows / len(rollouts), min)
    least = min(drawing, _seconds(fastest))

    slow = GenerationTiming.of(min(narrow, key=_seconds), max(wide, key=_seconds))
    longer = lengths.answer / max(1.0, mean)
    most = slow.seconds(rows, lengths.answer, lengths.answer, width)
    most += sum(times.of_step(config, rows / len(rollouts) * longer, max))
    return StepTimeEstimate(
        drawing,
        scored,
        learned,
        least + scored + learned,
        max(most, drawing + scored + learned),
        agrees,
        layout,
    )


def _requests(prompts: list[Prompt], samples: int) -> list[Request]:
    """Return ``ANSWERS`` requests with ``samples`` responses per prompt."""
    requests = []
    for prompt in prompts[: max(1, ANSWERS // samples)]:
        requests += [Request(prompt, seed=sample, sample=sample) for sample in range(samples)]
    return requests


@dataclass(frozen=True, slots=True)
class _PassTimes:
    """Seconds of each repeat of a forward pass, a training pass and an optimizer step."""

    forward: list[float]
    update: list[float]
    step: list[float]

    def of_step(
        self,
        config: RLConfig,
        scale: float,
        choose: Callable[[list[float]], float],
    ) -> tuple[float, float]:
        """Return the seconds of the passes of a step without and with gradient.

        Args:
            config: Settings of the run.
            scale: Tokens of a step per token of the measured passes.
            choose: Selects one of the repeats.
        """
        passes: Counter[bool] = Counter()
        for each in forward_passes(config):
            passes[each.gradient] += each.passes
        steps = config.train.ppo_epochs * config.train.num_mini_batches
        scored = choose(self.forward) * scale * passes[False]
        learned = choose(self.update) * scale * passes[True] + choose(self.step) * steps
        return scored, learned


def _timed_passes(
    strategy: Strategy,
    state: TrainState,
    actor: Actor,
    rollouts: list[Rollout],
    config: RLConfig,
) -> _PassTimes:
    """Run the passes over ``rollouts``, ``REPEATS`` times each.

    Args:
        strategy: Runs backward passes and optimizer steps.
        state: The policy with its optimizer.
        actor: The policy.
        rollouts: Responses of one step.
        config: Settings of the run.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        rollout.reward = 0.0  # collating needs one, and its value costs no time
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    batch = collate(list(groups.values()))
    indices = micro_batches(batch, config.train.micro_batch_tokens, actor.layout)
    parts = [batch.select(index).to(strategy.device) for index in indices]

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                actor.score(part)

    def update() -> None:
        # Gradient checkpointing applies in training mode only.
        actor.train()
        for number, part in enumerate(parts, start=1):
            loss = actor.score(part).logprobs.sum()
            strategy.backward(state, loss, last=number == len(parts))
        actor.eval()

    def repeated(work: Callable[[], object]) -> list[float]:
        return [_seconds(_timed(work, strategy.device)) for _ in range(REPEATS)]

    return _PassTimes(repeated(forward), repeated(update), repeated(lambda: strategy.step(state)))


def _agreement(
    actor: Actor,
    rollouts: list[Rollout],
    config: RLConfig,
) -> tuple[str, Agreement | None]:
    """Settle the layout as a run does, then compare log-probs of ``rollouts`` with the model's."""
    batch = batch_of(rollouts)
    reason = check_layout(actor, batch) if config.model.check_layout else ""
    found = compare_logprobs(actor, batch, config.sampling, None, engine=config.engine)
    if found is None:
        return reason, None
    return reason, agreement(actor, found, config.sampling, None)


def _drawn(
    engine: Engine,
    some: list[Request],
    config: RLConfig,
    device: torch.device,
) -> list[tuple[float, list[Rollout]]]:
    """Return the seconds and responses of ``REPEATS`` calls of the engine.

    Args:
        engine: Generates.
        some: The requests.
        config: Settings of the run.
        device: Device of the engine.
    """
    calls = []
    for _ in range(REPEATS):
        calls.append(_timed(lambda: list(engine.generate(some, config.sampling)), device))
    return calls


def _seconds(call: tuple[float, object]) -> float:
    return call[0]


def _per_step(seconds: float, rollouts: list[Rollout]) -> tuple[float, float]:
    """Return the seconds of a decoding step, and its mean number of responses."""
    steps = max(1, *(len(r) for r in rollouts))
    return seconds / steps, sum(len(r) for r in rollouts) / steps


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds of ``work``, including queued device work, and its result."""
    began = time.perf_counter()
    result = work()
    # Work on an accelerator is only queued when the call returns.
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began, result
