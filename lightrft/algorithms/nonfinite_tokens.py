"""Mask tokens and drop responses whose numbers are not finite.

Their numbers are replaced, because 0 times infinity is not 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.algorithms.requirements import Requirements
from lightrft.types import Batch

COLUMNS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "process_rewards", "logprobs")
"""Token columns that a phase fills in only if something reads them."""


def unread_tokens(batch: Batch, requirements: Requirements) -> Tensor:
    """Return a bool mask ``[N]`` of trained tokens that have an infinite or NaN log-prob.

    Only columns that the algorithm reads count.
    """
    columns = [getattr(batch, name) for name in COLUMNS]
    # if nothing reads the sampler's log-probs, infinite ones do no harm
    if requirements.sampler:
        columns.append(batch.behavior_logprobs)
    finite = torch.ones_like(batch.mask)
    for column in columns:
        if column is not None:
            finite = finite & torch.isfinite(column)
    return batch.mask & ~finite


def without_tokens(batch: Batch, lost: Tensor) -> Batch:
    """Return ``batch`` as if the tokens ``lost [N]`` had not been sampled.

    Denominators that are already fixed do not change.
    """
    columns: dict[str, Tensor | None] = {"sampled": batch.mask & ~lost}
    for name in ("loss_weights", "positive_weights"):
        column = getattr(batch, name)
        if column is not None:
            columns[name] = torch.where(lost, torch.zeros_like(column), column)
    return batch.replace(**columns)


def readable(batch: Batch, requirements: Requirements) -> Batch:
    """Return ``batch`` without the tokens of ``unread_tokens``.

    Without such tokens this is the same object.
    """
    lost = unread_tokens(batch, requirements)
    # the same object in the usual case, so nothing is copied
    return without_tokens(batch, lost) if bool(lost.any()) else batch


def rewarded(batch: Batch) -> Tensor:
    """Return the indices ``[K]`` of responses whose reward, baseline and costs are finite.

    Missing ``batch.baselines`` and ``batch.costs`` are not checked.

    Raises:
        ValueError: If ``batch.rewards`` is missing.
    """
    if batch.rewards is None:
        raise ValueError("a finite reward is looked for in batch.rewards")
    finite = torch.isfinite(batch.rewards)
    if batch.baselines is not None:
        finite = finite & torch.isfinite(batch.baselines)
    if batch.costs is not None:
        finite = finite & torch.isfinite(batch.costs).all(1)
    return finite.nonzero()[:, 0]
