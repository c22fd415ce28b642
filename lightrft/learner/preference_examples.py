"""Collate preference examples to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.datasets.preference.preference_dataset import PreferenceExample, PreferenceResponse
from lightrft.types import Batch, Segments


def preference_to_batch(examples: Sequence[PreferenceExample]) -> Batch:
    """Collate examples to one ``Batch`` with a group per example.

    ``sampled`` marks the trained tokens. ``example`` is the position in ``examples``, so that an
    example that occurs twice is two groups. ``rank``, ``desirable``, ``rating`` and ``margin`` are
    None unless every response has them; see ``PreferenceDataset.require``. ``example_weights`` is
    None if all weights are 1, since losses of a whole batch take no weights.
    """
    responses: list[PreferenceResponse] = []
    prompt_of: list[int] = []
    trained: list[bool] = []
    weights: list[float] = []
    for k, example in enumerate(examples):
        for response in example.responses:
            responses.append(response)
            prompt_of.append(k)
            trained += response.trained
            weights.append(example.weight)
    is_weighted = any(weight != 1.0 for weight in weights)
    groups = torch.tensor(prompt_of, dtype=torch.long)
    return Batch(
        Segments.cat([Segments.of([e.prompt_ids], e.prompt_media) for e in examples]),
        Segments.cat([Segments.of([r.token_ids], r.media) for r in responses]),
        groups,
        sampled=torch.tensor(trained, dtype=torch.bool),
        example=groups,
        rank=_column([r.rank for r in responses], torch.long),
        rating=_column([r.rating for r in responses], torch.float64),
        margin=_column([r.margin for r in responses], torch.float64),
        desirable=_column([r.desirable for r in responses], torch.bool),
        example_weights=torch.tensor(weights, dtype=torch.float64) if is_weighted else None,
    )


def _column(values: Sequence[float | None], dtype: torch.dtype) -> Tensor | None:
    """Return ``values`` as a tensor, or None if one is missing."""
    present = [value for value in values if value is not None]
    return torch.tensor(present, dtype=dtype) if len(present) == len(values) else None
