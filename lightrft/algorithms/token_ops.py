"""Reduce tokens per response and responses per prompt, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.types import Batch
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(slots=True)
class TokenRows:
    """Layout of a packed batch of ``N`` tokens in ``B`` rows, one row per response.

    Attributes:
        row_of: ``[N]`` long, the row of each token.
        lengths: ``[B]`` long, the number of tokens of each row.
        prompt_of: ``[B]`` long, the prompt of each row.
        mask: ``[N]`` bool, the tokens that count.
    """

    row_of: Tensor
    lengths: Tensor
    prompt_of: Tensor
    mask: Tensor

    @staticmethod
    def of(batch: Batch) -> TokenRows:
        """Return the layout of ``batch``."""
        return TokenRows(batch.row_of, batch.lengths, batch.prompt_of, batch.mask)

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def sum(self, x: Tensor) -> Tensor:
        """Sum ``x [N]`` over the counted tokens of each row, ``[B]``. Differentiable."""
        # not a product: a NaN outside the mask times 0 is NaN
        kept = torch.where(self.mask, x, torch.zeros_like(x))
        return torch.zeros(len(self), dtype=x.dtype, device=x.device).index_add(
            0, self.row_of, kept
        )

    def count(self) -> Tensor:
        """Return the number of counted tokens of each row, ``[B]``."""
        return torch.zeros(len(self), dtype=torch.long, device=self.mask.device).index_add(
            0, self.row_of, self.mask.long()
        )

    def mean(self, x: Tensor) -> Tensor:
        """Average ``x [N]`` over the counted tokens of each row, ``[B]``.

        A row without counted tokens gets 0.
        """
        return self.sum(x) / self.count().clamp(min=1).to(x.dtype)

    def spread(self, x: Tensor) -> Tensor:
        """Repeat one number per row, ``[B]``, for each of the row's tokens, ``[N]``."""
        return x[self.row_of]


def last_sampled(rows: TokenRows) -> Tensor:
    """Return the index of each row's last counted token, ``[B]``; -1 for a row without any."""
    place = torch.arange(rows.mask.numel(), device=rows.mask.device)
    # scatter_reduce includes the initial value, so -1 stays for a row without counted tokens
    last = torch.full((len(rows),), -1, dtype=torch.long, device=place.device)
    return last.scatter_reduce(0, rows.row_of, torch.where(rows.mask, place, -1), "amax")


