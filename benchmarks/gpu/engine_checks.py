"""Checks of an engine against a transformers model with the same weights, for the scripts of this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common  # first: it says where the rest lies
import torch

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine
from lightrft.types import Prompt, Request, Rollout

HALF = 0.05
"""Mean difference of log-probs, in nats, that bfloat16 explains."""


@dataclass
class Found:
    """What was measured, and what is wrong by check. Each number is printed at once.

    ``limit`` is the mean difference of log-probs, in nats, above which a comparison is wrong.
    """

    limit: float = HALF
    numbers: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        self.numbers[name] = value
        print(
            f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True
        )

    def fail(self, name: str, said: str) -> None:
        self.wrong[name] = said
        print(f"WRONG: {name}: {said}", flush=True)

    def compare(self, name: str, model: Any, rollouts: Sequence[Rollout]) -> None:
        """Add the mean difference of log-probs from those of ``model``. It is wrong at ``limit``."""
        value = gap(model, rollouts)
        self.add(f"log-prob difference {name}", value)
        if not value < self.limit:
            self.fail(name, f"{value:.3g} nats")

    def same_tokens(self, first: Sequence[Rollout], again: Sequence[Rollout]) -> None:
        """Compare the tokens of equal seeds."""
        tokens = {r.seed: r.token_ids for r in first}
        equal = sum(tokens[r.seed] == r.token_ids for r in again) / len(again)
        self.add("share of responses with equal tokens for equal seeds", equal)
        if equal < 1:
            self.fail("seeds", "the same seeds gave other tokens")

    def versions(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Check that every token has ``version``."""
        if {v for r in rollouts for v in r.versions} != {version}:
            self.fail("version", "tokens of the new weights do not have their version")

    def speed(self, name: str, engine: Engine, requests: Sequence[Request], tokens: int) -> None:
        """Add the tokens that ``engine`` generates in a second. The first call warms up."""
        best = 0.0
        for _ in range(2):
            common.wait()
            began = time.perf_counter()
            made = sum(map(len, engine.generate(requests, SamplingConfig(max_new_tokens=tokens))))
            common.wait()
            best = max(best, made / (time.perf_counter() - began))
        self.add(f"tokens per second, {name}", best)


def gap(model: Any, rollouts: Sequence[Rollout]) -> float:
    """The mean difference of log-probs from those of ``model``, in nats."""
    gaps = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]]).to(model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].float()
        chosen = torch.tensor(rollout.token_ids, device=model.device)[:, None]
        found = logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu()
        gaps += (found - torch.tensor(rollout.logprobs)).abs().tolist()
    return statistics.fmean(gaps)


def requests(vocabulary: int, prompts: int, tokens: int, responses: int) -> list[Request]:
    """Requests for ``responses`` to each of ``prompts`` prompts of ``tokens`` random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, vocabulary, (prompts, tokens), generator=generator).tolist()
    made = [Prompt(str(k), row) for k, row in enumerate(ids)]
    return [Request(p, 1000 * n + k, k) for n, p in enumerate(made) for k in range(responses)]


def change(model: Any) -> None:
    """Mix noise into each matrix, of its own spread, so that log-probs differ clearly."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.mul_(0.7).add_(noise * parameter.std())
            else:
                parameter.add_(0.02 * noise)
