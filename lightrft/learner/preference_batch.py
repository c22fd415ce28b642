"""Collate preference examples, and turn a batch and its log-probs into arguments of losses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.preference.inputs import (
    Labelled,
    Pairs,
    Preferences,
    Ranked,
    Responses,
    responses_of,
)
from lightrft.algorithms.preference.objective import token_weights, wpo_weights
from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.algorithms.running_stats import RunningStats
from lightrft.algorithms.token_ops import TokenRows, require_column
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.datasets.preference.preference_dataset import PreferenceExample, PreferenceResponse
from lightrft.types import CORRUPTED, GOLD, Batch, Segments
from lightrft.utils.seeding import derive_seed

MARGIN_DECAY = 0.9
"""Decay of the margins that ``beta_dpo`` compares with (arXiv 2407.08639, section 4.2)."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Numbers of each response token that a loss reads, ``[N]`` each.

    Attributes:
        logprobs: Log-probs of the policy, with gradient.
        kl: KL(reference, policy) over the vocabulary, with gradient.
        energy: Squared norm of the log-prob's gradient in the logits.
    """

    logprobs: Tensor
    kl: Tensor | None = None
    energy: Tensor | None = None


@dataclass(slots=True)
class PreferenceStats:
    """Numbers of a run that carry over from step to step.

    Attributes:
        rewards: Implicit rewards of all responses so far.
        margin_mean: Moving average of the margin. ``None`` before the first step.
        margin_std: Moving average of the standard deviation of the margins.
    """

    rewards: RunningStats = field(default_factory=RunningStats)
    margin_mean: float | None = None
    margin_std: float = 0.0

    def include(self, data: Preferences, unit: float, beta: float) -> None:
        """Add the numbers of a global batch.

        Args:
            data: The batch.
            unit: Unit of the margins in log-ratios.
            beta: The setting ``preference.beta``.
        """
        if isinstance(data, Pairs):
            ratios = torch.cat([data.chosen.log_ratio, data.rejected.log_ratio]).detach()
            margins = unit * data.log_ratio.detach()
            self._include_margins(float(margins.mean()), float(margins.std(unbiased=False)))
        else:
            ratios = data.responses.log_ratio.detach()
        self.rewards = self.rewards.including(beta * ratios)

    def _include_margins(self, mean: float, std: float) -> None:
        if self.margin_mean is None:
            self.margin_mean, self.margin_std = mean, std
            return
        self.margin_mean = MARGIN_DECAY * self.margin_mean + (1 - MARGIN_DECAY) * mean
        self.margin_std = MARGIN_DECAY * self.margin_std + (1 - MARGIN_DECAY) * std

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        seen = self.rewards
        numbers = [seen.count, seen.mean, seen.squares, seen.lowest, seen.highest]
        return {"rewards": numbers, "margins": [self.margin_mean, self.margin_std]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self.rewards = RunningStats(*state["rewards"])
        self.margin_mean, self.margin_std = state["margins"]


def pair_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rows of the better and of the worse response of every pair, ``[P]`` each.

    A pair is any two responses of an example with different ranks.
    """
    better, worse = [], []
    for rows in _examples(batch).values():
        ranked = [(rank, row) for rank, row in rows if rank >= 0]
        for rank, row in ranked:
            below = [other for other_rank, other in ranked if other_rank > rank]
            better += [row] * len(below)
            worse += below
    return _index(better, batch), _index(worse, batch)


def _examples(batch: Batch) -> dict[int, list[tuple[int, int]]]:
    """Return ``(rank, row)`` of the responses of each example."""
    ranks = require_column(batch.rank).tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for row, example in enumerate(require_column(batch.example).tolist()):
        found.setdefault(example, []).append((ranks[row], row))
    return found


def _index(rows: list[int], batch: Batch) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=batch.prompt_of.device)


def _rows_with(batch: Batch, rank: int, rows: Tensor) -> Tensor:
    """Return the row with ``rank`` in the example of each row of ``rows``."""
    special = {
        example: row
        for example, members in _examples(batch).items()
        for own, row in members
        if own == rank
    }
    examples = require_column(batch.example)[rows].tolist()
    return _index([special[example] for example in examples], batch)


