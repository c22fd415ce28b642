"""Outcome rewards to shaped rewards, and to rewards of tokens.

``SHAPINGS[name](batch, rewards [B], max_new_tokens=..., **options) -> rewards [B]``, applied in the order given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightrft.config import Part
from lightrft.trainer.kl import KL_ESTIMATORS
from lightrft.trainer.rows import Rows
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry

Shaping = Callable[..., Tensor]
SHAPINGS: Registry[Shaping] = Registry("shaping")


@SHAPINGS.register(
    "reward_clip", formula="R <- clip(R, low, high)", latex=r"R\leftarrow\operatorname{clip}(R,a,b)", paper="arXiv 1707.06347"
)
def reward_clip(batch: Batch, rewards: Tensor, *, max_new_tokens: int, low: float = -10.0, high: float = 10.0) -> Tensor:
    """Rewards held inside ``[low, high]``."""
    return rewards.clamp(low, high)


@SHAPINGS.register("reward_scale", formula="R <- scale R + shift", latex=r"R\leftarrow aR+b", paper="")
def reward_scale(batch: Batch, rewards: Tensor, *, max_new_tokens: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """An affine change of rewards."""
    return rewards * scale + shift


@SHAPINGS.register(
    "overlong",
    formula="R <- R + penalty * clip((L_max - buffer - l) / buffer, -1, 0)",
    latex=r"R\leftarrow R+c\,\operatorname{clip}\!\Big(\frac{L_{\max}-b-l}{b},-1,0\Big)",
    paper="DAPO, arXiv 2503.14476, eq. 13",
)
def overlong(batch: Batch, rewards: Tensor, *, max_new_tokens: int, buffer: float = 0.2, penalty: float = 1.0) -> Tensor:
    """Soft punishment that grows over the last ``buffer`` tokens before the length limit; below 1 it is a share of the limit, at least
    one token. Raises ``ConfigError`` without a buffer."""
    if buffer <= 0:
        raise ConfigError(
            f"shaping overlong: options.buffer is {buffer}; give a number of tokens, or a share of the limit above 0"
        )
    tokens = buffer if buffer >= 1 else max(1, round(buffer * max_new_tokens))
    over = (max_new_tokens - tokens - batch.lengths.to(rewards.dtype)) / tokens
    return rewards + penalty * over.clamp(-1, 0)


def shape(batch: Batch, parts: Sequence[Part], max_new_tokens: int) -> Tensor:
    """``[B]``: ``batch.rewards`` after every part, in order."""
    if batch.rewards is None:
        raise ValueError("shaping needs batch.rewards")
    rewards = batch.rewards
    for part in parts:
        rewards = SHAPINGS[part.name](batch, rewards, max_new_tokens=max_new_tokens, **part.options)
    return rewards


def token_rewards(batch: Batch, estimator: str, kl_coef: float) -> Tensor:
    """``[N]``: the outcome reward at the last sampled token of each row, less ``kl_coef`` times the KL estimate at every sampled one."""
    if batch.rewards is None:
        raise ValueError("token rewards need batch.rewards")
    rows = Rows.of(batch)
    place = torch.arange(rows.mask.numel(), device=rows.mask.device)
    last = torch.full((len(rows),), -1, dtype=torch.long, device=place.device)
    last = last.scatter_reduce(0, rows.row_of, torch.where(rows.mask, place, -1), "amax")
    rewards = torch.zeros(rows.mask.numel(), dtype=batch.rewards.dtype, device=place.device)
    rewards[last[last >= 0]] = batch.rewards[last >= 0]
    if kl_coef:
        if batch.old_logprobs is None or batch.ref_logprobs is None:
            raise ValueError("a KL penalty in the reward needs old_logprobs and ref_logprobs")
        kl = KL_ESTIMATORS[estimator](batch.old_logprobs, batch.ref_logprobs)
        rewards = rewards - kl_coef * torch.where(rows.mask, kl, torch.zeros_like(kl)).to(rewards.dtype)
    return rewards
