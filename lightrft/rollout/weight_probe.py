"""Compare an engine that has loaded new weights with the trainer, without stopping either.

The engine samples the first tokens of a few responses of the last batch again. It uses the new
weights and the same seeds. The trainer computes the logits of these tokens before its next update.
So neither waits for the other. An update changes the weights little, so the engine samples most
tokens again. Tokens after the first difference are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine
from lightrft.models.sampled_distribution import steps_of
from lightrft.roles import Roles
from lightrft.rollout.accounting import GREEDY
from lightrft.rollout.generation import no_op
from lightrft.rollout.logprob_check import (
    LogprobComparison,
    batch_of,
    coarsest,
    logits_at,
    refuse_gap,
    refuse_weights,
    room,
    seen_before,
)
from lightrft.types import Request, Rollout

PROMPTS, RESPONSES, TOKENS = 2, 4, 8
"""Number of prompts of a probe, responses per prompt, and tokens per response."""


@dataclass(slots=True)
class WeightProbe:
    """A comparison of engine and trainer under one version of the weights.

    Attributes:
        version: Version of the weights.
        sampling: The sampling settings.
        responses: The first tokens of responses that older weights sampled.
        engine: The settings ``engine``. ``None`` for an engine that quantizes nothing.
        answers: The tokens that the engine samples in their place.
        logits: ``[n, V]``. The trainer's logits of the first n tokens of ``responses``.
        dtype: The coarsest type used to compute ``logits``.
    """

    version: int
    sampling: SamplingConfig
    responses: list[Rollout]
    engine: EngineConfig | None = None
    answers: list[Rollout] = field(default_factory=list)
    logits: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(
        groups: Sequence[Sequence[Rollout]],
        sampling: SamplingConfig,
        version: int,
        engine: EngineConfig | None = None,
    ) -> WeightProbe | None:
        """Build a probe from ``groups``.

        Args:
            groups: Responses of the last batch.
            sampling: The sampling settings.
            version: Version of the weights.
            engine: The settings ``engine``. ``None`` for an engine that quantizes nothing.

        Returns:
            The probe. ``None`` if the groups have no tokens, or have tokens of ``version``, which
            are compared directly.
        """
        if any(version in r.versions for r in chain.from_iterable(groups)):
            return None
        few = chain.from_iterable(group[:RESPONSES] for group in groups[:PROMPTS])
        begun = list(filter(len, map(_begin, few)))
        if not begun:
            return None
        # The trainer's logits do not suppress end tokens, so the engine must not either.
        free = sampling.model_copy(update={"min_new_tokens": 0})
        return WeightProbe(version, free, begun, engine)

    def ask(self, engine: Engine, keep_alive: Callable[[], None] = no_op) -> None:
        """Sample the probe's tokens with ``engine``, which must have the weights of ``version``.

        ``keep_alive`` is called between tokens.
        """

        def over() -> bool:
            keep_alive()
            return False

        engine.wake()
        # The seed of each response, so that equal weights sample equal tokens.
        asked = [Request(r.prompt, r.seed, r.sample, max_new_tokens=len(r)) for r in self.responses]
        self.answers = list(engine.generate(asked, self.sampling, over))

    def expect(self, roles: Roles) -> None:
        """Compute the trainer's logits under the policy of ``version``. Every rank must call it."""
        actor = roles.actor
        with roles.strategy.gathered(actor):
            batch = batch_of(self.responses).to(actor.device)
            places = torch.arange(min(batch.tokens, room(actor)), device=actor.device)
            logits, dtype = logits_at(actor, batch, places)
        self.dtype = coarsest(dtype, self.engine)
        self.logits = logits.cpu()

    def compared(self) -> LogprobComparison | None:
        """Return the engine's tokens that the trainer has logits for; ``None`` without any."""
        if self.logits is None:
            return None
        answers = {answer.seed: answer for answer in self.answers}
        rows: list[tuple[int, int, float, float]] = []
        first = 0
        for response in self.responses:
            answer = answers.get(response.seed)
            # On ranks that share the engine of rank 0, there are no answers.
            if answer is not None:
                rows += _paired(response, answer, first)
            first += len(response)
        # ``expect`` computed logits of as many tokens as had room.
        rows = [row for row in rows if row[0] < len(self.logits)]
        if not rows:
            return None
        places, tokens, reported, before = (torch.tensor(column) for column in zip(*rows))
        logits, seen = self.logits, None
        batch = batch_of(self.responses)
        first = steps_of(batch)[places] == 0
        greedy = torch.full_like(places, self.sampling.temperature == 0, dtype=torch.bool)
        if self.sampling.first_token_temperature is not None:
            greedy &= ~first
        if self.sampling.repetition_penalty != 1:
            seen = seen_before(batch, places, logits.shape[1])
        return LogprobComparison(
            logits[places], tokens, reported, greedy, seen, self.dtype, first, None, before
        )

    def refuse(self, roles: Roles) -> None:
        """Raise ``ModelError`` with the cause if the log-probs of engine and trainer differ."""
        when = f"after the update to version {self.version} "
        # ``load_checked`` has compared the fingerprint.
        refuse_gap(roles.actor, self.compared(), self.sampling, lambda: "", when)


def load_checked(engine: Engine, weights: Mapping[str, Tensor], version: int, check: bool) -> None:
    """Load ``weights`` into ``engine``.

    Args:
        engine: The engine.
        weights: The parameters, by name.
        version: Their version.
        check: Compare the engine's fingerprint with ``weights``.

    Raises:
        ModelError: If the fingerprint belongs to other weights.
    """
    found = engine.load_weights(weights.items(), version)
    if check:
        refuse_weights(found, weights, version)


def _begin(response: Rollout) -> Rollout:
    """Return the first sampled tokens of ``response``; none if it is greedy."""
    sampled = response.sampled[:TOKENS] if response.sample != GREEDY else []
    # The engine cannot repeat the tokens of a tool, so the response ends before the first of them.
    end = [*sampled, False].index(False)
    names = ("token_ids", "sampled", "logprobs", "versions")
    return replace(response, **{name: getattr(response, name)[:end] for name in names})


def _paired(response: Rollout, answer: Rollout, first: int) -> list[tuple[int, int, float, float]]:
    """Return index, token, log-prob and older log-prob of the tokens of ``answer``.

    The last one is the first token that differs from ``response``. ``first`` is the index of the
    first token of ``response``.
    """
    rows: list[tuple[int, int, float, float]] = []
    for at, (old, new) in enumerate(zip(response.token_ids, answer.token_ids)):
        before = response.logprobs[at] if new == old else torch.nan
        rows.append((first + at, new, answer.logprobs[at], before))
        # From here on the two have different prefixes.
        if new != old:
            break
    return rows
