"""The policy loss of each token: one function and one equation each. Losses are minimised.

``POLICY_LOSSES[name](logprobs [N], old [N], advantages [N], rows, settings, **options) -> (losses [N], stats)``; ``stats`` are per-token
numbers ``[N]`` whose mean over the trained tokens is logged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.config import LossConfig
from lightrft.trainer.rows import Rows
from lightrft.utils.registry import Registry

Stats = dict[str, Tensor]
PolicyLoss = Callable[..., tuple[Tensor, Stats]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def token_ratio(logprobs: Tensor, old: Tensor, rows: Rows) -> Tensor:
    """``[N]``: ``pi / pi_old`` of each token."""
    return torch.exp(logprobs - old)


def sequence_ratio(logprobs: Tensor, old: Tensor, rows: Rows) -> Tensor:
    """``[N]``: the geometric mean of a row's token ratios, at each of its tokens (GSPO, arXiv 2507.18071, eq. 7)."""
    return rows.spread(torch.exp(rows.mean(logprobs - old)))


def sequence_token_ratio(logprobs: Tensor, old: Tensor, rows: Rows) -> Tensor:
    """``[N]``: the value of the sequence's ratio with the gradient of the token's (GSPO-token, arXiv 2507.18071, eq. 14)."""
    return sequence_ratio(logprobs.detach(), old, rows) * torch.exp(logprobs - logprobs.detach())


RATIOS: dict[str, Callable[[Tensor, Tensor, Rows], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}


@POLICY_LOSSES.register(
    "ppo_clip",
    formula="L_t = -min( min(rho_t, ratio_cap) A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t ),  rho_t = exp(logp - logp_old)",
    latex=r"L_{i,t}=-\min\!\big(\rho_t\hat A_t,\ \operatorname{clip}(\rho_t,1-\epsilon_l,1+\epsilon_h)\hat A_t\big),\quad"
    r"\rho_t=\pi_\theta/\pi_{old}",
    paper="PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729, eq. 7",
    reads=["ratio", "clip_low", "clip_high", "dual_clip", "ratio_cap"],
)
def ppo_clip(logprobs: Tensor, old: Tensor, advantages: Tensor, rows: Rows, settings: LossConfig) -> tuple[Tensor, Stats]:
    """Clipped surrogate; for negative advantages at most ``dual_clip`` times the advantage if that is set."""
    ratio = RATIOS[settings.ratio](logprobs, old, rows)
    capped = ratio if settings.ratio_cap is None else ratio.clamp(max=settings.ratio_cap)
    plain = -capped * advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    held = clipped > plain
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantages
        bounded = (advantages < 0) & (losses > ceiling)
        losses = torch.where(bounded, ceiling, losses)
        held = held | bounded
    return losses, {"clip_fraction": held.to(logprobs.dtype), "ratio": ratio.detach()}


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``[N]``: half the squared error, the larger of plain and clipped around ``old`` (as in the PPO authors' own code)."""
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return error / 2
