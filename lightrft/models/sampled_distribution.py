"""The distribution that responses are sampled from, for log-probs of a model that is trained.

Filters of sampling are part of the policy: a token that no response can have takes no probability.
The engine filters by the same functions (``utils/token_filters.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.models.attention.ulysses import SequencePart
from lightrft.types import Batch
from lightrft.utils.token_filters import (
    ban_tokens,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)

NEVER = 2**31 - 1
"""Place of the first occurrence of a token that does not occur."""


@dataclass(frozen=True, slots=True)
class SampledDistribution:
    """Temperature and filters of sampling.

    Attributes:
        sampling: The sampling settings. Temperature 0 stands for temperature 1 without top-k, top-p
            and min-p: the log-prob of a greedy token under a point mass is always 0.
        ends: Tokens that end a response. They are not sampled before ``min_new_tokens``.
        banned: Tokens that are never sampled.
    """

    sampling: SamplingConfig
    ends: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits of all tokens but the first."""
        return self.sampling.temperature or 1.0

    @property
    def depends_on_tokens(self) -> bool:
        """Return ``True`` if more acts than one temperature and the banned tokens."""
        sampling = self.sampling
        acts = [sampling.repetition_penalty != 1, bool(sampling.min_new_tokens and self.ends)]
        if sampling.temperature:
            acts += [sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0]
        return any(acts) or sampling.first_token_temperature is not None

    def at_tokens(self, batch: Batch, part: SequencePart) -> TokenFilters:
        """Return the filters at the response tokens of ``batch``, or at those of ``part``."""
        steps = steps_of(batch)
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = first_occurrences(batch)
        return TokenFilters(self, part.of(steps), part.of(batch.row_of), seen)


Distribution = float | SampledDistribution
"""A temperature, or a temperature with filters."""


def distribution_of(
    sampling: SamplingConfig, ends: tuple[int, ...], banned: tuple[int, ...] = ()
) -> Distribution:
    """Return the distribution that ``sampling`` samples from.

    It is a number where no filter acts: the temperature, or 1 for greedy responses.

    Args:
        sampling: The sampling settings.
        ends: Tokens that end a response.
        banned: Tokens that are never sampled.
    """
    found = SampledDistribution(sampling, ends, banned)
    return found if banned or found.depends_on_tokens else found.temperature


def temperature_of(distribution: Distribution) -> float:
    """Return the temperature of ``distribution``."""
    return distribution if isinstance(distribution, int | float) else distribution.temperature


@dataclass(frozen=True, slots=True)
class TokenFilters:
    """Filters of the logits of ``N`` response tokens.

    Attributes:
        distribution: Temperature and filters.
        steps: ``[N]``. Number of response tokens before each token.
        rows: ``[N]``. Response of each token.
        first: ``[B, V]``. Step of the first occurrence of each token in a response, -1 in its
            prompt. ``None`` without a repetition penalty.
    """

    distribution: SampledDistribution
    steps: Tensor
    rows: Tensor
    first: Tensor | None

    @property
    def banned(self) -> Tensor:
        """Return the tokens that are never sampled, ``[K]``."""
        return torch.tensor(self.distribution.banned, dtype=torch.long, device=self.steps.device)

    @property
    def only_bans(self) -> bool:
        """Return ``True`` if nothing but one temperature and the banned tokens act."""
        return not self.distribution.depends_on_tokens

    def apply(self, logits: Tensor, part: slice, targets: Tensor) -> Tensor:
        """Return the logits of the filtered distributions, ``[n, V]``, differentiable.

        Which tokens top-k, top-p and min-p keep does not depend on the logits but at single points,
        so the kept set counts as constant. A target is always kept: rounding can put the engine's
        token just outside the set, and an update can move it there.

        Args:
            logits: ``[n, V]`` float logits at temperature 1.
            part: Tokens ``n`` of ``N``.
            targets: ``[n]``. The sampled tokens.
        """
        sampling = self.distribution.sampling
        if self.distribution.banned:
            logits = ban_tokens(logits.clone(), self.banned, targets)
        if self.first is not None:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[:, : self.first.shape[1]] = self.first[self.rows[part]] < self.steps[part, None]
            logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
        if sampling.min_new_tokens and self.distribution.ends:
            banned = torch.zeros_like(logits, dtype=torch.bool)
            banned[:, list(self.distribution.ends)] = True
            early = self.steps[part, None] < sampling.min_new_tokens
            logits = logits.masked_fill(banned & early, -torch.inf)
        logits = logits / self._temperatures(part).to(logits.dtype)
        kept = self._filtered(logits.detach(), self.steps[part, None])
        removed = kept.isneginf().scatter(1, targets[:, None], False)
        return logits.masked_fill(removed, -torch.inf)

    def _temperatures(self, part: slice) -> Tensor:
        """Return the divisor of each token's logits, ``[n, 1]`` float64."""
        steps, sampling = self.steps[part, None], self.distribution.sampling
        usual = torch.full_like(steps, self.distribution.temperature, dtype=torch.float64)
        if sampling.first_token_temperature is None:
            return usual
        return torch.where(steps == 0, sampling.first_token_temperature, usual)

    def _filtered(self, logits: Tensor, steps: Tensor) -> Tensor:
        sampling = self.distribution.sampling
        kept = logits
        if sampling.top_k:
            kept = keep_top_k(kept, sampling.top_k)
        if sampling.top_p < 1:
            kept = keep_top_p(kept, sampling.top_p)
        if sampling.min_p > 0:
            kept = keep_min_p(kept, sampling.min_p)
        if sampling.temperature:
            return kept
        # Of greedy responses, only a first token with its own temperature is sampled.
        return torch.where(
            (steps == 0) & (sampling.first_token_temperature is not None), kept, logits
        )


def steps_of(batch: Batch) -> Tensor:
    """Return the index of each token within its response, ``[N]``."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    return torch.arange(batch.tokens, device=starts.device) - starts[batch.row_of]


def first_occurrences(batch: Batch) -> Tensor:
    """Return the step at which each token first occurs in each response, ``[B, V]`` int32.

    It is -1 for tokens of the prompt, and ``NEVER`` for others that do not occur. V is the largest
    token of the batch plus 1.
    """
    prompts, tokens = batch.prompts, batch.responses.tokens
    largest = max((int(x.max()) for x in (prompts.tokens, tokens) if x.numel()), default=-1)
    shape = (len(batch), largest + 1)
    table = torch.full(shape, NEVER, dtype=torch.int32, device=tokens.device)
    steps = steps_of(batch).to(torch.int32)
    table.view(-1).scatter_reduce_(0, batch.row_of * (largest + 1) + tokens, steps, "amin")
    rows = prompts.tokens.split(prompts.lengths.tolist())
    for row, prompt in enumerate(batch.prompt_of.tolist()):
        table[row, rows[prompt]] = -1
    return table
