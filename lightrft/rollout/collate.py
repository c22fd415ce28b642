"""Collate scored groups to a batch without padding, with each prompt stored once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from lightrft.types import Attachment, Batch, Rollout, Segments


def collate(groups: Sequence[Sequence[Rollout]], dtype: torch.dtype = torch.float32) -> Batch:
    """Build one ``Batch`` of all responses, group after group.

    Every response must be scored. Either all responses have a baseline or none has. Reward terms
    become columns, sorted by name.

    Args:
        groups: The responses of each prompt.
        dtype: Type of the log-probs.
    """
    rollouts = [r for group in groups for r in group]
    prompts = [group[0].prompt for group in groups]
    baselines = [r.baseline for r in rollouts]
    terms = sorted({name for r in rollouts for name in r.weights})
    of_terms = lambda rows: torch.tensor(rows, dtype=torch.float64) if terms else None  # noqa: E731
    flat = lambda rows, kind: torch.tensor([x for row in rows for x in row], dtype=kind)  # noqa: E731
    return Batch(
        Segments.of_prompts(prompts),
        Segments.of([r.token_ids for r in rollouts]),
        torch.tensor([g for g, group in enumerate(groups) for _ in group], dtype=torch.long),
        sampled=flat([r.sampled for r in rollouts], torch.bool),
        behavior_logprobs=flat([r.logprobs for r in rollouts], dtype),
        versions=flat([r.versions for r in rollouts], torch.long),
        sample=torch.tensor([r.sample for r in rollouts], dtype=torch.long),
        rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        baselines=torch.tensor(baselines, dtype=torch.float64)
        if any(b is not None for b in baselines)
        else None,
        terms=of_terms([[r.terms.get(name, math.nan) for name in terms] for r in rollouts]),
        term_weights=of_terms([[r.weights.get(name, 0.0) for name in terms] for r in rollouts]),
        version=torch.tensor([min(r.versions, default=0) for r in rollouts], dtype=torch.long),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts], dtype=torch.bool),
    )


def attached(rollouts: Iterable[Rollout]) -> list[Attachment]:
    """Return the attachments of the prompts of ``rollouts``, each once."""
    return list({a.name: a for r in rollouts for a in r.prompt.attachments}.values())
