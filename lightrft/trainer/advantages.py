"""Rewards to advantages: one function and one equation each.

``ADVANTAGES[name](batch, token_rewards [N], settings, **options) -> (advantages [N], returns [N])``. ``batch.rewards [B]`` is the outcome
reward after shaping; ``token_rewards`` holds it at the last sampled token of each row, with a KL penalty on every one if asked for.
Tokens that the policy did not sample get 0 and are passed through: the result is that of the rows without them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.config import AdvantageConfig
from lightrft.trainer.rows import Rows, compact, group_sum, scatter
from lightrft.types import Batch
from lightrft.utils.registry import Registry

Advantage = Callable[..., tuple[Tensor, Tensor]]
ADVANTAGES: Registry[Advantage] = Registry("advantage")


def scores(batch: Batch, token_rewards: Tensor, rows: Rows) -> Tensor:
    """``[B]``: the outcome reward with the row's KL penalty, if any. Counts for the baseline also in rows without sampled tokens."""
    if batch.rewards is None:
        raise ValueError("advantages need batch.rewards")
    rewards = batch.rewards.to(token_rewards.dtype)
    placed = torch.where(rows.count() > 0, rewards, torch.zeros_like(rewards))
    return rewards + (rows.sum(token_rewards) - placed)


@ADVANTAGES.register(
    "grpo",
    formula="A_i = (R_i - mean_group R) / (std_group R + eps)",
    latex=r"\hat A_i=\frac{R_i-\operatorname{mean}(R)}{\operatorname{std}(R)+\epsilon}",
    paper="DeepSeekMath, arXiv 2402.03300, section 4.1.2",
    needs=["groups"],
    reads=["eps"],
)
def grpo(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Reward standardised inside its group (unbiased deviation). Exactly 0 where the group is of one answer or of equal rewards."""
    rows = Rows.of(batch)
    r = scores(batch, token_rewards, rows)
    groups, of = len(batch.prompts), batch.prompt_of
    size = group_sum(torch.ones_like(r), of, groups)
    centred = r - (group_sum(r, of, groups) / size.clamp(min=1))[of]
    deviation = (group_sum(centred.square(), of, groups) / (size - 1).clamp(min=1)).sqrt()
    highest = torch.full((groups,), -torch.inf, dtype=r.dtype, device=r.device).scatter_reduce(0, of, r, "amax")
    lowest = torch.full((groups,), torch.inf, dtype=r.dtype, device=r.device).scatter_reduce(0, of, r, "amin")
    advantage = torch.where((highest == lowest)[of], torch.zeros_like(r), centred / (deviation + settings.eps)[of])
    tokens = torch.where(rows.mask, rows.spread(advantage), torch.zeros_like(token_rewards))
    return tokens, tokens


@ADVANTAGES.register(
    "reinforce",
    formula="A_t = sum_{s>=t} gamma^(s-t) r_s",
    latex=r"\hat A_t=\sum_{s\ge t}\gamma^{s-t}r_s",
    paper="REINFORCE++, arXiv 2501.03262, section 3 (whitened over the global batch)",
    reads=["gamma"],
)
def reinforce(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Discounted return of each token."""
    rows = Rows.of(batch)
    padded, row, column = compact(token_rewards, rows)
    returns = scatter(discounted(padded, settings.gamma), rows, row, column)
    return returns, returns


@ADVANTAGES.register(
    "gae",
    formula="delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t",
    latex=r"\delta_t=r_t+\gamma V_{t+1}-V_t,\quad \hat A_t=\delta_t+\gamma\lambda\hat A_{t+1},\quad \hat R_t=\hat A_t+V_t",
    paper="GAE, arXiv 1506.02438, eq. 16",
    needs=["critic"],
    reads=["gamma", "lam"],
)
def gae(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. A truncated row is bootstrapped with the value of the state it was cut in."""
    if batch.values is None:
        raise ValueError("gae needs batch.values")
    rows = Rows.of(batch)
    rewards, row, column = compact(token_rewards, rows)
    values, _, _ = compact(batch.values.to(token_rewards.dtype), rows)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    if batch.final_values is not None and batch.truncated is not None:
        cut = (rows.count() > 0) & batch.truncated
        following[cut, rows.count()[cut] - 1] = batch.final_values[cut].to(values.dtype)
    inside = torch.arange(values.shape[1], device=values.device) < rows.count()[:, None]
    delta = torch.where(inside, rewards + settings.gamma * following - values, torch.zeros_like(values))
    advantages = discounted(delta, settings.gamma * settings.lam)
    return scatter(advantages, rows, row, column), scatter(advantages + values, rows, row, column)


@ADVANTAGES.register(
    "teacher",
    formula="A_t = 0, and what distill adds",
    latex=r"\hat A_t=0",
    paper="distillation without a reward: GKD, arXiv 2306.13649",
    needs=["teacher"],
)
def teacher(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Nothing of a reward's: all that is learned comes from a teacher."""
    nothing = torch.zeros_like(token_rewards)
    return nothing, nothing


def discounted(x: Tensor, decay: float) -> Tensor:
    """``y_t = x_t + decay * y_{t+1}`` along the last axis of ``x [B, L]``."""
    if decay == 1:
        return x.flip(-1).cumsum(-1).flip(-1)
    y = torch.empty_like(x)
    carry = torch.zeros_like(x[:, 0]) if x.shape[1] else x.new_zeros(len(x))
    for t in range(x.shape[1] - 1, -1, -1):
        carry = x[:, t] + decay * carry
        y[:, t] = carry
    return y


def whiten(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    """``x [N]`` with mean 0 and deviation 1 over the tokens of ``mask [N]``, which must be those of the global batch; 0 elsewhere.
    Equal numbers become exactly 0: their mean may differ from them by rounding, which a small deviation would blow up."""
    kept = x[mask]
    if kept.numel() == 0 or bool((kept == kept[0]).all()):
        return torch.zeros_like(x)
    centred = kept - kept.mean()
    whitened = torch.zeros_like(x)
    whitened[mask] = centred / (centred.square().mean().sqrt() + eps)
    return whitened


def _as_they_are(x: Tensor, batch: Batch, eps: float) -> Tensor:
    return x


def _by_batch(x: Tensor, batch: Batch, eps: float) -> Tensor:
    return whiten(x, batch.mask, eps)


def _by_group(x: Tensor, batch: Batch, eps: float) -> Tensor:
    group = batch.prompt_of[batch.row_of]
    parts = [whiten(x, batch.mask & (group == g), eps) for g in range(len(batch.prompts))]
    return torch.stack(parts).sum(0) if parts else torch.zeros_like(x)


WHITENINGS: dict[str, Callable[[Tensor, Batch, float], Tensor]] = {"none": _as_they_are, "group": _by_group, "batch": _by_batch}
"""``WHITENINGS[mode](advantages [N], batch, eps) -> advantages [N]``"""
