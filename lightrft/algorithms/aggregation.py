"""Aggregate token losses to the loss of the global batch.

Every aggregation is linear in the token losses, so it is one weight per token. The weights are
computed once for the global batch, over all micro-batches and ranks: ``AGGREGATIONS[name](rows,
constant) -> weights [N]``. The loss of a part of the batch is ``sum(weights * losses)`` over that
part. Splitting the batch therefore changes neither the loss nor its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from lightrft.algorithms.token_ops import TokenRows, group_sum
from lightrft.config.presets import preset_hint
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Aggregation = Callable[[TokenRows, int], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", preset_hint)


@AGGREGATIONS.register(
    "token",
    formula="sum_t L_it / (all tokens)",
    latex=r"\frac{\sum_{i,t} L_{i,t}}{\sum_i l_i}",
    paper="DAPO, arXiv 2503.14476, eq. 12",
)
def token(rows: TokenRows, constant: int) -> Tensor:
    """Weight every token of the batch equally."""
    ones = torch.ones(len(rows), dtype=torch.float64, device=rows.mask.device)
    # without sampled tokens every weight is 0, whatever the divisor
    return _shares(rows, ones / max(1, int(rows.mask.sum())))


@AGGREGATIONS.register(
    "sequence",
    formula="mean_i ( mean_t L_it )",
    latex=r"\frac1B\sum_i\frac1{l_i}\sum_t L_{i,t}",
    paper="DeepSeekMath, arXiv 2402.03300, eq. 3",
)
def sequence(rows: TokenRows, constant: int) -> Tensor:
    """Weight every response that has tokens equally."""
    count = rows.count()
    responses = max(1, int((count > 0).sum()))
    return _shares(rows, 1 / (count.clamp(min=1).double() * responses))


@AGGREGATIONS.register(
    "sequence_sum",
    formula="mean_i ( sum_t L_it )",
    latex=r"\frac1B\sum_i\sum_t L_{i,t}",
    paper="the policy gradient of a trajectory",
)
def sequence_sum(rows: TokenRows, constant: int) -> Tensor:
    """Sum over the tokens of a response, then average over the responses that have tokens."""
    count = rows.count()
    responses = max(1, int((count > 0).sum()))
    return _shares(rows, torch.ones_like(count, dtype=torch.float64) / responses)


@AGGREGATIONS.register(
    "constant",
    formula="sum_t L_it / (responses * length limit)",
    latex=r"\frac{1}{B\,L_{\max}}\sum_{i,t} L_{i,t}",
    paper="Dr. GRPO, arXiv 2503.20783, section 3.2",
)
def constant_norm(rows: TokenRows, constant: int) -> Tensor:
    """Sum over the batch and divide by the number of responses times ``constant``."""
    ones = torch.ones(len(rows), dtype=torch.float64, device=rows.mask.device)
    return _shares(rows, ones / (max(1, len(rows)) * constant))


@AGGREGATIONS.register(
    "prompt",
    formula="mean_p ( sum_{i in p, t} L_it / (tokens of prompt p) )",
    latex=r"\frac1P\sum_p\frac{\sum_{i\in p,t} L_{i,t}}{\sum_{i\in p} l_i}",
    paper="mean over prompts of the token mean",
)
def prompt(rows: TokenRows, constant: int) -> Tensor:
    """Weight every prompt whose responses have tokens equally."""
    groups = int(rows.prompt_of.max()) + 1 if len(rows) else 0
    # prompts whose responses have no token do not count for the mean
    tokens = group_sum(rows.count(), rows.prompt_of, groups)
    prompts = max(1, int((tokens > 0).sum()))
    share = 1 / (tokens.clamp(min=1).double() * prompts)
    return _shares(rows, share[rows.prompt_of])


def _shares(rows: TokenRows, per_row: Tensor) -> Tensor:
    """Expand one weight per response, ``[B]``, to its counted tokens; 0 at other tokens."""
    # float64, so that splitting the batch into parts adds no rounding of float32
    nothing = torch.zeros_like(rows.mask, dtype=torch.float64)
    return torch.where(rows.mask, rows.spread(per_row), nothing)