def preferences_of(
    batch: Batch,
    columns: TokenColumns,
    requirements: PreferenceRequirements,
    kl: float | None = None,
    stats: PreferenceStats | None = None,
) -> Preferences:
    """Build the argument of the losses.

    Args:
        batch: Responses with the columns that ``requirements`` name. Pairs must not be cut.
        columns: Numbers of the tokens of ``batch``.
        requirements: What the losses read.
        kl: Mean log-ratio of mismatched pairs.
        stats: Running numbers. ``None`` leaves them out.
    """
    responses = _responses(batch, columns, requirements)
    number = responses.logprobs.new_tensor
    shift = None if stats is None or not requirements.shift else number(stats.rewards.mean)
    if requirements.kind == "labelled":
        mismatched = None if kl is None else number(kl)
        return Labelled(responses, require_column(batch.desirable), mismatched, shift)
    if requirements.kind == "ranked":
        kept = (require_column(batch.rank) >= 0).nonzero()[:, 0]
        _, group_of = torch.unique(require_column(batch.example)[kept], return_inverse=True)
        rating = None if batch.rating is None else batch.rating[kept].double()
        return Ranked(responses.select(kept), group_of, require_column(batch.rank)[kept], rating)
    better, worse = pair_rows(batch)
    corrupted = gold = margin = mean = std = None
    if requirements.corrupted:
        corrupted = responses.select(_rows_with(batch, CORRUPTED, better))
    if requirements.gold:
        gold = responses.select(_rows_with(batch, GOLD, better))
    if requirements.margin:
        margin = require_column(batch.margin)[better].double()
    if requirements.margin_stats and stats is not None and stats.margin_mean is not None:
        mean, std = number(stats.margin_mean), number(stats.margin_std)
    chosen, rejected = responses.select(better), responses.select(worse)
    return Pairs(chosen, rejected, margin, corrupted, gold, shift, mean, std)


def _responses(
    batch: Batch, columns: TokenColumns, requirements: PreferenceRequirements
) -> Responses:
    rows = TokenRows.of(batch)
    wpo = None
    if requirements.collision:
        logprobs = columns.logprobs.detach().double()
        # energy is 1 - 2 p + sum_v p_v^2
        collision = require_column(columns.energy).double() - 1 + 2 * logprobs.exp()
        tiny = torch.finfo(torch.float64).tiny
        wpo = wpo_weights(rows, logprobs, collision.clamp(min=tiny).log())
    # A token that does not count may have a log-prob that is not finite.
    weights = rows.mask.double() if batch.token_weights is None else batch.token_weights
    weights = torch.where(rows.mask, weights, torch.zeros_like(weights))
    reference = batch.ref_logprobs if requirements.reference else None
    return responses_of(rows, columns.logprobs, reference, weights, columns.kl, wpo)


def with_token_weights(batch: Batch, settings: PreferenceConfig, seed: int, step: int) -> Batch:
    """Add the weights of LD-DPO and SamPO, which compare the two responses of a pair.

    Args:
        batch: A whole batch of pairs.
        settings: The settings ``preference``.
        seed: The setting ``run.seed``.
        step: Number of completed steps.
    """
    better, worse = pair_rows(batch)
    partner = torch.arange(len(batch))
    partner[better], partner[worse] = worse, better
    examples, ranks = require_column(batch.example), require_column(batch.rank)
    seeds = [
        derive_seed(seed, "sampo", step, example, rank)
        for example, rank in zip(examples.tolist(), ranks.tolist())
    ]
    return batch.replace(token_weights=token_weights(TokenRows.of(batch), partner, settings, seeds))