def group_sum(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum ``x`` by group.

    Args:
        x: ``[B]``.
        group: ``[B]`` long, the group of each element.
        groups: Number of groups.

    Returns:
        ``[groups]``.
    """
    return torch.zeros(groups, dtype=x.dtype, device=x.device).index_add(0, group, x)


def compact(x: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the counted tokens row by row, left-aligned.

    Returns:
        ``padded [B, L]`` with 0 after a row's end. ``row [K]`` and ``column [K]`` are the indices
        of each counted token in it.
    """
    row = rows.row_of[rows.mask]
    count = rows.count()
    start = torch.cumsum(count, 0) - count
    # counted tokens of a row are consecutive in ``row``, in their order
    column = torch.arange(row.numel(), device=row.device) - start[row]
    longest = int(count.max()) if count.numel() else 0
    padded = torch.zeros(len(rows), longest, dtype=x.dtype, device=x.device)
    padded[row, column] = x[rows.mask]
    return padded, row, column


def scatter(padded: Tensor, rows: TokenRows, row: Tensor, column: Tensor) -> Tensor:
    """Invert ``compact``: ``[B, L]`` to ``[N]``, with 0 at tokens that do not count.

    Args:
        padded: ``[B, L]``.
        rows: The rows that ``compact`` was called with.
        row: ``[K]``, as returned by ``compact``.
        column: ``[K]``, as returned by ``compact``.
    """
    flat = torch.zeros(rows.mask.numel(), dtype=padded.dtype, device=padded.device)
    # the K counted tokens are in the order of the mask, as ``compact`` took them
    flat[rows.mask] = padded[row, column]
    return flat


LIMIT = 40.0
"""Largest log-ratio in nats.

The square of ``exp(LIMIT)`` is finite in float32. A ratio may therefore multiply another one, as in
a weighted KL or under a correction.
"""

ROUNDING = 16 * 2.0**-23
"""Relative difference of a log-prob that different micro-batch splits explain: 16 float32 eps."""


def clamp_log_ratio(gap: Tensor) -> Tensor:
    """Clamp ``gap`` to ``[-LIMIT, LIMIT]`` and keep its gradient wherever it is finite.

    A token far outside must still be pulled back. Where a clip has removed the gradient, 0 times it
    is 0 and not NaN. An infinite gap becomes the bound, without a gradient. NaN stays NaN.
    """
    held = gap.clamp(-LIMIT, LIMIT)
    # Infinity minus infinity would be NaN, in the backward pass too.
    finite = torch.where(gap.isinf(), held.detach(), gap)
    return finite + (held - finite).detach()


def absolute_gap(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return ``|logprobs - old|``, ``[N]``, with gradient 0 where the two differ by rounding alone.

    The slope of ``|x|`` jumps at 0. Otherwise the micro-batch split that computed ``old`` would
    decide its sign.
    """
    gap = logprobs - old
    rounding = ROUNDING * old.detach().abs().clamp(min=1)
    return torch.where(gap.detach().abs() > rounding, gap.abs(), gap.detach().abs())


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return ``pi / pi_old``, clamped between ``exp(-LIMIT)`` and ``exp(LIMIT)``."""
    return torch.exp(clamp_log_ratio(logprobs - old))


def weighted_sum(losses: Tensor, batch: Batch, weights: Tensor | None = None) -> Tensor:
    """Return the contribution of ``losses`` to the loss of the global batch, 0-d.

    Tokens of weight 0 are skipped, not multiplied by 0, since their loss may be infinite or NaN.

    Args:
        losses: ``[N]``.
        batch: Gives ``loss_weights [N]``.
        weights: ``[N]``. ``None`` uses ``batch.loss_weights``.
    """
    weights = require_column(batch.loss_weights) if weights is None else weights
    kept = weights != 0
    zero = losses.new_zeros(())
    return (losses.where(kept, zero) * weights.to(losses.dtype)).sum()


def discounted(x: Tensor, decay: float | Tensor) -> Tensor:
    """Return ``y_t = x_t + decay * y_{t+1}`` along the last axis of ``x [B, L]``.

    ``decay`` is one number for all rows, or ``[B]``.
    """
    if not isinstance(decay, Tensor) and decay == 1:
        # one call instead of one per token
        return x.flip(-1).cumsum(-1).flip(-1)
    y = torch.empty_like(x)
    carry = torch.zeros_like(x[:, 0]) if x.shape[1] else x.new_zeros(len(x))
    for t in range(x.shape[1] - 1, -1, -1):
        carry = x[:, t] + decay * carry
        y[:, t] = carry
    return y


def whiten(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Normalize ``x`` to mean 0 and standard deviation 1 over the tokens of ``mask``.

    Equal numbers become exactly 0. Their mean may differ from them by rounding, which division by a
    small deviation would amplify.

    Args:
        x: ``[N]``.
        mask: ``[N]`` bool. Must cover the global batch. Other tokens get 0.
        eps: Added to the standard deviation.
    """
    kept = x[mask]
    if kept.numel() == 0 or bool((kept == kept[0]).all()):
        return torch.zeros_like(x)
    # Sorted, so that the order of rows decides no rounding: a mask may read the sign of a
    # whitened advantage that is zero but for rounding.
    ordered = kept.double().sort().values
    mean = ordered.mean()
    deviation = (ordered - mean).square().mean().sqrt()
    whitened = torch.zeros_like(x)
    whitened[mask] = ((kept.double() - mean) / (deviation + eps)).to(x.dtype)
    return whitened


def require_column(column: Tensor | None) -> Tensor:
    """Return ``column``.

    Raises:
        ValueError: If no phase has filled in the column.
    """
    if column is None:
        raise ValueError("a column that this phase reads has not been filled in")
    return column
