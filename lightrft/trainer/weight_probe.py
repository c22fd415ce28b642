"""Compare an engine that took over weights with the trainer that gave them, although the two work side by side.

The responses that the trainer has just received are drawn once more: by the new weights, with the same seeds, a few tokens of each.
The trainer computes the logits of those tokens before its next update, and need not wait for the engine to come to them. Weights move
little in one update, so most tokens are drawn again; where one is not, the tokens after it are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightrft.strategy.engine.base import Engine
from lightrft.strategy.settings import SamplingConfig
from lightrft.trainer.account import GREEDY
from lightrft.trainer.logprob_check import Compared, batch_of, logits_at, refuse_gap, refuse_weights, room, seen_before
from lightrft.trainer.roles import Roles
from lightrft.trainer.rollout import silent
from lightrft.types import Request, Rollout

PROMPTS, RESPONSES, TOKENS = 2, 4, 8
"""Prompts of a probe, responses to each, and tokens of each response."""


@dataclass(slots=True)
class WeightProbe:
    """The first tokens of ``responses``, which older weights sampled, and what the engine and the trainer make of them by ``version``."""

    version: int
    sampling: SamplingConfig
    responses: list[Rollout]
    answers: list[Rollout] = field(default_factory=list)
    logits: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(groups: Sequence[Sequence[Rollout]], sampling: SamplingConfig, version: int) -> WeightProbe | None:
        """Return a probe of ``version`` made of ``groups``; ``None`` where they hold tokens of that version, or none at all."""
        if any(version in r.versions for group in groups for r in group):
            return None
        begun = [begin for group in groups[:PROMPTS] for r in group[:RESPONSES] if len(begin := _begin(r))]
        return WeightProbe(version, sampling.model_copy(update={"min_new_tokens": 0}), begun) if begun else None

    def ask(self, engine: Engine, sign: Callable[[], None] = silent) -> None:
        """Have ``engine``, which holds the weights of ``version``, draw the tokens. ``sign`` is called between tokens."""

        def over() -> bool:
            sign()
            return False

        engine.wake()
        asked = [Request(r.prompt, r.seed, r.sample, max_new_tokens=len(r)) for r in self.responses]
        self.answers = list(engine.generate(asked, self.sampling, over))

    def expect(self, roles: Roles) -> None:
        """Compute the logits of the tokens. The policy must be that of ``version``. A call of all ranks."""
        actor = roles.actor
        with roles.strategy.whole(actor):
            batch = batch_of(self.responses).to(actor.device)
            places = torch.arange(min(batch.tokens, room(actor)), device=actor.device)
            logits, self.dtype = logits_at(actor, batch, places)
        self.logits = logits.cpu()

    def compared(self) -> Compared | None:
        """Return the tokens that the engine drew after the same tokens as the trainer read; ``None`` without any."""
        if self.logits is None:
            return None
        answers = {answer.seed: answer for answer in self.answers}
        rows: list[tuple[int, int, float, float]] = []
        first = 0
        for response in self.responses:
            if (answer := answers.get(response.seed)) is not None:
                rows += [row for row in _paired(response, answer, first) if row[0] < len(self.logits)]
            first += len(response)
        if not rows:
            return None
        places, tokens, reported, before = (torch.tensor(column) for column in zip(*rows))
        greedy = torch.full_like(places, self.sampling.temperature == 0, dtype=torch.bool)
        logits, penalised = self.logits, self.sampling.repetition_penalty != 1
        seen = seen_before(batch_of(self.responses), places, logits.shape[1]) if penalised else None
        return Compared(logits[places], tokens, reported, greedy, seen, self.dtype, before)

    def refuse(self, roles: Roles) -> None:
        """Raise ``ModelError`` with the cause where the engine's log-probs are not those of the weights that it was given."""
        when = f"after the update to version {self.version} "
        # ``load_checked`` has compared the fingerprint.
        refuse_gap(roles.actor, self.compared(), self.sampling, lambda: "", when)


def load_checked(engine: Engine, weights: Mapping[str, Tensor], version: int, check: bool) -> None:
    """Have ``engine`` take over ``weights``; with ``check``, raise ``ModelError`` where its fingerprint is of others."""
    found = engine.load_weights(weights.items(), version)
    if check:
        refuse_weights(found, weights, version)


def _begin(response: Rollout) -> Rollout:
    """The first tokens of ``response``, up to one that was not sampled; none of a greedy one, which a request of its own kind draws."""
    sampled = response.sampled[:TOKENS] if response.sample != GREEDY else []
    end = sampled.index(False) if False in sampled else len(sampled)
    columns = {name: getattr(response, name)[:end] for name in ("token_ids", "sampled", "logprobs", "versions")}
    return replace(response, **columns)


def _paired(response: Rollout, answer: Rollout, first: int) -> list[tuple[int, int, float, float]]:
    """Place, token, log-prob, and log-prob by older weights, of each token of ``answer`` up to the first that ``response`` has not.

    ``first`` is the place of the first token of ``response``.
    """
    rows: list[tuple[int, int, float, float]] = []
    for at, (old, new) in enumerate(zip(response.token_ids, answer.token_ids)):
        rows.append((first + at, new, answer.logprobs[at], response.logprobs[at] if new == old else torch.nan))
        if new != old:
            break
    return rows