def mismatched(batch: Batch) -> Batch:
    """Return ``batch`` with each response after the next prompt that differs from its own.

    The last prompt is followed by the first. Responses whose prompt is the only one are left out.
    See KTO, arXiv 2402.01306, section 4.1.
    """
    keys = _prompt_keys(batch.prompts)
    count = len(keys)
    following = torch.full((count,), -1, dtype=torch.long)
    for k, key in enumerate(keys):
        later = ((k + step) % count for step in range(1, count))
        following[k] = next((j for j in later if keys[j] != key), -1)
    partner = following.to(batch.prompt_of.device)[batch.prompt_of]
    if bool((partner >= 0).all()):
        return batch.replace(prompt_of=partner)
    rows = (partner >= 0).nonzero()[:, 0]
    return batch.select(rows) if not len(rows) else batch.replace(prompt_of=partner).select(rows)


def _prompt_keys(prompts: Segments) -> list[bytes]:
    """Return a digest of the tokens and media of each prompt."""
    columns = [(prompts.tokens, prompts.lengths)]
    columns += [(ragged.values, ragged.lengths) for ragged in prompts.media.values()]
    digests = [hashlib.blake2b(digest_size=16) for _ in range(len(prompts))]
    for values, lengths in columns:
        for found, rows in zip(digests, values.cpu().split(lengths.tolist())):
            found.update(str(tuple(rows.shape)).encode())
            found.update(rows.contiguous().view(torch.uint8).numpy())
    return [found.digest() for found in digests]


def preference_to_batch(examples: Sequence[PreferenceExample], heads: Sequence[str] = ()) -> Batch:
    """Collate examples to one ``Batch`` with a group per example.

    ``sampled`` marks the trained tokens. ``example`` is the position in ``examples``, so that an
    example that occurs twice is two groups. ``rank``, ``desirable``, ``rating`` and ``margin`` are
    None unless every response has them; see ``PreferenceDataset.require``. ``example_weights`` is
    None if all weights are 1, since losses of a whole batch take no weights. An example with
    corrupted media has another group, with a copy of its best response of rank ``CORRUPTED``.

    Args:
        examples: the examples.
        heads: names of the columns of ``labels``; see ``PreferenceDataset.heads``. Without heads,
            ``labels`` is None.
    """
    prompts: list[Segments] = []
    responses: list[PreferenceResponse] = []
    prompt_of: list[int] = []
    example_of: list[int] = []
    for k, example in enumerate(examples):
        groups = [(example.prompt_media, example.responses)]
        if example.corrupted_media is not None:
            best = next(response for response in example.responses if response.rank == 0)
            groups.append((example.corrupted_media, [replace(best, rank=CORRUPTED)]))
        for media, members in groups:
            prompt_of += [len(prompts)] * len(members)
            prompts.append(Segments.of([example.prompt_ids], media))
            responses += members
            example_of += [k] * len(members)
    trained: list[bool] = []
    for response in responses:
        trained += response.trained
    weights = [examples[k].weight for k in example_of]
    is_weighted = any(weight != 1.0 for weight in weights)
    return Batch(
        Segments.cat(prompts),
        Segments.cat([Segments.of([r.token_ids], r.media) for r in responses]),
        torch.tensor(prompt_of, dtype=torch.long),
        sampled=torch.tensor(trained, dtype=torch.bool),
        example=torch.tensor(example_of, dtype=torch.long),
        rank=_column([r.rank for r in responses], torch.long),
        rating=_column([r.rating for r in responses], torch.float64),
        labels=_labels(responses, heads),
        margin=_column([r.margin for r in responses], torch.float64),
        desirable=_column([r.desirable for r in responses], torch.bool),
        example_weights=torch.tensor(weights, dtype=torch.float64) if is_weighted else None,
    )


def _column(values: Sequence[float | None], dtype: torch.dtype) -> Tensor | None:
    """Return ``values`` as a tensor, or None if one is missing."""
    present = [value for value in values if value is not None]
    return torch.tensor(present, dtype=dtype) if len(present) == len(values) else None


def _labels(responses: Sequence[PreferenceResponse], heads: Sequence[str]) -> Tensor | None:
    """Return the labels ``[B, H]`` of the responses, or None without heads."""
    if not heads:
        return None
    rows = [[response.labels.get(head, math.nan) for head in heads] for response in responses]
    return torch.tensor(rows, dtype=torch.float64)
