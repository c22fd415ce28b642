"""How far the sampler and the trainer are apart, as a weight on each token's policy loss.

``CORRECTIONS[name](logprobs [N], old [N], behavior [N], advantages [N], rows, **options) -> weights [N]``. All inputs are without
gradient: ``logprobs`` of the policy now, ``old`` the ratio's denominator, ``behavior`` of the sampler. Rows are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightrft.config import Part
from lightrft.trainer.rows import Rows
from lightrft.utils.registry import Registry

Correction = Callable[..., Tensor]
CORRECTIONS: Registry[Correction] = Registry("correction")


@CORRECTIONS.register(
    "tis",
    formula="w_t = min( exp(logp_old - logp_sampler), high )",
    latex=r"w_t=\min\!\big(\pi_{old}/\mu,\ C\big)",
    paper="truncated importance sampling: IMPALA, arXiv 1802.01561, eq. 1",
    needs=["behavior"],
)
def tis(logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows, *, high: float = 2.0) -> Tensor:
    """Token weights, truncated from above."""
    return torch.exp(old - behavior).clamp(max=high)


def correction_weights(
    parts: Sequence[Part], logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows
) -> Tensor:
    """``[N]``: the product of every part's weights."""
    weights = torch.ones_like(logprobs)
    for part in parts:
        weights = weights * CORRECTIONS[part.name](logprobs, old, behavior, advantages, rows, **part.options)
    return weights
