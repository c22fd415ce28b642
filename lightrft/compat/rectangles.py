"""Rectangles ``[B, L]`` with a mask, as rows of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.token_ops import TokenRows


def rows_of(mask: Tensor) -> TokenRows:
    """Return the rows of ``mask [B, L]``: all places of a row, of which the mask counts some."""
    rows, width = mask.shape
    index = torch.arange(rows, device=mask.device)
    lengths = torch.full_like(index, width)
    return TokenRows(index.repeat_interleave(width), lengths, index, mask.bool().flatten())


def full_mask(like: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``mask`` as bool ``[B, L]``. ``None`` counts every place of ``like [B, L]``."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()


def sequence_mean(losses: Tensor, rows: TokenRows) -> Tensor:
    """Return the mean over rows of the mean of ``losses [N]`` over the counted tokens of a row.

    A row without counted tokens is left out. Without any, the mean is 0.
    """
    weights = AGGREGATIONS["sequence"](rows, 1).to(losses.dtype)
    # Not a product: a loss that is not finite outside of the mask would make it NaN.
    return (losses.where(rows.mask, losses.new_zeros(())) * weights).sum()
