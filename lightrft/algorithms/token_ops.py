"""Sums and means over the tokens of each response, and over the responses of each prompt, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.types import Batch
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(slots=True)
class Rows:
    """Who is in whose row: ``row_of [N]``, ``lengths [B]``, ``prompt_of [B]``, ``mask [N]`` bool (tokens that count)."""

    row_of: Tensor
    lengths: Tensor
    prompt_of: Tensor
    mask: Tensor

    @staticmethod
    def of(batch: Batch) -> Rows:
        return Rows(batch.row_of, batch.lengths, batch.prompt_of, batch.mask)

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def sum(self, x: Tensor) -> Tensor:
        """``[N]`` to ``[B]``: the sum over the tokens of a row that count. Differentiable."""
        kept = torch.where(self.mask, x, torch.zeros_like(x))
        return torch.zeros(len(self), dtype=x.dtype, device=x.device).index_add(0, self.row_of, kept)

    def count(self) -> Tensor:
        """``[B]``: the number of tokens of a row that count."""
        return torch.zeros(len(self), dtype=torch.long, device=self.mask.device).index_add(0, self.row_of, self.mask.long())

    def mean(self, x: Tensor) -> Tensor:
        """``[N]`` to ``[B]``: the mean over the tokens that count; 0 for a row without any."""
        return self.sum(x) / self.count().clamp(min=1).to(x.dtype)

    def spread(self, x: Tensor) -> Tensor:
        """``[B]`` to ``[N]``: each row's number at each of its tokens."""
        return x[self.row_of]


def last_sampled(rows: Rows) -> Tensor:
    """``[B]``: the place of each row's last token that counts; -1 for a row without any."""
    place = torch.arange(rows.mask.numel(), device=rows.mask.device)
    last = torch.full((len(rows),), -1, dtype=torch.long, device=place.device)
    return last.scatter_reduce(0, rows.row_of, torch.where(rows.mask, place, -1), "amax")


def group_sum(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """``x [B]`` summed by ``group [B]`` to ``[groups]``."""
    return torch.zeros(groups, dtype=x.dtype, device=x.device).index_add(0, group, x)


def compact(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that count, row by row, left-aligned.

    Returns ``padded [B, L]`` (0 beyond a row's end), ``row [K]`` and ``column [K]``: the place of each counted token in it.
    """
    row = rows.row_of[rows.mask]
    count = rows.count()
    start = torch.cumsum(count, 0) - count
    column = torch.arange(row.numel(), device=row.device) - start[row]
    longest = int(count.max()) if count.numel() else 0
    padded = torch.zeros(len(rows), longest, dtype=x.dtype, device=x.device)
    padded[row, column] = x[rows.mask]
    return padded, row, column


def scatter(padded: Tensor, rows: Rows, row: Tensor, column: Tensor) -> Tensor:
    """The inverse of ``compact``: ``[B, L]`` to ``[N]``, with 0 at tokens that do not count."""
    flat = torch.zeros(rows.mask.numel(), dtype=padded.dtype, device=padded.device)
    flat[rows.mask] = padded[row, column]
    return flat


LIMIT = 40.0
"""Nats. ``exp`` of it, squared, is a float32: a ratio may meet another one, as in a weighted KL or under a correction."""

ROUNDING = 16 * 2.0**-23
"""Relative difference of a log-prob that two splits of a batch into micro-batches explain: 16 times the eps of float32."""


def bounded(gap: Tensor) -> Tensor:
    """``gap``, held inside ``[-LIMIT, LIMIT]``, with the gradient of ``gap`` wherever it is finite: what is too far away must still be
    pulled the right way, and where a clip has taken the gradient away, 0 times it is 0 and not nan.

    An infinite gap becomes the bound, without a gradient. NaN stays NaN.
    """
    held = gap.clamp(-LIMIT, LIMIT)
    finite = torch.where(gap.isinf(), held.detach(), gap)  # infinity less infinity would be NaN, also on its way back
    return finite + (held - finite).detach()


def absolute_gap(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return ``|logprobs - old| [N]``, with gradient 0 where the two differ by rounding alone.

    The slope of ``|x|`` jumps at 0. Without this, the micro-batches that computed ``old`` would decide its sign.
    """
    gap = logprobs - old
    rounding = ROUNDING * old.detach().abs().clamp(min=1)
    return torch.where(gap.detach().abs() > rounding, gap.abs(), gap.detach().abs())


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """``pi / pi_old``, between ``exp(-LIMIT)`` and ``exp(LIMIT)``."""
    return torch.exp(bounded(logprobs - old))


def weighted_sum(losses: Tensor, batch: Batch, weights: Tensor | None = None) -> Tensor:
    """The share of ``losses [N]`` in the loss of the global batch (0-d), by ``batch.loss_weights`` unless other ``weights`` are given.
    Tokens of weight 0 are left out, not multiplied: what stands there may be anything."""
    weights = require_column(batch.loss_weights) if weights is None else weights
    kept = weights != 0
    zero = losses.new_zeros(())
    return (losses.where(kept, zero) * weights.to(losses.dtype)).sum()


def require_column(column: Tensor | None) -> Tensor:
    """Return ``column``. Raises ``ValueError`` where no phase has filled it in."""
    if column is None:
        raise ValueError("a column that this phase reads has not been filled in")
    return column
